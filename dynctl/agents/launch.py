"""The seam of engine kinds: what a plug-in in `agents/engines` is asked and what it answers.

Not here: any particular engine, starting processes. A kind is one file with an object `ENGINE` of class `EngineKind`.
Pure.
"""

from dataclasses import dataclass
from typing import Protocol

from dynctl.agents.protocol import EngineWish, Gang
from dynctl.core.exposition import parse
from dynctl.core.units import whole
from dynctl.kv.ranks import COUNTED

NUM_INTERNAL_PORTS = 16
"""Loopback ports set apart for one engine's own processes, from `Places.internal_port` on."""


@dataclass(frozen=True, slots=True)
class Places:
    """What is chosen anew at every start, and where things lie on this host."""

    root: str
    directory: str
    """Of this incarnation alone, mode 0700, removed after it: short, since socket paths have 107 bytes at most."""
    python: str
    """The agent's own interpreter."""
    incarnation: str
    internal_port: int = 0
    interface: str = ""
    """Over which other members of a gang are reached; empty: there are none."""

    def endpoints(self, topic: str, ranks: int = 1) -> "Endpoints":
        """The endpoints an engine shall open: Unix sockets only; of several ranks each derives its own."""
        ipc = f"ipc://{self.directory}/{'' if ranks == 1 else f'{COUNTED}-'}"
        return Endpoints(
            socket=f"{self.directory}/http",
            kv_events=f"{ipc}kv",
            kv_replay=f"{ipc}replay",
            topic=topic,
        )


@dataclass(frozen=True, slots=True)
class Endpoints:
    """Where one start of a unit answers; empty or None: it has none of that kind."""

    socket: str = ""
    """Path of a Unix socket that speaks HTTP."""
    url: str = ""
    """`http://host:port`, of adopted servers only."""
    kv_events: str | None = None
    """Of the first data-parallel rank; `kv.ranks` tells those of the others."""
    kv_replay: str | None = None
    topic: str = ""


@dataclass(frozen=True, slots=True)
class Launch:
    """How to start one process and where it will answer."""

    argv: tuple[str, ...]
    """Empty: nothing to start, it runs already."""
    env: tuple[tuple[str, str], ...] = ()
    has_bundle: bool = False
    """Whether it runs our own code and so needs the bundle on its path; foreign code must not see it."""
    at: Endpoints = Endpoints()


@dataclass(frozen=True, slots=True)
class Capabilities:
    """What an engine kind is and needs."""

    is_process: bool = True
    needs_gpus: bool = False
    """Whether `device: gpu` asks for real GPUs."""
    version_floor: tuple[int, ...] = ()
    """Oldest version that may serve, compared with `GET /version`; empty: any."""
    start_deadline_s: float = 60.0
    stop_limit_s: float = 30.0
    """From SIGTERM to SIGKILL."""
    reports_running: bool = True
    """Whether `/metrics` tells when it is idle."""

    def deadline_s(self, wished_s: float | None) -> float:
        """How long a start may take: as the inventory wishes, else as engines of this kind do."""
        return wished_s or self.start_deadline_s


@dataclass(frozen=True, slots=True)
class CacheFacts:
    """The KV cache as the engine itself reports it; 0: not told."""

    block_size_tokens: int = 0
    kv_capacity_tokens: int = 0


class EngineKind(Protocol):
    """One way to run an engine."""

    capabilities: Capabilities

    def problems(self, wish: EngineWish) -> tuple[str, ...]:
        """Name what can never start, one sentence each; nothing is started then."""
        ...

    def launch(self, wish: EngineWish, places: Places) -> Launch:
        """Say how to start it. Same arguments, same answer."""
        ...


def cache_facts(metrics: str) -> CacheFacts:
    """Read block size and capacity from the labels of `vllm:cache_config_info`.

    Source: scrape of vLLM 0.32.0. Data-parallel ranks each have a line; their capacities add up.
    """
    name = "vllm:cache_config_info"
    lines = parse(metrics, {name}).get(name, [])
    if not lines:
        return CacheFacts()
    block_size = _whole(lines[0].labels.get("block_size"))
    capacity = 0
    for line in lines:
        told = _whole(line.labels.get("kv_cache_size_tokens"))
        capacity += told or block_size * _whole(line.labels.get("num_gpu_blocks"))
    return CacheFacts(block_size, capacity)


def _whole(text: str | None) -> int:
    """Read a label that may be missing, the text `None`, or a number that counts nothing there is."""
    return (whole(text) or 0) if text is not None and len(text) <= 15 else 0


def gang_flags(gang: Gang) -> list[str]:
    """Tell one member of an engine over several hosts its place, with vLLM's flags, which the simulated engine shares."""
    words = ["--nnodes", str(gang.nodes), "--node-rank", str(gang.rank)]
    words += ["--master-addr", gang.master_address, "--master-port", str(gang.master_port)]
    return [*words, "--headless"] if gang.rank else words


def gang_problems(wish: EngineWish) -> list[str]:
    """Name what engines over several hosts cannot do."""
    if wish.gang is None:
        return []
    found = []
    if wish.dp > 1:
        found.append(f"DP {wish.dp} over several hosts is not supported; ask for more replicas")
    if wish.tp * wish.pp % wish.gang.nodes:
        found.append(
            f"TP {wish.tp} × PP {wish.pp} do not divide over {wish.gang.nodes} hosts evenly"
        )
    if wish.kv_transfer:
        found.append("an engine over several hosts cannot hand over KV blocks")
    return found


def extra_flags(args: tuple[tuple[str, str], ...]) -> tuple[str, ...]:
    """Turn extra flags into argv words; a value that begins with a dash stays one word with its flag."""
    words: list[str] = []
    for name, value in args:
        if value == "":
            words.append(f"--{name}")
        elif value.startswith("-"):
            words.append(f"--{name}={value}")
        else:
            words += [f"--{name}", value]
    return tuple(words)


def flag_problems(args: tuple[tuple[str, str], ...], managed: frozenset[str]) -> tuple[str, ...]:
    """Name extra flags that dynctl sets itself, that would show a secret, or that are no flag names."""
    found = []
    for name, _ in args:
        plain = name.replace("_", "-").lower()
        if not all(part.isalnum() for part in plain.split("-")):
            found.append(f"engine flag {name!r} is no flag name; write it without dashes in front")
        elif plain in managed:
            found.append(f"engine flag {name!r} is set by dynctl; remove it from engine.args")
        elif plain in _SECRET_FLAGS:
            found.append(
                f"engine flag {name!r} would show a secret in the process list; "
                "put it in engine.env as ${file:NAME}"
            )
    return tuple(found)


_SECRET_FLAGS = frozenset({"api-key", "hf-token", "token", "password", "secret", "secret-key"})

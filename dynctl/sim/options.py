"""How one simulated engine is to be: its options, their defaults, and the flags of `python -m dynctl.sim`.

`dynctl sim engine` offers the same flags. Not here: doing anything. Pure.
"""

import argparse
import math
from dataclasses import dataclass, fields
from pathlib import Path

from dynctl.core.units import whole
from dynctl.errors import UsageError
from dynctl.kv.ranks import COUNTED, MAX_RANKS, can_count
from dynctl.sim.faults import parse_fault

DEFAULT_BLOCKS = 4096

HELP = {
    "model": "Name served under /v1/models.",
    "uds": "Serve on this Unix socket.",
    "listen": "Serve on HOST:PORT; port 0 takes a free one and prints it.",
    "tokenizer": "Model directory with tokenizer.json and tokenizer_config.json, instead of the one shipped.",
    "role": "both, prefill or decode; the last two need --side-channel. A label: every engine can do both.",
    "seed": "Of the hash chain that stands for the model; engines of one deployment share it.",
    "eos_every": "Say end-of-sequence about once in so many tokens; 0: never.",
    "block_size": "Tokens per KV block.",
    "prefix_caching": "0: blocks are never found again, as with vLLM's --no-enable-prefix-caching.",
    "num_blocks": f"KV blocks, of which one is never used; 0: {DEFAULT_BLOCKS}, or more where the longest request needs them.",
    "host_blocks": "KV blocks kept in the host's memory beside the device's, as with vLLM's offloading connector; 0: none.",
    "host_mbytes_s": "Megabytes a second of a load from there.",
    "self_describing_kv_events": "1: events of those blocks say what is in them, as with the connector's option of this name.",
    "data_parallel_size": "Ranks behind the one server, each with a cache, a queue, KV events (the next TCP port, or _dpN "
    "after a Unix socket with inproc in its path) and a side channel (the next port) of its own; a request names its rank "
    "in X-data-parallel-rank, or goes to the one with the least to do.",
    "nnodes": "Nodes the engine is over: rank 0 serves, and answers when all have come; it makes no step when one is lost.",
    "node_rank": "Which of them this is.",
    "master_addr": "Where nodes meet: rank 0 listens here.",
    "master_port": "Port where nodes meet.",
    "headless": "Be a node other than rank 0: serve nothing.",
    "max_model_len": "Longest prompt and answer together, in tokens.",
    "max_num_seqs": "Requests that run at once.",
    "max_num_batched_tokens": "Tokens computed in one step.",
    "prefill_us_per_token": "Microseconds per prompt token that is not cached.",
    "prefill_base_ms": "Milliseconds for every step in which a prompt begins.",
    "decode_ms": "Milliseconds for every step that decodes.",
    "decode_us_per_seq": "Microseconds per request in a step that decodes.",
    "kv_events": "Publish KV events here: ipc://PATH or tcp://HOST:PORT.",
    "kv_replay": "Replay KV events here.",
    "topic": "Topic of the KV events.",
    "side_channel": "HOST:PORT that decode engines pull KV from; without it there is no hand-off.",
    "kv_transfer_mbytes_s": "Megabytes a second of a KV pull.",
    "kv_bytes_per_token": "KV bytes per token, as pulled.",
    "shutdown_timeout": "Seconds requests under way may still take after SIGTERM; 0 cuts them at once, as vLLM does.",
    "control": "Unix socket for faults on demand and facts for tests.",
    "fault": "A fault from the start, such as die,after_tokens=5; see the documentation of dynctl.sim.faults.",
}
"""One line per option, for `--help` here and in `dynctl sim engine`."""

MODEL_DIR = Path(__file__).parent / "model"
"""The model directory shipped with the simulated engine."""

ROLES = ("both", "prefill", "decode")


USUAL_KV_BYTES = 131_072
"""Of a token's KV, where the flags do not say otherwise."""

_MAX_NUMBER = 10**15


@dataclass(frozen=True, slots=True)
class SimOptions:
    """Everything about one engine. Field names are the flags' names."""

    model: str = "sim"
    uds: str | None = None
    listen: str | None = None
    tokenizer: str | None = None
    role: str = "both"
    seed: int = 0
    eos_every: int = 0
    block_size: int = 16
    prefix_caching: int = 1
    num_blocks: int = 0
    host_blocks: int = 0
    host_mbytes_s: float = 20_000.0
    self_describing_kv_events: int = 0
    data_parallel_size: int = 1
    nnodes: int = 1
    node_rank: int = 0
    master_addr: str = "127.0.0.1"
    master_port: int = 29501
    headless: bool = False
    max_model_len: int = 8192
    max_num_seqs: int = 64
    max_num_batched_tokens: int = 2048
    prefill_us_per_token: float = 100.0
    prefill_base_ms: float = 2.0
    decode_ms: float = 10.0
    decode_us_per_seq: float = 50.0
    kv_events: str | None = None
    kv_replay: str | None = None
    topic: str = ""
    side_channel: str | None = None
    kv_transfer_mbytes_s: float = 10_000.0
    kv_bytes_per_token: int = USUAL_KV_BYTES
    """Source: an 8B model with grouped-query attention in bfloat16: 2 x 32 layers x 8 heads x 128 x 2 bytes."""
    shutdown_timeout: float = 0.0
    control: str | None = None
    fault: tuple[str, ...] = ()

    @property
    def num_cache_blocks(self) -> int:
        """Blocks of the cache, settled."""
        return self.num_blocks or max(
            DEFAULT_BLOCKS, -(-self.max_model_len // max(1, self.block_size)) + 1
        )

    def side_channel_of(self, rank: int) -> tuple[str, int] | None:
        """Where a rank's KV is pulled from: each has the next port; port 0 takes a free one."""
        if self.side_channel is None:
            return None
        host, port = split_address("--side-channel", self.side_channel)
        return host, port and port + rank

    def check(self) -> None:
        """Refuse what makes no sense together.

        Raises:
            UsageError: naming the flag.
        """
        self._check_nodes()
        if not self.headless and (self.uds is None) == (self.listen is None):
            raise UsageError("give one of --uds and --listen", "--listen 127.0.0.1:8100")
        for flag, value in (("--listen", self.listen), ("--side-channel", self.side_channel)):
            if value is not None:
                split_address(flag, value)
        if self.role not in ROLES:
            raise UsageError(f"--role {self.role}", f"one of: {', '.join(ROLES)}")
        if self.role != "both" and self.side_channel is None:
            raise UsageError(
                f"--role {self.role} needs --side-channel",
                "prefill and decode hand KV over through it",
            )
        if self.kv_replay is not None and self.kv_events is None:
            raise UsageError("--kv-replay needs --kv-events")
        if self.num_blocks and (self.num_blocks - 1) * self.block_size < self.max_model_len:
            raise UsageError(
                f"{self.num_blocks} blocks of {self.block_size} tokens hold less than one request of {self.max_model_len}",
                "raise --num-blocks or lower --max-model-len",
            )
        self.check_numbers()
        self._check_ranks()
        for spec in self.fault:
            parse_fault(spec)

    def _check_nodes(self) -> None:
        if not 0 <= self.node_rank < max(1, self.nnodes):
            raise UsageError(f"--node-rank {self.node_rank}", f"give 0 to {self.nnodes - 1}")
        if self.headless != (self.node_rank > 0):
            raise UsageError(
                "--headless is for every node but rank 0, which serves",
                "give it with --node-rank 1 and above",
            )
        if self.nnodes > 1 and self.data_parallel_size > 1:
            raise UsageError(
                "an engine over several nodes has one data-parallel rank here",
                "leave --data-parallel-size out",
            )

    def _check_ranks(self) -> None:
        ranks = self.data_parallel_size
        if ranks > MAX_RANKS:
            raise UsageError(f"--data-parallel-size {ranks}", f"give 1 to {MAX_RANKS}")
        for flag, place in (("--kv-events", self.kv_events), ("--kv-replay", self.kv_replay)):
            if place is not None and not can_count(place, ranks):
                raise UsageError(
                    f"{flag} {place} has no place for each of {ranks} ranks",
                    f"write tcp://HOST:PORT, or a Unix socket with {COUNTED!r} in its path",
                )
        last = self.side_channel_of(ranks - 1)
        if last is not None and last[1] > 65535:
            raise UsageError(
                f"--side-channel {self.side_channel} has no place for each of {ranks} ranks",
                "each has the next port",
            )

    def check_numbers(self) -> None:
        """Refuse numbers that mean nothing.

        Raises:
            UsageError: naming the flag.
        """
        for each in fields(self):
            if isinstance(getattr(self, each.name), int) and getattr(self, each.name) > _MAX_NUMBER:
                flag = each.name.replace("_", "-")
                raise UsageError(
                    f"--{flag} {getattr(self, each.name)}", f"give at most {_MAX_NUMBER}"
                )
        at_least = {
            1: (
                "block_size",
                "data_parallel_size",
                "nnodes",
                "max_model_len",
                "max_num_seqs",
                "max_num_batched_tokens",
            ),
            0: (
                "num_blocks",
                "host_blocks",
                "prefix_caching",
                "eos_every",
                "prefill_us_per_token",
                "prefill_base_ms",
                "decode_ms",
                "decode_us_per_seq",
                "kv_bytes_per_token",
                "shutdown_timeout",
                "node_rank",
            ),
        }
        for least, names in at_least.items():
            for name in names:
                if not least <= getattr(self, name) < math.inf:
                    flag = name.replace("_", "-")
                    raise UsageError(
                        f"--{flag} {getattr(self, name)}", f"give a number of at least {least}"
                    )
        for name in ("kv_transfer_mbytes_s", "host_mbytes_s"):
            if not 0 < getattr(self, name) < math.inf:
                flag = name.replace("_", "-")
                raise UsageError(f"--{flag} {getattr(self, name)}", "give a number above 0")


def split_address(flag: str, value: str) -> tuple[str, int]:
    """Read H:P; IPv6 in brackets.

    Raises:
        UsageError: when it is no address.
    """
    host, _, text = value.rpartition(":")
    port = whole(text)
    if not host or port is None or port > 65535:
        raise UsageError(f"{flag} {value} is no address", "write it as HOST:PORT")
    return host.strip("[]"), port


def parse_args(argv: list[str]) -> SimOptions:
    """Read the flags of `python -m dynctl.sim`.

    Raises:
        UsageError: when they make no sense together; argparse exits by itself on unknown flags.
    """
    parser = argparse.ArgumentParser(
        prog="python -m dynctl.sim", description="One simulated engine."
    )
    for option in fields(SimOptions):
        flag = "--" + option.name.replace("_", "-")
        default = option.default
        if option.name == "fault":
            text = HELP[option.name]
            parser.add_argument(flag, action="append", default=[], metavar="SPEC", help=text)
        elif isinstance(default, bool):
            parser.add_argument(flag, action="store_true", help=HELP[option.name])
        elif isinstance(default, int | float):
            parser.add_argument(flag, type=type(default), default=default, help=HELP[option.name])
        else:
            parser.add_argument(flag, default=default, help=HELP[option.name])
    values = vars(parser.parse_args(argv))
    values["fault"] = tuple(values["fault"])
    options = SimOptions(**values)
    options.check()
    return options


def model_dir(options: SimOptions) -> Path:
    """Return the directory that holds the tokenizer."""
    return MODEL_DIR if options.tokenizer is None else Path(options.tokenizer).expanduser()

"""The things an agent runs (engine, a member of one, router, relay), seen alike: how to launch, when ready, when idle.

A router and a relay can hand their port over: a successor starts beside its predecessor and takes the listening socket
from it at a Unix socket in the predecessor's directory (`http1.handover`).
Not here: when any of it happens (`unit`).
IO: sockets, files (a router's configuration).
"""

import secrets
import signal
import time
from abc import ABC, abstractmethod
from pathlib import Path

import msgspec

from dynctl import registry
from dynctl.agents import ask, gang
from dynctl.agents.ask import Pids, Say
from dynctl.agents.causes import Cause
from dynctl.agents.host import ports
from dynctl.agents.launch import Capabilities, Endpoints, EngineKind, Launch, Places
from dynctl.agents.lifecycle import RestartPolicy
from dynctl.agents.links import Links
from dynctl.agents.protocol import (
    RELAY_ID,
    EngineWish,
    Gang,
    Peer,
    RelayWish,
    RouterUnit,
    spec_digest,
)
from dynctl.agents.root import Facts, Run, UnitRecord
from dynctl.core.exposition import engine_sample, parse
from dynctl.core.snapshot import EngineSample
from dynctl.core.units import whole
from dynctl.errors import ProbeError
from dynctl.files import write_atomic
from dynctl.http1.upstream import UpstreamError

OFFER_NAME = "hand"
"""Socket, in the directory of one start, at which it offers its port to a successor."""
_ENGINES = "dynctl.agents.engines"
_STEPS = "vllm:iteration_tokens_total_count"
_TURN_S = 1.0
_LOST_S = 2.0
"""A member that is to end waits so long for rank 0 while nobody hears of that."""


class Program(ABC):
    """What a unit needs to know of the thing it runs; defaults are those of a router or relay."""

    id: str
    kind: str
    deployment = ""
    role = ""
    url = ""
    """Where clients connect, of a router."""
    digest: str
    policy = RestartPolicy()
    gpu_uuids: tuple[str, ...] = ()
    needs_gpus = False
    listens_on: tuple[int, ...]
    """TCP ports of this host that must be free before a start."""
    needs_internal_ports = False
    deadline_s: float
    start_deadline_s: float | None = None
    """Of that, what was wished for."""
    stop_limit_s: float
    gang: Gang | None = None
    peers: tuple[Peer, ...] = ()
    """Members of its gang that it must hear of."""
    leader = ""
    """The engine it is a part of, of a member."""
    now_signal = signal.SIGTERM
    """What tells it to end without a drain."""

    @abstractmethod
    def problems(self) -> tuple[str, ...]:
        """Name what can never start."""

    @abstractmethod
    def launch(self, places: Places, predecessor: str | None = None) -> Launch:
        """Say how to start it; may write its configuration into the directory of this start.

        `predecessor`: the socket at which the process it follows offers its port.
        """

    @abstractmethod
    def can_follow(self, other: "AnyProgram") -> bool:
        """Tell whether it can take the port over from a program of the same id, as that port is bound."""

    @abstractmethod
    async def check(self, run: Run, own_pids: Pids, say: Say) -> Facts | None:
        """Ask once whether it is ready; None: not yet, and `say` has been told what it lacks.

        Raises:
            UnfitError: when it never will be.
        """

    async def turn(self, last: str, say: Say) -> str:  # noqa: ARG002 - most start when they are told to
        """Wait until it may start; return the incarnation it shall be, empty: a new one. It was `last` before."""
        return ""

    def apart(self, incarnation: str) -> Cause | None:  # noqa: ARG002 - most stand alone
        """Say why it cannot go on as this incarnation, as others of its gang tell; None: it can."""
        return None

    async def is_waiting(self, run: Run) -> bool:  # noqa: ARG002 - most wait for nobody
        """Tell whether it does well and is only not ready because others are not; its deadline does not count then."""
        return False

    async def is_idle(self, run: Run) -> bool:  # noqa: ARG002 - routers and relays drain by themselves after SIGTERM
        """Tell whether it has nothing left to do."""
        return True


class _EngineProcess(Program):
    """What an engine and a part of one that another host leads have in common."""

    def __init__(self, wish: EngineWish, links: Links | None = None) -> None:
        """`links` are needed to run one that is over several hosts."""
        self.wish = wish
        self.engine: EngineKind = registry.load(_ENGINES, wish.kind, "ENGINE")
        can: Capabilities = self.engine.capabilities
        self.id = wish.id
        self.deployment = wish.deployment
        self.role = wish.role
        self.digest = spec_digest(wish)
        self.gang = wish.gang
        self.peers = wish.gang.peers if wish.gang else ()
        self.gpu_uuids = tuple(gpu.uuid for gpu in wish.gpus)
        self.needs_gpus = can.needs_gpus and wish.device == "gpu"
        self.listens_on = ()
        self.needs_internal_ports = can.needs_gpus and wish.internal_port is None
        self.start_deadline_s = wish.start_deadline_s
        self.deadline_s = can.deadline_s(wish.start_deadline_s)
        self.stop_limit_s = can.stop_limit_s
        self._links = links

    def problems(self) -> tuple[str, ...]:
        """Name what can never start."""
        return self.engine.problems(self.wish)

    def launch(self, places: Places, predecessor: str | None = None) -> Launch:  # noqa: ARG002
        """Say how to start it."""
        return self.engine.launch(self.wish, places)

    def can_follow(self, other: "AnyProgram") -> bool:  # noqa: ARG002 - the seam's signature
        """An engine's port is its GPU: two do not fit."""
        return False

    def apart(self, incarnation: str) -> Cause | None:
        """Say which member has ended, or gone on without this one."""
        if self.gang is None or self._links is None:
            return None
        return gang.broken(self.gang, self._links.hear, incarnation)


class EngineProgram(_EngineProcess):
    """An engine of any kind."""

    kind = "engine"

    def __init__(self, wish: EngineWish, links: Links | None = None) -> None:
        super().__init__(wish, links)
        can: Capabilities = self.engine.capabilities
        # A server that is not ours is waited for without end: it is not our process that fails.
        self.policy = RestartPolicy() if can.is_process else RestartPolicy(max_starts=10**9)
        listens = can.is_process and wish.kv_transfer
        meets = (wish.gang.master_port,) if wish.gang else ()
        self.listens_on = (*(wish.side_channel_ports if listens else ()), *meets)

    async def turn(self, last: str, say: Say) -> str:  # noqa: ARG002 - rank 0 names a new one
        """Wait until all other members of its gang would start."""
        if self.gang is None:
            return ""
        assert self._links is not None
        while missing := gang.lacking(self.gang, self._links.hear):
            say(missing)
            await self._links.wait(_TURN_S)
        # Shorter than others: members add their ranks.
        return secrets.token_hex(4)

    async def check(self, run: Run, own_pids: Pids, say: Say) -> Facts | None:
        """An engine is ready when it has produced a token."""
        can = self.engine.capabilities

        def say_of_all(text: str) -> None:
            say("; ".join(filter(None, [text, self._absent(run)])))

        return await ask.engine_facts(self.wish, can, run.at, own_pids, say_of_all)

    def _absent(self, run: Run) -> str:
        if self.gang is None or self._links is None:
            return ""
        return gang.absent(self.gang, self._links.hear, run.incarnation)

    async def is_idle(self, run: Run) -> bool:
        """No request runs or waits; an engine that cannot tell is drained by the time limit alone."""
        if not self.engine.capabilities.reports_running:
            return True
        try:
            sample = await self.sample(run)
        except (UpstreamError, ProbeError):
            return not await ask.answers(run.at)
        return sample.running == 0 and not sample.waiting

    async def sample(self, run: Run) -> EngineSample:
        """Scrape it.

        Raises:
            UpstreamError: when it does not answer.
            ProbeError: when its answer cannot be read.
        """
        sample, _ = await self.look(run)
        return sample

    async def look(self, run: Run) -> tuple[EngineSample, str]:
        """Scrape it, with how many steps it has made, empty where it does not tell.

        Raises:
            UpstreamError: when it does not answer.
            ProbeError: when its answer cannot be read.
        """
        return self.read(await ask.metrics(run.at), run)

    def read(self, text: str, run: Run) -> tuple[EngineSample, str]:
        """Read a scrape as `look` does."""
        lines = parse(text, {_STEPS}).get(_STEPS, [])
        return engine_sample(text, self.id, run.incarnation), str([x.value for x in lines])

    @property
    def ranks(self) -> "tuple[EngineRank, ...]":
        """Its data-parallel ranks."""
        return tuple(EngineRank(self, number) for number in range(self.wish.dp))


class MemberProgram(_EngineProcess):
    """A part of an engine that another host's agent leads: started, ended and ready with it, and never asked anything."""

    kind = "member"
    # Whoever leads decides how often is too often.
    policy = RestartPolicy(first_s=0.1, most_s=1.0, max_starts=10**9)

    def __init__(self, wish: EngineWish, links: Links | None = None) -> None:
        super().__init__(wish, links)
        assert wish.gang is not None
        self.place = wish.gang
        self.leader = wish.gang.id
        self._silent_since_s: float | None = None

    async def turn(self, last: str, say: Say) -> str:
        """Wait for rank 0 to begin an incarnation it was not part of yet, and return that."""
        links, self._silent_since_s = self._heard, None
        while not (incarnation := gang.to_join(self.place, links.hear, last)):
            say(gang.why_waiting(self.place, links.hear))
            await links.wait(_TURN_S)
        return incarnation

    async def check(self, run: Run, own_pids: Pids, say: Say) -> Facts | None:  # noqa: ARG002
        """It is ready when the engine is."""
        if gang.is_led(self.place, self._heard.hear, run.incarnation):
            return Facts()
        say(f"{self.leader} on {self.peers[0].host_name} has not produced a token yet")
        return None

    async def is_waiting(self, run: Run) -> bool:  # noqa: ARG002 - the seam's signature
        """How long a start may take is for rank 0 to say."""
        return True

    async def is_idle(self, run: Run) -> bool:
        """Rank 0 needs it until it has ended itself; when nobody can say, not for long."""
        if gang.is_left(self.place, self._heard.hear, run.incarnation):
            return True
        if not self._heard.hear(self.peers[0]).silence:
            self._silent_since_s = None
            return False
        if self._silent_since_s is None:
            self._silent_since_s = time.monotonic()
        return time.monotonic() - self._silent_since_s > _LOST_S

    @property
    def _heard(self) -> Links:
        assert self._links is not None
        return self._links


class EngineRank:
    """One data-parallel rank of an engine, of most the only one: what may hang while the others work."""

    def __init__(self, program: EngineProgram, number: int) -> None:
        self.wish = program.wish
        self.number = number
        self._program = program

    async def look(self, run: Run) -> tuple[EngineSample, str]:
        """Scrape it, with how many steps it has made, empty where it does not tell.

        Raises:
            UpstreamError: when the engine does not answer.
            ProbeError: when its answer cannot be read.
        """
        text = await ask.metrics(run.at)
        if self.wish.dp > 1:
            label = f'engine="{self.number}"'
            text = "\n".join([line for line in text.splitlines() if label in line])
        return self._program.read(text, run)

    async def says_token(self, run: Run, timeout_s: float) -> bool:
        """Tell whether it produces a token in time."""
        return await ask.says_token(self.wish, run.at, self.number, timeout_s)


class RouterProgram(Program):
    """A router: `python -m dynctl.router` with its configuration in a file and an admin socket."""

    kind = "router"
    deadline_s = 60.0
    # After SIGTERM it closes its listener and lets streams end; 120 s is the drain limit.
    stop_limit_s = 130.0
    # Its clients are told: every stream ends in an error event.
    now_signal = signal.SIGQUIT

    def __init__(self, wish: RouterUnit) -> None:
        self.wish = wish
        self.id = wish.id
        self.deployment = wish.deployment
        self.digest = spec_digest(wish)
        scheme = "https" if wish.config.get("server_tls") else "http"
        self.url = f"{scheme}://{wish.listen}"
        port = whole(wish.listen.rpartition(":")[2])
        self.listens_on = (port,) if port else ()

    def problems(self) -> tuple[str, ...]:
        """Name what can never start."""
        if whole(self.wish.listen.rpartition(":")[2]) is None:
            return (f"router listen {self.wish.listen!r} must look like HOST:PORT",)
        return ()

    def launch(self, places: Places, predecessor: str | None = None) -> Launch:
        """Write the configuration and say how to start it."""
        config = f"{places.directory}/config.json"
        write_atomic(Path(places.directory) / "config.json", msgspec.json.encode(self.wish.config))
        socket = f"{places.directory}/admin"
        argv = [places.python, "-sP", "-m", "dynctl.router"]
        argv += ["--config", config, "--admin-socket", socket]
        argv += _hand_over_flags(places, predecessor)
        return Launch(argv=tuple(argv), has_bundle=True, at=Endpoints(socket=socket))

    def can_follow(self, other: "AnyProgram") -> bool:
        """It listens where the other does."""
        return isinstance(other, RouterProgram) and other.wish.listen == self.wish.listen

    async def check(self, run: Run, own_pids: Pids, say: Say) -> Facts | None:
        """A router is ready when its admin socket says so and is its own."""
        if not await ask.is_healthy(run.at, say):
            return None
        if await ask.listener_pid(run.at.socket) not in own_pids():
            say("its admin socket is another process's")
            return None
        return Facts()

    async def is_waiting(self, run: Run) -> bool:
        """Engines may take half an hour to load; a router that says so is well."""
        return await ask.status_of(run.at, "/health") == 503


class RelayProgram(Program):
    """The host's relay: `python -m dynctl.agents.relay`, fed by the agent's table."""

    kind = "relay"
    id = RELAY_ID
    deadline_s = 30.0
    # It ends answers within 15 s of SIGTERM, or within 120 s when a successor has its port.
    stop_limit_s = 130.0

    def __init__(self, wish: RelayWish, agent_socket: str) -> None:
        self.wish = wish
        self._agent_socket = agent_socket
        self.digest = spec_digest(wish)
        self.listens_on = (wish.port,)

    def problems(self) -> tuple[str, ...]:
        """Name what can never start."""
        return () if 0 < self.wish.port < 65536 else (f"relay port {self.wish.port} is no port",)

    def launch(self, places: Places, predecessor: str | None = None) -> Launch:
        """Say how to start it."""
        argv = [places.python, "-sP", "-m", "dynctl.agents.relay", "--root", places.root]
        name = self.wish.listen_host
        host = f"[{name}]" if ":" in name else name
        argv += ["--listen", f"{host}:{self.wish.port}", "--agent-socket", self._agent_socket]
        socket = f"{places.directory}/admin"
        argv += ["--admin-socket", socket, *_hand_over_flags(places, predecessor)]
        return Launch(argv=tuple(argv), has_bundle=True, at=Endpoints(socket=socket))

    def can_follow(self, other: "AnyProgram") -> bool:
        """It listens where the other does."""
        return isinstance(other, RelayProgram) and other.wish == self.wish

    async def check(self, run: Run, own_pids: Pids, say: Say) -> Facts | None:  # noqa: ARG002
        """A relay is ready when the process we started listens on the port."""
        if ports.owners(self.wish.port, own_pids()):
            return Facts()
        say(f"does not listen on port {self.wish.port} yet")
        return None


AnyProgram = EngineProgram | MemberProgram | RouterProgram | RelayProgram


def _hand_over_flags(places: Places, predecessor: str | None) -> list[str]:
    flags = ["--offer", f"{places.directory}/{OFFER_NAME}"]
    return flags if predecessor is None else [*flags, "--take-over", predecessor]


def of_engine(wish: EngineWish, links: Links | None = None) -> EngineProgram | MemberProgram:
    """Make the program of an engine, or of the part of one that another host leads."""
    is_led = wish.gang is not None and wish.gang.rank > 0
    return MemberProgram(wish, links) if is_led else EngineProgram(wish, links)


def make_program(record: UnitRecord, agent_socket: str, links: Links) -> AnyProgram | None:
    """Make the program of a remembered unit, None when the record names none."""
    if record.engine is not None:
        return of_engine(record.engine, links)
    if record.router is not None:
        return RouterProgram(record.router)
    if record.relay is not None:
        return RelayProgram(record.relay, agent_socket)
    return None

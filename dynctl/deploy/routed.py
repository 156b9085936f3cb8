"""Do routers send requests to every engine that is ready? Agents say what is ready; only routers say what they reach.

For `up` and `drain --undo`, which wait for it, and `status`, which shows it. IO: HTTP, clocks.
"""

import time
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass

import msgspec

from dynctl.agents.client import AgentClient
from dynctl.agents.protocol import AgentStatus
from dynctl.core.deployment import EngineState, UnitStatus
from dynctl.core.text import clean
from dynctl.core.units import format_seconds
from dynctl.deploy.awaited import awaited
from dynctl.deploy.steps import Tell
from dynctl.errors import DeployError, DynctlError, ExitCode
from dynctl.router.seen import FAILING, FIRST_EVENTS, UNREACHABLE, Seen

LIMIT_S = 60.0
"""After all is ready. A relay's table comes at once, or when the router has connected; first KV events are waited for 20 s."""
HEARTBEAT_S = 10.0
_MAX_TOLD = 8
"""Named each time it is told what is waited for."""

_TEXTS = {
    UNREACHABLE: "is out of its reach",
    FAILING: "failed its last requests",
    FIRST_EVENTS: "has told it of no KV event yet",
}

_decode = msgspec.json.Decoder(Seen).decode


@dataclass(frozen=True, slots=True)
class Lack:
    """Why a router does not send requests to an engine as it should."""

    host_name: str
    """Where the router runs."""
    router_id: str
    text: str
    is_reached: bool = False
    """It gets requests, but not yet by what it has cached."""


async def ask_seen(
    clients: Mapping[str, AgentClient], statuses: Mapping[str, AgentStatus]
) -> dict[str, Seen | DynctlError]:
    """What every router that is ready sees, by its id; or why it does not say."""
    found: dict[str, Seen | DynctlError] = {}
    for host_name, unit in _routers(statuses):
        if unit.state is EngineState.READY:
            try:
                found[unit.id] = _decode(await clients[host_name].ask_router(unit.id, "/engines"))
            except DynctlError as error:
                found[unit.id] = error
            except msgspec.MsgspecError as error:
                found[unit.id] = DynctlError(f"its answer cannot be read: {error}")
    return found


def lacks(
    statuses: Mapping[str, AgentStatus],
    found: Mapping[str, Seen | DynctlError],
    only: Collection[str] | None = None,
) -> list[Lack]:
    """What routers lack of the engines that are ready, or of `only` those."""
    return [
        Lack(host_name, unit.id, text, is_reached)
        for host_name, unit in _routers(statuses)
        for text, is_reached in _lacks_of(unit, found.get(unit.id), statuses, only)
    ]


def reach_text(seen: Seen) -> str:
    """How many engines of each role a router reaches."""
    by_role: dict[str, list[bool]] = {}
    for engine in seen.engines:
        by_role.setdefault(engine.role, []).append(engine.lack in {"", FIRST_EVENTS})
    parts = [
        f"{'engines' if role == 'aggregated' else role} {sum(reached)}/{len(reached)}"
        for role, reached in sorted(by_role.items(), reverse=True)
    ]
    return f"reaches {', '.join(parts) or 'no engine'}"


def _routers(statuses: Mapping[str, AgentStatus]) -> list[tuple[str, UnitStatus]]:
    return [
        (name, unit)
        for name, unit in awaited(statuses)
        if unit.kind == "router" and not unit.beside
    ]


def _lacks_of(
    router: UnitStatus,
    seen: Seen | DynctlError | None,
    statuses: Mapping[str, AgentStatus],
    only: Collection[str] | None,
) -> Iterator[tuple[str, bool]]:
    engines = [
        (host_name, unit)
        for host_name, status in statuses.items()
        for unit in status.units
        if unit.kind == "engine" and unit.deployment == router.deployment
        if unit.state is EngineState.READY and (only is None or unit.id in only)
    ]
    if not engines:
        return
    if seen is None:
        yield f"it is {router.state.value}", False
    elif isinstance(seen, DynctlError):
        yield f"it does not say which engines it reaches: {clean(seen.message, 300)}", False
    else:
        for host_name, unit in engines:
            why = seen.silent.get(host_name) or seen.silent.get(unit.id)
            yield from _lacks_of_engine(unit, seen, f": {clean(why, 200)}" if why else "")


def _lacks_of_engine(unit: UnitStatus, seen: Seen, cause: str) -> Iterator[tuple[str, bool]]:
    """`cause`: what keeps the router from knowing better, if that is known."""
    # Each of its data-parallel ranks; a start is told from every other by its incarnation alone.
    own = [one for one in seen.engines if one.incarnation == unit.incarnation]
    if not own:
        is_older = any(one.id == unit.id for one in seen.engines)
        what = (
            "is known to it as it was before its last start" if is_older else "is not known to it"
        )
        yield f"{unit.id} {what}{cause}", False
    for one in own:
        if one.lack:
            text = _TEXTS.get(one.lack, f"is {clean(one.lack, 40)} to it")
            yield f"{one.id} {text}{cause}", one.lack == FIRST_EVENTS


class Routing:
    """Waits until routers send requests to what is ready: asked once a round, it says whether to go on waiting."""

    def __init__(
        self,
        clients: Mapping[str, AgentClient],
        tell: Tell,
        only: Collection[str] | None = None,
    ) -> None:
        """`only` of these engines, whose routers may be too old to say what they reach: those are not waited for."""
        self._clients, self._tell, self._only = clients, tell, only
        self._mute: set[str] = set()
        self._since_s: float | None = None
        self._told_s = 0.0

    def begin_anew(self) -> None:
        """Forget for how long it was waited: engines or routers are not ready themselves."""
        self._since_s = None

    async def is_lacking(self, statuses: Mapping[str, AgentStatus]) -> bool:
        """Ask all routers; tell every 10 s what is waited for.

        Raises:
            DeployError: exit 6 when it was waited for too long.
        """
        seen = await ask_seen(self._clients, statuses)
        left = lacks(statuses, seen, self._only)
        if self._only is not None:
            left = self._without_mute(left, seen)
        if not left:
            return False
        now_s = time.monotonic()
        if self._since_s is None:
            self._since_s = self._told_s = now_s
        passed_s = now_s - self._since_s
        if passed_s > LIMIT_S:
            lines = [f"{each.host_name}: {each.router_id}: {each.text}" for each in left]
            raise DeployError(
                f"all is ready, and after {format_seconds(passed_s)} not all is used:\n  "
                + "\n  ".join(lines),
                f"dynctl logs {left[0].router_id}, and dynctl doctor for the ways between hosts; what runs goes on: "
                "dynctl status shows what routers reach",
                code=ExitCode.GATE,
            )
        if now_s - self._told_s > HEARTBEAT_S:
            self._told_s = now_s
            passed = f"{format_seconds(passed_s)} of {format_seconds(LIMIT_S)}"
            for each in left[:_MAX_TOLD]:
                self._tell(each.host_name, each.router_id, f"{each.text}, {passed}")
            if len(left) > _MAX_TOLD:
                self._tell("", "wait", f"and {len(left) - _MAX_TOLD} more, see dynctl status")
        return True

    def _without_mute(
        self, left: Sequence[Lack], seen: Mapping[str, Seen | DynctlError]
    ) -> list[Lack]:
        mute = [each for each in left if isinstance(seen.get(each.router_id), DynctlError)]
        for each in mute:
            if each.router_id not in self._mute:
                self._mute.add(each.router_id)
                self._tell(each.host_name, each.router_id, f"{each.text}; not waited for")
        return [each for each in left if each not in mute]

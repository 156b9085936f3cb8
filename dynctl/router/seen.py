"""What a router sees of its engines: whoever asks learns whether requests reach all that were planned. Pure."""

from collections.abc import Container, Iterable, Mapping, Sequence
from dataclasses import dataclass

from dynctl.core.deployment import EngineState
from dynctl.router.findings import Finding
from dynctl.router.workers import Worker

UNREACHABLE = "unreachable"
FAILING = "failing"
FIRST_EVENTS = "first_events"
NOT_YET = "has not answered yet"
"""Of a relay that was not heard of since the router started."""


@dataclass(frozen=True, slots=True)
class SeenEngine:
    """One engine, as a router sees it."""

    id: str
    incarnation: str
    role: str
    lack: str = ""
    """Why it gets no request, or as yet by its load alone: a state other than ready, `unreachable`, `failing` (its last
    requests), `first_events` (are waited for); empty: nothing."""


@dataclass(frozen=True, slots=True)
class Seen:
    """All engines a router knows."""

    engines: tuple[SeenEngine, ...]
    silent: Mapping[str, str]
    """Relays, by host, and engines reached without one that do not answer, with why."""
    findings: tuple[Finding, ...] = ()
    """What is wrong with the router itself, or keeps an engine's cache from being hit."""


def see(
    workers: Iterable[Worker],
    silent: Mapping[str, str],
    unheard: Container[str],
    findings: Iterable[Finding],
    now_s: float,
) -> Seen:
    """Say what is seen; of engines that are `unheard` the first KV events are waited for."""
    engines = [
        SeenEngine(worker.id, worker.incarnation, worker.info.role, _lack(worker, unheard, now_s))
        for worker in workers
    ]
    return Seen(tuple(engines), dict(silent), tuple(findings))


def _lack(worker: Worker, unheard: Container[str], now_s: float) -> str:
    if worker.info.state is not EngineState.READY:
        return worker.info.state.value
    if not worker.is_reachable:
        return UNREACHABLE
    if now_s < worker.open_until_s:
        return FAILING
    return FIRST_EVENTS if worker.id in unheard else ""


def join(views: Sequence[Seen]) -> Seen:
    """What several processes of one port see: a request may reach any of them, so what one lacks or does not know counts."""
    by_engine: dict[str, list[SeenEngine]] = {}
    silent: dict[str, str] = {}
    for view in views:
        silent |= view.silent
        for engine in view.engines:
            by_engine.setdefault(engine.id, []).append(engine)
    engines = [
        next((one for one in found if one.lack), found[0])
        for found in by_engine.values()
        if len(found) == len(views)
    ]
    findings = {(one.engine, one.cause): one for view in views for one in view.findings}
    return Seen(tuple(engines), silent, tuple(findings.values()))

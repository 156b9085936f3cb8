"""What goes wrong in single engines while they run: full KV memory, preemptions, failed transfers, figures that stop. Pure.

Not here: dead units and lost hosts (`events`), latency goals (`goals`).
"""

from collections.abc import Iterator
from dataclasses import dataclass, field, replace

from dynctl.core.text import clean
from dynctl.core.units import format_seconds
from dynctl.telemetry.events import BAD, NOTE, Event
from dynctl.telemetry.figures import STALE, STALE_S, EngineFigures, Overview
from dynctl.telemetry.lasting import Lasting

KV_FULL = 0.95
BEGINS_S = 10.0
ENDS_S = 30.0
FAILED_EVERY_S = 60.0
"""Failed transfers of this long are one event."""


@dataclass(slots=True)
class _Known:
    """What was known of one engine."""

    full: Lasting = field(default_factory=lambda: Lasting(BEGINS_S, ENDS_S))
    preempts: Lasting = field(default_factory=lambda: Lasting(BEGINS_S, ENDS_S))
    silent: Lasting = field(default_factory=lambda: Lasting(0.0, BEGINS_S))
    failed_total: float | None = None
    num_failed: float = 0.0
    """Not told yet."""
    failed_told_s: float | None = None

    def copy(self) -> "_Known":
        return replace(
            self,
            full=replace(self.full),
            preempts=replace(self.preempts),
            silent=replace(self.silent),
        )


class EngineWatch:
    """Fed with every overview; tells what began and what is over."""

    __slots__ = ("_engines",)

    def __init__(self) -> None:
        self._engines: dict[str, _Known] = {}

    def copy(self) -> "EngineWatch":
        """Return one that goes on by itself."""
        found = EngineWatch()
        found._engines = {name: known.copy() for name, known in self._engines.items()}
        return found

    def add(self, overview: Overview, now_s: float) -> Iterator[Event]:
        """Look at all engines; what is not known changes nothing, and engines that are gone are forgotten."""
        answering = {h.name for h in overview.hosts if h.age_s <= STALE_S and not h.error}
        self._engines = {
            engine.id: self._engines.get(engine.id) or _Known() for engine in overview.engines
        }
        for engine in overview.engines:
            known = self._engines[engine.id]
            for mark, text in (
                *_silence(known, engine, engine.host_name in answering, now_s),
                *_fullness(known, engine, now_s),
                *_preemptions(known, engine, now_s),
                *_transfers(known, engine, now_s),
            ):
                yield Event(overview.taken_unix_s, mark, clean(engine.id, 40), text)


Told = Iterator[tuple[str, str]]


def _silence(known: _Known, engine: EngineFigures, is_answering: bool, now_s: float) -> Told:
    if not is_answering:
        return  # the event of its host says so
    if known.silent.turns(engine.state == STALE, now_s):
        if known.silent.is_on:
            host = clean(engine.host_name, 40)
            yield BAD, f"no figures for {engine.age_s:.0f} s, though {host} answers"
        else:
            yield NOTE, f"figures again, after {_lasted(known.silent)}"


def _fullness(known: _Known, engine: EngineFigures, now_s: float) -> Told:
    ratio = engine.kv_usage_ratio
    if ratio is not None and known.full.turns(ratio >= KV_FULL, now_s):
        if known.full.is_on:
            yield BAD, f"{ratio * 100:.0f}% of its KV memory in use for {BEGINS_S:.0f} s"
        else:
            lasted = _lasted(known.full)
            yield NOTE, f"{ratio * 100:.0f}% of its KV memory in use, after {lasted} of more"


def _preemptions(known: _Known, engine: EngineFigures, now_s: float) -> Told:
    rate = engine.preemptions_s
    if rate is not None and known.preempts.turns(rate > 0.0, now_s):
        if known.preempts.is_on:
            yield BAD, f"preempts {rate:.1f} requests a second for lack of KV memory"
        else:
            yield NOTE, f"preempts no more, after {_lasted(known.preempts)}"


def _transfers(known: _Known, engine: EngineFigures, now_s: float) -> Told:
    total, before = engine.transfers_failed_total, known.failed_total
    if total is None:
        return
    known.failed_total = total
    if before is not None:
        # Below what it was, the engine began anew, and from zero.
        known.num_failed += total - before if total >= before else total
    told_s = known.failed_told_s
    if known.num_failed > 0 and (told_s is None or now_s - told_s >= FAILED_EVERY_S):
        yield BAD, f"{known.num_failed:.0f} KV transfers failed, {total:.0f} since it started"
        known.num_failed, known.failed_told_s = 0.0, now_s


def _lasted(lasting: Lasting) -> str:
    return format_seconds(lasting.lasted_s)

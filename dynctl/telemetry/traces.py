"""Requests as their routers decided and timed them: where each went, and what its time to first token was spent on.

From routers' decisions, which hold no prompts. Not here: asking for them (`inquiry`). Pure.
"""

import re
from collections import Counter
from collections.abc import Container, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Annotated

import msgspec

from dynctl.core.text import clean
from dynctl.errors import ProbeError

NUM_KEPT = 500
"""Requests remembered while watching."""
MAX_TEXT_CHARS = 120
Ms = Annotated[float, msgspec.Meta(ge=0.0, le=1e12)]
Count = Annotated[int, msgspec.Meta(ge=0, le=2**53)]
UnixS = Annotated[float, msgspec.Meta(ge=0.0, le=1e11)]
"""What can be drawn; what a host tells beyond that is refused."""
_RANK = re.compile(r"_dp\d+$")
RUNS = ""
LOST = "unknown"
"""The outcome of one that ran when it was last seen, and is no longer among the newest decisions."""


@dataclass(frozen=True, slots=True)
class Told:
    """One decision as a router tells it; what an older router leaves out is not known."""

    request_id: str
    leg: str
    engine: str
    unix_s: UnixS
    shown_id: str = ""
    route_key: str = ""
    prompt_tokens: Count = 0
    overlap_tokens: Count | None = None
    cached_tokens: Count | None = None
    output_tokens: Count = 0
    waited_ms: Ms | None = None
    ttft_ms: Ms | None = None
    outcome: str = ""
    path: str = ""
    link: str = ""
    move_tokens: Count = 0
    move_bytes: Count = 0


@dataclass(frozen=True, slots=True)
class Trace:
    """One request. Times are None until they are known; those of parts add up to `ttft_ms`."""

    id: str
    """As its client reads it."""
    unix_s: float
    """When it was placed."""
    route_key: str
    outcome: str
    """Empty: it runs."""
    prefill: str
    """The engine that computed the prompt; the same as `engine` without a hand-over."""
    engine: str
    """The engine that generates."""
    prompt_tokens: int
    expected_cached_tokens: int | None
    """As the router expected them on the engine that computed the prompt, …"""
    cached_tokens: int | None
    """… and as that engine counted them."""
    output_tokens: int | None
    queue_ms: float | None
    """From arrival to sending: tokenising, waiting for room, attempts that failed."""
    prefill_ms: float | None
    """From sending to the end of the prompt; of one engine that does both to the first token."""
    handover_ms: float | None
    """From there to the first token of the engine that generates: the transfer and its first step."""
    link: str
    """What KV was handed over on (`core.kv_links`); empty: nothing was."""
    path: str
    """With pools: `copy`, or why the engine that generates computed the prompt, too."""
    move_tokens: int
    move_bytes: int | None
    num_failed: int
    """Attempts that failed."""

    @property
    def is_handed_over(self) -> bool:
        """Whether one engine computed the prompt and another one generates."""
        return self.prefill != self.engine

    @property
    def ttft_ms(self) -> float | None:
        """From arrival to the first token."""
        parts = [self.queue_ms, self.prefill_ms]
        parts += [self.handover_ms] if self.is_handed_over else []
        known = [part for part in parts if part is not None]
        return sum(known) if len(known) == len(parts) else None

    @property
    def hit_ratio(self) -> float | None:
        """Share of the prompt found cached, as the engine counted."""
        if self.cached_tokens is None or not self.prompt_tokens:
            return None
        return self.cached_tokens / self.prompt_tokens


def told(body: bytes) -> list[Told]:
    """Read a router's answer to `/decisions`.

    Raises:
        ProbeError: when it is no list of decisions, or their numbers are none of a request.
    """
    try:
        return msgspec.json.decode(body, type=list[Told])
    except msgspec.DecodeError as error:
        raise ProbeError(f"the router's decisions are not understood: {error}") from error


def trace(decisions: Sequence[Told]) -> Trace | None:
    """Join the decisions of one request; None while the one for the engine that generates is missing."""
    in_order = sorted(decisions, key=lambda one: one.unix_s)
    main = next((one for one in reversed(in_order) if one.leg != "prefill"), None)
    prefill = next((one for one in reversed(in_order) if one.leg == "prefill"), None)
    if main is None or (main.leg == "decode" and prefill is None):
        return None
    first = main if main.leg == "whole" or prefill is None else prefill
    is_handed_over = first is not main
    queue_ms = first.waited_ms if first.ttft_ms is not None else None
    total_ms = _total_ms(main)
    spent = (queue_ms, first.ttft_ms, total_ms)
    handover_ms = None
    if is_handed_over and None not in spent:
        # What the router itself needs between the two counts here, so that the parts add up.
        handover_ms = max(0.0, (total_ms or 0.0) - (queue_ms or 0.0) - (first.ttft_ms or 0.0))
    return Trace(
        id=clean(main.shown_id or main.request_id, MAX_TEXT_CHARS),
        unix_s=in_order[0].unix_s,
        route_key=clean(main.route_key, MAX_TEXT_CHARS),
        outcome=clean(main.outcome, MAX_TEXT_CHARS),
        prefill=clean(first.engine, MAX_TEXT_CHARS),
        engine=clean(main.engine, MAX_TEXT_CHARS),
        prompt_tokens=main.prompt_tokens,
        expected_cached_tokens=first.overlap_tokens,
        cached_tokens=first.cached_tokens,
        output_tokens=main.output_tokens or None,
        queue_ms=queue_ms,
        prefill_ms=first.ttft_ms,
        handover_ms=handover_ms,
        link=clean(main.link, MAX_TEXT_CHARS) if is_handed_over else "",
        path=clean(main.path, MAX_TEXT_CHARS),
        move_tokens=main.move_tokens if is_handed_over else 0,
        move_bytes=(main.move_bytes or None) if is_handed_over else None,
        num_failed=sum(one.outcome not in {RUNS, main.outcome} for one in in_order),
    )


def _total_ms(main: Told) -> float | None:
    if main.ttft_ms is None or main.waited_ms is None:
        return None
    return main.waited_ms + main.ttft_ms


class TraceBook:
    """The newest requests over several looks at the newest decisions, newest first."""

    __slots__ = ("_decisions", "_newest")

    def __init__(self) -> None:
        self._decisions: dict[str, dict[tuple[str, float], Told]] = {}
        """By request, then by leg and time."""
        self._newest: frozenset[str] = frozenset()
        """Those that the last look showed."""

    def copy(self) -> "TraceBook":
        """Return one that goes on by itself."""
        found = TraceBook()
        found._decisions = {name: known.copy() for name, known in self._decisions.items()}
        found._newest = self._newest
        return found

    def add(self, decisions: Iterable[Told]) -> None:
        """Take in what all routers told at one look."""
        seen = set()
        for one in decisions:
            seen.add(one.request_id)
            self._decisions.setdefault(one.request_id, {})[one.leg, one.unix_s] = one
        self._newest = frozenset(seen)
        by_age = sorted(self._decisions, key=self._placed_unix_s)
        for request_id in by_age[: max(0, len(by_age) - NUM_KEPT)]:
            del self._decisions[request_id]

    def _placed_unix_s(self, request_id: str) -> float:
        return min(one.unix_s for one in self._decisions[request_id].values())

    def newest(self) -> tuple[Trace, ...]:
        """Return all requests that are known as a whole, newest first."""
        found = []
        for request_id, decisions in self._decisions.items():
            joined = trace(tuple(decisions.values()))
            if joined is None:
                continue
            if joined.outcome == RUNS and request_id not in self._newest:
                joined = replace(joined, outcome=LOST)
            found.append(joined)
        return tuple(sorted(found, key=lambda one: one.unix_s, reverse=True))


def engine_of(worker: str, engines: Container[str]) -> str:
    """Name the engine of a router's worker: itself, or of its data-parallel ranks (`ENGINE_dp1`) the engine they are of."""
    return worker if worker in engines else _RANK.sub("", worker)


def routes(traces: Iterable[Trace]) -> Mapping[tuple[str, str], int]:
    """Count requests by the engine that computed the prompt and the one that generates."""
    return Counter((one.prefill, one.engine) for one in traces)

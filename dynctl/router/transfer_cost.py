"""Copy or recompute: what moving a prompt's KV from a prefill to a decode engine costs, and whether it can be moved at all.

A transfer costs a set-up and its tokens' share of the link, both learned per pair of engines, and waits for the transfers
booked before it at either end. What is not known of a pair is taken to be as with its peers: those between the same hosts
where that link was measured, and then as measured, else those of the same class, and then as assumed. A pair that fails three times in a row is not used for a while.
Not here: checking transfer parameters (`transfer`), choosing engines (`placement`). Pure: times are passed in.
"""

import math
from collections.abc import Iterable
from typing import NamedTuple

from dynctl.core.kv_links import LINK_CLASSES, LinkClasses
from dynctl.router.metrics import Values, counter, gauge
from dynctl.router.rates import Line, SteadyLine

ASSUMED = "assumed"
"""A link of which nothing was measured, seen or told."""
LEARNED = "learned"

_PAIR_FAILURES = 3
"""In a row; fewer may be chance."""

_PAIR_REST_S = 30.0

_SCALE_TOKENS = 4096.0

_FEW_TOKENS = 16
"""A block. What fewer take is set-up and the decode engine's step, and tells nothing of the rate: 9 tokens in 15 ms are no slow link."""

_STEPS = 2.0
"""Of the decode engine, that a transfer takes beside the move itself: until it is taken up, until its end is seen, and one for the
first token; …"""
_STEPS_APART = 1.5
"""… and how many more or less that may be: one, and they are not all alike."""

_MAX_PAIRS = 4096

_HALF_S = 30.0
"""In which half of what a pair is known for is forgotten at most: one that is not used is taken for its peers' like again."""


class TransferFacts(NamedTuple):
    """What decides whether a prompt's KV can be moved."""

    tokens: int
    """To be moved."""
    target_free_tokens: int | None
    """Room in the decode engine's KV memory; None: not known."""
    is_pair_usable: bool = True
    bytes_per_token: int = 0
    """0: not known, then no size is too large."""
    max_bytes: int = 0
    """0: no limit."""


def can_transfer(facts: TransferFacts) -> str:
    """Say the first reason against moving; empty: it can be done."""
    if facts.target_free_tokens is not None and facts.target_free_tokens < facts.tokens:
        return "no_memory"
    if not facts.is_pair_usable:
        return "link_down"
    if facts.max_bytes and facts.tokens * facts.bytes_per_token > facts.max_bytes:
        return "too_large"
    return ""


class MoveCost(NamedTuple):
    """What one transfer is expected to take."""

    wait_ms: float
    move_ms: float


class _Late(NamedTuple):
    """A transfer that is behind, and all that wait with it; the later one is the greater."""

    by_ms: float
    expected_ms: float
    left_ms: float


_NOT_LATE = _Late(0.0, 1.0, 0.0)


class _Peers:
    """Pairs of which the same was declared."""

    __slots__ = ("basis", "declared", "line", "wider")

    def __init__(
        self, basis: str, declared: Line, line: SteadyLine, wider: SteadyLine | None = None
    ) -> None:
        self.basis = basis
        self.declared = declared
        self.line = line
        self.wider = wider
        """Learns from them, too, and tells them nothing: they have a measurement to come back to."""


class _Pair:
    __slots__ = ("failures_in_row", "line", "peers", "rest_until_s")

    def __init__(self, peers: _Peers) -> None:
        self.line = SteadyLine(peers.declared, peers.line, _HALF_S)
        self.peers = peers
        self.failures_in_row = 0
        self.rest_until_s = 0.0


class _Port:
    """One engine's end of its transfers, sending or receiving."""

    __slots__ = ("busy_until_s", "ended_s", "held_s", "held_until_s", "moves", "step_ms")

    def __init__(self) -> None:
        self.busy_until_s = 0.0
        self.ended_s = 0.0
        self.held_until_s = 0.0
        """What arrives before is not taken up: the engine computes a prompt of its own."""
        self.held_s = 0.0
        """So far and up to then, added up."""
        self.moves: dict[Move, None] = {}
        """Under way or waiting, oldest first."""
        self.step_ms = 0.0
        """What one step of a decode engine takes; 0: not known yet."""


class Links:
    """Transfers between engines: learned costs, what is under way, which pairs do not work."""

    def __init__(
        self, setup_ms: float, ms_per_token: float, classes: LinkClasses | None = None
    ) -> None:
        """Both are assumed until learned, where `classes` knows no rate of a pair's link.

        A first guess can be off by orders of magnitude, so it is given little weight.
        """
        self.classes = classes or LinkClasses()
        self.moved_tokens = dict.fromkeys(LINK_CLASSES, 0)
        """By transfers that worked, by class of link."""
        assumed = _declared(setup_ms, ms_per_token)
        self._all = SteadyLine(assumed)
        self._classes = {
            name: _Peers(ASSUMED, assumed, SteadyLine(assumed, self._all)) for name in LINK_CLASSES
        }
        self._routes: dict[tuple[str, str, str], _Peers] = {}
        """Hosts and class, where a rate is known."""
        for rate in self.classes.rates:
            known = _declared(setup_ms + rate.latency_ms, rate.ms_per_token)
            wider = self._classes[rate.link].line
            self._routes[rate.route] = _Peers(rate.basis, known, SteadyLine(known), wider)
        self._pairs: dict[tuple[str, str], _Pair] = {}
        self._ports: dict[str, _Port] = {}

    def cost(self, source: str, target: str, tokens: int, start_s: float, now_s: float) -> MoveCost:
        """Predict a transfer that would start at `start_s`."""
        base_ms, ms_per_token, wait_ms = self._rates(source, target, start_s, now_s)
        return MoveCost(wait_ms, self._steps_ms(target) + base_ms + tokens * ms_per_token)

    def price(self, source: str, target: str, start_s: float, now_s: float) -> tuple[float, float]:
        """The same for any number of tokens: what it takes before the first byte, and then for each."""
        base_ms, ms_per_token, wait_ms = self._rates(source, target, start_s, now_s)
        return wait_ms + self._steps_ms(target) + base_ms, ms_per_token

    def usual_price(self, now_s: float) -> tuple[float, float]:
        """The pairs' average, where it is not known who sends."""
        self._all.look(now_s)
        return self._all.base, self._all.slope

    def basis(self, source: str, target: str, now_s: float) -> str:
        """Say what a pair's price rests on: `learned`, else what it is until then: `measured`, `nominal`, `assumed`."""
        line = self._line(source, target)
        line.look(now_s)
        return LEARNED if line.seen_share >= 0.5 else self._peers(source, target).basis

    def _rates(
        self, source: str, target: str, start_s: float, now_s: float
    ) -> tuple[float, float, float]:
        """Set-up, time per token and wait."""
        line, late, busy_s = self._line(source, target), _NOT_LATE, 0.0
        line.look(now_s)
        for name in (source, target):
            port = self._ports.get(name)
            if port is not None and port.moves:
                late = max(late, self._late(port, now_s))
                busy_s = max(busy_s, port.busy_until_s)
        if late.by_ms > 0.0:
            # What it takes in the end is not known yet. On a link that is not known either, it tells how slow the link
            # is; on a known one it is its own trouble, which may last as long again.
            doubt = 1.0 / (1.0 + line.num_seen)
            strain = 1.0 + doubt * late.by_ms / late.expected_ms
            own_ms = (1.0 - doubt) * late.by_ms
            return line.base * strain, line.slope * strain, late.left_ms * strain + own_ms
        return line.base, line.slope, max(busy_s - start_s, 0.0) * 1e3

    def hold(self, engine: str, until_s: float, now_s: float) -> None:
        """Note that a decode engine computes a prompt itself: till then it takes nothing up, and no link is to blame."""
        port = self._ports.setdefault(engine, _Port())
        port.held_s += max(until_s - max(port.held_until_s, now_s), 0.0)
        port.held_until_s = until_s

    def book(self, source: str, target: str, tokens: int, start_s: float, now_s: float) -> "Move":
        """Count a transfer expected to start then."""
        base_ms, ms_per_token, wait_ms = self._rates(source, target, start_s, now_s)
        move_ms = base_ms + tokens * ms_per_token
        move = Move(self, source, target, tokens)
        self._expect(move, start_s + wait_ms / 1e3, move_ms, now_s)
        for name in (source, target):
            port = self._ports.setdefault(name, _Port())
            port.busy_until_s = move.start_s + move_ms / 1e3
            port.moves[move] = None
        return move

    def moved(self, move: "Move", began_s: float, now_s: float, step_ms: float) -> None:
        """Learn from a transfer that worked: the decode engine was asked at `began_s`, and takes so long for a step; 0: not known."""
        pair, ports = self._count(move), self._ports_of(move)
        ended_s = max([began_s, *(port.ended_s for port in ports)])
        ms, held_ms = (now_s - ended_s) * 1e3, self._held_ms(move)
        ms -= held_ms
        # Where holding up may be all there is to it, nothing is learned.
        is_plain = not held_ms or ms > pair.line.at(move.tokens, now_s)
        if is_plain and move.tokens >= _FEW_TOKENS:
            if step_ms:
                expected_ms = pair.line.at(move.tokens, now_s)
                ms = _beside_steps(ms, expected_ms, step_ms, is_behind=ended_s > began_s)
            pair.line.learn(move.tokens, ms, now_s)
            if pair.peers.wider is not None:
                pair.peers.wider.learn(move.tokens, ms, now_s)
        self._ports.setdefault(move.target, _Port()).step_ms = step_ms
        self._end(move, now_s)

    def arrived(self, move: "Move") -> None:
        """Count a transfer that worked and of which nobody knows when it ended: nothing is learned."""
        self._count(move)
        self.dropped(move)

    def failed(self, move: "Move", now_s: float) -> None:
        """Count a transfer that failed; several in a row keep the pair apart for a while."""
        pair = self._pair(move.source, move.target)
        pair.failures_in_row += 1
        if pair.failures_in_row >= _PAIR_FAILURES:
            pair.rest_until_s = now_s + _PAIR_REST_S
        self.dropped(move)

    def dropped(self, move: "Move") -> None:
        """Take out a transfer that will not happen."""
        for port in self._ports_of(move):
            if move in port.moves:
                del port.moves[move]
                # Nothing is left: no rounding either.
                left_s = port.busy_until_s - move.expected_ms / 1e3
                port.busy_until_s = left_s if port.moves else 0.0

    @property
    def num_booked(self) -> int:
        """Transfers under way or waiting."""
        return len({move for port in self._ports.values() for move in port.moves})

    def is_usable(self, source: str, target: str, now_s: float) -> bool:
        """Whether a pair may be used; after its rest one attempt tells."""
        pair = self._pairs.get((source, target))
        return pair is None or now_s >= pair.rest_until_s

    def sums(self, bytes_per_token: int) -> dict[str, int]:
        """What was moved, by names of which those of several processes can be added."""
        tokens = {f"moved_{name}_tokens": number for name, number in self.moved_tokens.items()}
        if not bytes_per_token:
            return tokens
        return tokens | {
            f"moved_{name}_bytes": number * bytes_per_token
            for name, number in self.moved_tokens.items()
        }

    def exposition(self, bytes_per_token: int) -> Iterable[str]:
        """The metrics' lines; bytes where it is known what a token takes."""
        moved: Values = {(name,): float(number) for name, number in self.moved_tokens.items()}
        text = "KV handed over, by class of link."
        yield from counter("kv_moved_tokens_total", text, moved, ("link",))
        yield from gauge("kv_bytes_per_token", "0: not known.", {(): float(bytes_per_token)})
        if bytes_per_token:
            num_bytes = {key: number * bytes_per_token for key, number in moved.items()}
            yield from counter("kv_moved_bytes_total", text, num_bytes, ("link",))

    def _count(self, move: "Move") -> _Pair:
        self.moved_tokens[self.classes.of(move.source, move.target)] += move.tokens
        pair = self._pair(move.source, move.target)
        pair.failures_in_row = 0
        return pair

    def _end(self, move: "Move", now_s: float) -> None:
        for port in self._ports_of(move):
            port.moves.pop(move, None)
            port.ended_s = now_s
            # What is left is counted from here, so that a wrong guess does not last.
            left_ms = 0.0
            for other in port.moves:
                expected_ms = self._line(other.source, other.target).at(other.tokens, now_s)
                self._expect(other, now_s + left_ms / 1e3, expected_ms, now_s)
                left_ms += expected_ms
            port.busy_until_s = now_s + left_ms / 1e3 if port.moves else 0.0

    def _expect(self, move: "Move", start_s: float, expected_ms: float, now_s: float) -> None:
        move.start_s, move.expected_ms = start_s, expected_ms
        port = self._ports.get(move.target)
        if port is not None:
            move.held_before_s = port.held_s - max(port.held_until_s - now_s, 0.0)

    def _held_ms(self, move: "Move") -> float:
        """How long a transfer's end can at most have waited for its decode engine."""
        port = self._ports.get(move.target)
        return 0.0 if port is None else (port.held_s - move.held_before_s) * 1e3

    def _steps_ms(self, target: str) -> float:
        """What a decode engine's steps add to a transfer."""
        port = self._ports.get(target)
        return 0.0 if port is None else _STEPS * port.step_ms

    def _late(self, port: _Port, now_s: float) -> "_Late":
        """How far the oldest transfer is behind what was expected of it."""
        oldest = next(iter(port.moves), None)
        if oldest is None or oldest.expected_ms <= 0.0:
            return _NOT_LATE
        expected_ms = (
            oldest.expected_ms + (_STEPS + _STEPS_APART) * self._ports[oldest.target].step_ms
        )
        by_ms = (now_s - oldest.start_s) * 1e3 - self._held_ms(oldest) - expected_ms
        if by_ms <= 0.0:
            return _NOT_LATE
        return _Late(by_ms, oldest.expected_ms, sum(move.expected_ms for move in port.moves))

    def _ports_of(self, move: "Move") -> "list[_Port]":
        return [self._ports[name] for name in (move.source, move.target) if name in self._ports]

    def _line(self, source: str, target: str) -> SteadyLine:
        pair = self._pairs.get((source, target))
        return self._peers(source, target).line if pair is None else pair.line

    def _peers(self, source: str, target: str) -> _Peers:
        if self._routes:
            route = self.classes.route(source, target)
            return self._routes.get(route) or self._classes[route[2]]
        return self._classes[self.classes.of(source, target)]

    def _pair(self, source: str, target: str) -> _Pair:
        found = self._pairs.get((source, target))
        if found is None:
            if len(self._pairs) >= _MAX_PAIRS:
                self._pairs.clear()
            found = self._pairs[source, target] = _Pair(self._peers(source, target))
        return found


def _beside_steps(ms: float, expected_ms: float, step_ms: float, *, is_behind: bool) -> float:
    """Say what is learned of the time to a first token: what was expected, where the decode engine's steps may be the difference.

    It is taken up between two steps, its end is seen between two steps, and the first token takes one. Counted from another's
    first token (`is_behind`), which had to wait as well, that is a step more or less. Where the difference is greater all of it
    counts: a link that is taken to be too fast costs more than one that is taken to be too slow.
    """
    usual_ms = ms if is_behind else max(ms - _STEPS * step_ms, 0.0)
    if abs(usual_ms - expected_ms) <= _STEPS_APART * step_ms:
        return expected_ms
    return ms if expected_ms < usual_ms else usual_ms


def _declared(setup_ms: float, ms_per_token: float) -> Line:
    return Line(
        *(setup_ms, ms_per_token, _SCALE_TOKENS),
        weight=0.05,
        outlier=math.inf,
        is_base_sure=True,
    )


class Move:
    """One transfer, waiting or under way; its end is told once."""

    __slots__ = (
        "_links",
        "expected_ms",
        "held_before_s",
        "source",
        "start_s",
        "target",
        "tokens",
    )

    def __init__(self, links: Links, source: str, target: str, tokens: int) -> None:
        self._links = links
        self.source = source
        self.target = target
        self.tokens = tokens
        self.start_s = self.expected_ms = self.held_before_s = 0.0

    def took(self, began_s: float, now_s: float, step_ms: float = 0.0) -> None:
        """It worked: the decode engine, which takes so long for a step, was asked at `began_s` and its first token came now."""
        self._links.moved(self, began_s, now_s, step_ms)

    def arrived(self) -> None:
        """It worked some time ago: the whole answer is here."""
        self._links.arrived(self)

    def failed(self, now_s: float) -> None:
        """It did not."""
        self._links.failed(self, now_s)

    def dropped(self) -> None:
        """It will not happen."""
        self._links.dropped(self)


class PathCosts(NamedTuple):
    """Both ways of getting a prompt's KV onto a decode engine, in milliseconds to the first token."""

    recompute_ms: float
    """Uncached prefill and its queue on the decode engine, and what that holds up there."""
    copy_ms: float
    """Prefill elsewhere and its queue, the link's queue, set-up and transfer."""


def stall_ms(prefill_ms: float, running: int, weight: float) -> float:
    """What a prefill costs the sequences a decode engine runs; at least one is expected there."""
    return prefill_ms * weight * (running + 1)

"""Copy or recompute: what moving a prompt's KV from a prefill to a decode engine costs, and whether it can be moved at all.

A transfer costs a set-up and its tokens' share of the link, both learned per pair of engines, and waits for the
transfers booked before it at either end. A pair that fails three times in a row is not used for a while (row P8).
Not here: checking transfer parameters (`transfer`), choosing engines (`placement`). Pure: times are passed in.
"""

from typing import NamedTuple

from dynctl.router.rates import Line

_PAIR_FAILURES = 3
"""Source: row P8."""

_PAIR_REST_S = 30.0

_SCALE_TOKENS = 4096.0

_MAX_PAIRS = 4096


class TransferFacts(NamedTuple):
    """What decides whether a prompt's KV can be moved."""

    tokens: int
    """To be moved."""
    target_free_tokens: int | None
    """Room in the decode engine's KV memory; None: not known."""
    is_pair_usable: bool = True
    has_address: bool = True
    """Whether the prefill engine can be reached for its blocks at all."""
    bytes_per_token: int = 0
    """0: not known, then no size is too large."""
    max_bytes: int = 0
    """0: no limit."""


def can_transfer(facts: TransferFacts) -> str:
    """Say the first reason against moving; empty: it can be done."""
    if facts.target_free_tokens is not None and facts.target_free_tokens < facts.tokens:
        return "no_memory"
    if not (facts.has_address and facts.is_pair_usable):
        return "link_down"
    if facts.max_bytes and facts.tokens * facts.bytes_per_token > facts.max_bytes:
        return "too_large"
    return ""


class MoveCost(NamedTuple):
    """What one transfer is expected to take."""

    wait_ms: float
    move_ms: float


class _Pair:
    __slots__ = ("failures_in_row", "line", "rest_until_s")

    def __init__(self, setup_ms: float, ms_per_token: float) -> None:
        self.line = Line(setup_ms, ms_per_token, _SCALE_TOKENS)
        self.failures_in_row = 0
        self.rest_until_s = 0.0


class Links:
    """Transfers between engines: learned costs, what is under way, which pairs do not work."""

    def __init__(self, setup_ms: float, ms_per_token: float) -> None:
        """Both are assumed until learned."""
        self._all = Line(setup_ms, ms_per_token, _SCALE_TOKENS)
        self._pairs: dict[tuple[str, str], _Pair] = {}
        self._busy_until_s: dict[str, float] = {}
        """By engine, sending or receiving."""

    @property
    def setup_ms(self) -> float:
        """Before a transfer's first byte, on the pairs' average."""
        return self._all.base

    @property
    def ms_per_token(self) -> float:
        """Of a transfer, on the pairs' average."""
        return self._all.slope

    def cost(self, source: str, target: str, tokens: int, now_s: float) -> MoveCost:
        """Predict a transfer that would start at `now_s`."""
        pair = self._pairs.get((source, target))
        line = self._all if pair is None else pair.line
        busy_s = max(self._busy_until_s.get(source, 0.0), self._busy_until_s.get(target, 0.0))
        return MoveCost(max(busy_s - now_s, 0.0) * 1e3, line.at(tokens))

    def book(self, source: str, target: str, tokens: int, start_s: float) -> None:
        """Count a transfer expected to start then."""
        cost = self.cost(source, target, tokens, start_s)
        until_s = start_s + (cost.wait_ms + cost.move_ms) / 1e3
        self._busy_until_s[source] = self._busy_until_s[target] = until_s

    def moved(self, source: str, target: str, tokens: int, ms: float) -> None:
        """Learn from a transfer that worked."""
        pair = self._pair(source, target)
        pair.line.learn(tokens, ms)
        pair.failures_in_row = 0
        self._all.learn(tokens, ms)

    def failed(self, source: str, target: str, now_s: float) -> None:
        """Count a transfer that failed; several in a row keep the pair apart for a while."""
        pair = self._pair(source, target)
        pair.failures_in_row += 1
        if pair.failures_in_row >= _PAIR_FAILURES:
            pair.rest_until_s = now_s + _PAIR_REST_S

    def is_usable(self, source: str, target: str, now_s: float) -> bool:
        """Whether a pair may be used; after its rest one attempt tells."""
        pair = self._pairs.get((source, target))
        return pair is None or now_s >= pair.rest_until_s

    def forget(self, engine_id: str) -> None:
        """Drop what was learned with an engine that is gone or started anew."""
        self._busy_until_s.pop(engine_id, None)
        for pair in [pair for pair in self._pairs if engine_id in pair]:
            del self._pairs[pair]

    def _pair(self, source: str, target: str) -> _Pair:
        found = self._pairs.get((source, target))
        if found is None:
            if len(self._pairs) >= _MAX_PAIRS:
                self._pairs.clear()
            found = _Pair(self._all.base, self._all.slope)
            self._pairs[source, target] = found
        return found


class Move:
    """One transfer under way; its end is told once."""

    __slots__ = ("_links", "_source", "_target", "_tokens")

    def __init__(self, links: Links, source: str, target: str, tokens: int) -> None:
        self._links = links
        self._source = source
        self._target = target
        self._tokens = tokens

    def took(self, ms: float) -> None:
        """It worked, in so many milliseconds from asking the decode engine to its first token."""
        self._links.moved(self._source, self._target, self._tokens, ms)

    def failed(self, now_s: float) -> None:
        """It did not."""
        self._links.failed(self._source, self._target, now_s)


class PathCosts(NamedTuple):
    """Both ways of getting a prompt's KV onto a decode engine, in milliseconds to the first token."""

    recompute_ms: float
    """Uncached prefill and its queue on the decode engine, and what that holds up there."""
    copy_ms: float
    """Prefill elsewhere and its queue, the link's queue, set-up and transfer."""


def stall_ms(prefill_ms: float, running: int, weight: float) -> float:
    """What a prefill costs the sequences a decode engine runs; at least one is expected there."""
    return prefill_ms * weight * (running + 1)

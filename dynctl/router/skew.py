"""How the last decisions spread their requests over engines, and how they would be spread without a policy.

Sums, so that those of several processes can be added. Not here: what they mean (`checks.skew`). Pure.
"""

from collections import defaultdict
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from itertools import islice

from dynctl.router.choosing import Load
from dynctl.router.decisions import Decision
from dynctl.router.hits import scaled

MEASURES = ("requests", "uncached_tokens", "output_tokens")
"""What a request weighs; its answer's length only where the engine told it."""

FREE, TURN, PREFIX = "free", "turn", "prefix"
"""What drew a request to its engine: nothing of its cache, the cache of its own conversation, a prefix it shares."""

OTHER_KEYS = "other"
_MAX_KEYS = 64
_MAX_LOOKS = 1000
"""Decisions of which every candidate is looked at, not only the one taken."""


@dataclass(slots=True)
class Amount:
    """One measure of what an engine got, …"""

    actual: float = 0.0
    fair: float = 0.0
    """… would have had if every request were shared equally by its candidates, …"""
    in_turn: float = 0.0
    """… or if the same requests were dealt out in turn."""
    variance: float = 0.0
    """Of `fair`, where each candidate is as likely as the others."""

    def join(self, other: "Amount") -> None:
        """Add another process's."""
        self.actual += other.actual
        self.fair += other.fair
        self.in_turn += other.in_turn
        self.variance += other.variance


@dataclass(slots=True)
class Engine:
    """What one engine got, and what it is like."""

    amounts: dict[str, Amount] = field(
        default_factory=lambda: {measure: Amount() for measure in MEASURES}
    )
    num_looks: int = 0
    under_way: int = 0
    """Requests, summed over looks."""
    num_full: int = 0
    """Looks at which its KV memory had no room up to the watermark."""
    prefill_base_ms: float = 0.0
    prefill_ms_per_token: float = 0.0
    """Both as learned, at the last decision."""
    capacity_tokens: int = 0
    """Of KV memory; 0: not known."""
    num_timed: int = 0
    """First tokens of prompts that had no other prefill before them, …"""
    took_ms: float = 0.0
    """… how long these took in all, …"""
    usual_ms: float = 0.0
    """… and would take at the fleet's learned rates. An engine's own are held to those, so they tell less."""

    def join(self, other: "Engine") -> None:
        """Add another process's; what the engine is like, its own process knows."""
        for measure, amount in self.amounts.items():
            amount.join(other.amounts[measure])
        self.num_looks += other.num_looks
        self.under_way += other.under_way
        self.num_full += other.num_full
        self.num_timed += other.num_timed
        self.took_ms += other.took_ms
        self.usual_ms += other.usual_ms


@dataclass(slots=True)
class Pool:
    """Engines that do the same work: those that only prefill, or the others."""

    num_decisions: int = 0
    policies: dict[str, int] = field(default_factory=dict)
    """Decisions by policy; `short` is the rule for prompts that are not looked at."""
    engines: dict[str, Engine] = field(default_factory=dict)
    drawn: dict[str, dict[str, dict[str, list[float]]]] = field(default_factory=dict)
    """By what drew requests, route key and engine: the amounts of `MEASURES`. Of the first 64 keys; the rest is `other`."""

    def join(self, other: "Pool") -> None:
        """Add another process's."""
        self.num_decisions += other.num_decisions
        for policy, number in other.policies.items():
            self.policies[policy] = self.policies.get(policy, 0) + number
        for name, engine in other.engines.items():
            if name in self.engines:
                self.engines[name].join(engine)
            else:
                self.engines[name] = engine
        for kind, keys in other.drawn.items():
            for key, engines in keys.items():
                for name, amounts in engines.items():
                    self.draw(kind, key, name, amounts)

    def draw(self, kind: str, key: str, engine: str, amounts: Iterable[float]) -> None:
        """Add what was drawn to an engine."""
        keys = self.drawn.setdefault(kind, {})
        sums = keys.setdefault(key, {}).setdefault(engine, [0.0] * len(MEASURES))
        for i, amount in enumerate(amounts):
            sums[i] += amount


@dataclass(slots=True)
class SkewSums:
    """All pools of a router that decided anything, by the leg their engines serve."""

    pools: dict[str, Pool] = field(default_factory=dict)

    def join(self, other: "SkewSums") -> None:
        """Add another process's sums."""
        for name, pool in other.pools.items():
            if name in self.pools:
                self.pools[name].join(pool)
            else:
                self.pools[name] = pool


def add_up(decisions: Iterable[Decision]) -> SkewSums:
    """Sum decisions up, given oldest first."""
    by_pool: dict[str, list[Decision]] = {}
    for decision in decisions:
        name = "prefill" if decision.leg == "prefill" else "main"
        by_pool.setdefault(name, []).append(decision)
    return SkewSums({name: _pool(mine) for name, mine in by_pool.items()})


def _pool(decisions: list[Decision]) -> Pool:
    pool = Pool(len(decisions))
    groups: dict[tuple[str, ...], list[tuple[float, ...]]] = defaultdict(list)
    keys: set[str] = set()
    for decision in decisions:
        pool.policies[decision.policy] = pool.policies.get(decision.policy, 0) + 1
        amounts = _amounts(decision)
        groups[tuple([load.engine for load in decision.loads])].append(amounts)
        key = decision.route_key
        if key not in keys:
            if len(keys) < _MAX_KEYS:
                keys.add(key)
            else:
                key = OTHER_KEYS
        pool.draw(_drawn_by(decision), key, decision.engine, amounts)
    for names, members in groups.items():
        _share_out(pool, names, members)
    for keyed in pool.drawn.values():
        for engines in keyed.values():
            for name, sums in engines.items():
                mine = pool.engines[name].amounts
                for measure, amount in zip(MEASURES, sums, strict=True):
                    mine[measure].actual += amount
    _look(pool, decisions)
    for decision in decisions:
        _time(pool.engines[decision.engine], decision)
    return pool


def _amounts(decision: Decision) -> tuple[float, ...]:
    """What a request weighs, in the order of `MEASURES`."""
    cached = decision.overlap_tokens
    if decision.cached_tokens is not None:
        counted = decision.counted_tokens or decision.prompt_tokens
        cached = scaled(decision.cached_tokens, decision.prompt_tokens, counted)
    return 1.0, float(max(decision.prompt_tokens - cached, 1)), float(decision.output_tokens)


def _drawn_by(decision: Decision) -> str:
    overlaps = decision.overlaps_tokens
    if overlaps[decision.position] <= min(overlaps):
        return FREE
    return PREFIX if decision.need.popularity else TURN


def _share_out(pool: Pool, names: tuple[str, ...], members: list[tuple[float, ...]]) -> None:
    """Give each engine its part of requests that had the same candidates."""
    number = len(names)
    part = 1.0 / number
    amounts = [pool.engines.setdefault(name, Engine()).amounts for name in names]
    for i, measure in enumerate(MEASURES):
        sizes = [member[i] for member in members]
        fair = sum(sizes) * part
        variance = sum([size * size for size in sizes]) * part * (1.0 - part)
        for turn in range(number):
            amount = amounts[turn][measure]
            amount.fair += fair
            amount.variance += variance
            amount.in_turn += sum(islice(sizes, turn, None, number))


def _look(pool: Pool, decisions: list[Decision]) -> None:
    """See what engines are like: at decisions evenly spread over all, and at the last one of each."""
    for decision in decisions[:: max(len(decisions) // _MAX_LOOKS, 1)]:
        for engine, load in _known(pool, decision):
            engine.num_looks += 1
            engine.under_way += load.active_requests
            engine.num_full += load.room_tokens <= 0.0
    missing = set(pool.engines)
    for decision in reversed(decisions):
        if not missing:
            break
        for engine, load in _known(pool, decision):
            if load.engine in missing:
                missing.discard(load.engine)
                engine.prefill_base_ms = load.prefill_base_ms
                engine.prefill_ms_per_token = load.prefill_ms_per_token
                engine.capacity_tokens = load.capacity_tokens


def _time(engine: Engine, decision: Decision) -> None:
    """Take the time of a prefill that did not have to wait for another one."""
    need, load = decision.need, decision.loads[decision.position]
    if decision.ttft_ms is None or decision.leg == "decode" or load.free_at_s > need.now_s:
        return
    engine.num_timed += 1
    engine.took_ms += decision.ttft_ms
    engine.usual_ms += need.least_prefill_ms + _amounts(decision)[1] * need.ms_per_token


def _known(pool: Pool, decision: Decision) -> Iterator[tuple[Engine, Load]]:
    return ((pool.engines[load.engine], load) for load in decision.loads)

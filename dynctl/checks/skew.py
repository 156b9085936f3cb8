"""Whether engines of a pool are loaded evenly, and if not, which step of the operators' sequence explains it.

First how uneven it is, beside what chance would give; then the same requests dealt out in turn, without a policy; then
the causes in the order in which they are met: routing policy, parallel layout, KV memory. Pure.
"""

import math
from collections.abc import Iterable
from dataclasses import dataclass
from statistics import NormalDist, median

from dynctl.router.skew import FREE, MEASURES, PREFIX, TURN, Amount, Engine, Pool

_EVEN = 1.25
"""Most loaded engine over its fair share that needs no cure: what `kv` has on traces of every kind (0006)."""
_SURE = 0.95
"""How often chance alone stays below what is called uneven."""
_UNDER_WAY_RATIO, _UNDER_WAY_MORE = 1.5, 2.0
"""Requests under way above the mean of all engines, as the policy `prefix` takes an engine for busy."""
_HALF = 0.5
"""A step that explains this much of the excess explains the skew."""
_FEW = 20
"""Requests that no cache drew anywhere, or prefills that were timed; fewer say nothing."""
_SLOW, _SLOW_TIMED = 1.25, 1.5
"""Time of the same prefill, over the pool's median: as learned, which is held to the fleet's, and as measured."""
_SMALL = 0.8
"""KV memory, over the pool's median."""
_FULL_MORE = 0.2
"""Share of looks at which an engine had no room, above the pool's median."""
_TYPICAL_TOKENS = 1024
_UNDER_WAY = "under_way"

_NAMES = {
    "requests": "requests",
    "uncached_tokens": "uncached prompt tokens",
    "output_tokens": "output tokens",
    _UNDER_WAY: "requests under way",
}
_DRAWN = {TURN: "turns of conversations", PREFIX: "prompts with a shared prefix"}


@dataclass(frozen=True, slots=True)
class Spread:
    """How uneven one measure is: of the engine furthest above its fair share."""

    measure: str
    engine: str
    ratio: float
    """Over its fair share."""
    chance: float
    """Below this, 19 times in 20, if every request went anywhere; of requests under way: what is not busy yet."""
    in_turn: float | None
    """The worst engine's, if the same requests were dealt out in turn; None: cannot be told."""

    @property
    def is_even(self) -> bool:
        """Whether it is near enough, or chance would do as much."""
        return self.ratio <= max(_EVEN, self.chance)

    @property
    def is_uneven_in_turn(self) -> bool:
        """Whether dealing out in turn would leave at least half of the excess."""
        if self.in_turn is None:
            return False
        return self.in_turn > _EVEN and self.in_turn - 1.0 >= _HALF * (self.ratio - 1.0)

    @property
    def name(self) -> str:
        """The measure in words."""
        return _NAMES[self.measure]


@dataclass(frozen=True, slots=True)
class Cause:
    """One of the known causes, whether it was found, and on what evidence."""

    name: str
    holds: bool
    evidence: str
    remedy: str = ""
    engine: str = ""
    """That differs from the others."""


@dataclass(frozen=True, slots=True)
class Diagnosis:
    """What is the matter with a pool."""

    verdict: str
    """`even`, `policy`, `layout`, `kv_memory`, `sizes` (of requests), or `engine`: one lags for none of these reasons."""
    step: str
    """What explains it, in a sentence."""
    remedy: str
    num_decisions: int
    policy: str
    """That made most of the decisions."""
    spreads: tuple[Spread, ...]
    causes: tuple[Cause, ...]
    """In the order in which they are met."""


def diagnose(pool: Pool) -> Diagnosis:
    """Go through the steps with the decisions of one pool."""
    policy = max(pool.policies, key=lambda name: pool.policies[name])
    spreads = tuple(_spreads(pool))
    # A queue is what uneven amounts lead to: it is looked at by itself only where they are even.
    worst = max(
        spreads,
        key=lambda spread: (
            spread.measure != _UNDER_WAY and not spread.is_even,
            spread.ratio / max(_EVEN, spread.chance),
        ),
    )
    layout, kv_memory = _layout(pool.engines), _kv_memory(pool.engines)
    starved = _starved(pool, worst)
    is_lame = starved is not None and any(
        cause.holds and cause.engine == starved.engine for cause in (layout, kv_memory)
    )
    causes = (_policy(pool, policy, worst, starved if is_lame else None), layout, kv_memory)
    verdict, step, remedy = _judge(worst, causes, policy, starved)
    return Diagnosis(verdict, step, remedy, pool.num_decisions, policy, spreads, causes)


def _judge(
    worst: Spread,
    causes: tuple[Cause, ...],
    policy: str,
    starved: "_Starved | None",
) -> tuple[str, str, str]:
    """The verdict, the step that explains it, and what to do."""
    if worst.is_even:
        return "even", "load is as even as it needs to be", ""
    excess = f"{worst.engine} has {worst.ratio:.2f} times its share of {worst.name}"
    for verdict, cause in zip(("policy", "layout", "kv_memory"), causes, strict=True):
        if cause.holds:
            return verdict, f"{excess}: {cause.evidence}", cause.remedy
    if worst.is_uneven_in_turn:
        step = f"{excess}; dealt out in turn it would be {worst.in_turn:.2f}: a few requests are most of the load"
        return "sizes", step, _for_sizes(policy)
    if worst.measure == _UNDER_WAY:
        step = (
            f"{excess}, though it is sent no more than others, and nothing learned of it says why"
        )
        return "engine", step, f"look at the engine: dynctl doctor; dynctl logs {worst.engine}"
    if starved:
        step = f"{excess}: {starved.text}, and nothing learned of it says why"
        look = f"look at the engine: dynctl status; dynctl explain; dynctl logs {starved.engine}"
        return "engine", step, look
    step = (
        f"{excess}, dealt out in turn it would be {worst.in_turn:.2f}, and no cache drew them there"
    )
    return "policy", step, _try("kv" if policy != "kv" else "least_loaded")


# How uneven


def _spreads(pool: Pool) -> Iterable[Spread]:
    engines = {name: engine for name, engine in pool.engines.items() if engine.num_looks}
    for measure in MEASURES:
        amounts = {name: engine.amounts[measure] for name, engine in engines.items()}
        amounts = {name: amount for name, amount in amounts.items() if amount.fair}
        if not amounts:
            continue
        quantile = NormalDist().inv_cdf(_SURE ** (1.0 / len(amounts)))

        def chance(amount: Amount, quantile: float = quantile) -> float:
            return 1.0 + quantile * math.sqrt(amount.variance) / amount.fair

        name = max(
            amounts,
            key=lambda n: amounts[n].actual / amounts[n].fair / max(_EVEN, chance(amounts[n])),
        )
        most = amounts[name]
        in_turn = max(amount.in_turn / amount.fair for amount in amounts.values())
        yield Spread(measure, name, most.actual / most.fair, chance(most), in_turn)
    means = {name: engine.under_way / engine.num_looks for name, engine in engines.items()}
    mean = sum(means.values()) / len(means)
    name = max(means, key=lambda n: means[n])
    limit = max(_UNDER_WAY_RATIO * mean, mean + _UNDER_WAY_MORE)
    unit = mean or 1.0
    yield Spread(_UNDER_WAY, name, (means[name] or unit) / unit, limit / unit, None)


# The causes


def _policy(pool: Pool, policy: str, worst: Spread, starved: "_Starved | None") -> Cause:
    """Whether caches drew the excess to the engine that has too much, and not only away from a lame one."""
    name = "routing policy"
    if worst.is_even:
        return Cause(name, False, "nothing to explain")
    if worst.measure == _UNDER_WAY:
        return Cause(name, False, f"requests and tokens are even under {policy}")
    if worst.is_uneven_in_turn:
        text = (
            f"dealt out in turn {worst.name} would be {worst.in_turn:.2f} too, without any policy"
        )
        return Cause(name, False, text)
    if starved:
        return Cause(name, False, starved.text)
    position = MEASURES.index(worst.measure)
    amount = pool.engines[worst.engine].amounts[worst.measure]
    part = amount.fair / sum(e.amounts[worst.measure].fair for e in pool.engines.values())
    excess = amount.actual - amount.fair
    cells: dict[tuple[str, str], float] = {}
    free = [0.0, 0.0, 0.0]
    for kind, keys in pool.drawn.items():
        for key, engines in keys.items():
            total = sum(sums[position] for sums in engines.values())
            here = engines.get(worst.engine, [0.0] * len(MEASURES))[position]
            if kind == FREE:
                free[0] += here
                free[1] += total * part
                free[2] += sum(sums[0] for sums in engines.values())
            else:
                cells[kind, key] = here - total * part
    drawn = sum(cells.values()) / excess
    free_ratio = free[0] / free[1] if free[2] >= _FEW else 0.0
    seen = f"caches drew {min(drawn, 1.0):.0%} of the excess there"
    if free_ratio:
        seen += f", what no cache draws went there {free_ratio:.2f} times its share"
    if drawn < _HALF or free_ratio - 1.0 > _HALF * (worst.ratio - 1.0):
        return Cause(name, False, seen)
    kind, key = max(cells, key=lambda cell: cells[cell])
    seen += f"; most of it, {min(cells[kind, key] / excess, 1.0):.0%}, {_DRAWN[kind]} of route key {key}"
    return Cause(name, True, seen, _for_cache(policy, kind, key))


@dataclass(frozen=True, slots=True)
class _Starved:
    """An engine whose lack is all there is to the others' excess."""

    engine: str
    text: str


def _starved(pool: Pool, worst: Spread) -> _Starved | None:
    amounts = {name: engine.amounts.get(worst.measure) for name, engine in pool.engines.items()}
    known = {name: amount for name, amount in amounts.items() if amount and amount.fair}
    if len(known) < 3:
        return None
    least = min(known, key=lambda name: known[name].actual / known[name].fair)
    ratio = known[least].actual / known[least].fair
    rest = [amount for name, amount in known.items() if name != least]
    rest_ratio = worst.ratio * sum(a.fair for a in rest) / sum(a.actual for a in rest)
    if ratio * _EVEN > 1.0 or rest_ratio > max(_EVEN, worst.chance):
        return None
    text = f"{least} has {ratio:.2f} times its share; the others beside each other are even ({rest_ratio:.2f})"
    return _Starved(least, text)


def _layout(engines: dict[str, Engine]) -> Cause:
    """Whether one engine takes longer for the same prefill."""
    name = "parallel layout"
    took = {
        engine: facts.prefill_base_ms + _TYPICAL_TOKENS * facts.prefill_ms_per_token
        for engine, facts in engines.items()
    }
    slowest, usual = max(took, key=lambda engine: took[engine]), median(_others(took))
    text = f"{slowest} computes {_TYPICAL_TOKENS} tokens in {took[slowest]:.1f} ms, the others in {usual:.1f}"
    holds = len(took) > 1 and took[slowest] >= _SLOW * usual > 0.0
    paces = {
        engine: facts.took_ms / facts.usual_ms
        for engine, facts in engines.items()
        if facts.num_timed >= _FEW and facts.usual_ms
    }
    if not holds and len(paces) > 1:
        longest, pace = max(paces, key=lambda engine: paces[engine]), median(_others(paces))
        if paces[longest] >= _SLOW_TIMED * pace:
            slowest, holds = longest, True
            text = f"{slowest} takes {paces[slowest] / pace:.2f} times as long as the others for the same prefill"
    return Cause(
        name,
        holds,
        text,
        f"give the pool's engines one layout (dynctl plan --why shows tp and islands); look for what slows {slowest}: "
        f"dynctl doctor, dynctl logs {slowest}; until then: dynctl drain {slowest}",
        slowest,
    )


def _others(took: dict[str, float]) -> list[float]:
    """Without the largest, so that one of two can differ."""
    return sorted(took.values())[: max(len(took) - 1, 1)]


def _kv_memory(engines: dict[str, Engine]) -> Cause:
    """Whether one engine has fewer KV blocks than the others, or runs out of them before they do."""
    name = "KV memory"
    sizes = {engine: facts.capacity_tokens for engine, facts in engines.items()}
    full = {
        engine: facts.num_full / facts.num_looks
        for engine, facts in engines.items()
        if facts.num_looks
    }
    if not all(sizes.values()) or not full:
        return Cause(name, False, "not every engine says how many KV blocks it has")
    smallest, fullest = min(sizes, key=lambda e: sizes[e]), max(full, key=lambda e: full[e])
    usual_size = median(sorted(sizes.values())[min(1, len(sizes) - 1) :])
    usual_full = median(_others(full))
    remedy = "give the pool's engines the same KV memory (gpu_memory_utilization, max_model_len); {} is told by dynctl doctor"
    if sizes[smallest] < _SMALL * usual_size:
        text = (
            f"{smallest} has room for {sizes[smallest]:,} tokens, the others for {usual_size:,.0f}"
        )
        return Cause(name, True, text, remedy.format("what else holds its GPU memory"), smallest)
    text = f"{fullest} was full at {full[fullest]:.0%} of looks, the others at {usual_full:.0%}"
    holds = len(full) > 1 and full[fullest] - usual_full >= _FULL_MORE
    return Cause(name, holds, text, remedy.format("what takes it"), fullest)


# What to do


def _for_cache(policy: str, kind: str, key: str) -> str:
    if policy == "prefix":
        less = f"take a policy that sticks the less, the more an engine has above its share: {_try('kv')}"
    elif policy == "kv":
        less = "let requests leave their cache sooner, for some recomputing: dynctl policy --stickiness 0.5"
    else:
        less = f"take a policy that does not stick to caches: {_try('least_loaded')}"
    if kind == PREFIX:
        return (
            f"let prompts of {key} differ earlier: put what tells tenants or lines of business apart before what they share; "
            f"or {less}"
        )
    return f"spread {key} over more conversations; or {less}"


def _for_sizes(policy: str) -> str:
    better = "" if policy in {"kv", "least_loaded"} else f"{_try('kv')}; or "
    return (
        f"{better}keep large requests apart: a deployment of their own, or prefill and decode pools"
    )


def _try(policy: str) -> str:
    return (
        f"dynctl policy --shadow {policy}, then dynctl explain hits says what that costs in hits, and "
        f"dynctl policy {policy} changes it"
    )

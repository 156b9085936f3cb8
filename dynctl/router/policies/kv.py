"""The cheapest engine in milliseconds: uncached prefill, queued prefill, room in the cache, decode, memory, fair share. Pure.

Rates are the engine's own, learned. The fair share is what makes a cached prefix yield: an engine that had more than
its share of the recent requests must offer so much more of the prompt. Among near-equals the longest overlap wins, then
of two drawn the one that had less. What an idle engine is sent this way it has cached from then on, so hot prefixes
spread as far as load asks.
"""

from collections.abc import Sequence
from operator import itemgetter

from dynctl.router.choosing import WATERMARK, Load, Need

_FULL = 0.2
"""What an engine with full KV memory costs more, in prefills of what is to be there in the end: somebody may be preempted, and
computed again. At more, prefixes are given up for a danger that mostly passes. Tuned: benchmarks/balance.py."""

_SHARE = 0.75
"""What one fair share above the fair share costs, in prefills of this prompt; …"""

_SHARE_SQUARE = 3.0
"""… and what its square does: a little unfairness is cheap, much is dear. Tuned with benchmarks/balance.py."""

_CONTINUED = 0.1
"""Both weigh this much for a conversation under way: moving it costs its history and balances little. A start weighs as
much as its prefix is popular: a copy of a hot prefix takes load off its holder for good, one of a rare prefix does not; …"""

_RARE, _HOT = 0.3, 2.0
"""… within these bounds."""

_SHARE_PRIOR = 4.0
"""Requests each engine is taken to have had before the first one: a handful says nothing about shares, and copies made
on its word are the ones that turn out not to be needed."""


_HELD_UP = 0.3
"""What a prompt that nobody has cached costs each request under way where it goes, in its prefills: that is the same work on
every engine, but who is answered there waits for it."""


_RECENT = itemgetter(Load._fields.index("recent"))


class _Kv:
    uses_index = True
    term_names = ("prefill_ms", "queue_ms", "room_ms", "decode_ms", "memory_ms", "share_ms")

    def choose(
        self, need: Need, loads: Sequence[Load], overlaps: Sequence[int], draw: float
    ) -> int:
        """Choose the engine with the lowest sum of terms."""
        overlaps = _credited(need, overlaps)
        sure = _sure(need, loads, overlaps)
        return _scan(need, loads, overlaps, draw) if sure is None else sure

    def terms(
        self, need: Need, loads: Sequence[Load], overlaps: Sequence[int]
    ) -> list[tuple[float, ...]]:
        """Say what makes up each candidate's cost."""
        return _all_terms(need, loads, _credited(need, overlaps))


def _credited(need: Need, overlaps: Sequence[int]) -> Sequence[int]:
    """What cached tokens count for, by how much requests are to stick to them."""
    credit = need.stickiness
    return overlaps if credit >= 1.0 else [int(credit * overlap) for overlap in overlaps]


def _sure(need: Need, loads: Sequence[Load], overlaps: Sequence[int]) -> int | None:
    """Find the engine that holds so much more of the prompt than all others that none of them can be near it.

    Its cost against what the others' prefill costs at least. A next turn ends here, without a look at each engine.
    """
    if need.is_moved or len(loads) < 2:
        return None
    others, most = sorted(overlaps)[-2:]
    if not most:
        return None
    position = overlaps.index(most)
    least_ms = need.least_prefill_ms + (need.prompt_tokens - others) * need.least_ms_per_token
    [cost] = _costs(need, [loads[position]], [most], _fairness(need, loads))
    return position if least_ms > _near_limit(need, cost) else None


def _scan(need: Need, loads: Sequence[Load], overlaps: Sequence[int], draw: float) -> int:
    costs = _costs(need, loads, overlaps, _fairness(need, loads))
    limit = _near_limit(need, min(costs))
    near = [position for position, cost in enumerate(costs) if cost <= limit]
    if len(near) > 1:
        most = max([overlaps[position] for position in near])
        near = [position for position in near if overlaps[position] == most]
    return _of_two(near, loads, draw)


def _of_two(near: Sequence[int], loads: Sequence[Load], draw: float) -> int:
    """Draw two of several equally good positions and take the one that had less lately.

    What nobody has cached costs the same on all engines below their share: this is balance that costs nothing.
    First of all requests under way: they are the ones that a prefill holds up. Always taking the least would send what several
    routers decide at once to one engine.
    """
    others = len(near) - 1
    if not others:
        return near[0]
    place = draw * len(near)
    first = int(place)
    second = int((place - first) * others)
    one, other = near[first], near[second + (second >= first)]
    a, b = loads[one], loads[other]
    is_less = (a.active_requests, a.recent) <= (b.active_requests, b.recent)
    return one if is_less else other


def _near_limit(need: Need, best_ms: float) -> float:
    return best_ms + max(need.near_ms, need.near_ratio * best_ms)


def _fairness(need: Need, loads: Sequence[Load]) -> tuple[float, float, float]:
    """The fair number of recent requests, how many excess shares each one above is, and what a share costs."""
    fair = sum(map(_RECENT, loads)) / len(loads)
    popularity = need.popularity
    weight = min(max(popularity, _RARE), _HOT) if popularity else _CONTINUED
    share_ms = weight * need.prompt_tokens * need.ms_per_token / max(need.stickiness, 1.0)
    return fair, 1.0 / (fair + _SHARE_PRIOR * need.recent_unit), share_ms


def _costs(
    need: Need,
    loads: Sequence[Load],
    overlaps: Sequence[int],
    fairness: tuple[float, float, float],
) -> list[float]:
    """Sums of `_terms`, in one expression: this is where a decision's time goes."""
    if need.is_moved:
        return [sum(term) for term in _all_terms(need, loads, overlaps)]
    fair, shares, share_ms = fairness
    prompt, output, now_s = need[0], float(need[1]), need.now_s
    prompt_tokens = float(prompt)  # between two floats a comparison is three times as fast
    linear_ms, square_ms = _SHARE * share_ms, _SHARE_SQUARE * share_ms
    held_up = _held_up(need, overlaps)
    return [
        base_ms
        + (prompt - overlap) * uncached_ms
        + ((free_at_s - now_s) * 1e3 if free_at_s > now_s else 0.0)
        + output * decode_ms
        + (held_up * active * (base_ms + prompt * prefill_ms) if held_up else 0.0)
        + (_memory_ms(need, prompt_tokens - room, capacity) if prompt_tokens > room else 0.0)
        + (
            (excess := (recent - fair) * shares) * (linear_ms + square_ms * excess)
            if recent > fair
            else 0.0
        )
        for (
            _,
            prefill_ms,
            base_ms,
            free_at_s,
            decode_ms,
            recent,
            room,
            capacity,
            active,
            _,
            uncached_ms,
            _,
            _,
        ), overlap in zip(loads, overlaps, strict=True)
    ]


def _all_terms(
    need: Need, loads: Sequence[Load], overlaps: Sequence[int]
) -> list[tuple[float, ...]]:
    fair, shares, share_ms = _fairness(need, loads)
    held_up = _held_up(need, overlaps)
    return [
        (
            *_prefill_terms(need, load, overlap),
            _room_ms(need, load, overlap),
            need.output_tokens * load.decode_ms_per_token
            + held_up * load.active_requests * _prefill_terms(need, load, 0)[0],
            _memory_ms(need, need.prompt_tokens - load.room_tokens, load.capacity_tokens),
            (excess := max(load.recent - fair, 0.0) * shares)
            * share_ms
            * (_SHARE + _SHARE_SQUARE * excess),
        )
        for load, overlap in zip(loads, overlaps, strict=True)
    ]


def _held_up(need: Need, overlaps: Sequence[int]) -> float:
    """Nobody is answered on engines that only prefill, and nobody waits for a transfer."""
    return 0.0 if need.is_moved or need.output_tokens <= 1 or any(overlaps) else _HELD_UP


def _prefill_terms(need: Need, load: Load, overlap: int) -> tuple[float, float]:
    uncached = need.prompt_tokens - overlap
    if need.is_moved:
        return load.move_base_ms + uncached * load.move_ms_per_token, 0.0
    queue_ms = max(load.free_at_s - need.now_s, 0.0) * 1e3
    return load.prefill_base_ms + uncached * load.prefill_ms_per_token, queue_ms


def _room_ms(need: Need, load: Load, overlap: int) -> float:
    if need.is_moved:
        return 0.0
    per_token_ms = load.uncached_ms_per_token - load.prefill_ms_per_token
    return (need.prompt_tokens - overlap) * per_token_ms


def _memory_ms(need: Need, excess_tokens: float, capacity: int) -> float:
    """Grow smoothly from the watermark to beyond full."""
    if excess_tokens <= 0.0:
        return 0.0
    full_ms = _FULL * (need.prompt_tokens + need.output_tokens) * need.ms_per_token
    used = excess_tokens / capacity / (1.0 - WATERMARK)
    return float(full_ms * min(used, 2.0) ** 2)


POLICY = _Kv()

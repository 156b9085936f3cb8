"""A second policy on the same decisions, without acting: what it would have chosen and what that would have cost.

It has a table and an index of its own, in which its choices have happened: a simulated cache per engine, as large as the
real one, and the same learned rates. So after a while it says what switching would bring. Each of several processes
follows its own decisions; their sums can be added. Not here: acting. Pure.
"""

import math
import random
from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass, field

from dynctl.router.choosing import Load, Need, Policy
from dynctl.router.decisions import Decision
from dynctl.router.prompt import Prompt
from dynctl.router.workers import Worker

_TWO_SIDED = 1.96
_BATCH = 50
"""Decisions whose difference is taken together: their scatter says how sure the whole difference is."""

_MAX_BLOCKS = 1 << 20
"""Of simulated cache, over all engines; beyond it, or where no capacity is known, old blocks go."""


class _Cache:
    """Blocks one engine would hold; the least recently used go first, tails before heads.

    What it generated is held too. Nobody knows those blocks by name, but a next turn begins with the prompt before, and
    what follows there is its answer.
    """

    __slots__ = ("_blocks", "_capacity", "_num_held")

    def __init__(self, capacity: int) -> None:
        self._blocks: OrderedDict[int, int] = OrderedDict()
        """Each with the number of blocks that an answer left behind it."""
        self._capacity = capacity
        self._num_held = 0

    def depth(self, hashes: Sequence[int]) -> int:
        """Blocks of a prompt held without a gap."""
        low, high = 0, len(hashes)
        while low < high:
            middle = (low + high + 1) // 2
            if hashes[middle - 1] in self._blocks:
                low = middle
            else:
                high = middle - 1
        return min(low + self._blocks[hashes[low - 1]], len(hashes)) if low else 0

    def take(self, hashes: Sequence[int], num_answered: int) -> None:
        """Hold a prompt's blocks, and so many behind them."""
        blocks = self._blocks
        for block in reversed(hashes):
            self._num_held += 1 - (1 + blocks.pop(block) if block in blocks else 0)
            blocks[block] = 0
        if hashes:
            blocks[hashes[-1]] = num_answered
            self._num_held += num_answered
        while self._num_held > self._capacity:
            self._num_held -= 1 + blocks.popitem(last=False)[1]


@dataclass(slots=True)
class _Engine:
    cache: _Cache
    free_at_s: float = 0.0
    recent: float = 0.0


@dataclass(slots=True)
class Tally:
    """One side's sums."""

    num: int = 0
    prompt_tokens: int = 0
    hit_tokens: int = 0
    ttft_ms: float = 0.0
    requests: dict[str, int] = field(default_factory=dict)
    """By engine; 0 for one that could have been chosen and never was."""

    def knows(self, engine: str) -> None:
        """Count an engine among those that requests are spread over."""
        self.requests.setdefault(engine, 0)

    def add(self, engine: str, prompt_tokens: int, hit_tokens: int, ttft_ms: float) -> None:
        """Take one request in."""
        self.num += 1
        self.prompt_tokens += prompt_tokens
        self.hit_tokens += hit_tokens
        self.ttft_ms += ttft_ms
        self.requests[engine] = self.requests.get(engine, 0) + 1

    def join(self, other: "Tally") -> None:
        """Add another process's sums."""
        self.num += other.num
        self.prompt_tokens += other.prompt_tokens
        self.hit_tokens += other.hit_tokens
        self.ttft_ms += other.ttft_ms
        for engine, number in other.requests.items():
            self.requests[engine] = self.requests.get(engine, 0) + number

    def to_json(self, policy: str) -> dict[str, object]:
        """Means, and how even the requests were spread; None where there were none."""
        counts = self.requests.values()
        return {
            "policy": policy,
            "max_over_mean": max(counts) * len(counts) / self.num if self.num else None,
            "hit_ratio": round(self.hit_tokens / max(self.prompt_tokens, 1), 4)
            if self.num
            else None,
            "ttft_ms": round(self.ttft_ms / self.num, 2) if self.num else None,
        }


@dataclass(slots=True)
class Gain:
    """How much more one side hits than the other, and how sure that is: the scatter over batches in a row."""

    num_batches: int = 0
    share: float = 0.0
    share_squares: float = 0.0
    """Sums over whole batches."""
    batch: int = 0
    hits: int = 0
    tokens: int = 0
    """Of the batch that is not whole yet."""

    def add(self, prompt_tokens: int, more_tokens: int) -> None:
        """Take one decision in."""
        self.tokens += prompt_tokens
        self.hits += more_tokens
        self.batch += 1
        if self.batch == _BATCH:
            share = self.hits / max(self.tokens, 1)
            self.share += share
            self.share_squares += share * share
            self.num_batches += 1
            self.batch = self.hits = self.tokens = 0

    def join(self, other: "Gain") -> None:
        """Add another process's whole batches."""
        self.num_batches += other.num_batches
        self.share += other.share
        self.share_squares += other.share_squares

    def to_json(self) -> dict[str, float | None]:
        """The mean over whole batches, and the half-width within which it holds 19 times in 20; None for too few."""
        number = self.num_batches
        if number < 2:
            return {"hit_ratio": None, "band": None}
        mean = self.share / number
        variance = max(self.share_squares / number - mean * mean, 0.0) * number
        error = math.sqrt(variance / (number - 1) / number)
        return {"hit_ratio": round(mean, 4), "band": round(_TWO_SIDED * error, 4)}


@dataclass(slots=True)
class ShadowSums:
    """All that a shadow has counted; those of several processes that follow the same two policies can be joined."""

    real_policy: str
    shadow_policy: str
    num_decisions: int = 0
    num_same: int = 0
    gain: Gain = field(default_factory=Gain)
    real: Tally = field(default_factory=Tally)
    shadow: Tally = field(default_factory=Tally)

    def join(self, other: "ShadowSums") -> None:
        """Add another process's sums."""
        self.num_decisions += other.num_decisions
        self.num_same += other.num_same
        self.gain.join(other.gain)
        self.real.join(other.real)
        self.shadow.join(other.shadow)

    def to_json(self) -> dict[str, object]:
        """Both sides, by the same model, and how even each spreads its requests; the sums beside what they mean."""
        return {
            "num_decisions": self.num_decisions,
            "num_same": self.num_same,
            "gain": self.gain.to_json(),
            "real": self.real.to_json(self.real_policy),
            "shadow": self.shadow.to_json(self.shadow_policy),
            "sums": self,
        }


class Shadow:
    """Follows the real decisions; both sides are judged by the same model, so that the difference means something."""

    def __init__(self, name: str, policy: Policy, real_name: str, rng: random.Random) -> None:
        self.name = name
        self.sums = ShadowSums(real_name, name)
        self._policy = policy
        self._rng = rng
        self._sides: tuple[dict[str, _Engine], dict[str, _Engine]] = ({}, {})
        self._unit = 0.0

    def follow(self, decision: Decision, prompt: Prompt, workers: Sequence[Worker]) -> None:
        """Take one real decision of a leg that prefills."""
        if not prompt.is_known or not workers or not workers[0].block_size:
            return
        size = workers[0].block_size
        blocks = prompt.blocks(size)
        assert blocks is not None
        hashes = blocks.hashes()
        usable = hashes[: prompt.num_cacheable(size)]
        need = decision.need
        for worker in workers:
            self.sums.real.knows(worker.id)
            self.sums.shadow.knows(worker.id)
        self._follow_unit(need.recent_unit)
        position = self._choose(need, decision.loads, usable, workers)
        self.sums.num_decisions += 1
        self.sums.num_same += position == decision.position
        real, other = (
            self._serve(side, need, workers[chosen], decision.loads[chosen], hashes, usable)
            for side, chosen in ((0, decision.position), (1, position))
        )
        self.sums.gain.add(need.prompt_tokens, other - real)

    def _follow_unit(self, unit: float) -> None:
        """Units grow and now and then begin anew (`WorkerTable.recent_unit`)."""
        if unit < self._unit:
            for engines in self._sides:
                for engine in engines.values():
                    engine.recent /= self._unit
        self._unit = unit

    def _choose(
        self, need: Need, real: Sequence[Load], usable: Sequence[int], workers: Sequence[Worker]
    ) -> int:
        engines = [self._engine(1, worker) for worker in workers]
        loads = [
            load._replace(free_at_s=engine.free_at_s, recent=engine.recent)
            for load, engine in zip(real, engines, strict=True)
        ]
        size = workers[0].block_size
        overlaps = [engine.cache.depth(usable) * size for engine in engines]
        return self._policy.choose(need, loads, overlaps, self._rng.random())

    def _serve(
        self,
        side: int,
        need: Need,
        worker: Worker,
        load: Load,
        hashes: Sequence[int],
        usable: Sequence[int],
    ) -> int:
        """Let a choice happen on one side; returns the tokens hit."""
        engine = self._engine(side, worker)
        hit = engine.cache.depth(usable) * worker.block_size
        work_ms = load.prefill_base_ms + (need.prompt_tokens - hit) * load.prefill_ms_per_token
        engine.free_at_s = max(engine.free_at_s, need.now_s) + work_ms / 1e3
        engine.recent += need.recent_unit
        num_blocks = (need.prompt_tokens + need.output_tokens) // max(worker.block_size, 1)
        engine.cache.take(hashes, max(num_blocks - len(hashes), 0))
        ttft_ms = (engine.free_at_s - need.now_s) * 1e3
        tally = self.sums.shadow if side else self.sums.real
        tally.add(worker.id, need.prompt_tokens, hit, ttft_ms)
        return hit

    def _engine(self, side: int, worker: Worker) -> _Engine:
        engines = self._sides[side]
        found = engines.get(worker.id)
        if found is None:
            capacity = worker.capacity_tokens // max(worker.block_size, 1)
            found = engines[worker.id] = _Engine(_Cache(min(capacity or _MAX_BLOCKS, _MAX_BLOCKS)))
        return found

    def to_json(self) -> dict[str, object]:
        """What was counted, and what it means."""
        return self.sums.to_json()

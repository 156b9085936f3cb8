"""Simulated engines in virtual time: the simulated engine's own scheduler and cache, driven by a clock that jumps.

Not here: the router (`simulate`), what engines cost (`check`, `roofline`).
Pure.
"""

import heapq
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from dynctl.core.plan import Role
from dynctl.kv.hashing import BlockHasher
from dynctl.kv.tracker import BlockTracker, Delta
from dynctl.sim.cache import PagedCache
from dynctl.sim.chain import Chain
from dynctl.sim.scheduler import Output, Scheduler, Step, StepCosts
from dynctl.sim.sequence import Phase, SimSequence, Wish


class VirtualClock:
    """Time that jumps from event to event; events of one moment come in the order they were asked for."""

    def __init__(self) -> None:
        self.now_s = 0.0
        self._events: list[tuple[float, int, Callable[[], None]]] = []
        self._count = 0

    def at(self, when_s: float, event: Callable[[], None]) -> None:
        """Let something happen at a time that is not over."""
        self._count += 1
        heapq.heappush(self._events, (max(when_s, self.now_s), self._count, event))

    def after(self, delay_s: float, event: Callable[[], None]) -> None:
        """Let something happen after a delay."""
        self.at(self.now_s + delay_s, event)

    def run(self) -> None:
        """Go on until nothing is left to happen."""
        while self._events:
            self.now_s, _, event = heapq.heappop(self._events)
            event()


class _StillChain(Chain):
    """A model that says one word: what is said does not matter here, only when."""

    __slots__ = ()

    def advance(self, state: int, token_ids: Sequence[int]) -> int:  # noqa: ARG002 - Chain's signature
        return state

    def next_token(self, state: int, can_stop: bool = True) -> int:  # noqa: ARG002 - Chain's signature
        return self.words[0]


@dataclass(frozen=True, slots=True)
class VirtualEngineSpec:
    """One engine as the simulation sees it."""

    id: str
    role: Role
    costs: StepCosts
    num_blocks: int
    block_size: int = 16
    max_num_seqs: int = 64
    max_num_batched_tokens: int = 2048
    kv_bytes_per_token: int = 131_072


@dataclass(slots=True)
class EngineTally:
    """What an engine did."""

    busy_s: float = 0.0
    num_requests: int = 0
    peak_kv_ratio: float = 0.0
    num_output_tokens: int = 0
    num_prefill_tokens: int = 0


OnOutput = Callable[[Output], None]


@dataclass(slots=True)
class VirtualEngine:
    """Plans a step, lets its time pass, completes it, plans the next."""

    spec: VirtualEngineSpec
    clock: VirtualClock
    on_delta: Callable[[Delta], None]
    """Takes what changed in the cache, as the relay would send it."""
    on_fetch: Callable[[SimSequence], None]
    """Takes a request whose KV is to be pulled."""
    hasher: BlockHasher
    tally: EngineTally = field(default_factory=EngineTally)
    scheduler: Scheduler = field(init=False)
    _tracker: BlockTracker = field(init=False)
    _listeners: dict[SimSequence, OnOutput] = field(default_factory=dict)
    _is_stepping: bool = False

    def __post_init__(self) -> None:
        spec = self.spec
        self._tracker = BlockTracker(self.hasher)
        self.scheduler = Scheduler(
            PagedCache(spec.num_blocks, spec.block_size),
            _StillChain((7,)),
            spec.costs,
            spec.max_num_seqs,
            spec.max_num_batched_tokens,
            has_connector=spec.role is not Role.AGGREGATED,
        )

    def submit(self, wish: Wish, on_output: OnOutput) -> SimSequence:
        """Queue a request."""
        sequence = self.scheduler.add(wish, self.clock.now_s)
        self._listeners[sequence] = on_output
        self.tally.num_requests += 1
        self.wake()
        return sequence

    def fetched(self, sequence: SimSequence, source: SimSequence) -> None:
        """Take KV that was pulled from a prefill engine."""
        num_local = len(sequence.block_states)
        self.scheduler.fetched(sequence, source.block_states[num_local:], source.tail_state)
        self.wake()

    def release(self, sequence: SimSequence) -> None:
        """Free the blocks that were kept for a decode engine."""
        self.scheduler.release(sequence)
        self.wake()

    def wake(self) -> None:
        """Make the next step if none is under way."""
        if self._is_stepping:
            return
        step = self.scheduler.plan(self.clock.now_s)
        for sequence in self.scheduler.take_fetches():
            self.on_fetch(sequence)
        self.tally.peak_kv_ratio = max(self.tally.peak_kv_ratio, self.scheduler.cache.usage_ratio)
        if step is None:
            return
        self._is_stepping = True
        self.tally.busy_s += step.duration_s
        self.clock.after(step.duration_s, lambda: self._complete(step))

    def _complete(self, step: Step) -> None:
        for sequence, num_tokens in step.items:
            if sequence.phase is Phase.PREFILL:
                self.tally.num_prefill_tokens += num_tokens
        outputs = self.scheduler.complete(step, self.clock.now_s)
        delta = self._tracker.apply(self.scheduler.take_events(), self.clock.now_s)
        if not delta.is_empty:
            self.on_delta(delta)
        for output in outputs:
            self.tally.num_output_tokens += 1
            listener = self._listeners[output.sequence]
            if output.finish_reason is not None:
                del self._listeners[output.sequence]
            listener(output)
        self._is_stepping = False
        self.wake()

"""Continuous batching: which requests advance by how many tokens in the next step, how long it takes, what comes out.

Steps are planned and completed by whoever keeps the time, so a test runs hours in a moment. Deterministic.
The order is vLLM's: running requests first, then waiting ones first come first served, prefill in chunks within a
token budget; without a free block the youngest running request is preempted and computed again later.
Not here: sockets, clocks, texts. Pure.
"""

from collections import deque
from dataclasses import dataclass, field

from dynctl.core.kv import KvEvent
from dynctl.sim.cache import PagedCache
from dynctl.sim.chain import Chain
from dynctl.sim.host_cache import HostCache
from dynctl.sim.sequence import Phase, SimSequence, Wish


@dataclass(frozen=True, slots=True)
class StepCosts:
    """How long work takes. A step's time is the sum of its parts."""

    prefill_us_per_token: float = 100.0
    prefill_base_ms: float = 2.0
    """Once for every step in which a prompt begins."""
    decode_ms: float = 10.0
    """Once for every step that decodes."""
    decode_us_per_seq: float = 50.0
    load_us_per_token: float = 0.0
    """Of tokens whose KV comes from the host's memory. An engine computes others meanwhile; here all wait."""

    def duration_s(
        self, num_prefill_tokens: int, num_starts: int, num_decodes: int, num_loaded_tokens: int = 0
    ) -> float:
        """Add up a step's time."""
        time_us = self.prefill_us_per_token * num_prefill_tokens
        time_us += self.load_us_per_token * num_loaded_tokens
        if num_starts:
            time_us += self.prefill_base_ms * 1e3
        if num_decodes:
            time_us += self.decode_ms * 1e3 + self.decode_us_per_seq * num_decodes
        return time_us / 1e6


@dataclass(frozen=True, slots=True)
class Step:
    """One planned step: each sequence computes that many tokens."""

    items: tuple[tuple[SimSequence, int], ...]
    duration_s: float
    has_prefill: bool

    @property
    def num_tokens(self) -> int:
        """Tokens computed in all."""
        return sum(num_tokens for _, num_tokens in self.items)


@dataclass(frozen=True, slots=True)
class Output:
    """A token for a client; with it the sequence may have ended."""

    sequence: SimSequence
    token: int
    finish_reason: str | None = None
    stop_reason: int | None = None


@dataclass(slots=True)
class Counts:
    """Totals in vLLM's meaning; tokens unless said otherwise."""

    num_prefix_queries: int = 0
    num_prefix_hits: int = 0
    num_external_queries: int = 0
    num_external_hits: int = 0
    num_host_hits: int = 0
    """Of those, from the host's memory."""
    num_preemptions: int = 0
    """Requests."""


@dataclass(slots=True)
class _Plan:
    budget: int
    items: list[tuple[SimSequence, int]] = field(default_factory=list)
    num_prefill_tokens: int = 0
    num_starts: int = 0
    num_decodes: int = 0
    num_loaded_tokens: int = 0
    has_preempted: bool = False


class Scheduler:
    """The engine's core. `has_connector`: KV can be handed from engine to engine."""

    def __init__(
        self,
        cache: PagedCache,
        chain: Chain,
        costs: StepCosts,
        max_num_seqs: int = 64,
        max_num_batched_tokens: int = 2048,
        *,
        has_connector: bool = False,
        host: HostCache | None = None,
    ) -> None:
        """`host` is a second cache beside the device's."""
        self.cache = cache
        self.host = host
        self.counts = Counts()
        self.waiting: deque[SimSequence] = deque()
        self.fetching: list[SimSequence] = []
        self.ready: deque[SimSequence] = deque()
        """Their KV has arrived; they hold blocks, so they go in before all others."""
        self.running: list[SimSequence] = []
        self._chain = chain
        self._costs = costs
        self._max_num_seqs = max_num_seqs
        self._max_num_batched_tokens = max_num_batched_tokens
        self._has_connector = has_connector
        self._to_fetch: list[SimSequence] = []

    @property
    def num_waiting(self) -> int:
        """Count the requests that do not run yet."""
        return len(self.waiting) + len(self.fetching) + len(self.ready)

    def add(self, wish: Wish, now_s: float) -> SimSequence:
        """Queue a request that fits the cache and the model."""
        sequence = SimSequence(wish, self._chain, now_s)
        self.waiting.append(sequence)
        return sequence

    def plan(self, now_s: float) -> Step | None:
        """Decide the next step and take the blocks it needs; None when there is nothing to do now."""
        plan = _Plan(self._max_num_batched_tokens)
        for sequence in tuple(self.running):
            if sequence.phase is not Phase.WAITING and plan.budget > 0:
                self._advance(plan, sequence)
        if not plan.has_preempted or not plan.items:
            self._admit(plan, now_s)
        if not plan.items:
            return None
        duration_s = self._costs.duration_s(
            plan.num_prefill_tokens, plan.num_starts, plan.num_decodes, plan.num_loaded_tokens
        )
        return Step(tuple(plan.items), duration_s, plan.num_prefill_tokens > 0)

    def complete(self, step: Step, now_s: float) -> list[Output]:
        """Apply a step that took place; requests aborted meanwhile are left out."""
        outputs = []
        for sequence, num_tokens in step.items:
            if sequence.phase in {Phase.PREFILL, Phase.DECODE}:
                first = len(sequence.block_states)
                sequence.compute(num_tokens, self.cache.block_size)
                self._commit(sequence, first)
                if sequence.num_missing == 0:
                    outputs.append(self._say(sequence, now_s))
        return outputs

    def take_fetches(self) -> list[SimSequence]:
        """Return the requests whose KV is to be pulled from a prefill engine now."""
        fetches, self._to_fetch = self._to_fetch, []
        return fetches

    def fetched(self, sequence: SimSequence, states: list[int], tail_state: int) -> None:
        """Take pulled KV: `states` are of the full blocks after the local hit."""
        if sequence.phase is not Phase.FETCHING:
            return
        self.fetching.remove(sequence)
        num_local = len(sequence.block_states)
        sequence.num_external_tokens = sequence.num_prompt - sequence.num_cached_tokens
        self.counts.num_external_hits += sequence.num_external_tokens
        sequence.receive(states, tail_state)
        self._commit(sequence, num_local)
        sequence.phase = Phase.WAITING
        self.ready.append(sequence)

    def stop(self, sequence: SimSequence) -> None:
        """End a request from outside (abort, stop string, failed pull) and free its blocks."""
        if sequence.phase is Phase.DONE:
            return
        for queue in (self.waiting, self.fetching, self.ready, self.running, self._to_fetch):
            if sequence in queue:
                queue.remove(sequence)
        sequence.phase = Phase.DONE
        self.release(sequence)

    def release(self, sequence: SimSequence) -> None:
        """Free the blocks of a request that ended; those kept for a decode engine are freed only so."""
        block_ids, sequence.block_ids = sequence.block_ids, []
        self.cache.release(block_ids)

    def take_events(self) -> tuple[KvEvent, ...]:
        """Return the caches' events since the last call, the device's first."""
        events = self.cache.take_events()
        return events if self.host is None else events + self.host.take_events()

    def _advance(self, plan: _Plan, sequence: SimSequence) -> None:
        num_tokens = min(sequence.num_missing, plan.budget)
        if not self._grow(plan, sequence, num_tokens):
            return
        plan.items.append((sequence, num_tokens))
        plan.budget -= num_tokens
        if sequence.phase is Phase.DECODE:
            plan.num_decodes += 1
        else:
            plan.num_prefill_tokens += num_tokens

    def _grow(self, plan: _Plan, sequence: SimSequence, num_tokens: int) -> bool:
        """Take the blocks for further tokens, preempting younger requests; False when it had to go itself."""
        end = sequence.num_computed + num_tokens
        num_new = -(-end // self.cache.block_size) - len(sequence.block_ids)
        if num_new <= 0:
            return True
        while not self.cache.can_take((), num_new):
            victim = self.running.pop()
            self.release(victim)
            victim.preempt()
            self.waiting.appendleft(victim)
            self.counts.num_preemptions += 1
            plan.has_preempted = True
            if victim is sequence:
                return False
        sequence.block_ids += self.cache.take((), num_new)
        return True

    def _admit(self, plan: _Plan, now_s: float) -> None:
        """Let waiting requests in while there are seats, budget and blocks; the first that does not fit blocks."""
        while len(self.running) < self._max_num_seqs and plan.budget > 0:
            queue = self.ready or self.waiting
            if not queue or (queue is self.waiting and not self._allocate(plan, queue[0])):
                return
            sequence = queue.popleft()
            if sequence.times.scheduled_s is None:
                sequence.times.scheduled_s = now_s
                self._count_admission(sequence)
            is_first_time = queue is self.waiting and sequence.num_preemptions == 0
            if is_first_time and sequence.wish.remote_prefill is not None:
                sequence.phase = Phase.FETCHING
                self.fetching.append(sequence)
                self._to_fetch.append(sequence)
                continue
            sequence.phase = Phase.DECODE if sequence.num_missing == 1 else Phase.PREFILL
            plan.num_starts += sequence.phase is Phase.PREFILL
            self.running.append(sequence)
            self._advance(plan, sequence)

    def _allocate(self, plan: _Plan, sequence: SimSequence) -> bool:
        """Take the blocks for all tokens known, the cached prefix first; at least one token is always computed."""
        size, num_tokens = self.cache.block_size, len(sequence.tokens)
        names = sequence.hashes((num_tokens - 1) // size, size)
        found = self.cache.find(names)
        num_new = -(-num_tokens // size) - len(found)
        if not self.cache.can_take(found, num_new):
            return False
        states = [self.cache.state_of(block_id) for block_id in found]
        loaded = [] if self.host is None else self.host.find(names[len(found) :])
        sequence.begin(self.cache.take(found, num_new), states + loaded, size)
        sequence.num_loaded_tokens = len(loaded) * size
        plan.num_loaded_tokens += len(loaded) * size
        if self.host is not None:
            self.host.touch(names)
            self._commit(sequence, len(found))
        return True

    def _count_admission(self, sequence: SimSequence) -> None:
        counts, loaded = self.counts, sequence.num_loaded_tokens
        sequence.num_cached_tokens = sequence.num_computed
        num_local = sequence.num_cached_tokens - loaded
        counts.num_prefix_queries += sequence.num_prompt
        counts.num_prefix_hits += num_local
        counts.num_external_hits += loaded
        counts.num_host_hits += loaded
        if self._has_connector or self.host is not None:
            counts.num_external_queries += sequence.num_prompt - num_local

    def _commit(self, sequence: SimSequence, first: int) -> None:
        full = sequence.full_blocks(first, self.cache.block_size)
        if full:
            names = sequence.hashes(first, self.cache.block_size)
            parent = names[-1] if names else None
            self.cache.commit(full, parent, sequence.lora_name)
            if self.host is not None:
                self.host.store(full, parent, sequence.lora_name)
                self.host.touch([*names, *[block.hash for block in full]])

    def _say(self, sequence: SimSequence, now_s: float) -> Output:
        token = sequence.say()
        times, wish = sequence.times, sequence.wish
        sequence.phase = Phase.DECODE
        times.last_token_s = now_s
        if times.first_token_s is None:
            times.first_token_s = now_s
        can_stop = sequence.num_output > wish.min_tokens
        reason, stop_reason = None, None
        if can_stop and token in wish.stop_token_ids:
            reason, stop_reason = "stop", token
        elif token == self._chain.eos_id and not wish.ignore_eos:
            reason = "stop"
        elif sequence.num_output >= wish.max_tokens:
            reason = "length"
        if reason is not None:
            self.running.remove(sequence)
            sequence.phase = Phase.DONE
            if not (wish.is_remote_decode and self._has_connector and reason == "length"):
                self.release(sequence)
        return Output(sequence, token, reason, stop_reason)

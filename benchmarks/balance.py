"""Hit rate, balance and TTFT of the routing policies on conversations, in virtual time: seconds of traffic in moments.

The router's own index, books and policies decide; only clock, sockets and engines are simulated. The engine is the model
of `simcore.py` in the comparison harness: LRU cache of blocks, a serial prefill queue (2 ms and a fixed time per uncached
token), a fixed gap between tokens. As in real engines, and not there, a prompt waits until the blocks in use leave room for
its own. KV events arrive 2 ms late. Traces, by the harness's parameters:

    trace   60 conversations of 6 turns, 8 shared system prompts (zipf), 6 a second, caches that hold nearly all
    heavy   80 conversations, 16 a second, prefill 2.5 times slower: queues
    small   as trace for 3 times as long, caches together hold a quarter of the working set
    full    as small, people think five times as long: more is wanted again than the caches hold
    tenants as small, people think longer, 24 tenants with system prompts of 2,048 words: those alone would fill the caches
    crowded as heavy, smaller caches: prompts in use fill them if what they share is counted for each
    tight   as trace, short system prompts, slow answers, small caches: prompts in use do fill them, and some wait
    long    8 conversations on 2 engines, a few thousand words at the start, caches of 60 % of the working set each: they fit only if
            the caches share them evenly. Prefills of one size take unlike times, as on a busy machine

The bound is one unlimited cache. Run: python benchmarks/balance.py [trace|heavy|small|full|tenants|crowded|tight|long ...] [--seeds N] [--policies a,b]
"""

import argparse
import heapq
import itertools
import json
import random
from collections import Counter, OrderedDict, deque
from dataclasses import dataclass, field

from dynctl.core.deployment import EngineInfo, EngineState
from dynctl.router.config import Settings
from dynctl.router.desk import load_policy
from dynctl.router.placement import Order, Placement, Unplaced
from dynctl.router.prefix_index import PrefixIndex, Source
from dynctl.router.prompt import Hashers, Prompt
from dynctl.router.worker_table import WorkerTable

BLOCK = 16
VOCABULARY, FIRST_WORD = 8192, 16
SYSTEM, USER, ASSISTANT = 4, 5, 6
NUM_ENGINES = 4
EVENT_DELAY_S = 0.002
OUT_TOKENS = 32
OUT_BLOCKS = OUT_TOKENS // BLOCK + 1
QUARTER = 1 / 4 / NUM_ENGINES
HASHERS = Hashers("bench")
HASHER = HASHERS.of(BLOCK)


@dataclass(frozen=True)
class Trace:
    convs: int = 60
    turns: int = 6
    groups: int = 8
    sys_words: int = 1024
    user_words: int = 128
    think_s: float = 0.6
    conv_rate: float = 6.0
    prefill_us: float = 60.0
    capacity: int = 2048
    first_seed: int = 1
    first_words: int = 0
    """More, in each conversation's first turn."""
    engines: int = NUM_ENGINES
    noise: float = 0.0
    """Standard deviation of the logarithm of what a prefill takes."""
    share: float = 0.0
    """Of the working set that one engine's cache holds; 0: `capacity` says it."""
    tells_capacity: bool = True
    """Whether engines say how much they hold: real ones do, the harness's do not."""
    gap_s: float = 8e-3


TRACES = {
    "trace": Trace(),
    "heavy": Trace(convs=80, conv_rate=16.0, think_s=0.3, prefill_us=150.0, first_seed=3),
    "small": Trace(convs=180, share=QUARTER),
    "full": Trace(convs=180, think_s=3.0, share=QUARTER),
    "tenants": Trace(convs=180, think_s=1.5, groups=24, sys_words=2048, share=QUARTER),
    "crowded": Trace(80, conv_rate=16.0, think_s=0.3, prefill_us=150.0, capacity=900, first_seed=3),
    "tight": Trace(sys_words=16, user_words=300, capacity=900, gap_s=50e-3),
    "long": Trace(
        *(8, 12, 1, 2, 40),
        think_s=60.0,
        conv_rate=0.1,
        prefill_us=300.0,
        first_words=7200,
        engines=2,
        noise=0.3,
        share=0.6,
    ),
}


def conversations(trace, seed):
    """(start, system ids, [(user ids, think time)]), drawn in the order the harness draws."""
    rng = random.Random(seed)

    def words(mean):
        return [
            FIRST_WORD + rng.randrange(VOCABULARY)
            for _ in range(rng.randrange(mean // 2, mean * 3 // 2))
        ]

    groups = [words(trace.sys_words) for _ in range(trace.groups)]
    weights = [1.0 / (g + 1) for g in range(trace.groups)]
    convs, start_s = [], 0.0
    for _ in range(trace.convs):
        system = groups[rng.choices(range(trace.groups), weights)[0]]
        turns = []
        for turn in range(trace.turns):
            text = words(trace.user_words + (0 if turn else trace.first_words))
            turns.append((text, rng.expovariate(1.0 / trace.think_s)))
        convs.append((start_s, system, turns))
        start_s += rng.expovariate(trace.conv_rate)
    return convs


def answer_to(tokens):
    """A function of the prompt, so that every engine answers the same."""
    state = (sum(tokens[-32:]) * 2654435761 + len(tokens)) & 0xFFFFFFFF
    out = []
    for _ in range(OUT_TOKENS):
        state = (state * 1664525 + 1013904223) & 0xFFFFFFFF
        out.append(FIRST_WORD + (state >> 8) % VOCABULARY)
    return out


def bound_of(convs):
    """Best hit rate any placement can have: one unlimited cache, turns in order; and the distinct blocks."""
    seen, asked, hit = set(), 0, 0
    states = [[SYSTEM, *system] for _, system, _ in convs]
    for turn in range(len(convs[0][2])):
        for tokens, (_, _, turns) in zip(states, convs, strict=True):
            tokens += [USER, *turns[turn][0], ASSISTANT]
            hashes = HASHER.prompt(tokens).hashes()
            depth = depth_in(seen, tokens, hashes)
            asked += len(tokens)
            hit += depth * BLOCK
            out = answer_to(tokens)
            seen.update(HASHER.prompt(tokens + out[:-1]).hashes())
            tokens[-1:] = [ASSISTANT, *out]
    return hit / asked, len(seen)


def depth_in(held, tokens, hashes, depth=0):
    """Blocks of a prompt that are held one behind the other from a depth on; the last token is always computed."""
    while depth < (len(tokens) - 1) // BLOCK and hashes[depth] in held:
        depth += 1
    return depth


def insert(held, hashes, capacity, in_use=()):
    """Put a prompt's blocks into an LRU cache; what is new there, and what had to go: nothing that is in use."""
    stored = [block for block in hashes if block not in held]
    held.update(dict.fromkeys(stored))
    for block in reversed(hashes):
        held.move_to_end(block)
    idle = (block for block in held if block not in in_use)
    removed = list(itertools.islice(idle, max(len(held) - capacity, 0)))
    for block in removed:
        del held[block]
    return stored, removed


class Clock:
    """Events in order of their time."""

    def __init__(self):
        self.now_s = 0.0
        self._queue = []
        self._order = itertools.count()

    def after(self, delay_s, call, *args):
        heapq.heappush(self._queue, (self.now_s + delay_s, next(self._order), call, args))

    def run(self):
        while self._queue:
            self.now_s, _, call, args = heapq.heappop(self._queue)
            call(*args)


class Engine:
    """LRU block cache, serial prefill, fixed gap."""

    def __init__(self, clock, name, trace, capacity, on_event):
        self.clock, self.name, self.on_event = clock, name, on_event
        self.capacity = capacity
        self.prefill_s, self.base_s, self.gap_s = trace.prefill_us * 1e-6, 2e-3, trace.gap_s
        self.noise, self.rng = trace.noise, random.Random(name)
        self.cache, self.queue, self.is_busy = OrderedDict(), deque(), False
        self.in_use = Counter()
        self.num_requests = self.prompt_tokens = self.cached_tokens = 0
        self.work_s = 0.0

    def submit(self, tokens, on_first, on_done):
        self.queue.append((tokens, HASHER.prompt(tokens).hashes(), on_first, on_done))
        if not self.is_busy:
            self._next()

    def _next(self):
        self.is_busy = bool(self.queue) and self._has_room(self.queue[0][1])
        if not self.is_busy:
            return
        request = self.queue.popleft()
        tokens, hashes = request[:2]
        self.in_use.update(hashes)
        cached, load_s = self._look_up(tokens, hashes)
        self.num_requests += 1
        self.prompt_tokens += len(tokens)
        self.cached_tokens += cached
        cost_s = self.base_s + (len(tokens) - cached) * self.prefill_s + load_s
        cost_s *= self.rng.lognormvariate(0.0, self.noise)
        self.work_s += cost_s
        self.clock.after(cost_s, self._prefilled, request, cached)

    def _has_room(self, hashes):
        more = len([block for block in hashes if block not in self.in_use]) + OUT_BLOCKS
        return not self.in_use or len(self.in_use) + more <= self.capacity

    def _look_up(self, tokens, hashes):
        """Tokens that need not be computed, and the seconds it takes to have them."""
        return depth_in(self.cache, tokens, hashes) * BLOCK, 0.0

    def _prefilled(self, request, cached):
        tokens, hashes, on_first, on_done = request
        self._insert(hashes)
        on_first(cached)
        self.clock.after(self.gap_s * (OUT_TOKENS - 1), self._finish, tokens, hashes, on_done)
        self._next()

    def _finish(self, tokens, hashes, on_done):
        out = answer_to(tokens)
        self._insert(HASHER.prompt(tokens + out[:-1]).hashes())
        self.in_use -= Counter(hashes)
        on_done(out)
        if not self.is_busy:
            self._next()

    def _insert(self, hashes):
        stored, removed = insert(self.cache, hashes, self.capacity, self.in_use)
        if stored or removed:
            self.clock.after(EVENT_DELAY_S, self.on_event, self.name, stored, removed)


@dataclass
class Run:
    """One trace under one policy."""

    trace: Trace
    policy: str
    seed: int
    capacity: int
    ttfts_ms: list = field(default_factory=list)
    firsts_s: list = field(default_factory=list)
    """When each of them came."""
    predicted_tokens: int = 0

    def __post_init__(self):
        settings = Settings()
        self.clock, self.waiting = Clock(), deque()
        self.table, self.index = WorkerTable(settings), PrefixIndex()
        self.placement = Placement(
            self.table, self.index, load_policy(self.policy), settings, random.Random(self.seed)
        )
        self.engines = {}
        for i in range(self.trace.engines):
            name = f"e{i}"
            info = EngineInfo(
                *(name, f"{name}.1", EngineState.READY, "aggregated", "d", "sim", "m"),
                block_size_tokens=BLOCK,
                kv_capacity_tokens=self.capacity * BLOCK * self.trace.tells_capacity,
            )
            self.table.put(info)
            self.index.begin(Source(name, f"{name}.1"))
            self.engines[name] = Engine(self.clock, name, self.trace, self.capacity, self._on_event)

    def _on_event(self, name, stored, removed):
        source = Source(name, f"{name}.1")
        self.index.remove(source, removed)
        self.index.store(source, stored)

    def _tick(self, left):
        self.index.sweep(self.clock.now_s)
        if left % 10 == 0:
            self.table.relax(self.clock.now_s, self.index)
        if left:
            self.clock.after(0.1, self._tick, left - 1)

    def run(self, convs):
        for start_s, system, turns in convs:
            self.clock.after(start_s, self._turn, [SYSTEM, *system], turns, 0)
        self._tick(int(10 * (convs[-1][0] + 20)))
        self.clock.run()

    def _turn(self, tokens, turns, turn):
        tokens = [*tokens, USER, *turns[turn][0], ASSISTANT]
        prompt = Prompt.known(HASHERS, tokens)
        self.waiting.append((prompt, self.clock.now_s, tokens, turns, turn))
        self._place()

    def _place(self):
        while self.waiting:
            prompt, *asked = self.waiting[0]
            placed = self.placement.place(Order("r", prompt, None, OUT_TOKENS), self.clock.now_s)
            if isinstance(placed, Unplaced):
                return
            self.waiting.popleft()
            self._send(placed, *asked)

    def _send(self, placed, asked_s, tokens, turns, turn):
        now_s = self.clock.now_s
        booking = placed.main
        worker = booking.worker
        self.predicted_tokens += placed.overlap_tokens

        def first(cached):
            first_s = self.clock.now_s
            self.ttfts_ms.append((first_s - asked_s) * 1e3)
            self.firsts_s.append(first_s)
            began_s = max(now_s, worker.prefill_ended_s)
            booking.prefill_ended(first_s)
            self.learn(placed, tokens, cached, (first_s - began_s) * 1e3)

        def done(out):
            booking.release()
            worker.gaps_took(self.trace.gap_s * 1e3)
            self.table.lengths.learn("", OUT_TOKENS)
            if turn + 1 < len(turns):
                self.clock.after(turns[turn][1], self._turn, tokens + out, turns, turn + 1)
            self._place()

        self.engines[worker.id].submit(tokens, first, done)

    def learn(self, placed, tokens, cached, ms):
        """Let the router learn from what a prefill took."""
        placed.main.worker.prefill_took(len(tokens) - cached, ms)

    def ttfts_between(self, from_s, to_s):
        both = zip(self.firsts_s, self.ttfts_ms, strict=True)
        return [ms for first_s, ms in both if from_s <= first_s < to_s]

    def figures(self):
        engines = list(self.engines.values())
        counts = [engine.num_requests for engine in engines]
        work = [engine.work_s for engine in engines]
        asked = sum(engine.prompt_tokens for engine in engines)
        times = sorted(self.ttfts_ms)
        return {
            "hit": sum(engine.cached_tokens for engine in engines) / asked,
            "predicted": self.predicted_tokens / asked,
            "max/mean": max(counts) * len(counts) / sum(counts),
            "work max/mean": max(work) * len(work) / sum(work),
            "ttft_mean_ms": sum(times) / len(times),
            "ttft_p50_ms": times[len(times) // 2],
            "ttft_p99_ms": times[int(len(times) * 0.99)],
        }


def capacity_of(trace, num_distinct):
    """Blocks per engine."""
    return int(num_distinct * trace.share) or trace.capacity


def measure(name, policies, num_seeds):
    """Print each policy's mean over the seeds."""
    trace = TRACES[name]
    totals = {policy: [] for policy in policies}
    bounds = []
    for seed in range(trace.first_seed, trace.first_seed + num_seeds):
        convs = conversations(trace, seed)
        bound, num_distinct = bound_of(convs)
        bounds.append(bound)
        for policy in policies:
            run = Run(trace, policy, seed, capacity_of(trace, num_distinct))
            run.run(convs)
            totals[policy].append(run.figures())
    mean_bound = sum(bounds) / len(bounds)
    for policy, rows in totals.items():
        mean = {key: round(sum(row[key] for row in rows) / len(rows), 4) for key in rows[0]}
        worst = round(max(row["max/mean"] for row in rows), 3)
        result = {"trace": name, "policy": policy, "bound": round(mean_bound, 4), **mean}
        print(json.dumps(result | {"worst max/mean": worst, "first bound": round(bounds[0], 4)}))


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("traces", nargs="*", default=[])
    parser.add_argument("--seeds", type=int, default=5)
    parser.add_argument("--policies", default="kv,prefix,least_loaded,round_robin,random")
    args = parser.parse_args()
    for name in args.traces or TRACES:
        measure(name, args.policies.split(","), args.seeds)


if __name__ == "__main__":
    main()

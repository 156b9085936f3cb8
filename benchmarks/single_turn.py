"""Prompts that have nothing in common, in virtual time: what a policy that looks at caches costs where there is nothing to find.

Three engines that compute steps as vLLM does: a step takes a time of its own, some for each sequence that decodes, and some for
each token of the prompts that begin in it, for which all others wait. Arrivals, prompts and lengths of answers are random, the same
for both policies. Shown are the mean of whole answers and of first tokens in ms, and `kv` against `least_loaded` in percent with twice
the standard error. Run: python benchmarks/single_turn.py [--seeds 12] [--requests 400]
"""

import argparse
import heapq
import itertools
import math
import random
import statistics
from dataclasses import dataclass

from dynctl.core.deployment import EngineInfo, EngineState
from dynctl.router.config import Settings
from dynctl.router.desk import load_policy
from dynctl.router.placement import Order, Placement
from dynctl.router.prefix_index import PrefixIndex, Source
from dynctl.router.prompt import Hashers, Prompt
from dynctl.router.worker_table import WorkerTable

BLOCK, NUM_ENGINES, STEP_TOKENS, TOKEN_S, EVENT_DELAY_S = 16, 3, 2048, 50e-6, 2e-3
HASHERS = Hashers("bench")


@dataclass(frozen=True)
class Load:
    """Traffic, and what a step takes."""

    rate: float
    answer_tokens: int
    step_s: float
    sequence_s: float


LOADS = {
    **{f"short answers, {rate}/s": Load(rate, 16, 2e-3, 0.5e-3) for rate in (9, 24, 48)},
    **{f"longer ones, {rate}/s": Load(rate, 128, 2e-3, 0.5e-3) for rate in (3, 8, 16)},
    **{f"slower steps, {rate}/s": Load(rate, 128, 8e-3, 0.1e-3) for rate in (3, 8, 16)},
}


class Engine:
    """Steps of at most so many tokens of prompts, beside one token of each answer under way."""

    def __init__(self, world, load):
        self.world, self.load = world, load
        self.waiting, self.running, self.is_busy = [], [], False

    def submit(self, request):
        self.waiting.append(request)
        if not self.is_busy:
            self._step()

    def _step(self):
        left, begun = STEP_TOKENS, []
        for request in self.waiting:
            part = min(request.left, left)
            request.left -= part
            left -= part
            if not request.left:
                begun.append(request)
        decoding = list(self.running)
        self.is_busy = bool(decoding) or left < STEP_TOKENS
        if self.is_busy:
            took_s = self.load.step_s + self.load.sequence_s * len(decoding)
            took_s += TOKEN_S * (STEP_TOKENS - left)
            self.world.at(self.world.now_s + took_s, self._end, begun, decoding)

    def _end(self, begun, decoding):
        for request in begun:
            self.waiting.remove(request)
            self.running.append(request)
            request.first()
        for request in (*decoding, *begun):
            request.num_said += 1
            if request.num_said == request.answer_tokens:
                self.running.remove(request)
                request.done()
        self._step()


class Request:
    """One prompt nobody had before."""

    def __init__(self, world, number, prompt_tokens, answer_tokens):
        self.world, self.tokens = world, prompt_tokens
        self.prompt = Prompt.known(HASHERS, [10**6 + number, *range(prompt_tokens - 1)])
        self.left, self.answer_tokens, self.num_said = prompt_tokens, answer_tokens, 0

    def arrive(self):
        world = self.world
        self.arrived_s = world.now_s
        self.booking = world.placement.place(Order("r", self.prompt, None, 512), world.now_s).main
        self.worker = self.booking.worker
        world.engines[self.worker.id].submit(self)

    def first(self):
        world, worker = self.world, self.worker
        self.first_s = world.now_s
        began_s = max(self.arrived_s, worker.prefill_ended_s)
        self.booking.prefill_ended(world.now_s)
        worker.prefill_took(self.tokens, (world.now_s - began_s) * 1e3)
        world.at(world.now_s + EVENT_DELAY_S, world.stored, worker.id, self.prompt)

    def done(self):
        world = self.world
        self.booking.release()
        self.worker.gaps_took((world.now_s - self.first_s) * 1e3 / (self.answer_tokens - 1))
        world.table.lengths.learn("", self.answer_tokens)
        world.firsts_ms.append((self.first_s - self.arrived_s) * 1e3)
        world.wholes_ms.append((world.now_s - self.arrived_s) * 1e3)


class World:
    """A router's placement before engines, all in one process and one clock."""

    def __init__(self, load, policy, seed, num_requests):
        settings = Settings()
        self.now_s, self._todo, self._order = 0.0, [], itertools.count()
        self.table, self.index = WorkerTable(settings), PrefixIndex()
        self.placement = Placement(
            self.table, self.index, load_policy(policy), settings, random.Random(seed)
        )
        self.engines, self.firsts_ms, self.wholes_ms = {}, [], []
        for name in [f"e{i}" for i in range(NUM_ENGINES)]:
            about = *(name, f"{name}.1", EngineState.READY, "aggregated", "d", "sim", "m"), BLOCK
            self.table.put(EngineInfo(*about))
            self.index.begin(Source(name, f"{name}.1"))
            self.engines[name] = Engine(self, load)
        rng, at_s = random.Random(seed), 0.0
        for number in range(num_requests):
            at_s += rng.expovariate(load.rate)
            tokens = int(min(max(rng.lognormvariate(math.log(600), 0.6), 32), 6000))
            answer = max(2, int(rng.lognormvariate(math.log(load.answer_tokens), 0.5)))
            self.at(at_s, Request(self, number, tokens, answer).arrive)
        for second in range(int(at_s)):
            self.at(second + 0.5, self.table.relax, second + 0.5, self.index)

    def at(self, at_s, call, *args):
        heapq.heappush(self._todo, (at_s, next(self._order), call, args))

    def stored(self, name, prompt):
        self.index.store(Source(name, f"{name}.1"), prompt.blocks(BLOCK).hashes())

    def run(self):
        """Mean of whole answers and of first tokens."""
        while self._todo:
            self.now_s, _, call, args = heapq.heappop(self._todo)
            call(*args)
        return statistics.fmean(self.wholes_ms), statistics.fmean(self.firsts_ms)


def compared(load, seeds, num_requests):
    """Means of both policies, and differences in percent with twice their standard errors; whole answers, then first tokens."""
    runs = {
        policy: [World(load, policy, seed, num_requests).run() for seed in range(seeds)]
        for policy in ("kv", "least_loaded")
    }
    for part in range(2):
        ours, theirs = ([run[part] for run in found] for found in runs.values())
        more = [100.0 * (one / other - 1.0) for one, other in zip(ours, theirs, strict=True)]
        error = 2.0 * statistics.stdev(more) / math.sqrt(seeds)
        yield statistics.fmean(ours), statistics.fmean(theirs), statistics.fmean(more), error


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--seeds", type=int, default=12)
    parser.add_argument("--requests", type=int, default=400)
    args = parser.parse_args()
    for name, load in LOADS.items():
        told = [
            f"{what} {ours:.1f} / {theirs:.1f}, {more:+.2f} ± {error:.2f} %"
            for what, (ours, theirs, more, error) in zip(
                ("whole", "first"), compared(load, args.seeds, args.requests), strict=True
            )
        ]
        print(f"{name:24} {'; '.join(told)}", flush=True)


if __name__ == "__main__":
    main()

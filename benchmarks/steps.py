"""What a decode engine's steps do to the price of transfers, and so to how evenly two decode engines are used. Virtual time.

One prefill engine and two decode engines on equal links; 60 conversations of 8 turns on six system prompts, with few new tokens
a turn. Decode engines that run anything take up requests, and see transfers end, only between two steps, and a first token
takes one. With --blind the router counts all of that as the link's. Shown are the most used decode engine over the mean, by how
much the predicted time from hand-over to first token is wrong, the mean time to first token, and what share was computed in place.
Run: python benchmarks/steps.py [--blind] [--seeds 12]
"""

import argparse
import heapq
import json
import math
import random
import statistics
from collections import Counter
from itertools import count

from copy_or_recompute import BLOCK, HASHERS, KV_BYTES_PER_TOKEN

from dynctl.core.deployment import EngineInfo, EngineState
from dynctl.router.config import Settings
from dynctl.router.desk import load_policy
from dynctl.router.placement import Order, Placement
from dynctl.router.prefix_index import PrefixIndex, Source
from dynctl.router.prompt import Prompt
from dynctl.router.worker_table import WorkerTable

BASE_S, TOKEN_S, SETUP_S, BYTES_S = 2e-3, 50e-6, 0.5e-3, 10e9
CONVERSATIONS, RATE, TURNS, SYSTEM_TOKENS, OUT_TOKENS = 60, 3.0, 8, 600, 30
NAMES = ("p0", "d0", "d1")


class Run:
    """The router's placement before engines with steps."""

    def __init__(self, seed, step_s, user_tokens, *, is_blind):
        self.rng, self.step_s, self.user_tokens = random.Random(seed), step_s, user_tokens
        self.is_blind = is_blind
        self.table, self.index = WorkerTable(Settings()), PrefixIndex()
        for name in NAMES:
            role = "prefill" if name[0] == "p" else "decode"
            info = EngineInfo(*(name, name, EngineState.READY, role, "d", "sim", "m", BLOCK))
            self.table.put(info)
            self.index.begin(Source(name, name))
        self.placement = Placement(
            *(self.table, self.index, load_policy("kv"), Settings(), random.Random(seed + 1))
        )
        self.now_s, self.todo, self.numbers = 0.0, [], count()
        self.free_s, self.link_free_s = {}, {}
        self.running = {name: [] for name in NAMES}
        self.ttfts_ms, self.wrong_ms, self.sent, self.num_in_place = [], [], Counter(), 0

    def at(self, at_s, call, *args):
        heapq.heappush(self.todo, (at_s, next(self.numbers), call, args))

    def words(self, number):
        return [self.rng.randrange(16, 50_000) for _ in range(number)]

    def between_steps(self, name, at_s):
        if all(end_s <= at_s for end_s in self.running[name]):
            return at_s
        return math.ceil(at_s / self.step_s) * self.step_s

    def compute(self, booking, prompt, held, began_s):
        """One engine's queue: when its prefill is over."""
        worker = booking.worker
        left = prompt.num_tokens - min(held.get(worker.id, 0) * BLOCK, prompt.num_tokens - 1)
        free_s = max(began_s, self.free_s.get(worker.id, 0.0))
        ended_s = self.between_steps(worker.id, free_s) + BASE_S + left * TOKEN_S
        self.free_s[worker.id] = ended_s
        self.at(ended_s, booking.prefill_ended, ended_s)
        self.at(ended_s, worker.prefill_took, left, (ended_s - free_s) * 1e3)
        return ended_s

    def move(self, placed, prompt, held, asked_s):
        """When the decode engine, asked then, has its first token."""
        worker = placed.main.worker
        left = prompt.num_tokens - min(held.get(worker.id, 0) * BLOCK, prompt.num_tokens - 1)
        begun_s = max(self.between_steps(worker.id, asked_s), self.link_free_s.get(worker.id, 0.0))
        moved_s = begun_s + SETUP_S + left * KV_BYTES_PER_TOKEN / BYTES_S
        self.link_free_s[worker.id] = moved_s
        first_s = self.between_steps(worker.id, moved_s) + self.step_s
        (decision,) = [one for one in placed.decisions if one.leg == "decode"]
        predicted_ms = sum(decision.predicted_ms(decision.position).values())
        self.wrong_ms.append(abs(predicted_ms - (first_s - asked_s) * 1e3))
        self.at(first_s, self.took, placed, asked_s, first_s)
        return first_s

    def took(self, placed, asked_s, first_s):
        step_ms = 0.0 if self.is_blind else placed.main.worker.step_ms
        placed.move.took(asked_s, first_s, step_ms)

    def turn(self, tokens, left):
        tokens = tokens + self.words(max(1, int(self.rng.expovariate(1 / self.user_tokens))))
        prompt, now_s = Prompt.known(HASHERS, tokens), self.now_s
        placed = self.placement.place(Order("r", prompt, None, 64), now_s)
        blocks = HASHERS.of(BLOCK).prompt(tokens)
        held, name = self.index.match(blocks), placed.main.worker.id
        self.sent[name] += 1
        if placed.prefill is None:
            first_s = self.compute(placed.main, prompt, held, now_s)
            self.num_in_place += 1
        else:
            computed_s = self.compute(placed.prefill, prompt, held, now_s)
            self.at(computed_s, placed.prefill.release)
            self.at(computed_s, self.index.store, Source("p0", "p0"), blocks.hashes())
            first_s = self.move(placed, prompt, held, computed_s)
        self.at(first_s, self.index.store, Source(name, name), blocks.hashes())
        self.ttfts_ms.append((first_s - now_s) * 1e3)
        end_s = first_s + OUT_TOKENS * self.step_s
        self.running[name].append(end_s)
        self.at(end_s, self.ended, placed.main, tokens + self.words(OUT_TOKENS), end_s, left - 1)

    def ended(self, booking, tokens, end_s, left):
        worker = booking.worker
        worker.gaps_took(self.step_s * 1e3)
        booking.release()
        self.running[worker.id].remove(end_s)
        hashes = HASHERS.of(BLOCK).prompt(tokens).hashes()
        self.index.store(Source(worker.id, worker.id), hashes)
        if left:
            self.at(end_s + self.rng.expovariate(1.0), self.turn, tokens, left)

    def tick(self, left):
        self.table.relax(self.now_s, self.index)
        self.index.sweep(self.now_s)
        if left:
            self.at(self.now_s + 1.0, self.tick, left - 1)

    def run(self):
        systems, at_s = [self.words(SYSTEM_TOKENS) for _ in range(6)], 0.0
        for _ in range(CONVERSATIONS):
            at_s += self.rng.expovariate(RATE)
            self.at(at_s, self.turn, self.rng.choice(systems), TURNS)
        self.tick(60)
        while self.todo:
            self.now_s, _, call, args = heapq.heappop(self.todo)
            call(*args)
        return {
            "max/mean": 2 * max(self.sent.values()) / self.sent.total(),
            "wrong_ms": statistics.mean(self.wrong_ms),
            "ttft_mean_ms": statistics.mean(self.ttfts_ms),
            "in_place_share": self.num_in_place / len(self.ttfts_ms),
        }


def main():
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--blind", action="store_true")
    parser.add_argument("--seeds", type=int, default=12)
    args = parser.parse_args()
    for step_ms in (10, 30):
        for user_tokens in (40, 200):
            rows = [
                Run(seed, step_ms / 1e3, user_tokens, is_blind=args.blind).run()
                for seed in range(args.seeds)
            ]
            mean = {name: round(statistics.mean(row[name] for row in rows), 3) for name in rows[0]}
            print(json.dumps({"step_ms": step_ms, "user_tokens": user_tokens} | mean), flush=True)


if __name__ == "__main__":
    main()

"""Prefill and decode engines on two hosts: fast links within a host, slow ones between them. Time to first token, virtual time.

Every prefill engine can send to every decode engine; links are learned from nothing, or with --told from their true rates.
Shown are mean and 95th percentile of the
time to first token (ms), what share of the requests went from one host to the other, and what share was computed in place.
Run: python benchmarks/near_and_far.py [--told] [--requests 400] [--seeds 2]
"""

import argparse
import heapq
import json
import random
import statistics
from itertools import count

from copy_or_recompute import BASE_S, BLOCK, HASHERS, KV_BYTES_PER_TOKEN, SETUP_S, TOKEN_S

from dynctl.core.deployment import EngineInfo, EngineState
from dynctl.core.kv_links import HOST, TCP, EnginePlace, LinkClasses, LinkRate
from dynctl.router.config import Settings
from dynctl.router.desk import load_policy
from dynctl.router.placement import Order, Placement
from dynctl.router.prefix_index import PrefixIndex, Source
from dynctl.router.prompt import Prompt
from dynctl.router.worker_table import WorkerTable

GIGABYTES_S = ((50.0, 12.5), (50.0, 3.0), (50.0, 1.2), (12.5, 1.2), (12.5, 0.3))
"""Within a host, and between two."""

RATE = 4.0


class Run:
    """The router's placement before engines and links of known speed."""

    def __init__(self, seed, near, far, *, is_told=False):
        self.rng, self.bytes_s = random.Random(seed), {True: near * 1e9, False: far * 1e9}
        table, index = WorkerTable(Settings()), PrefixIndex()
        for host in "01":
            for role in ("prefill", "decode"):
                name = f"{role[0]}{host}"
                info = EngineInfo(*(name, name, EngineState.READY, role, "d", "sim", "m", BLOCK))
                table.put(info)
                index.begin(Source(name, name))
        self.index, self.free_s, self.link_free_s = index, {}, {}
        self.placement = Placement(
            *(table, index, load_policy("kv"), Settings(), random.Random(seed + 1)),
            classes=told(near, far) if is_told else None,
        )
        self.todo, self.numbers = [], count()
        self.ttfts_ms, self.num_far, self.num_in_place = [], 0, 0

    def at(self, at_s, call, *args):
        heapq.heappush(self.todo, (at_s, next(self.numbers), call, args))

    def compute(self, booking, now_s, length):
        """One engine's queue: when its prefill is over."""
        worker = booking.worker
        began_s = max(now_s, self.free_s.get(worker.id, 0.0))
        self.free_s[worker.id] = ended_s = began_s + BASE_S + length * TOKEN_S
        self.at(ended_s, booking.prefill_ended, ended_s)
        self.at(ended_s, worker.prefill_took, length, (ended_s - began_s) * 1e3)
        return ended_s

    def ask(self, number, now_s):
        rng = self.rng
        length = int(min(max(rng.lognormvariate(7.0, 1.1), 48), 24_000))
        prompt = Prompt.known(HASHERS, [rng.randrange(50_000) for _ in range(length)])
        placed = self.placement.place(Order(str(number), prompt, None, 64), now_s)
        if placed.prefill is None:
            first_s = self.compute(placed.main, now_s, length)
            self.num_in_place += 1
        else:
            ended_s = self.compute(placed.prefill, now_s, length)
            ends = placed.prefill.worker.id, placed.main.worker.id
            is_near = ends[0][1] == ends[1][1]
            began_s = max([ended_s, *(self.link_free_s.get(end, 0.0) for end in ends)])
            first_s = began_s + SETUP_S + length * KV_BYTES_PER_TOKEN / self.bytes_s[is_near]
            self.link_free_s |= dict.fromkeys(ends, first_s)
            self.at(ended_s, placed.prefill.release)
            self.at(first_s, placed.move.took, ended_s, first_s)
            self.num_far += not is_near
        self.ttfts_ms.append((first_s - now_s) * 1e3)
        self.at(first_s + rng.uniform(0.3, 1.2), placed.main.release)

    def run(self, number):
        now_s = 0.0
        for one in range(number):
            now_s += self.rng.expovariate(RATE)
            while self.todo and self.todo[0][0] <= now_s:
                _, _, call, args = heapq.heappop(self.todo)
                call(*args)
            self.index.sweep(now_s)
            self.ask(one, now_s)
        times = sorted(self.ttfts_ms)
        return {
            "ttft_mean_ms": statistics.mean(times),
            "ttft_p95_ms": times[int(0.95 * number)],
            "far_share": self.num_far / number,
            "in_place_share": self.num_in_place / number,
        }


def told(near, far):
    latency_ms = SETUP_S * 1e3 - Settings().transfer_setup_ms
    rates = [
        LinkRate(a, b, *((HOST, per_token(near)) if a == b else (TCP, per_token(far))), latency_ms)
        for a in "01"
        for b in "01"
    ]
    return LinkClasses([EnginePlace(role + host, host) for host in "01" for role in "pd"], rates)


def per_token(gigabytes_s):
    return KV_BYTES_PER_TOKEN / (gigabytes_s * 1e6)


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--requests", type=int, default=400)
    parser.add_argument("--seeds", type=int, default=2)
    parser.add_argument("--told", action="store_true")
    args = parser.parse_args()
    for near, far in GIGABYTES_S:
        rows = [
            Run(seed, near, far, is_told=args.told).run(args.requests) for seed in range(args.seeds)
        ]
        mean = {name: round(statistics.mean(row[name] for row in rows), 3) for name in rows[0]}
        print(json.dumps({"near_gigabytes_s": near, "far_gigabytes_s": far} | mean), flush=True)


if __name__ == "__main__":
    main()

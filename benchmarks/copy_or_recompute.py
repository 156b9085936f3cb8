"""Copy or recompute: regret of the router's own rule against an oracle, over link bandwidths, in virtual time.

One prefill engine and one decode engine with a link between them; requests of mixed lengths arrive, some with most of
their prompt cached on the decode engine. Each rule decides per request: prefill there and copy, or recompute on the
decode engine. The router's rule is `dynctl.router.placement`'s, with `Links` and `Line` learning from what happened; it
starts with the default rates, which are wrong for most links. Fixed rules copy from N uncached tokens on. The oracle knows
the true rates and both queues exactly. "Told" is the router's rule that was given the link's true rate, as `up` gives
what `linktest` measured, or half or twice of it. Cost: mean time to first token plus what prefill on the decode engine holds up
(`decode_stall` times its duration for each sequence running). With --step-ms the decode engine takes up requests and sees
transfers end only between its steps, and a first token takes one, as in real engines: the router learns that from the gaps
between tokens. Run: python benchmarks/copy_or_recompute.py [--step-ms 20]
"""

import argparse
import heapq
import json
import math
import random

from dynctl.core.deployment import EngineInfo, EngineState
from dynctl.core.kv_links import TCP, EnginePlace, LinkClasses, LinkRate
from dynctl.router.config import Settings
from dynctl.router.desk import load_policy
from dynctl.router.placement import Order, Placement
from dynctl.router.prefix_index import PrefixIndex, Source
from dynctl.router.prompt import Hashers, Prompt
from dynctl.router.worker_table import WorkerTable

BLOCK = 16
KV_BYTES_PER_TOKEN = 131_072
BASE_S, TOKEN_S, SETUP_S = 4e-3, 100e-6, 3e-3
GIGABYTES_S = (0.1, 0.3, 1.0, 3.0, 12.5, 50.0)
THRESHOLDS = (0, 128, 512, 2048, 8192, 10**9)
FACTORS = (1.0, 0.5, 2.0)
"""By which the rate is wrong that the router is told."""
HASHERS = Hashers("bench")


def requests(seed, number, rate):
    """(arrival, tokens, tokens cached on the decode engine, generation time)."""
    rng, now_s = random.Random(seed), 0.0
    found = []
    for i in range(number):
        length = int(min(max(rng.lognormvariate(7.0, 1.1), 48), 24_000))
        cached = length * 9 // 10 // BLOCK * BLOCK if rng.random() < 0.4 else 0
        found.append((now_s, i, length, cached, rng.uniform(0.3, 1.2)))
        now_s += rng.expovariate(rate)
    return found


class World:
    """The true times of both engines and the link; every rule gets one of its own."""

    def __init__(self, bandwidth, step_s=0.0):
        self.copy_token_s = KV_BYTES_PER_TOKEN / (bandwidth * 1e9)
        self.step_s = step_s
        self.prefill_free_s = self.decode_free_s = self.link_free_s = 0.0
        self.running = []

    def num_running(self, now_s):
        while self.running and self.running[0] <= now_s:
            heapq.heappop(self.running)
        return len(self.running)

    def between_steps(self, at_s):
        """When the decode engine next looks at what has come; one that runs nothing does at once."""
        if not self.step_s or all(end_s <= at_s for end_s in self.running):
            return at_s
        return math.ceil(at_s / self.step_s) * self.step_s

    def local(self, now_s, left):
        """(end of queue, first token, cost of what it holds up)."""
        began_s = max(now_s, self.decode_free_s)
        took_s = BASE_S + left * TOKEN_S
        first_s = self.between_steps(began_s) + took_s
        return began_s, first_s, took_s * (self.num_running(now_s) + 1)

    def remote(self, now_s, length, left):
        """(end of queue, end of prefill, end of copy, first token)."""
        began_s = max(now_s, self.prefill_free_s)
        computed_s = began_s + BASE_S + length * TOKEN_S
        copy_s = max(self.between_steps(computed_s), self.link_free_s)
        copied_s = copy_s + SETUP_S + left * self.copy_token_s
        return began_s, computed_s, copied_s, self.between_steps(copied_s) + self.step_s

    def take_local(self, now_s, left, generates_s):
        times = self.local(now_s, left)
        self.decode_free_s = times[1]
        heapq.heappush(self.running, times[1] + generates_s)
        return times

    def take_remote(self, now_s, length, left, generates_s):
        times = self.remote(now_s, length, left)
        self.prefill_free_s, self.link_free_s = times[1:3]
        heapq.heappush(self.running, times[3] + generates_s)
        return times


class Fixed:
    def __init__(self, tokens):
        self.tokens = tokens

    def is_local(self, _world, _now_s, _index, length, cached):
        return length - cached < self.tokens

    def ended(self, *_):
        pass


class Oracle:
    """Takes the cheaper of the two true costs of this request."""

    def __init__(self, stall):
        self.stall = stall

    def is_local(self, world, now_s, _index, length, cached):
        left = length - cached
        _, first_s, held_s = world.local(now_s, left)
        return first_s + self.stall * held_s <= world.remote(now_s, length, left)[3]

    def ended(self, *_):
        pass


class Router:
    """The router's placement, with books kept as its requests end."""

    def __init__(self, settings, told_gigabytes_s=None, step_s=0.0):
        self.step_s = step_s
        self.table, self.index = WorkerTable(settings), PrefixIndex()
        for name, role in (("p", "prefill"), ("d", "decode")):
            info = EngineInfo(name, f"{name}.1", EngineState.READY, role, "d", "sim", "m", BLOCK)
            self.table.put(info)
            self.index.begin(Source(name, f"{name}.1"))
        rng = random.Random(1)
        policy = load_policy("kv")
        classes = None if told_gigabytes_s is None else told(told_gigabytes_s, settings)
        self.placement = Placement(self.table, self.index, policy, settings, rng, classes=classes)
        self.todo = []
        self.num = 0
        self.placed = None

    def is_local(self, _world, now_s, index, length, cached):
        while self.todo and self.todo[0][0] <= now_s:
            _, _, call, args = heapq.heappop(self.todo)
            call(*args)
        rng = random.Random(index)
        tokens = [rng.randrange(50_000) for _ in range(length)]
        if cached:
            blocks = HASHERS.of(BLOCK).prompt(tokens[:cached]).hashes()
            self.index.store(Source("d", "d.1"), blocks)
        self.index.sweep(now_s)
        self.placed = self.placement.place(
            Order(str(index), Prompt.known(HASHERS, tokens), None, 64), now_s
        )
        return self.placed.prefill is None

    def ended(self, _now_s, length, left, times, done_s):
        """Learn at the true times what the router would learn."""
        placed = self.placed
        if placed.prefill is None:
            worker = placed.main.worker
            self._at(times[1], placed.main.prefill_ended, times[1])
            self._at(times[1], worker.prefill_took, left, (times[1] - times[0]) * 1e3)
        else:
            worker = placed.prefill.worker
            self._at(times[1], placed.prefill.prefill_ended, times[1])
            self._at(times[1], worker.prefill_took, length, (times[1] - times[0]) * 1e3)
            self._at(times[1], placed.prefill.release)
            self._at(times[3], self._moved, placed, times)
        self._at(done_s, self._done, placed.main)

    def _moved(self, placed, times):
        placed.move.took(times[1], times[3], placed.main.worker.step_ms)

    def _done(self, booking):
        if self.step_s:
            booking.worker.gaps_took(self.step_s * 1e3)
        booking.release()

    def _at(self, at_s, call, *args):
        self.num += 1
        heapq.heappush(self.todo, (at_s, self.num, call, args))


def told(gigabytes_s, settings):
    ms_per_token = KV_BYTES_PER_TOKEN / (gigabytes_s * 1e6)
    latency_ms = SETUP_S * 1e3 - settings.transfer_setup_ms
    return LinkClasses(
        [EnginePlace("p", "a"), EnginePlace("d", "b")],
        [LinkRate("a", "b", TCP, ms_per_token, latency_ms)],
    )


def run(rule, bandwidth, trace, stall, step_s=0.0):
    """Mean cost in milliseconds, and the share of requests computed locally."""
    world, total_s, num_local = World(bandwidth, step_s), 0.0, 0
    for now_s, index, length, cached, generates_s in trace:
        left = length - cached
        if rule.is_local(world, now_s, index, length, cached):
            times = world.take_local(now_s, left, generates_s)
            total_s += times[1] - now_s + stall * times[2]
            done_s = times[1] + generates_s
            num_local += 1
        else:
            times = world.take_remote(now_s, length, left, generates_s)
            total_s += times[3] - now_s
            done_s = times[3] + generates_s
        rule.ended(now_s, length, left, times, done_s)
    return total_s / len(trace) * 1e3, num_local / len(trace)


def compared(bandwidth, seeds, number=600, rate=2.5, factors=(1.0,), step_s=0.0):
    """Mean cost in milliseconds, and the share of requests computed locally, by rule."""
    settings = Settings()
    stall = settings.decode_stall
    rules = {"oracle": lambda: Oracle(stall), "router": lambda: Router(settings, None, step_s)}
    rules |= {f"told {f:g}": (lambda f=f: Router(settings, f * bandwidth, step_s)) for f in factors}
    rules |= {f"from {n}": (lambda n=n: Fixed(n)) for n in THRESHOLDS}
    means, shares = {}, {}
    for name, make in rules.items():
        costs = [
            run(make(), bandwidth, requests(seed, number, rate), stall, step_s) for seed in seeds
        ]
        means[name] = sum(cost for cost, _ in costs) / len(costs)
        shares[name] = sum(share for _, share in costs) / len(costs)
    return means, shares


def regret(means, name):
    """Of a rule against the oracle."""
    return means[name] / means["oracle"] - 1


def figures(means):
    """Regret of what begins with the default rates against the oracle, and against the best fixed rule."""
    best = min(value for name, value in means.items() if name.startswith("from"))
    return regret(means, "router"), means["router"] / best - 1


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--requests", type=int, default=600)
    parser.add_argument("--rate", type=float, default=2.5)
    parser.add_argument("--seeds", type=int, default=8)
    parser.add_argument("--step-ms", type=float, default=0.0)
    args = parser.parse_args()
    for bandwidth in GIGABYTES_S:
        seeds = range(args.seeds)
        means, shares = compared(
            *(bandwidth, seeds, args.requests, args.rate, FACTORS), step_s=args.step_ms / 1e3
        )
        untold, over_best_fixed = figures(means)
        print(
            json.dumps(
                {
                    "gigabytes_s": bandwidth,
                    "regret": round(untold, 4),
                    "regret_told": [round(regret(means, f"told {f:g}"), 4) for f in FACTORS],
                    "over_best_fixed": round(over_best_fixed, 4),
                    "local_share": round(shares["router"], 3),
                    "oracle_local_share": round(shares["oracle"], 3),
                    "ms": {name: round(value, 1) for name, value in means.items()},
                }
            )
        )


if __name__ == "__main__":
    main()

"""What it brings that idle engines compute hot prefixes before load needs them there (`warm_idle`). Virtual time.

Conversations of two turns on long system prompts (zipf) come to 6 engines at 0.6 a second, and for 2 s of every 20 at 12 a second:

    bursts  four prompts, caches that hold them all
    fresh   as bursts, but each burst is on a prompt that nobody had before
    many    sixteen prompts, caches of four of them: what is computed beforehand leaves less room for what comes

Then the traces of `balance.py`, where engines are hardly ever idle. Time to first token (ms), hits lost against one unlimited
cache (points), balance, tokens computed beforehand, as means over seeds; and on how many seeds the mean is better or worse.
Run: python benchmarks/idle.py [bursts|fresh|many|trace|heavy|… ...] [--seeds 6] [--per-minute 0 6]
"""

import argparse
import json
import random
import statistics
from dataclasses import replace

import balance

from dynctl.kv.hashing import unpack_tokens
from dynctl.router.spreading import Copies

AGGREGATED = frozenset(("aggregated",))
LOOK_S = 0.2
BURSTS = balance.Trace(turns=2, groups=4, sys_words=4096, capacity=2500, engines=6)
BURSTY = {
    "bursts": BURSTS,
    "fresh": BURSTS,
    "many": replace(BURSTS, groups=16, capacity=1000),
}
RATE, BURST_RATE, EVERY_S, BURST_S, NUM_BURSTS = 0.6, 12.0, 20.0, 2.0, 5


def bursts(name, seed):
    """Conversations of a bursty trace."""
    rng = random.Random(seed)
    at_s, found, fresh = 0.0, [], {}
    # More of them than are needed, for what they say.
    for _, system, turns in balance.conversations(replace(BURSTY[name], convs=400), seed):
        # Drawn at the higher rate; of what comes between bursts most is left out.
        at_s += rng.expovariate(BURST_RATE)
        while not is_burst(at_s) and rng.random() > RATE / BURST_RATE:
            at_s += rng.expovariate(BURST_RATE)
        if at_s >= NUM_BURSTS * EVERY_S:
            break
        if name == "fresh" and is_burst(at_s):
            if at_s // EVERY_S not in fresh:
                words = range(balance.FIRST_WORD, balance.FIRST_WORD + balance.VOCABULARY)
                fresh[at_s // EVERY_S] = rng.choices(words, k=BURSTS.sys_words)
            found.append((at_s, fresh[at_s // EVERY_S], turns))
        else:
            found.append((at_s, system, turns))
    return found


def is_burst(at_s):
    return at_s % EVERY_S >= EVERY_S - BURST_S


class Run(balance.Run):
    """A run in which idle engines get so many prefixes a minute."""

    per_minute = 0

    def __post_init__(self):
        super().__post_init__()
        self.num_copied = 0
        self.is_copying = False
        hot = self.placement.overlaps.hot
        self.copies = Copies(self.table, self.index, hot, self.per_minute)

    def _tick(self, left):
        super()._tick(left)
        if left % 2 == 0 and self.per_minute and not self.is_copying:
            self._look()

    def _look(self):
        now_s = self.clock.now_s
        found = self.copies.next([self.table.view(AGGREGATED, None, now_s).workers], now_s)
        if found is None:
            return
        worker, prefix = found
        self.copies.begun(worker, prefix, now_s)
        engine, ids = self.engines[worker.id], unpack_tokens(prefix.token_bytes)
        booking = worker.book(len(ids), len(ids), 1, now_s, 0.0)
        self.is_copying = True

        def first(cached):
            # Nobody asked for it: it enters no figure.
            engine.num_requests -= 1
            engine.prompt_tokens -= len(ids)
            engine.cached_tokens -= cached
            booking.release()
            self.num_copied += len(ids) - cached
            self.is_copying = False

        engine.submit(ids, first, lambda _: None)


def measure(name, per_minute, seeds):
    rows = []
    for seed in seeds:
        trace = BURSTY.get(name) or balance.TRACES[name]
        convs = bursts(name, seed) if name in BURSTY else balance.conversations(trace, seed)
        bound, num_distinct = balance.bound_of(convs)
        Run.per_minute = per_minute
        run = Run(trace, "kv", seed, balance.capacity_of(trace, num_distinct))
        run.run(convs)
        figures, times = run.figures(), sorted(run.ttfts_ms)
        rows.append(
            {
                "ttft_mean_ms": figures["ttft_mean_ms"],
                "ttft_p95_ms": times[int(0.95 * len(times))],
                "ttft_p99_ms": figures["ttft_p99_ms"],
                "loss_points": 100 * (bound - figures["hit"]),
                "max/mean": figures["max/mean"],
                "copied_tokens": run.num_copied,
                "asked": len(times),
            }
        )
    return rows


def main():
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("traces", nargs="*", default=[*BURSTY, *balance.TRACES])
    parser.add_argument("--seeds", type=int, default=6)
    parser.add_argument("--first-seed", type=int, default=1)
    parser.add_argument("--per-minute", type=int, nargs="*", default=[0, 6])
    args = parser.parse_args()
    seeds = range(args.first_seed, args.first_seed + args.seeds)
    for name in args.traces:
        before = None
        for per_minute in args.per_minute:
            rows = measure(name, per_minute, seeds)
            mean = {key: round(statistics.mean(row[key] for row in rows), 3) for key in rows[0]}
            found = {"trace": name, "per_minute": per_minute} | mean
            if before:
                changes = [
                    row["ttft_mean_ms"] - old["ttft_mean_ms"]
                    for row, old in zip(rows, before, strict=True)
                ]
                found["ttft_mean_change_ms"] = round(statistics.mean(changes), 3)
                found["seeds_better_worse"] = [
                    sum(c < 0 for c in changes),
                    sum(c > 0 for c in changes),
                ]
            before = before or rows
            print(json.dumps(found), flush=True)


if __name__ == "__main__":
    main()

"""What warming an engine that joins brings: conversations on three engines, a fourth joins after ten seconds. Virtual time.

Time to first token of the ten seconds after that (ms), hits lost over the whole run (points), and how many requests the new
engine had, as means over seeds; with and without the hot prefixes computed beforehand, as `dynctl.router.warming` does.
Run: python benchmarks/joining.py [--seeds 8]
"""

import argparse
import json
import statistics
from dataclasses import replace

import balance

from dynctl.core.deployment import EngineInfo, EngineState
from dynctl.kv.hashing import unpack_tokens
from dynctl.router.config import Settings
from dynctl.router.prefix_index import Source

JOIN_S, LOOK_S = 10.0, 10.0
NEW = Source("e3", "e3.2")
TRACE = replace(balance.TRACES["trace"], convs=160, conv_rate=8.0, prefill_us=100.0, capacity=4096)
AGGREGATED = frozenset(("aggregated",))


class Run(balance.Run):
    """A run whose last engine is there only from `JOIN_S` on."""

    is_warmed = True

    def __post_init__(self):
        super().__post_init__()
        self.table.remove(NEW.engine_id)
        self.index.drop(NEW.engine_id)
        self.clock.after(JOIN_S, self._join)

    def _on_event(self, name, stored, removed):
        if name != NEW.engine_id:
            super()._on_event(name, stored, removed)
            return
        self.index.remove(NEW, removed)
        self.index.store(NEW, stored)

    def _join(self):
        self.table.put(
            EngineInfo(*NEW[:2], EngineState.READY, "aggregated", "d", "sim", "m", balance.BLOCK)
        )
        self.index.begin(NEW)
        self.table.view(AGGREGATED, None, self.clock.now_s)
        if self.is_warmed:
            self._warm(self.placement.overlaps.hot.hottest(Settings().warm_prefixes))

    def _warm(self, left):
        worker = self.table.get(NEW.engine_id)
        if not left:
            return
        if worker.pending_prefills:
            self.clock.after(0.2, self._warm, left)
            return
        engine, ids = self.engines[NEW.engine_id], unpack_tokens(left[0].token_bytes)
        booking = worker.book(len(ids), len(ids), 1, self.clock.now_s, 0.0)

        def first(cached):
            del cached
            engine.num_requests -= 1
            booking.release()
            self._warm(left[1:])

        engine.submit(ids, first, lambda _: None)


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--seeds", type=int, default=8)
    args = parser.parse_args()
    for is_warmed in (False, True):
        rows = []
        for seed in range(1, args.seeds + 1):
            convs = balance.conversations(TRACE, seed)
            bound, _ = balance.bound_of(convs)
            run = Run(TRACE, "kv", seed, TRACE.capacity)
            run.is_warmed = is_warmed
            run.run(convs)
            times = sorted(run.ttfts_between(JOIN_S, JOIN_S + LOOK_S))
            rows.append(
                {
                    "ttft_mean_ms": statistics.mean(times),
                    "ttft_p95_ms": times[int(0.95 * len(times))],
                    "loss_points": 100 * (bound - run.figures()["hit"]),
                    "requests_of_new": run.engines[NEW.engine_id].num_requests,
                }
            )
        mean = {key: round(statistics.mean(row[key] for row in rows), 2) for key in rows[0]}
        print(json.dumps({"warmed": is_warmed} | mean))


if __name__ == "__main__":
    main()

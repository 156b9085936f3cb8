"""What it brings to know what engines hold in their hosts' memory, in virtual time: the trace "full" of balance.py.

Each engine writes what it computes to its host, four times as large as its device, and loads from there what the device
lacks, whether the router knows or not. `blind` does not hear of it, `told` does; `none` has no hosts. Loads take so many
microseconds a token (computing one: 60). Run: python benchmarks/hosts.py [--seeds N] [--load-us 7,20,60]
"""

import argparse
import json
from collections import OrderedDict

from balance import (
    BLOCK,
    EVENT_DELAY_S,
    TRACES,
    Engine,
    Run,
    bound_of,
    capacity_of,
    conversations,
    depth_in,
    insert,
)

from dynctl.core.kv import HOST
from dynctl.router.prefix_index import Source

HOST_BLOCKS = 4
"""For each of the device."""


class HostEngine(Engine):
    """Loads from its host what the device lacks."""

    def __init__(self, clock, name, trace, capacity, on_event, on_host, load_us):
        super().__init__(clock, name, trace, capacity, on_event)
        self.host, self.on_host, self.load_s = OrderedDict(), on_host, load_us * 1e-6

    def _look_up(self, tokens, hashes):
        depth = depth_in(self.cache, tokens, hashes)
        found = depth_in(self.host, tokens, hashes, depth)
        return found * BLOCK, (found - depth) * BLOCK * self.load_s

    def _insert(self, hashes):
        super()._insert(hashes)
        stored, removed = insert(self.host, hashes, HOST_BLOCKS * self.capacity)
        if stored or removed:
            self.clock.after(EVENT_DELAY_S, self.on_host, self.name, stored, removed)


class HostRun(Run):
    """One trace on engines with hosts."""

    def __init__(self, trace, seed, capacity, load_us, *, is_told):
        self.load_us, self.is_told = load_us, is_told
        super().__init__(trace, "kv", seed, capacity)
        for name in self.engines:
            if is_told:
                self.index.begin(Source(name, f"{name}.1", 0, HOST))
            self.engines[name] = HostEngine(
                self.clock, name, trace, capacity, self._on_event, self._on_host, load_us
            )

    def _on_host(self, name, stored, removed):
        if self.is_told:
            source = Source(name, f"{name}.1", 0, HOST)
            self.index.remove(source, removed)
            self.index.store(source, stored)

    def learn(self, placed, tokens, cached, ms):
        """As the router's books do: what the rest does not explain was the load."""
        worker, to_load = placed.main.worker, placed.decisions[0].to_load
        if to_load is not None and cached > to_load.device_tokens:
            loaded = cached - to_load.device_tokens
            worker.load_took(HOST, loaded, max(ms - worker.prefill.at(len(tokens) - cached), 0.0))
        else:
            worker.prefill_took(len(tokens) - cached, ms)


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--seeds", type=int, default=4)
    parser.add_argument("--load-us", default="7,20,60")
    args = parser.parse_args()
    trace = TRACES["full"]
    rows = {}
    for seed in range(trace.first_seed, trace.first_seed + args.seeds):
        convs = conversations(trace, seed)
        capacity = capacity_of(trace, bound_of(convs)[1])
        runs = {"none": Run(trace, "kv", seed, capacity)}
        for load_us in map(float, args.load_us.split(",")):
            for name, is_told in (("blind", False), ("told", True)):
                run = HostRun(trace, seed, capacity, load_us, is_told=is_told)
                runs[f"{name}, {load_us:g} us"] = run
        for name, run in runs.items():
            run.run(convs)
            rows.setdefault(name, []).append(run.figures())
    for name, figures in rows.items():
        mean = {key: round(sum(f[key] for f in figures) / len(figures), 4) for key in figures[0]}
        print(json.dumps({"hosts": name, **mean}))


if __name__ == "__main__":
    main()

"""Memory and speed of the prefix index at millions of blocks on 64 engines, beside a plain dictionary of the same keys.

Prints resident memory per block, CPU per block stored and removed, CPU of a match of 128 blocks by jumps (p50, p99) beside
a walk over all depths, of dropping an engine, and memory and match times under churn: every engine stores and evicts, oldest
first, as many blocks as it would in so many minutes of full prefill, without waiting for the clock. CPU time, one process.
With --host every block is in its engine's host too, and stays there when the device evicts it.
Run: python benchmarks/index.py [--blocks 10000000] [--minutes 30] [--blocks-s 40000] [--host]
"""

import argparse
import gc
import json
import os
import random
import time
from array import array
from collections import deque
from pathlib import Path

from dynctl.core.kv import HOST
from dynctl.kv.hashing import BlockHasher
from dynctl.router.prefix_index import PrefixIndex, Source

NUM_ENGINES = 64
NUM_PROMPTS = 2000
DEPTH = 128
HASHER = BlockHasher(b"bench", 16)
BATCH = 512


def rss_bytes():
    gc.collect()
    return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")


def sources():
    return [Source(f"e{i}", f"e{i}.1") for i in range(NUM_ENGINES)]


def host_of(source):
    return source._replace(medium=HOST)


class Fleet:
    """Engines that store and evict; one batch in eight is held by a second engine too."""

    def __init__(self, index, *, has_hosts):
        self.index, self.sources, self.number = index, sources(), 0
        self.hosts = [host_of(source) for source in self.sources] if has_hosts else []
        self.held = [deque() for _ in self.sources]
        """Packed, so that what the index needs for its keys is not shared."""
        self.store_s = 0.0

    def store(self, num_blocks):
        packed = array("Q", os.urandom(8 * num_blocks))
        at = self.number % NUM_ENGINES
        for engine in (at, (at + 1) % NUM_ENGINES)[: 2 if self.number % 8 == 0 else 1]:
            blocks = packed.tolist()
            started = time.process_time()
            self.index.store(self.sources[engine], blocks)
            if self.hosts:
                self.index.store(self.hosts[engine], blocks)
            self.store_s += time.process_time() - started
            self.held[engine].append(packed)
        self.number += 1

    def turn_over(self):
        """Every engine in its turn stores a batch and evicts the oldest."""
        at = self.number % NUM_ENGINES
        self.store(BATCH)
        while len(self.held[at]) > self.num_batches[at]:
            self.index.remove(self.sources[at], self.held[at].popleft().tolist())

    def fill(self, num_blocks):
        for start in range(0, num_blocks, BATCH):
            self.store(min(BATCH, num_blocks - start))
        self.num_batches = [len(batches) for batches in self.held]


def prompts(index, *, has_hosts):
    """Prompts whose first quarter all engines hold, and one engine nearly all the rest; in its host, where it has one."""
    rng, found, plain = random.Random(1), [], {}
    shared = [rng.randrange(150_000) for _ in range(16 * DEPTH // 4)]
    for i in range(NUM_PROMPTS):
        ids = shared + [rng.randrange(150_000) for _ in range(16 * DEPTH - len(shared))]
        prompt = HASHER.prompt(ids)
        hashes = prompt.hashes()
        if i == 0:
            for source in sources():
                index.store(source, hashes[: DEPTH // 4])
            plain |= dict.fromkeys(hashes, 2**NUM_ENGINES - 1)
        holder = sources()[i % NUM_ENGINES]
        index.store(host_of(holder) if has_hosts else holder, hashes[: DEPTH - 8])
        plain |= dict.fromkeys(hashes[DEPTH // 4 : DEPTH - 8], 1 << i % NUM_ENGINES)
        found.append(ids)
    return found, plain


def match_us(index, all_ids, plain):
    spent, walked = [], []
    for ids in all_ids:
        prompt = HASHER.prompt(ids)
        started = time.thread_time_ns()
        tiers = index.tiers(prompt, DEPTH)
        spent.append((time.thread_time_ns() - started) / 1e3)
        assert max(tiers).depth == DEPTH - 8
        started = time.thread_time_ns()
        hashes = prompt.hashes()
        bits = 2**NUM_ENGINES - 1
        for block in hashes:
            bits &= plain.get(block, 0)
            if not bits:
                break
        walked.append((time.thread_time_ns() - started) / 1e3)
    return quantiles("match", spent) | quantiles("walk", walked)


def quantiles(name, values):
    values = sorted(values)
    return {
        f"{name}_p50_us": round(values[len(values) // 2], 1),
        f"{name}_p99_us": round(values[int(len(values) * 0.99)], 1),
    }


def plain_bytes(num_blocks):
    """Resident memory of a dictionary with the same number of keys and one shared value."""
    before = rss_bytes()
    plain = {}
    for start in range(0, num_blocks, BATCH):
        plain.update(dict.fromkeys(array("Q", os.urandom(8 * min(BATCH, num_blocks - start))), 1))
    used = rss_bytes() - before
    assert len(plain) > num_blocks * 0.99
    return used


def churn(fleet, minutes, blocks_s, all_ids, plain):
    """Memory and match times every few minutes; memory without what stands beside the index."""
    beside = rss_bytes() - fleet.used_bytes
    seen = []
    for minute in range(1, minutes + 1):
        spent = -time.process_time()
        for number in range(blocks_s * 60 // BATCH):
            fleet.turn_over()
            if number * BATCH * 10 // blocks_s != (number + 1) * BATCH * 10 // blocks_s:
                fleet.index.sweep(0.0)  # the router's timer: ten times a second
        spent += time.process_time()
        if minute % 5 == 0 or minute in (1, minutes):
            mib = round((rss_bytes() - beside) / 2**20)
            share = {"minute": minute, "mib": mib, "cpu_share": round(spent / 60, 3)}
            seen.append(share | match_us(fleet.index, all_ids, plain))
            print(json.dumps(seen[-1]), flush=True)
    return seen


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--blocks", type=int, default=10_000_000)
    parser.add_argument("--minutes", type=int, default=30, help="of traffic, as fast as it goes")
    parser.add_argument("--blocks-s", type=int, default=40_000, help="stored by all engines")
    parser.add_argument("--host", action="store_true", help="hosts hold every block too")
    parser.add_argument("--plain", action="store_true", help="measure the plain dictionary instead")
    args = parser.parse_args()
    if args.plain:
        print(json.dumps({"plain_dict_mib": round(plain_bytes(args.blocks) / 2**20)}))
        return
    before = rss_bytes()
    index = PrefixIndex(max_bytes=4 * 2**30)
    for source in sources():
        index.begin(source)
        if args.host:
            index.begin(host_of(source))
    fleet = Fleet(index, has_hosts=args.host)
    fleet.fill(args.blocks)
    used = rss_bytes() - before - 8 * sum(len(batch) for held in fleet.held for batch in held)
    result = {
        "blocks": len(index),
        "mib": round(used / 2**20),
        "bytes_per_block": round(used / len(index), 1),
        "store_us_per_block": round(fleet.store_s / args.blocks / 1.125 * 1e6, 3),
    }
    all_ids, plain = prompts(index, has_hosts=args.host)
    result |= match_us(index, all_ids, plain)
    print(json.dumps(result), flush=True)
    fleet.used_bytes = used * len(index) // result["blocks"]
    churn(fleet, args.minutes, args.blocks_s, all_ids, plain)
    result = {}
    started = time.thread_time_ns()
    index.drop("e5")
    result["drop_us"] = round((time.thread_time_ns() - started) / 1e3, 1)
    sweeps, num_sweeps = 0.0, 0
    is_left = True
    while is_left:
        started = time.process_time()
        is_left = index.sweep(0.0)
        sweeps, num_sweeps = max(sweeps, time.process_time() - started), num_sweeps + 1
    result["longest_sweep_ms"] = round(sweeps * 1e3, 1)
    print(json.dumps(result))


if __name__ == "__main__":
    main()

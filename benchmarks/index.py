"""Memory and speed of the prefix index at millions of blocks on 64 engines, beside a plain dictionary of the same keys.

Prints resident memory per block, CPU per block stored and removed, CPU of a match of 128 blocks by jumps (p50, p99) beside
a walk over all depths, of dropping an engine, and memory after rounds of churn. CPU time, one process.
Run: python benchmarks/index.py [--blocks 10000000] [--rounds 5]
"""

import argparse
import gc
import json
import os
import random
import time
from array import array
from pathlib import Path

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


def fill(index, num_blocks):
    """Store blocks in batches, one in eight of them on a second engine too; CPU seconds."""
    spent, all_sources = 0.0, sources()
    for number, start in enumerate(range(0, num_blocks, BATCH)):
        blocks = array("Q", os.urandom(8 * min(BATCH, num_blocks - start))).tolist()
        source = all_sources[number % NUM_ENGINES]
        started = time.process_time()
        index.store(source, blocks)
        spent += time.process_time() - started
        if number % 8 == 0:
            index.store(all_sources[(number + 1) % NUM_ENGINES], blocks)
    return spent


def prompts(index):
    """Prompts whose first quarter all engines hold, and one engine nearly all the rest."""
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
        index.store(sources()[i % NUM_ENGINES], hashes[: DEPTH - 8])
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


def churn(index, rounds, num_blocks):
    """Store and remove a tenth of the index again and again; memory after each round."""
    seen = []
    for _ in range(rounds):
        for source in sources():
            blocks = array("Q", os.urandom(8 * (num_blocks // 10 // NUM_ENGINES))).tolist()
            index.store(source, blocks)
            index.remove(source, blocks)
        seen.append(round(rss_bytes() / 2**20))
    return seen


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--blocks", type=int, default=10_000_000)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--plain", action="store_true", help="measure the plain dictionary instead")
    args = parser.parse_args()
    if args.plain:
        print(json.dumps({"plain_dict_mib": round(plain_bytes(args.blocks) / 2**20)}))
        return
    before = rss_bytes()
    index = PrefixIndex(max_bytes=4 * 2**30)
    for source in sources():
        index.begin(source)
    spent = fill(index, args.blocks)
    used = rss_bytes() - before
    result = {
        "blocks": len(index),
        "mib": round(used / 2**20),
        "bytes_per_block": round(used / len(index), 1),
        "store_us_per_block": round(spent / args.blocks * 1e6, 3),
    }
    result |= match_us(index, *prompts(index))
    result["mib_with_prompts"] = round(rss_bytes() / 2**20)
    result["churn_mib"] = churn(index, args.rounds, args.blocks)
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

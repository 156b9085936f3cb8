"""CPU of one whole decision beside 64 engines: pack tokens, hash, match, price, book, expect.

Every engine holds the first quarter of the prompt (a shared system prompt) and one holds nearly all of it; every round
takes another prompt, so nothing is cached between decisions. "explained" adds a decision's explanation, which is only made
on request. With --host the one engine holds it in its host's memory and the others hold half of it there. Best and median
of many, CPU time. Run: python benchmarks/decision.py [--engines N] [--host]
"""

import argparse
import json
import random
import statistics
import time
from array import array

from dynctl.core.deployment import EngineInfo, EngineState
from dynctl.core.kv import DEVICE, HOST
from dynctl.router.config import Settings
from dynctl.router.desk import load_policy
from dynctl.router.placement import Order, Placement
from dynctl.router.prefix_index import PrefixIndex, Source
from dynctl.router.prompt import Hashers, Prompt
from dynctl.router.worker_table import WorkerTable

BLOCK = 16
GOALS_US = {2048: 50, 8192: 130, 32768: 450}


def measure(num_tokens, num_engines, rounds, *, has_hosts):
    rng = random.Random(num_tokens)
    table, index, hashers = WorkerTable(Settings()), PrefixIndex(), Hashers("bench")
    for i in range(num_engines):
        name = f"e{i}"
        table.put(
            EngineInfo(
                *(name, f"{name}.1", EngineState.READY, "aggregated", "d", "sim", "m"),
                block_size_tokens=BLOCK,
                kv_capacity_tokens=10_000_000,
                max_num_seqs=256,
            )
        )
        index.begin(Source(name, f"{name}.1"))
        if has_hosts:
            index.begin(Source(name, f"{name}.1", 0, HOST))
    placement = Placement(table, index, load_policy("kv"), Settings(), rng)
    shared = [rng.randrange(150_000) for _ in range(num_tokens // 4)]
    prompts = []
    for i in range(rounds):
        ids = shared + [rng.randrange(150_000) for _ in range(num_tokens - len(shared))]
        hashes = hashers.of(BLOCK).prompt(ids).hashes()
        if i == 0:
            for e in range(num_engines):
                index.store(Source(f"e{e}", f"e{e}.1"), hashes[: len(shared) // BLOCK])
        holder = f"e{i % num_engines}"
        medium = HOST if has_hosts else DEVICE
        index.store(Source(holder, f"{holder}.1", 0, medium), hashes[:-8])
        for e in range(num_engines if has_hosts else 0):
            index.store(Source(f"e{e}", f"e{e}.1", 0, HOST), hashes[: len(hashes) // 2])
        prompts.append(array("I", ids))
    decide, decisions, explain, hits = [], [], [], 0
    for i, packed in enumerate(prompts):
        ids = packed.tolist()  # as it comes from a tokenizer: just made
        started = time.thread_time_ns()
        placed = placement.place(Order("r", Prompt.known(hashers, ids), None, 100), i * 0.01)
        decide.append((time.thread_time_ns() - started) / 1e3)
        hits += placed.overlap_tokens
        placed.main.prefill_ended(i * 0.01)
        placed.main.release()
        decisions += placed.decisions
    for decision in decisions:
        started = time.thread_time_ns()
        decision.to_json()
        explain.append((time.thread_time_ns() - started) / 1e3)
    return {
        "tokens": num_tokens,
        "engines": num_engines,
        "best_us": round(min(decide), 1),
        "median_us": round(statistics.median(decide), 1),
        "p99_us": round(sorted(decide)[int(len(decide) * 0.99)], 1),
        "goal_us": GOALS_US.get(num_tokens),
        "explained_median_us": round(statistics.median(explain), 1),
        "overlap_share": round(hits / num_tokens / rounds, 3),
    }


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--engines", type=int, default=64)
    parser.add_argument("--host", action="store_true", help="engines have a host tier")
    args = parser.parse_args()
    for num_tokens in GOALS_US:
        rounds = 400 if num_tokens < 10_000 else 120
        print(json.dumps(measure(num_tokens, args.engines, rounds, has_hosts=args.host)))


if __name__ == "__main__":
    main()

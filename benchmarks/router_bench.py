"""What a router costs and how well it places: dynctl, the rivals (`rivals.py`) and a bare pass-through in one run.

Engines, load generator and trace are the harness that measured the peers (`peers/`). Within a suite all take turns, round
by round, so that what else the machine does is shared; of CPU time the least of the rounds counts, of placement the mean
over seeds, of "heavy" the median over rounds; "heavy" is below a rival only where the median of the rounds' differences is
more than their spread (median absolute deviation). Hits and requests are clients'; what a router has engines compute unasked
takes their time, and is told as a share of what clients asked for. At the end every bound is printed with the best rival.

Suites: micro (CPU, memory), workers (two processes against one), paced (CPU of streams at an engine's pace), latency, rss
(150,000 words), trace, heavy, small (24 tenants with long system prompts; caches of a quarter of the working set).
Run: python benchmarks/router_bench.py [suite …] [--rounds 5] [--seeds 5] [--only "kv|vllm-router round_robin"]
"""

import argparse
import json
import os
import random
import statistics
import subprocess
import sys
import tempfile
import time
from contextlib import ExitStack, contextmanager
from functools import partial
from pathlib import Path

import rivals
from stand import NUM_ENGINES, PEERS, Contender, Stand, cpu_s, load, rss_mb, tree
from tokenizers import Tokenizer, models, pre_tokenizers

BARE = Contender("bare", "bare")
BARE_TWICE = Contender("bare, 2 processes", "bare", num_processes=2)
KV = Contender("dynctl kv", "dynctl", "kv")
RULE_OFF = Contender("dynctl rule off", "dynctl", "kv", ("--set", "short_request_chars=0"))
WORKERS = Contender("dynctl 2 workers", "dynctl", "kv", ("--workers", "2"))
RELAYED = Contender("dynctl relayed, TLS", "relayed", "kv")
OWN = (KV, RULE_OFF, Contender("dynctl round_robin", "dynctl", "round_robin"), WORKERS, RELAYED)

ROUND_ROBIN = tuple(Contender(f"{name} round_robin", name, "round_robin") for name in rivals.RIVALS)
EVENT_DRIVEN = (
    Contender("vllm-router kv_aware", "vllm-router", "kv_aware"),
    Contender("dynamo kv", "dynamo", "kv"),
)
CACHE_AWARE = tuple(
    Contender(f"{name} cache_aware", name, "cache_aware")
    for name in ("sglang", "smg", "vllm-router")
)
PLACING = (*CACHE_AWARE, *EVENT_DRIVEN)

SHAPES = {
    "trace": ((), 60),
    "heavy": (("--convs", 80, "--turns", 6, "--conv-rate", 16, "--think", 0.3), 150),
    "small": (("--convs", 180, "--think", 1.5, "--groups", 24, "--sys-words", 2048), 60),
}
"""By placing suite: the trace's parameters, and microseconds of prefill per uncached token."""

ONE_AND_TWO = ((KV, WORKERS), (BARE, BARE_TWICE))
MICRO = (("short", ()), ("stream", ("--chunks", 64)))
"""Test, more parameters."""

CONNECTIONS = 32

MIN_ROUNDS = 3
"""Fewer say nothing of their spread."""

CAPACITY = 2048
"""Blocks per engine, except in "small"."""


class Report:
    """Bounds and what was measured against them."""

    def __init__(self):
        self.rows = []

    def at_most(self, title, own, share, best):
        """`best`: name and value of the best rival; None where none was there."""
        if best is None:
            self.rows.append((title, own, "no rival ran", None, f"≤ {share} ×", None))
            return
        name, value = best
        self.rows.append((title, own, name, value, f"≤ {share} ×", own <= share * value))

    def below(self, title, own, rivals):
        """`own` and what each rival had, by round: below all of them, by more than the spread of the rounds' differences.

        Printed is the rival that is the nearest to not being beaten. Too few rounds have no spread, and no verdict.
        """
        found = []
        for name, theirs in rivals.items():
            rounds = [number for number in own if number in theirs]
            if len(rounds) >= MIN_ROUNDS:
                less, spread = middle_and_spread([theirs[at] - own[at] for at in rounds])
                value = statistics.median(theirs[at] for at in rounds)
                found.append((less - spread, less, spread, name, value))
        own_value = statistics.median(own.values())
        if not found:
            self.rows.append(
                (title, own_value, f"no rival had {MIN_ROUNDS} rounds", None, "", None)
            )
            return
        margin, less, spread, name, value = min(found)
        bound = f"less by {less:.1f}, spread {spread:.1f}"
        self.rows.append((title, own_value, name, value, bound, margin > 0.0))

    def fixed(self, title, own, bound, holds, rival=("", None)):
        self.rows.append((title, own, *rival, bound, holds))

    def show(self):
        print(f"\n{'':38}{'dynctl':>9}  {'best rival of this run':32}{'ratio':>6}  bound")
        for title, own, name, value, bound, holds in self.rows:
            shown = f"{name} {value:.4g}" if value is not None else name
            ratio = f"{own / value:.2f}" if value else ""
            verdict = {True: "holds", False: "MISSES", None: ""}[holds]
            print(f"{title:38}{own:9.4g}  {shown:32}{ratio:>6}  {bound} {verdict}")


def middle_and_spread(values):
    """Median and median absolute deviation."""
    middle = statistics.median(values)
    return middle, statistics.median(abs(value - middle) for value in values)


def best_of(figures, contenders, better=min):
    """Name and value of the best of some contenders; None when none of them was measured."""
    found = [(figures[one.name], one.name) for one in contenders if one.name in figures]
    if not found:
        return None
    value, name = better(found)
    return name, value


def start_all(stack, stand, contenders):
    """Start all; one that does not come up is named and left out."""
    found = {}
    for contender in contenders:
        try:
            found[contender] = stack.enter_context(stand.router(contender))
        except OSError as error:
            print(f"{contender.name}: left out, it does not serve: {error}")
    return found


def micro(stand_of, contenders, options, report):
    """CPU per request, and memory."""
    stand = stand_of("zero")
    with stand.engines(), ExitStack() as stack:
        routers = start_all(stack, stand, contenders((BARE, *OWN, *ROUND_ROBIN, *PLACING)))
        rss = {one.name: rss_mb(*up.pids) for one, up in routers.items()}
        figures, rates = {}, {}
        for test, extra in MICRO:
            for _ in range(options.rounds):
                for one, up in routers.items():
                    used_ms, rate = asked(one, up, test, CONNECTIONS, options.seconds, extra)
                    figures.setdefault((test, one.name), []).append(used_ms)
                    rates.setdefault((test, one.name), []).append(rate)
        print("\nCPU ms per request, least (median) of rounds; memory of the tree at rest, MB\n")
        print(f"{'':26}{'short':>18}{'64-chunk stream':>20}{'RSS':>8}{'after':>7}{'short/s':>9}")
        for one, up in routers.items():
            row = f"{one.name:26}"
            for test in ("short", "stream"):
                values = figures[test, one.name]
                row += f"{min(values):11.4f} ({statistics.median(values):.3f})"
            rate = statistics.median(rates["short", one.name])
            print(f"{row}{rss[one.name]:10.1f}{rss_mb(*up.pids):7.1f}{rate:9.0f}")
        print(
            f"\n{os.cpu_count()} cores are shared by clients, engines and router. What several processes bring in throughput"
            "\nshows in the last column only where there are more cores than those three keep busy."
        )
    least = {test: {} for test, _ in MICRO}
    for (test, name), values in figures.items():
        least[test][name] = min(values)
    report_micro(report, least, rss)


def report_micro(report, least, rss):
    short, stream = least["short"], least["stream"]
    everyone = (*ROUND_ROBIN, *PLACING)
    if KV.name in short:
        best = best_of(short, ROUND_ROBIN)
        report.at_most("CPU ms / short, defaults", short[KV.name], 0.8, best)
        report.at_most("CPU ms / 64-chunk stream", stream[KV.name], 0.6, best_of(stream, everyone))
        own, best = rss[KV.name], best_of(rss, everyone)
        report.fixed("RSS at rest, MB", own, "≤ 60 MB", own <= 60, best or ("", None))
    if RULE_OFF.name in short:
        best = best_of(short, EVENT_DRIVEN)
        report.at_most("CPU ms / short, rule off", short[RULE_OFF.name], 0.8, best)
    if RELAYED.name in short:
        own = short[RELAYED.name]
        report.fixed("relay and router, CPU ms / short", own, "≤ 0.15", own <= 0.15)
        own = stream[RELAYED.name]
        report.fixed("relay and router, CPU ms / stream", own, "≤ 0.6", own <= 0.6)


def asked(one, up, test, connections, seconds, extra=()):
    """CPU milliseconds per request of one turn, and requests per second."""
    before_s = cpu_s(*up.pids)
    result = load(
        *(test, "--port", up.port, "--concurrency", connections),
        *("--ignore-eos", "--seconds", seconds, "--warmup", 0.2, *extra),
    )
    used_ms = (cpu_s(*up.pids) - before_s) * 1e3
    if result["errors"]:
        print(f"{one.name}: {result['errors']} errors in {test}")
    return used_ms / max(1, result["total"]), result["rps"]


def workers(stand_of, contenders, options, report):
    """CPU per short request of two processes against one, turn beside turn: a ratio of each round, their median and spread.

    On few cores one process has a core for itself, and two share theirs with engines and clients, whose code and data push
    theirs out of the caches. So one process is also measured with all that it serves on one core ("on one core"): what two on
    two cores take more than that is what being two costs. What processes cost that do next to nothing ("bare") is the machine's.
    """
    stand = stand_of("zero")
    chosen = contenders([one for pair in ONE_AND_TWO for one in pair])
    ratios = {}
    with stand.engines() as engines, ExitStack() as stack:
        routers = {one.name: (one, up) for one, up in start_all(stack, stand, chosen).items()}
        pairs = [pair for pair in ONE_AND_TWO if all(one.name in routers for one in pair)]
        for _ in range(4 * options.rounds):
            for one, two in pairs:
                ask = partial(asked, test="short", seconds=options.seconds)
                alone, _ = ask(*routers[one.name], connections=CONNECTIONS)
                with on_one_core(engines, *routers[one.name][1].pids):
                    shared, _ = ask(*routers[one.name], connections=CONNECTIONS)
                used, _ = ask(*routers[two.name], connections=CONNECTIONS)
                twice, _ = ask(*routers[two.name], connections=2 * CONNECTIONS)
                for title, ratio in (
                    ("same connections", used / alone),
                    ("as many each", twice / alone),
                    ("as many each, one on one core", twice / shared),
                ):
                    ratios.setdefault((title, two.name), []).append(ratio)
    print("\nCPU per short request, two processes against one: median of rounds, spread\n")
    for (title, name), values in ratios.items():
        middle, spread = middle_and_spread(values)
        print(f"{name:26}{title:32}{middle:7.3f} ± {spread:.3f}")
        if name == WORKERS.name:
            bare = ratios.get((title, BARE_TWICE.name))
            machine = ("bare", statistics.median(bare)) if bare else ("", None)
            row = f"2 workers / 1, {title}"
            report.fixed(row, middle, "≤ 1.1", middle <= 1.1, machine)


@contextmanager
def on_one_core(*pids):
    """Keep process trees, and what is started meanwhile, on the first of this process's cores."""
    cores = os.sched_getaffinity(0)
    everybody = [os.getpid(), *(one for pid in pids for one in tree(pid))]
    threads = [int(one.name) for pid in everybody for one in Path(f"/proc/{pid}/task").iterdir()]

    def keep_on(allowed):
        for thread in threads:
            os.sched_setaffinity(thread, allowed)

    keep_on({min(cores)})
    try:
        yield
    finally:
        keep_on(cores)


def paced(stand_of, contenders, options, report):
    """CPU per stream whose tokens come one by one, as engines generate them: nothing comes together."""
    stand = stand_of("sim", ("--itl-ms", 8, "--base-ms", 1, "--prefill-us", 1))
    used_ms = {}
    with stand.engines(), ExitStack() as stack:
        routers = start_all(stack, stand, contenders((BARE, KV, *ROUND_ROBIN)))
        for _ in range(options.rounds):
            for one, up in routers.items():
                before_s = cpu_s(*up.pids)
                result = load(
                    *("stream", "--port", up.port, "--concurrency", 192, "--chunks", 64),
                    *("--ignore-eos", "--seconds", 2 * options.seconds, "--warmup", 0.2),
                )
                if result["errors"]:
                    print(f"{one.name}: {result['errors']} errors")
                used = (cpu_s(*up.pids) - before_s) * 1e3 / max(1, result["total"])
                used_ms.setdefault(one.name, []).append(used)
    print(
        "\nCPU ms per stream of 64 tokens, 8 ms between them, 192 at once: least (median) of rounds\n"
    )
    for name, values in used_ms.items():
        print(f"{name:26}{min(values):11.3f} ({statistics.median(values):.2f})")
    least = {name: min(values) for name, values in used_ms.items()}
    best = best_of(least, ROUND_ROBIN)
    if KV.name in least and best:
        report.fixed("CPU ms / 64 tokens at 8 ms", least[KV.name], "", None, best)


def latency(stand_of, contenders, options, report):
    """Latency added at a low rate, one request at a time."""
    stand = stand_of("zero")
    with stand.engines(), ExitStack() as stack:
        routers = start_all(stack, stand, contenders((BARE, *OWN, *ROUND_ROBIN, *PLACING)))
        ports = [stand.engine_ports[0], *(up.port for up in routers.values())]
        result = load(
            *("pair", "--port", ports[0], "--ports", ",".join(map(str, ports)), "--rate", 120),
            *("--seconds", options.latency_seconds, "--chunks", 16, "--ignore-eos"),
        )
    added = {"short": {}, "stream_ttft": {}}
    print("\nms added over direct, p10 / p50\n")
    for one, up in routers.items():
        row = f"{one.name:26}"
        for test, title in (("short", "short"), ("stream_ttft", "first token")):
            figures = result[str(up.port)]
            added[test][one.name] = figures[f"{test}_added_p50_ms"]
            row += (
                f"{title:>14} {figures[f'{test}_added_p10_ms']:5.2f} / {added[test][one.name]:.2f}"
            )
        print(row)
    for test, title in (("short", "short"), ("stream_ttft", "first token")):
        if KV.name in added[test]:
            best = best_of(added[test], (*ROUND_ROBIN, *PLACING))
            report.at_most(f"added ms p50, {title}", added[test][KV.name], 0.8, best)


def big_vocabulary(stand_of, contenders, options, report):
    """Memory at rest with a vocabulary of 150,000 words."""
    del contenders, options
    draw = random.Random(1)
    letters = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocabulary, merges = {letter: at for at, letter in enumerate(letters)}, []
    usual = [letter for letter in letters if letter.isascii() and letter.isalpha()]
    pool = list(usual)
    while len(vocabulary) < 150_000:
        left = draw.choice(pool)
        word = left + draw.choice(usual)
        if len(word) < 12 and word not in vocabulary:
            vocabulary[word] = len(vocabulary)
            merges.append((left, word[len(left) :]))
            pool.append(word)
    big = Tokenizer(models.BPE(vocabulary, merges))
    big.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    stand = stand_of("zero")
    saved = Path(stand.model, "tokenizer.json")
    before = saved.read_bytes()
    with stand.engines():
        big.save(str(saved))
        try:
            with stand.router(KV) as up:
                own = rss_mb(*up.pids)
        finally:
            saved.write_bytes(before)
    report.fixed("RSS at rest, MB, 150,000 words", own, "", None)


def bound_of(seed, shape):
    """One cache without limit, for the trace of a seed: its hit rate and the blocks it ends with."""
    sys.path.insert(0, str(PEERS))
    import loadgen  # noqa: PLC0415 - on the path only now
    import simcore  # noqa: PLC0415

    args = loadgen.parser().parse_args(
        ["trace", "--port", "1", "--seed", str(seed), *map(str, shape)]
    )
    seen, num_tokens, num_cached = set(), 0, 0
    talks = [([{"role": "system", "content": s}], t) for _, s, t in loadgen.make_trace(args)]
    for turn in range(args.turns):
        for messages, turns in talks:
            messages.append({"role": "user", "content": turns[turn][0]})
            tokens = simcore.tokenize(simcore.render_chat(messages))
            hashes, depth = simcore.chain_hashes(tokens, 16), 0
            while depth < (len(tokens) - 1) // 16 and hashes[depth] in seen:
                depth += 1
            num_tokens, num_cached = num_tokens + len(tokens), num_cached + depth * 16
            out = simcore.out_tokens(tokens, args.out_tokens)
            seen.update(simcore.chain_hashes(tokens + out[:-1], 16))
            words = " ".join(simcore.tok_text(token) for token in out)
            messages.append({"role": "assistant", "content": words})
    return num_cached / num_tokens, len(seen)


def placing(suite):
    """A suite of one trace."""

    def run(stand_of, contenders, options, report):
        shape, prefill_us = SHAPES[suite]
        first = 3 if suite == "heavy" else 1
        seeds = range(first, first + options.seeds)
        bounds = {seed: bound_of(seed, shape) for seed in seeds}
        blocks = CAPACITY if suite != "small" else bounds[first][1] // 4 // NUM_ENGINES
        flags = ("--prefill-us", prefill_us, "--itl-ms", 8, "--capacity", blocks)
        stand = stand_of("sim", flags)
        chosen = contenders((KV, *PLACING, *((WORKERS,) if suite == "trace" else ())))
        rows = {}
        with stand.engines():
            for seed in seeds:
                for one in chosen:
                    # Started anew each time: no router profits from what it saw in another's turn.
                    try:
                        with stand.router(one) as up:
                            row = one_trace(up, seed, shape)
                    except OSError as error:
                        print(f"{suite} {seed} {one.name}: left out: {error}")
                        continue
                    rows.setdefault(one.name, []).append({"round": seed} | row)
                    print(suite, seed, one.name, row, flush=True)
        bound = statistics.mean(found[0] for found in bounds.values())
        report_placing(report, suite, rows, bound)

    return run


def one_trace(up, seed, shape):
    up.stats("?reset=1&clear=1")
    time.sleep(1.0)
    up.stats("?reset=1")
    before_s = cpu_s(*up.pids)
    result = load("trace", "--port", up.port, "--seed", seed, *shape)
    stats = up.stats()
    requests = [one["requests"] for one in stats]
    cached, asked = (sum(one[f"{kind}_tokens"] for one in stats) for kind in ("cached", "prompt"))
    row = {
        "hit": cached / asked,
        "max/mean": max(requests) / (sum(requests) / len(requests)),
        "ttft_ms": result["ttft_mean_ms"],
        "p99_ms": result["ttft_p99_ms"],
        "cpu_ms": (cpu_s(*up.pids) - before_s) / result["n"] * 1e3,
        "unasked": sum(one.get("unasked_tokens", 0) for one in stats) / asked,
        "errors": result["errors"],
    }
    return {name: round(value, 4) for name, value in row.items()}


def report_placing(report, suite, rows, bound):
    middle = statistics.median if suite == "heavy" else statistics.mean
    figures = {
        key: {name: middle(row[key] for row in found) for name, found in rows.items()}
        for key in ("hit", "max/mean", "ttft_ms", "p99_ms", "cpu_ms", "unasked")
    }
    print(f"\n{suite}: {middle.__name__} over seeds; one unlimited cache would hit {bound:.4f}\n")
    print(
        f"{'':26}{'hit rate':>9}{'max/mean':>10}{'TTFT ms':>9}{'p99':>8}{'CPU ms':>8}{'unasked':>9}  spread: TTFT / p99"
    )
    for name, found in rows.items():
        hit, share, ttft, p99, cpu, unasked = (figures[key][name] for key in figures)
        spreads = [
            middle_and_spread([row[key] for row in found])[1] for key in ("ttft_ms", "p99_ms")
        ]
        shown = " / ".join(f"{spread:.1f}" for spread in spreads)
        print(
            f"{name:26}{hit:9.4f}{share:10.2f}{ttft:9.1f}{p99:8.0f}{cpu:8.2f}{unasked:9.4f}  ± {shown}"
        )
    if KV.name not in rows:
        return
    hit, share, ttft = (figures[key][KV.name] for key in ("hit", "max/mean", "ttft_ms"))
    best_hit = best_of(figures["hit"], PLACING, max) or ("", None)
    best_ttft = best_of(figures["ttft_ms"], PLACING)
    if suite == "trace":
        report.fixed(
            "trace: hit rate", hit, f"≥ {bound - 0.005:.4f}", hit >= bound - 0.005, best_hit
        )
        best = best_of(figures["max/mean"], PLACING) or ("", None)
        report.fixed("trace: max/mean load", share, "≤ 1.25", share <= 1.25, best)
        if WORKERS.name in rows:
            two = figures["hit"][WORKERS.name]
            report.fixed("trace: hit rate, 2 workers", two, "as 1", abs(two - hit) <= 0.005)
            two = figures["max/mean"][WORKERS.name]
            report.fixed("trace: max/mean, 2 workers", two, "≤ 1.25", two <= 1.25)
    elif suite == "heavy":
        for title, key in (("mean", "ttft_ms"), ("p99", "p99_ms")):
            by_round = {
                name: {row["round"]: row[key] for row in found} for name, found in rows.items()
            }
            rivals_of = {one.name: by_round[one.name] for one in PLACING if one.name in by_round}
            report.below(f"heavy: TTFT {title}, ms", by_round[KV.name], rivals_of)
    else:
        if best_hit[1] is not None:
            bound = best_hit[1] + 0.03
            report.fixed("small: hit rate", hit, f"≥ {bound:.4f}", hit >= bound, best_hit)
        report.at_most("small: TTFT mean, ms", ttft, 0.9, best_ttft)


SUITES = {
    "micro": micro,
    "workers": workers,
    "paced": paced,
    "latency": latency,
    "rss": big_vocabulary,
}
SUITES |= {name: placing(name) for name in SHAPES}


def main():
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("suites", nargs="*", default=list(SUITES))
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--seconds", type=float, default=1.5)
    parser.add_argument("--latency-seconds", type=float, default=60.0)
    parser.add_argument("--seeds", type=int, default=5)
    parser.add_argument("--only", help="names of routers with | between them, instead of all")
    parser.add_argument("--flag", action="append", default=[], help="one more of `dynctl route`")
    cache = Path(os.environ.get("XDG_CACHE_HOME", Path.home() / ".cache"))
    parser.add_argument(
        "--rivals", default=cache / "dynctl/peers", help="where rivals are installed"
    )
    options = parser.parse_args()
    wanted = options.only.split("|") if options.only else None
    present = {"dynctl", "relayed", "bare", *rivals.install(options.rivals)}

    def contenders(those):
        chosen = [
            one for one in those if one.kind in present and (not wanted or one.name in wanted)
        ]
        return [
            Contender(one.name, one.kind, one.policy, (*one.flags, *options.flag))
            if one.kind == "dynctl"
            else one
            for one in chosen
        ]

    report = Report()
    with tempfile.TemporaryDirectory(prefix="router-bench") as folder:
        make_model = [sys.executable, "make_model.py", f"{folder}/model"]
        subprocess.run(make_model, cwd=PEERS, check=True, stdout=subprocess.DEVNULL)
        for suite in options.suites:
            SUITES[suite](
                lambda mode, flags=(): Stand(folder, options.rivals, mode, flags),
                contenders,
                options,
                report,
            )
        print(f"\nload average now: {json.dumps(os.getloadavg())}")
    report.show()


if __name__ == "__main__":
    main()

"""What the router costs: CPU, added latency, memory, and how well it places, beside a bare pass-through in the same run.

Engines, load generator and trace are the harness that measured the peers (`peers/`). Only the router's process tree counts
for CPU, read from /proc, so work of others on the machine does little harm; rounds are interleaved and the least of each
is kept. Peers' figures are those of their quiet run on another day, and marked so; they are not run here.

Run: python benchmarks/router_bench.py [micro] [latency] [rss] [trace] [heavy] [--rounds 5] [--seconds 1.5]
"""

import argparse
import asyncio
import json
import os
import random
import re
import signal
import socket
import statistics
import subprocess
import sys
import tempfile
import time
import urllib.request
from contextlib import ExitStack, contextmanager
from pathlib import Path

import httptools
import uvloop
from tokenizers import Tokenizer, models, pre_tokenizers

HERE = Path(__file__).parent
PEERS = HERE / "peers"
NUM_ENGINES = 4
CLOCK_HZ = os.sysconf("SC_CLK_TCK")
BEST_PEERS = {
    "CPU ms / short, round robin": ("vllm-router", 0.077),
    "CPU ms / short, cache-aware": ("sglang", 0.121),
    "CPU ms / short, event-driven": ("vllm-router kv_aware", 0.282),
    "CPU ms / 64-chunk stream": ("sglang", 0.542),
    "added ms p50, short": ("vllm-router", 0.63),
    "added ms p50, first token": ("vllm-router", 0.73),
    "RSS MB": ("smg", 61.0),
}
"""Of the quiet run on a machine of this kind; another run of another day, so ratios to them are rough."""


# The bare pass-through: uvloop and httptools with nothing else, engines in turn


class Front(asyncio.Protocol):
    """A client's connection: whole requests go to the next engine."""

    def __init__(self, pools):
        self.pools, self.parts = pools, []
        self.parser = httptools.HttpRequestParser(self)

    def connection_made(self, transport):
        self.transport = transport

    def data_received(self, data):
        self.parts.append(data)
        self.parser.feed_data(data)

    def on_message_complete(self):
        wire, self.parts = b"".join(self.parts), []
        port, free = self.pools[0]
        self.pools.append(self.pools.pop(0))
        if free:
            free.pop().carry(self, wire)
        else:
            self.task = asyncio.ensure_future(self.connect(port, free, wire))

    async def connect(self, port, free, wire):
        loop = asyncio.get_running_loop()
        _, back = await loop.create_connection(lambda: Back(free), "127.0.0.1", port)
        back.carry(self, wire)


class Back(asyncio.Protocol):
    """A connection to an engine: bytes go to the client as they come."""

    def __init__(self, free):
        self.free, self.parser = free, httptools.HttpResponseParser(self)

    def connection_made(self, transport):
        self.transport = transport

    def carry(self, front, wire):
        self.front = front
        self.transport.write(wire)

    def data_received(self, data):
        if not self.front.transport.is_closing():
            self.front.transport.write(data)
        self.parser.feed_data(data)

    def on_message_complete(self):
        self.free.append(self)


async def bare(port, engine_ports):
    pools = [(engine, []) for engine in engine_ports]
    server = await asyncio.get_running_loop().create_server(lambda: Front(pools), "127.0.0.1", port)
    await server.serve_forever()


# Processes


def free_ports(number):
    sockets = [socket.socket() for _ in range(number)]
    try:
        for one in sockets:
            one.bind(("127.0.0.1", 0))
        return [one.getsockname()[1] for one in sockets]
    finally:
        for one in sockets:
            one.close()


def free_run(number):
    """The first of some ports in a row."""
    while True:
        first = free_ports(1)[0]
        try:
            for port in range(first, first + number):
                with socket.socket() as one:
                    one.bind(("127.0.0.1", port))
        except OSError:
            continue
        return first


@contextmanager
def running(command, log):
    with Path(log).open("ab") as out:
        process = subprocess.Popen(
            [str(part) for part in command], stdout=out, stderr=subprocess.STDOUT, cwd=PEERS
        )
    try:
        yield process.pid
    finally:
        process.send_signal(signal.SIGTERM)
        try:
            process.wait(5)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()


def tree(pid):
    found, todo = [], [pid]
    while todo:
        found.append(todo.pop())
        try:
            for task in Path(f"/proc/{found[-1]}/task").iterdir():
                todo += map(int, (task / "children").read_text().split())
        except OSError:
            continue
    return found


def cpu_s(pid):
    """User and system time of a process tree."""
    ticks = 0
    for one in tree(pid):
        fields = Path(f"/proc/{one}/stat").read_text().rsplit(")", 1)[1].split()
        ticks += int(fields[11]) + int(fields[12])
    return ticks / CLOCK_HZ


def rss_mb(pid):
    total = 0
    for one in tree(pid):
        status = Path(f"/proc/{one}/status").read_text()
        total += int(re.search(r"VmRSS:\s+(\d+)", status)[1])
    return total / 1024


def load(*args):
    done = subprocess.run(
        [sys.executable, "loadgen.py", *map(str, args)],
        cwd=PEERS,
        capture_output=True,
        timeout=400,
        check=True,
    )
    return json.loads(done.stdout)


def get(port, path):
    with urllib.request.urlopen(f"http://127.0.0.1:{port}{path}", timeout=5) as answer:
        return answer.read()


def wait_up(port):
    body = json.dumps(
        {"model": "mock", "max_tokens": 1, "messages": [{"role": "user", "content": "w1"}]}
    ).encode()
    request = urllib.request.Request(
        f"http://127.0.0.1:{port}/v1/chat/completions", body, {"content-type": "application/json"}
    )
    until_s = time.monotonic() + 30
    while True:
        try:
            with urllib.request.urlopen(request, timeout=5) as answer:
                if answer.status == 200:
                    return
        except OSError:
            if time.monotonic() > until_s:
                raise
        time.sleep(0.2)


class Stand:
    """Engines of one mode, and the routers before them."""

    def __init__(self, folder, mode, extra=()):
        self.folder, self.mode, self.extra = folder, mode, extra
        self.engine_port, self.kv_port = free_run(NUM_ENGINES), free_run(NUM_ENGINES)
        self.log = f"{folder}/log"

    @contextmanager
    def engines(self):
        command = [sys.executable, "mock_engine.py", "--port", self.engine_port]
        command += ["--workers", NUM_ENGINES, "--mode", self.mode, "--kv-port", self.kv_port]
        command += ["--model-path", f"{self.folder}/model", "--capacity", 2048, *self.extra]
        with running(command, self.log) as pid:
            wait_up(self.engine_port)
            yield pid

    @contextmanager
    def router(self, kind, policy="kv", flags=()):
        """A router of some kind: its port and pid."""
        [port] = free_ports(1)
        if kind == "bare":
            ports = ",".join(str(self.engine_port + i) for i in range(NUM_ENGINES))
            command = [sys.executable, __file__, "--bare", f"{port}:{ports}"]
        else:
            command = [sys.executable, "-m", "dynctl", "route", "--listen", f"127.0.0.1:{port}"]
            for i in range(NUM_ENGINES):
                events = f",kv-events=tcp://127.0.0.1:{self.kv_port + i}"
                command += ["--engine", f"http://127.0.0.1:{self.engine_port + i}{events}"]
            command += ["--policy", policy, "--tokenizer", f"{self.folder}/model", *flags]
        with running(command, self.log) as pid:
            try:
                wait_up(port)
            except OSError:
                print(Path(self.log).read_text()[-2000:])
                raise
            time.sleep(1.0)
            yield port, pid

    def stats(self, query=""):
        return [json.loads(get(self.engine_port + i, f"/stats{query}")) for i in range(NUM_ENGINES)]


KINDS = {
    "bare": ("bare", "", ()),
    "round robin": ("dynctl", "round_robin", ()),
    "kv": ("dynctl", "kv", ()),
    "kv, 2 workers": ("dynctl", "kv", ("--workers", "2")),
    "kv, every one tokenised": ("dynctl", "kv", ("--set", "short_request_chars=0")),
}


def micro(folder, options):
    """CPU per request and memory; a table of ms."""
    stand = Stand(folder, "zero")
    with stand.engines(), _all(stand, options.kinds) as routers:
        rss = {name: rss_mb(pid) for name, (_, pid) in routers.items()}
        figures = {}
        for test, extra in (("short", ()), ("stream", ("--chunks", 64))):
            for _ in range(options.rounds):
                for name, (port, pid) in routers.items():
                    before_s = cpu_s(pid)
                    result = load(
                        test,
                        *("--port", port, "--seconds", options.seconds, "--warmup", 0.2),
                        *("--concurrency", 32, "--ignore-eos", *extra),
                    )
                    if result["errors"]:
                        print(f"{name}: {result['errors']} errors")
                    used_s = cpu_s(pid) - before_s
                    figures.setdefault((name, test), []).append(
                        used_s / max(1, result["total"]) * 1e3
                    )
        print_micro(figures, rss, {name: rss_mb(pid) for name, (_, pid) in routers.items()})


@contextmanager
def _all(stand, names):
    with ExitStack() as stack:
        yield {
            name: stack.enter_context(stand.router(*KINDS[name][:2], flags=KINDS[name][2]))
            for name in names
        }


def print_micro(figures, rss_start, rss_end):
    names = list(rss_start)
    base = {test: min(figures.get(("bare", test), [float("nan")])) for test in ("short", "stream")}
    print("\nCPU ms per request, least (median) of rounds; × bare\n")
    print(f"{'':26}{'short':>16}{'× bare':>8}{'stream':>16}{'× bare':>8}{'RSS MB':>8}{'after':>7}")
    for name in names:
        row = f"{name:26}"
        for test in ("short", "stream"):
            values = figures[(name, test)]
            row += f"{min(values):9.4f} ({statistics.median(values):.3f}){min(values) / base[test]:7.2f}"
        print(f"{row}{rss_start[name]:8.1f}{rss_end[name]:7.1f}")
    rows = (
        ("CPU ms / short, round robin", "kv", "short", 0.8),
        ("CPU ms / short, event-driven", "kv, every one tokenised", "short", 0.8),
        ("CPU ms / 64-chunk stream", "kv", "stream", 0.6),
    )
    print("\nagainst the peers' quiet run (another day: rough)\n")
    for title, name, test, share in rows:
        peer, value = BEST_PEERS[title]
        if (name, test) in figures:
            ours = min(figures[(name, test)])
            verdict = "holds" if ours <= share * value else "misses"
            print(
                f"{title:32}{ours:8.4f}  {peer} {value:.3f}, ratio {ours / value:.2f}, bound {share}: {verdict}"
            )


def rss(folder, options):
    """Memory at rest with the harness's vocabulary, and with one of 150,000 words."""
    del options

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
    model = Path(folder) / "model"
    stand = Stand(folder, "zero")
    with stand.engines():
        for name in ("harness's model", "150,000 words"):
            with stand.router("dynctl") as (_, pid):
                print(f"RSS at rest, whole tree, {name}: {rss_mb(pid):.1f} MB")
            big.save(str(model / "tokenizer.json"))
    print(f"peers' best, quiet run: {BEST_PEERS['RSS MB'][1]} MB ({BEST_PEERS['RSS MB'][0]})")


def latency(folder, options):
    """Added latency at a low rate, requests in turn."""
    stand = Stand(folder, "zero")
    with stand.engines(), _all(stand, options.kinds) as routers:
        ports = [stand.engine_port, *(port for port, _ in routers.values())]
        result = load(
            "pair",
            *("--port", ports[0], "--ports", ",".join(map(str, ports)), "--rate", 120),
            *("--seconds", options.seconds * options.rounds * 2, "--chunks", 16, "--ignore-eos"),
        )
        print("\nms added over direct, p10 / p50\n")
        for name, (port, _) in routers.items():
            one = result[str(port)]
            print(
                f"{name:26} short {one['short_added_p10_ms']:.2f} / {one['short_added_p50_ms']:.2f}"
                f"   first token {one['stream_ttft_added_p10_ms']:.2f} / {one['stream_ttft_added_p50_ms']:.2f}"
            )
        for title in ("added ms p50, short", "added ms p50, first token"):
            print(
                f"peers' best, quiet run: {title} {BEST_PEERS[title][1]} ({BEST_PEERS[title][0]})"
            )


def bound_of(seed, shape):
    """The hit rate of one cache without limit, for the trace of a seed."""
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
    return num_cached / num_tokens


def trace(folder, options, kind="trace"):
    """Hit rate and balance of the shared-prefix trace over seeds."""
    if kind == "heavy":
        engines = ("--prefill-us", 150, "--itl-ms", 8)
        shape = ("--convs", 80, "--turns", 6, "--conv-rate", 16, "--think", 0.3)
    else:
        engines, shape = ("--prefill-us", 60, "--itl-ms", 8), ()
    stand = Stand(folder, "sim", engines)
    flags = tuple(options.flag or ())
    first = 3 if kind == "heavy" else 1
    rows = []
    with stand.engines(), stand.router("dynctl", options.policy, flags) as (port, pid):
        for seed in range(first, first + options.seeds):
            stand.stats("?reset=1&clear=1")
            time.sleep(1.0)
            stand.stats("?reset=1")
            before_s = cpu_s(pid)
            result = load("trace", "--port", port, "--seconds", 1, "--seed", seed, *shape)
            stats = stand.stats()
            requests = [one["requests"] for one in stats]
            row = {
                "bound": bound_of(seed, shape),
                "hit": sum(one["cached_tokens"] for one in stats)
                / sum(one["prompt_tokens"] for one in stats),
                "max/mean": max(requests) / (sum(requests) / len(requests)),
                "cpu_ms": (cpu_s(pid) - before_s) / result["n"] * 1e3,
                "ttft_ms": result["ttft_mean_ms"],
                "p99_ms": result["ttft_p99_ms"],
                "errors": result["errors"],
            }
            rows.append(row)
            print(kind, seed, {name: round(value, 4) for name, value in row.items()}, requests)
    mean = {name: round(statistics.mean(row[name] for row in rows), 4) for name in rows[0]}
    print(f"{kind} mean of {len(rows)} seeds: {mean}")


def main():
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("suites", nargs="*", default=["micro", "latency", "rss", "trace"])
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--seconds", type=float, default=1.5)
    parser.add_argument("--seeds", type=int, default=5)
    parser.add_argument("--policy", default="kv")
    parser.add_argument("--flag", action="append", help="a further flag of `dynctl route`")
    parser.add_argument("--kinds", default="|".join(KINDS), help="names with | between them")
    parser.add_argument("--bare", help=argparse.SUPPRESS)
    options = parser.parse_args()
    options.kinds = options.kinds.split("|")
    if options.bare:
        port, _, engines = options.bare.partition(":")
        uvloop.run(bare(int(port), list(map(int, engines.split(",")))))
        return
    with tempfile.TemporaryDirectory(prefix="router-bench") as folder:
        subprocess.run(
            [sys.executable, "make_model.py", f"{folder}/model"],
            cwd=PEERS,
            check=True,
            stdout=subprocess.DEVNULL,
        )
        for suite in options.suites:
            {"micro": micro, "latency": latency, "trace": trace, "rss": rss}.get(
                suite, lambda *args: trace(*args, kind="heavy")
            )(folder, options)


if __name__ == "__main__":
    main()

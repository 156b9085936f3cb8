"""What a storm of KV events adds to the latency of requests: p99 of short and of matched requests, with and without it.

Four engines without service time, each with a publisher of KV events (or several, `--ranks`); they offer so many blocks a second,
prompts of 64 blocks stored and as many evicted, in vLLM's format. Short requests are placed by load; matched ones are 1,024
token ids that the index knows of one engine. Each is sent straight to an engine and through the router, in turn, and what the
second took more is added. Rounds without and with the storm take turns; after each storm the router works off what has come.
All share this machine's cores: on two, engines and client take time of the router's too, publishers only what is left over.
With `--own-core` the router has one to itself.
Bound: a storm adds at most 5 ms to the p99.
Run: python benchmarks/storm.py [--blocks 1000000] [--ranks 1] [--own-core] [--seconds 4] [--rounds 3]
"""

import argparse
import asyncio
import json
import os
import random
import subprocess
import sys
import tempfile
import time
from contextlib import contextmanager
from pathlib import Path

import msgspec
import uvloop
import zmq
from stand import NUM_ENGINES, PEERS, Stand, cpu_s, free_ports, free_run, get, running, wait_up

from dynctl.core.kv import BlockRemoved, BlockStored
from dynctl.http1.upstream import Address, Upstream
from dynctl.kv.events import EventBatch, encode

BLOCK_SIZE, PROMPT_BLOCKS = 16, 64
NUM_PROMPTS = 1600
"""Of all publishers: each stores its share in a circle, and lets go of the one that was half a circle before."""
BOUND_MS = 5.0
TICK_S = 0.005
PAUSE_S = 0.004
TIMEOUT_S = 30.0
KINDS = ("short", "matched")


def life_of(draw, num_prompts, rank):
    """Messages of one circle: the first time, when nothing is there to evict, and any other."""
    prompts = []
    for _ in range(num_prompts):
        handles = tuple(draw.getrandbits(63) for _ in range(PROMPT_BLOCKS))
        tokens = tuple(draw.randrange(8192) for _ in range(PROMPT_BLOCKS * BLOCK_SIZE))
        prompts.append((handles, tokens))
    num_held = num_prompts // 2
    first, again = [], []
    for at, (handles, tokens) in enumerate(prompts):
        stored = BlockStored(handles, None, tokens, BLOCK_SIZE, medium="GPU")
        removed = BlockRemoved(prompts[at - num_held][0][::-1], "GPU")
        again.append(encode(EventBatch(0.0, (stored, removed), rank)))
        first.append(again[-1] if at >= num_held else encode(EventBatch(0.0, (stored,), rank)))
    return first, again


def publish(endpoints, ranks, known_file):
    """What a process of its own does: publish what all are to know once told to, and then storms, a line of input each.

    A line says how many blocks a second and for how long; the answer is how many there were.
    """
    known = msgspec.msgpack.decode(Path(known_file).read_bytes())
    context, sockets = zmq.Context(), []
    for endpoint in endpoints.split(","):
        sockets.append(context.socket(zmq.PUB))
        sockets[-1].setsockopt(zmq.SNDHWM, 100_000)  # vLLM's default
        sockets[-1].bind(endpoint)
    os.nice(19)
    num_prompts = NUM_PROMPTS // len(sockets)
    lives = [life_of(random.Random(at), num_prompts, at % int(ranks)) for at in range(len(sockets))]
    seqs, sent = [0] * len(sockets), 0

    def send(at, payload):
        sockets[at].send_multipart([b"", seqs[at].to_bytes(8, "big"), payload])
        seqs[at] += 1

    print("bound", flush=True)
    sys.stdin.readline()
    send(0, known)
    print("known", flush=True)
    for line in sys.stdin:
        rate, seconds = map(float, line.split())
        begun, start_s = sent, time.monotonic()
        while (now_s := time.monotonic()) - start_s < seconds:
            due = int(rate * (now_s - start_s) / PROMPT_BLOCKS) - (sent - begun)
            for _ in range(due):
                at, turn = sent % len(sockets), sent // len(sockets)
                life = lives[at][turn >= num_prompts]
                send(at, life[turn % num_prompts])
                sent += 1
            time.sleep(TICK_S)
        print((sent - begun) * PROMPT_BLOCKS, flush=True)


class Publishers:
    """That process."""

    def __init__(self, endpoints, ranks, known_file):
        what = (",".join(endpoints), str(ranks), known_file)
        command = [sys.executable, __file__, "--publish", *what]
        self._child = subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
        )
        self._child.stdout.readline()

    def tell(self, line=""):
        self._child.stdin.write(line + "\n")
        self._child.stdin.flush()

    def answer(self):
        return self._child.stdout.readline()

    def close(self):
        self._child.communicate(timeout=30)


def value_of(port, name):
    """A counter of the router's."""
    lines = get(port, "/metrics").decode().splitlines()
    return sum(float(line.rsplit(" ", 1)[1]) for line in lines if line.startswith(name))


async def until_quiet(pid):
    """Wait until a process has nothing to do; the seconds that took."""
    start_s = time.monotonic()
    while True:
        before_s = cpu_s(pid)
        await asyncio.sleep(0.4)
        if cpu_s(pid) - before_s <= 0.04:
            return time.monotonic() - start_s - 0.4


def body_of(kind, known_tokens, draw):
    if kind == "short":
        prompt = " ".join(f"w{draw.randrange(8192)}" for _ in range(16))
    else:
        prompt = [*known_tokens, *(draw.randrange(16, 8192) for _ in range(16))]
    return json.dumps({"model": "mock", "prompt": prompt, "max_tokens": 4}).encode()


async def check_matched(way, known_tokens):
    """See that the router knows of the cached prompt, or nothing is measured."""
    until_s, body = time.monotonic() + TIMEOUT_S, body_of("matched", known_tokens, random.Random(0))
    headers = ((b"content-type", b"application/json"), (b"x-dynctl-explain", b"1"))
    while True:
        answer = await way.fetch("POST", "/v1/completions", headers, body, TIMEOUT_S)
        expected = dict(answer.headers).get(b"x-dynctl-predicted-cached-tokens")
        if expected == b"%d" % len(known_tokens):
            return
        if time.monotonic() > until_s:
            raise SystemExit(f"the router expects {expected} cached tokens: {answer.status}")
        await asyncio.sleep(0.1)


async def load(ways, known_tokens, seconds, seed, times_ms):
    """Requests one at a time, each kind both ways, in a random order."""
    draw, until_s = random.Random(seed), time.monotonic() + seconds
    while time.monotonic() < until_s:
        kinds = [(kind, way) for kind in KINDS for way in ways]
        draw.shuffle(kinds)
        for kind, way in kinds:
            body = body_of(kind, known_tokens, draw)
            start_s = time.perf_counter()
            answer = await ways[way].fetch(
                "POST",
                "/v1/completions",
                ((b"content-type", b"application/json"),),
                body,
                TIMEOUT_S,
            )
            times_ms.setdefault((kind, way), []).append((time.perf_counter() - start_s) * 1e3)
            if answer.status != 200:
                raise SystemExit(f"{kind} {way}: {answer.status} {answer.body[:200]!r}")
            await asyncio.sleep(PAUSE_S)


def percentile(values, share):
    ordered = sorted(values)
    return ordered[min(int(share * len(ordered)), len(ordered) - 1)]


def added(times_ms, kind, share):
    """Of what the way through the router took more, pair by pair: the tail of the direct way is not taken off."""
    pairs = zip(times_ms[kind, "routed"], times_ms[kind, "direct"], strict=True)
    return percentile([routed - direct for routed, direct in pairs], share)


async def measure(options, publishers, router_pid, router_port, engine_port, known_tokens):
    """Times by whether there was a storm; a line about each storm."""
    ways = {
        "direct": Upstream(Address(host="127.0.0.1", port=engine_port)),
        "routed": Upstream(Address(host="127.0.0.1", port=router_port)),
    }
    found = {False: {}, True: {}}
    try:
        publishers.tell()
        publishers.answer()
        await check_matched(ways["routed"], known_tokens)
        await until_quiet(router_pid)
        await load(ways, known_tokens, 1.0, 0, {})
        for number in range(options.rounds):
            for is_storm in (False, True) if number % 2 == 0 else (True, False):
                if is_storm:
                    publishers.tell(f"{options.blocks} {options.seconds}")
                before_s, lost = cpu_s(router_pid), value_of(router_port, LOST)
                await load(ways, known_tokens, options.seconds, number + 1, found[is_storm])
                used_s = cpu_s(router_pid) - before_s
                if is_storm:
                    num_blocks = int(await asyncio.to_thread(publishers.answer))
                    late_s = await until_quiet(router_pid)
                    lost = value_of(router_port, LOST) - lost
                    print(
                        f"storm {number + 1}: {num_blocks / options.seconds / 1e6:.2f} M blocks/s sent, router "
                        f"{used_s / options.seconds:.0%} of a core, done {late_s:.1f} s after its end, "
                        f"{lost:.0f} gaps"
                    )
                    await check_matched(ways["routed"], known_tokens)
    finally:
        for way in ways.values():
            await way.close()
    return found


LOST = 'dynctl_router_kv_frames_total{kind="lost"}'


def report(found):
    """Print what is added, and whether a storm adds no more than it may; False where it does."""
    calm, storm = found[False], found[True]
    number = min(map(len, [*calm.values(), *storm.values()]))
    print(f"\nms added over direct, at least {number} requests each\n")
    print(
        f"{'':10}{'':5}{'without':>9}{'storm':>9}{'ratio':>7}{'more':>8}{'direct':>9}{'storm':>8}"
    )
    is_held = True
    for kind in KINDS:
        for title, share in (("p50", 0.5), ("p99", 0.99)):
            before, now = added(calm, kind, share), added(storm, kind, share)
            ratio = f"{now / before:.1f}" if before > 0 else ""
            verdict = ""
            if title == "p99":
                is_held = is_held and now - before <= BOUND_MS
                verdict = f"≤ {BOUND_MS:g} {'holds' if now - before <= BOUND_MS else 'MISSES'}"
            direct = [percentile(times[kind, "direct"], share) for times in (calm, storm)]
            print(
                f"{kind:10}{title:5}{before:9.2f}{now:9.2f}{ratio:>7}{now - before:8.2f}"
                f"{direct[0]:9.2f}{direct[1]:8.2f}  {verdict}"
            )
    return is_held


@contextmanager
def router_on(command, log, options):
    """A router; on a core of its own, if that is wanted."""
    cores = sorted(os.sched_getaffinity(0))
    if not options.own_core:
        with running(command, log) as pid:
            yield pid
        return
    os.sched_setaffinity(0, cores[:1])
    with running(command, log) as pid:
        os.sched_setaffinity(0, cores[1:])
        yield pid


def main():
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--blocks", type=float, default=1e6, help="offered a second")
    parser.add_argument("--ranks", type=int, default=1, help="of each engine, each a publisher")
    parser.add_argument(
        "--own-core",
        action="store_true",
        help="the router has one core, and all others share the rest",
    )
    parser.add_argument("--seconds", type=float, default=4.0)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--publish", nargs=3, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.publish:
        publish(*options.publish)
        return 0
    draw = random.Random(99)
    known_tokens = [draw.randrange(16, 8192) for _ in range(PROMPT_BLOCKS * BLOCK_SIZE)]
    handles = tuple(draw.getrandbits(63) for _ in range(PROMPT_BLOCKS))
    known = BlockStored(handles, None, tuple(known_tokens), BLOCK_SIZE, medium="GPU")
    with tempfile.TemporaryDirectory(prefix="storm") as folder:
        make_model = [sys.executable, "make_model.py", f"{folder}/model"]
        subprocess.run(make_model, cwd=PEERS, check=True, stdout=subprocess.DEVNULL)
        known_file = Path(folder, "known")
        known_file.write_bytes(msgspec.msgpack.encode(encode(EventBatch(0.0, (known,)))))
        num_places = NUM_ENGINES * options.ranks
        first = free_run(num_places)
        places = [f"tcp://127.0.0.1:{first + at}" for at in range(num_places)]
        publishers = Publishers(places, options.ranks, str(known_file))
        stand, [port] = Stand(folder, folder, "zero"), free_ports(1)
        command = [sys.executable, "-m", "dynctl", "route", "--listen", f"127.0.0.1:{port}"]
        for engine_port, place in zip(stand.engine_ports, places[:: options.ranks], strict=True):
            events = f"kv-events={place},ranks={options.ranks}"
            command += ["--engine", f"http://127.0.0.1:{engine_port},{events}"]
        # Its own questions would be answered by nobody's events.
        command += ["--tokenizer", stand.model, "--set", "probe_s=0"]
        try:
            with stand.engines(), router_on(command, f"{folder}/router.log", options) as pid:
                wait_up(port)
                found = uvloop.run(
                    measure(options, publishers, pid, port, stand.engine_ports[0], known_tokens)
                )
                is_held = report(found)
                print(f"\nload average now: {json.dumps(os.getloadavg())}", flush=True)
        finally:
            publishers.close()
    return 0 if is_held else 1


if __name__ == "__main__":
    sys.exit(main())

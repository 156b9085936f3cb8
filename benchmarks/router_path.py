"""The router's own steps for one request, without kernel and event loop: sockets are replaced by objects that only count.

Microseconds here are Python alone, so that small changes show; what a client sees is `router_bench.py`. With `--cold` the
processor's caches are emptied before each step, as other processes do between the requests of an idle router.
Run: python benchmarks/router_path.py [--policy kv] [--cold] [--profile] [--flag NAME=NUMBER]
"""

import argparse
import asyncio
import collections
import cProfile
import gc
import json
import os
import pstats
import statistics
import subprocess
import sys
import tempfile
import time
import zlib
from pathlib import Path

import uvloop

from dynctl.core.deployment import EngineInfo, EngineState
from dynctl.http1.connection import Connection
from dynctl.http1.server import Server, ServerLimits
from dynctl.http1.server_connection import ServerConnection
from dynctl.http1.upstream import Address, Upstream
from dynctl.router.config import EngineTarget, RouterConfig, make_settings
from dynctl.router.desk import Desk
from dynctl.router.server import Entrance
from dynctl.router.sources.route import Route
from dynctl.router.tokens import load_tokenizer

PEERS = Path(__file__).parent / "peers"
HEAD = b'"created":1,"model":"mock","system_fingerprint":"w1",'
SHORT = (
    b'{"id":"cmpl-1","object":"chat.completion",%b"choices":[{"index":0,"message":{"role":"assistant",'
    b'"content":"w1 w2 w3 w4"},"finish_reason":"stop"}],"usage":{"prompt_tokens":16,'
    b'"completion_tokens":4,"total_tokens":20}}' % HEAD
)


def _event(finish):
    return (
        b'data: {"id":"cmpl-1","object":"chat.completion.chunk",%b"choices":[{"index":0,"delta":{"content":" w1"},'
        b'"finish_reason":%b}]}\n\n' % (HEAD, finish)
    )


def _chunk(data):
    return b"%x\r\n%b\r\n" % (len(data), data)


ANSWER = b"HTTP/1.1 200 OK\r\ncontent-type: application/json\r\ncontent-length: %d\r\n\r\n%b" % (
    len(SHORT),
    SHORT,
)
STREAM_HEAD = (
    b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream; charset=utf-8\r\ncache-control: no-cache\r\n"
    b"transfer-encoding: chunked\r\n\r\n"
)
TOKEN = _chunk(_event(b"null"))
LAST = _chunk(_event(b'"stop"')) + _chunk(b"data: [DONE]\n\n") + b"0\r\n\r\n"


class Wire(asyncio.Transport):
    """A transport that drops what is written."""

    def __init__(self):
        self.num_bytes = self.num_writes = 0
        self.first_ns = 0
        """When something was written since this was last 0."""

    def write(self, data):
        self.first_ns = self.first_ns or time.perf_counter_ns()
        self.num_bytes += len(data)
        self.num_writes += 1

    def is_closing(self):
        return False

    def get_extra_info(self, name, default=None):
        return ("127.0.0.1", 1) if name == "peername" else default

    def set_write_buffer_limits(self, high=None, low=None):
        pass

    def get_write_buffer_size(self):
        return 0

    def abort(self):
        pass

    def pause_reading(self):
        pass

    def resume_reading(self):
        pass


def _request(stream):
    words = " ".join(f"w{i * 37}" for i in range(16))
    body = json.dumps(
        {
            "model": "mock",
            "max_tokens": 64 if stream else 4,
            "temperature": 0,
            "stream": stream,
            "ignore_eos": True,
            "messages": [{"role": "user", "content": words}],
        }
    ).encode()
    return (
        b"POST /v1/chat/completions HTTP/1.1\r\nhost: 127.0.0.1:9100\r\ncontent-type: application/json\r\n"
        b"accept: */*\r\ncontent-length: %d\r\n\r\n%b" % (len(body), body)
    )


def _unit_us():
    """What a fixed piece of Python costs just now: machines and moments differ, ratios less so."""
    start_s = time.process_time()
    found = {}
    for number in range(2000):
        found[number & 63] = b"%d: %b" % (number, b"value")
        found.get(number & 127)
    return (time.process_time() - start_s) / 100 * 1e6


def _print_garbage(calls):
    """What a request leaves to the garbage collector, by type: nothing, or every request pays for it."""
    gc.collect()
    gc.set_debug(gc.DEBUG_SAVEALL)
    gc.disable()
    for call in calls:
        for _ in range(100):
            call()
    gc.collect()
    found = collections.Counter(type(one).__name__ for one in gc.garbage)
    gc.set_debug(0)
    gc.garbage.clear()
    gc.enable()
    print("objects left to the collector by 100 requests of each kind:", dict(found) or "none")


def _print_cold(steps, rounds, afterwards):
    """How long each step takes until it writes, and in whole, when nothing of it is in the processor's caches.

    What the router does once it has slept (`afterwards`) nobody waits for.
    """
    evicting = os.urandom(64 * 1024**2)
    found = {name: ([], []) for name, *_ in steps}
    for _ in range(rounds):
        for name, side, data, wire in steps:
            zlib.crc32(evicting)
            wire.first_ns = 0
            start_ns = time.perf_counter_ns()
            side.data_received(data)
            found[name][1].append(time.perf_counter_ns() - start_ns)
            if wire.first_ns:
                found[name][0].append(wire.first_ns - start_ns)
            afterwards()
    print(f"{'cold, median':30}{'until written':>14}{'in whole':>10}")
    for name, (written_ns, whole_ns) in found.items():
        until = f"{statistics.median(written_ns) / 1e3:11.1f} µs" if written_ns else " " * 14
        print(f"{name:30}{until}{statistics.median(whole_ns) / 1e3:7.1f} µs")


async def measure(options, folder):
    targets = tuple(EngineTarget(f"e{i}", "http://127.0.0.1:1") for i in range(4))
    settings = {}
    for flag in options.flag or ():
        name, _, value = flag.partition("=")
        settings[name] = float(value)
    config = RouterConfig(
        listen="127.0.0.1:0",
        policy=options.policy,
        tokenizer=f"{folder}/model",
        engines=targets,
        settings=make_settings(settings),
    )
    desk = Desk(config, load_tokenizer(config.tokenizer))
    pool = Upstream(Address(host="127.0.0.1", port=1))
    for target in targets:
        info = EngineInfo(
            id=target.id,
            incarnation="1",
            state=EngineState.READY,
            role="aggregated",
            deployment="",
            kind="external",
            model="mock",
            block_size_tokens=16,
        )
        desk.fleet.saw(target.id, info, Route(pool))
    entrance = Entrance(desk)
    server = Server(entrance._on_client, ServerLimits(), entrance._admit)  # noqa: SLF001
    front, back = ServerConnection(server), Connection(pool)
    to_client, to_engine = Wire(), Wire()
    front.connection_made(to_client)
    back.connection_made(to_engine)
    pool._open.add(back)  # noqa: SLF001
    pool.give_back(back)
    short, stream = _request(False), _request(True)

    def one_short():
        front.data_received(short)
        back.data_received(ANSWER)

    def one_stream(per_read=1):
        front.data_received(stream)
        back.data_received(STREAM_HEAD)
        for _ in range(63 // per_read):
            back.data_received(TOKEN * per_read)
        back.data_received(LAST)

    cases = {
        "short": (one_short, 300),
        "stream, 64 reads": (one_stream, 20),
        "stream, 9 reads": (lambda: one_stream(7), 50),
        "stream, 2 reads": (lambda: one_stream(31), 60),
    }
    for name, (call, number) in cases.items():
        if options.only and options.only not in name:
            continue
        before = desk.metrics.requests.value("chat", "200")
        call()
        desk.afterwards.keep()
        if desk.metrics.requests.value("chat", "200") != before + 1:
            raise SystemExit(f"{name}: the request was not served")
        best_us = unit_us = float("inf")
        for _ in range(options.rounds):
            unit_us = min(unit_us, _unit_us())
            start_s = time.process_time()
            for _ in range(number):
                call()
            best_us = min(best_us, (time.process_time() - start_s) / number * 1e6)
            await asyncio.sleep(0.01)
        print(f"{name:20}{best_us:9.1f} µs{best_us / unit_us:9.1f} units")
        if options.profile:
            profile = cProfile.Profile()
            profile.enable()
            for _ in range(number):
                call()
            profile.disable()
            stats = pstats.Stats(profile).sort_stats(options.sort)
            stats.print_stats(options.profile)
            if options.callers:
                stats.print_callers(options.callers)
    if options.cold:
        first = STREAM_HEAD + TOKEN
        steps = [
            ("short: request", front, short, to_engine),
            ("short: answer", back, ANSWER, to_client),
            ("stream: request", front, stream, to_engine),
            ("stream: head and first event", back, first, to_client),
            ("stream: 15 events and end", back, TOKEN * 15 + LAST, to_client),
            ("stream in one read: request", front, stream, to_engine),
            ("stream in one read: all", back, first + TOKEN * 15 + LAST, to_client),
        ]
        _print_cold(steps, options.rounds, desk.afterwards.keep)
    if options.garbage:
        _print_garbage([call for call, _ in cases.values()])
    desk.afterwards.keep()
    ok = desk.metrics.requests.value("chat", "200")
    print(f"{ok:.0f} requests answered with 200, {len(desk.flights)} left")
    await pool.close()
    await desk.close(0)


def main():
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--policy", default="kv")
    parser.add_argument("--rounds", type=int, default=100)
    parser.add_argument("--profile", type=int, default=0)
    parser.add_argument("--sort", default="tottime")
    parser.add_argument("--callers", help="whose callers to print")
    parser.add_argument("--garbage", action="store_true", help="print what cycles are left")
    parser.add_argument("--cold", action="store_true", help="also with empty caches")
    parser.add_argument("--only", default="")
    parser.add_argument("--flag", action="append")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        subprocess.run(
            [sys.executable, "make_model.py", f"{folder}/model"],
            cwd=PEERS,
            check=True,
            stdout=subprocess.DEVNULL,
        )
        uvloop.run(measure(options, folder))


if __name__ == "__main__":
    main()

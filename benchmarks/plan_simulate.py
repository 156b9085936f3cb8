"""Whether `plan --simulate` tells the truth: the same trace replayed in virtual time, and live on this machine.

Live means simulated engines and the router in this process, on Unix sockets and loopback, driven on schedule. Prints
each figure of both and their ratio; exits 1 when one is off by more than 15 %. Noisy machines give noisy ratios.

Run: python benchmarks/plan_simulate.py [--seconds 20]
"""

import argparse
import asyncio
import json
import sys
import tempfile
import time
from dataclasses import dataclass, field

from dynctl.core.plan import Role
from dynctl.core.workload import Slo, Workload
from dynctl.http1.server import serve
from dynctl.http1.sse import EventSplitter
from dynctl.http1.upstream import Address, Upstream
from dynctl.planner.prompts import Prompts, make_trace
from dynctl.planner.simulate import SimSetting, simulate
from dynctl.planner.trace import Call, Trace
from dynctl.planner.virtual import VirtualEngineSpec
from dynctl.router.config import EngineTarget, RouterConfig, make_settings
from dynctl.router.run import Router
from dynctl.sim.api.routes import Api
from dynctl.sim.engine import SimEngine
from dynctl.sim.options import MODEL_DIR, SimOptions
from dynctl.sim.scheduler import StepCosts
from dynctl.sim.text import TextModel

COSTS = StepCosts(
    prefill_us_per_token=150.0, prefill_base_ms=4.0, decode_ms=25.0, decode_us_per_seq=100.0
)
NUM_BLOCKS = 2048
BYTES_S = 1e10
ALLOWED = 0.15


def multi_turn(num_chats, num_turns, rate_rps, seed):
    """Chats whose prompts grow by a few blocks a turn; turns of a chat are far enough apart."""
    base = make_trace(Workload(16, 32, rate_rps), num_chats * num_turns, seed, sigma=0.3)
    calls = []
    for number, call in enumerate(base.calls):
        chat, turn = number % num_chats, number // num_chats
        blocks = tuple(chat * 10_000 + i for i in range(16 + turn * 12))
        calls.append(Call(call.at_s, len(blocks) * 16 + 7, call.osl_tokens, blocks))
    return Trace(tuple(calls), 16, "multi-turn")


def workloads(seconds):
    shared = make_trace(Workload(640, 40, 6.0, 0.6), int(6 * seconds), 2)
    single = make_trace(Workload(480, 48, 5.0), int(5 * seconds), 3)
    aggregated = {f"e{i}": Role.AGGREGATED for i in range(3)}
    apart = {"p0": Role.PREFILL, "p1": Role.PREFILL, "d0": Role.DECODE, "d1": Role.DECODE}
    turns = multi_turn(12, max(2, int(seconds * 5 / 12)), 5.0, 4)
    return (
        ("single-turn, 3 aggregated", single, aggregated),
        ("multi-turn, 3 aggregated", turns, aggregated),
        ("shared prefixes, 2 prefill + 2 decode", shared, apart),
    )


@dataclass
class Heard:
    """One answer as it came."""

    due_s: float
    isl: int
    times_s: list = field(default_factory=list)
    cached: int = 0
    error: str = ""


class Sink:
    def __init__(self, heard, done):
        self.heard, self.done, self.events = heard, done, EventSplitter()

    def on_head(self, status, headers):  # noqa: ARG002 - the sink's signature
        if status != 200:
            self.heard.error = f"HTTP {status}"

    def on_data(self, data):
        now_s = time.monotonic()
        for event in self.events.feed(data):
            text = bytes(event).strip().removeprefix(b"data: ")
            if not text.startswith(b"{"):
                continue
            chunk = json.loads(text)
            if any(choice.get("token_ids") for choice in chunk.get("choices", [])):
                self.heard.times_s.append(now_s)
            if usage := chunk.get("usage"):
                details = usage.get("prompt_tokens_details") or {}
                self.heard.cached = details.get("cached_tokens") or 0

    def on_end(self):
        self.done.set_result(None)

    def on_error(self, error):
        self.heard.error = str(error)
        self.done.set_result(None)


async def ask(upstream, prompt, call, start_s, heard_all):
    due_s = start_s + call.at_s
    await asyncio.sleep(max(0.0, due_s - time.monotonic()))
    heard = Heard(due_s, call.isl_tokens)
    heard_all.append(heard)
    body = {
        "model": "sim", "prompt": list(prompt), "max_tokens": call.osl_tokens, "ignore_eos": True, "stream": True,
        "return_token_ids": True, "stream_options": {"include_usage": True},
    }  # fmt: skip
    done = asyncio.get_running_loop().create_future()
    headers = [(b"content-type", b"application/json")]
    upstream.send("POST", "/v1/completions", headers, json.dumps(body).encode(), Sink(heard, done))
    async with asyncio.timeout(120):
        await done


async def live(trace, roles, words):
    """Replay a trace against real sockets."""
    text = TextModel(MODEL_DIR)
    with tempfile.TemporaryDirectory(prefix="dyn") as directory:
        engines, servers, targets = [], [], []
        for name, role in roles.items():
            path, events = f"{directory}/{name}.sock", f"ipc://{directory}/{name}.kv"
            options = SimOptions(
                uds=path,
                role="both" if role is Role.AGGREGATED else role.value,
                side_channel=None if role is Role.AGGREGATED else "127.0.0.1:0",
                kv_events=events,
                kv_replay=f"ipc://{directory}/{name}.re",
                num_blocks=NUM_BLOCKS,
                kv_transfer_mbytes_s=BYTES_S / 1e6,
                prefill_us_per_token=COSTS.prefill_us_per_token,
                prefill_base_ms=COSTS.prefill_base_ms,
                decode_ms=COSTS.decode_ms,
                decode_us_per_seq=COSTS.decode_us_per_seq,
            )
            engine = SimEngine(options, text)
            servers.append(await serve(Api(engine).handle, path=path))
            await engine.start()
            engines.append(engine)
            targets.append(
                EngineTarget(name, f"unix:{path}", role.value, events, options.kv_replay)
            )
        config = RouterConfig(
            "127.0.0.1:0",
            engines=tuple(targets),
            tokenizer=str(MODEL_DIR),
            settings=make_settings({"engine_poll_s": 0.2}),
        )
        heard: list[Heard] = []
        async with Router(config) as router:
            upstream = Upstream(Address(host="127.0.0.1", port=router.port))
            async with asyncio.timeout(20):
                while not all(
                    w.is_serving() and w.parity == "verified" for w in router.desk.workers.all()
                ) or len(router.desk.workers.all()) < len(roles):
                    await asyncio.sleep(0.05)
            prompts = Prompts(trace.block_tokens, words)
            ready = [prompts.of(call, number) for number, call in enumerate(trace.calls)]
            start_s = time.monotonic() + 0.2
            async with asyncio.TaskGroup() as group:
                for call, prompt in zip(trace.calls, ready, strict=True):
                    group.create_task(ask(upstream, prompt, call, start_s, heard))
            await upstream.close()
        for engine, server in zip(engines, servers, strict=True):
            await engine.close()
            await server.close(0)
    return heard


def quantile(values, q):
    ranked = sorted(values)
    place = q * (len(ranked) - 1)
    low = int(place)
    high = min(low + 1, len(ranked) - 1)
    return ranked[low] + (ranked[high] - ranked[low]) * (place - low)


def compare(name, trace, roles, words):
    specs = [VirtualEngineSpec(engine, role, COSTS, NUM_BLOCKS) for engine, role in roles.items()]
    told = simulate(trace, specs, SimSetting(transfer_bytes_s=BYTES_S), Slo())
    heard = asyncio.run(live(trace, roles, words))
    failed = [h.error for h in heard if h.error]
    good = [h for h in heard if h.times_s and not h.error]
    ttft = [(h.times_s[0] - h.due_s) * 1e3 for h in good]
    gaps = [(b - a) * 1e3 for h in good for a, b in zip(h.times_s, h.times_s[1:], strict=False)]
    hits = sum(h.cached for h in good) / sum(h.isl for h in good)
    rows = (
        ("TTFT p50 ms", told.ttft_ms.p50, quantile(ttft, 0.5)),
        ("TTFT p95 ms", told.ttft_ms.p95, quantile(ttft, 0.95)),
        ("ITL p50 ms", told.itl_ms.p50, quantile(gaps, 0.5)),
        ("ITL mean ms", told.itl_ms.mean, sum(gaps) / len(gaps)),
        ("hit rate %", told.hit_ratio * 100, hits * 100),
    )
    print(f"{name}: {len(good)} requests, {len(failed)} failed {set(failed) or ''}")
    is_close = not failed
    for label, virtual, real in rows:
        ratio = virtual / real if real else (1.0 if virtual < 1 else float("inf"))
        is_close &= abs(ratio - 1) <= ALLOWED
        print(f"  {label:<12} simulated {virtual:8.2f}  live {real:8.2f}  ratio {ratio:5.2f}")
    return is_close


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--seconds", type=float, default=20.0)
    given = parser.parse_args()
    words = TextModel(MODEL_DIR).words
    results = [compare(*workload, words) for workload in workloads(given.seconds)]
    print(f"{sum(results)} of {len(results)} workloads within {ALLOWED:.0%}")
    sys.exit(0 if all(results) else 1)


if __name__ == "__main__":
    main()

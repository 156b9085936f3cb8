# ruff: noqa: ARG001, B007, I001
# Origin: the harness of the peers measurement (files of the same name), unchanged but for formatting.
"""The same simulated engine as mock_engine.py --mode sim, served as a Dynamo worker (one worker a process).

KV events go through Dynamo's own KvEventPublisher. Counters: GET /stats on --stats-port.
"""

import argparse
import asyncio
import json

import uvloop
from dynamo.llm import (
    KvEventPublisher,
    ModelInput,
    ModelRuntimeConfig,
    ModelType,
    WorkerType,
    register_model,
)
from dynamo.runtime import DistributedRuntime

from simcore import SimWorker, out_tokens


async def main(a):
    loop = asyncio.get_running_loop()
    rt = DistributedRuntime(loop, "file", "tcp", event_plane="zmq")
    ep = rt.endpoint("dynamo.backend.generate")
    pub = None

    def on_event(kind, p):
        if pub is None:
            return
        if kind == "stored":
            hashes, parent, tokens = p
            pub.publish_stored(tokens, [a.block] * len(hashes), hashes, parent)
        else:
            pub.publish_removed(p)

    sim = SimWorker(loop, a.wid, a.block, a.capacity, a.prefill_us, a.base_ms, a.itl_ms, on_event)

    async def generate(request, context=None):
        toks = request["token_ids"]
        if a.zero:
            n = (request.get("stop_conditions") or {}).get("max_tokens") or 16
            for i in range(n - 1):
                yield {"token_ids": [17]}
            yield {"token_ids": [18], "finish_reason": "length"}
            return
        toks = list(toks)
        n = (request.get("stop_conditions") or {}).get("max_tokens") or 16
        out = out_tokens(toks, n)
        q = asyncio.Queue()
        cached = [0]

        def first(c):
            cached[0] = c
            q.put_nowait(0)

        sim.submit(toks, n, first, q.put_nowait, lambda: None)
        for i in range(n):
            await q.get()
            d = {"token_ids": [out[i]]}
            if i == n - 1:
                d["finish_reason"] = "length"
                d["completion_usage"] = {
                    "prompt_tokens": len(toks),
                    "completion_tokens": n,
                    "total_tokens": len(toks) + n,
                    "prompt_tokens_details": {"cached_tokens": cached[0]},
                }
            yield d

    async def stats(r, w):
        line = await r.readline()
        if b"reset=1" in line:
            body = json.dumps(sim.stats()).encode()
            sim.reset(b"clear=1" in line)
        else:
            body = json.dumps(sim.stats()).encode()
        w.write(
            b"HTTP/1.0 200 OK\r\ncontent-type: application/json\r\ncontent-length: %d\r\n\r\n"
            % len(body)
            + body
        )
        await w.drain()
        w.close()

    if a.stats_port:
        await asyncio.start_server(stats, "127.0.0.1", a.stats_port)
    rc = ModelRuntimeConfig()
    rc.total_kv_blocks = a.capacity
    rc.max_num_seqs = 256
    rc.max_num_batched_tokens = 8192
    rc.enable_local_indexer = True
    serve = asyncio.ensure_future(ep.serve_endpoint(generate, graceful_shutdown=False))
    await asyncio.sleep(0.3)
    pub = KvEventPublisher(ep, kv_block_size=a.block, enable_local_indexer=True)
    await register_model(
        ModelInput.Tokens,
        ModelType.Chat | ModelType.Completions,
        ep,
        a.model_path,
        a.model,
        worker_type=WorkerType.Aggregated,
        kv_cache_block_size=a.block,
        runtime_config=rc,
        ignore_weights=True,
    )
    print("worker ready", a.wid, flush=True)
    await serve


if __name__ == "__main__":
    p = argparse.ArgumentParser()
    p.add_argument("--wid", type=int, required=True)
    p.add_argument("--stats-port", type=int, default=0)
    p.add_argument("--zero", action="store_true", help="answer at once, no cache, no service time")
    p.add_argument("--model", default="mock")
    p.add_argument("--model-path", required=True)
    p.add_argument("--block", type=int, default=16)
    p.add_argument("--capacity", type=int, default=4096)
    p.add_argument("--prefill-us", type=float, default=50.0)
    p.add_argument("--base-ms", type=float, default=2.0)
    p.add_argument("--itl-ms", type=float, default=8.0)
    uvloop.run(main(p.parse_args()))

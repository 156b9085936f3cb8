"""How soon a router that was killed serves again, and knows again what engines hold (Q11).

A relay with the blocks of some engines, as a process; a router behind it, killed and started anew. Run:
python benchmarks/router_killed.py [--blocks 1000000] [--engines 4]
"""

import argparse
import asyncio
import json
import random
import socket
import subprocess
import sys
import tempfile
import time
import urllib.request
from pathlib import Path

import zmq
from relayed import HOST_NAME, agent_told, certificates, relay_command

from dynctl.core.exposition import parse
from dynctl.core.kv import BlockStored
from dynctl.kv.events import EventBatch
from dynctl.kv.publisher import EventPublisher

_BLOCK = 16
_CHAIN = 512
"""Blocks of one prompt, told of in one batch."""

_BLOCKS = "dynctl_router_engine_blocks"
_TLS = {"ca": "ca.crt", "cert": "router.crt", "key": "router.key"}


def free_ports(number):
    held = [socket.socket() for _ in range(number)]
    for one in held:
        one.bind(("127.0.0.1", 0))
    ports = [one.getsockname()[1] for one in held]
    for one in held:
        one.close()
    return ports


async def publish(publisher, num_blocks, rng):
    for first in range(0, num_blocks, _CHAIN):
        handles = tuple(rng.getrandbits(63) for _ in range(min(_CHAIN, num_blocks - first)))
        tokens = tuple(rng.choices(range(50_000), k=_BLOCK * len(handles)))
        publisher.publish(EventBatch(0.0, (BlockStored(handles, None, tokens, _BLOCK),)))
        await asyncio.sleep(0)


def get(port, path):
    try:
        with urllib.request.urlopen(f"http://127.0.0.1:{port}{path}", timeout=5) as answer:
            return answer.status, answer.read().decode()
    except OSError:
        return 0, ""


def num_known(port):
    """Blocks the router has of all engines."""
    status, text = get(port, "/metrics")
    return sum(one.value for one in parse(text, {_BLOCKS}).get(_BLOCKS, ())) if status == 200 else 0


async def until(condition, timeout_s=300):
    async with asyncio.timeout(timeout_s):
        while not await asyncio.to_thread(condition):
            await asyncio.sleep(0.02)


async def measure(folder, num_blocks, num_engines):
    port, relay_port, *ports = free_ports(2 + num_engines)
    tls = certificates(folder)
    config = {
        "listen": f"127.0.0.1:{port}",
        "served_names": ["mock"],
        "relays": [{"host_name": HOST_NAME, "address": "127.0.0.1", "port": relay_port}],
        "tls": {name: str(tls / f"{file}") for name, file in _TLS.items()},
        "settings": {"probe_s": 0},
    }
    (Path(folder) / "router.json").write_text(json.dumps(config))
    router = [sys.executable, "-m", "dynctl.router", "--config", f"{folder}/router.json"]
    context = zmq.Context()
    publishers = [EventPublisher(f"tcp://127.0.0.1:{p}", None, context=context) for p in ports]
    with agent_told(f"{folder}/agent.sock", ports, ports):
        processes = [
            subprocess.Popen(command, stderr=subprocess.DEVNULL)
            for command in (relay_command(folder, relay_port, f"{folder}/agent.sock"), router)
        ]
        try:
            await until(lambda: get(port, "/health")[0] == 200)
            await asyncio.sleep(1.0)  # subscriptions have no answer to wait for
            rng = random.Random(1)
            for publisher in publishers:
                await publish(publisher, num_blocks // num_engines, rng)
            known = 0
            while not known or await asyncio.to_thread(num_known, port) > known:
                known = await asyncio.to_thread(num_known, port)
                await asyncio.sleep(2.0)
            processes[1].kill()
            processes[1].wait()
            began_s = time.monotonic()
            processes[1] = subprocess.Popen(router, stderr=subprocess.DEVNULL)
            await until(lambda: get(port, "/health")[0] == 200)
            serving_s = time.monotonic() - began_s
            await until(lambda: num_known(port) >= 0.95 * known)
            known_s = time.monotonic() - began_s
        finally:
            for process in processes:
                process.kill()
                process.wait()
            for publisher in publishers:
                publisher.close()
            context.term()
    return {"blocks": known, "serving_s": round(serving_s, 2), "known_95_s": round(known_s, 2)}


def main():
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--blocks", type=int, default=1_000_000)
    parser.add_argument("--engines", type=int, default=4)
    args = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="dynctl-killed-") as folder:
        print(json.dumps(asyncio.run(measure(folder, args.blocks, args.engines))))


if __name__ == "__main__":
    main()

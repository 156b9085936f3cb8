"""Requests leave nothing to the garbage collector: at thousands a second its passes would cost as much as the requests."""

import asyncio
import gc
from collections import Counter

import pytest
from router_bench import routed
from router_fakes import FakeEngine


@pytest.mark.parametrize(
    ("body", "script"),
    [
        ({}, None),
        ({"prompt": "x" * 700}, None),
        ({"stream": True}, None),
        ({}, "status:400"),
        ({"stream": True}, "cut:2"),
    ],
)
def test_a_request_leaves_no_cycles(run, body, script):
    async def main():
        async with routed(FakeEngine("e0"), FakeEngine("e1"), policy="kv") as bench:
            for engine in bench.engines:
                engine.script = lambda _: script

            async def ask():
                for _ in range(20):
                    await bench.client.complete(**body)
                await asyncio.sleep(0.05)

            await ask()
            gc.collect()
            gc.set_debug(gc.DEBUG_SAVEALL)
            try:
                await ask()
                gc.collect()
                left = Counter(
                    type(one).__module__ + "." + type(one).__name__ for one in gc.garbage
                )
            finally:
                gc.set_debug(0)
                gc.garbage.clear()
            ours = {name: n for name, n in left.items() if name.startswith("dynctl.") and n >= 10}
            assert not ours

    run(main)

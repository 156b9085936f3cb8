"""Locks are given back whatever comes meanwhile."""

import asyncio
from types import SimpleNamespace

import pytest

from dynctl.deploy import lock


class Fleet:
    """Does the work for each host named."""

    async def map(self, work, names):
        return {name: await work(SimpleNamespace(name=name), None) for name in names}


SEATS = {
    name: SimpleNamespace(place=SimpleNamespace(root="/r"), python="python") for name in ("a", "b")
}


def test_locks_are_given_back_though_we_are_told_to_end_again_and_again(monkeypatch):
    released = []

    async def main():
        holding, releasing, allowed = asyncio.Event(), asyncio.Event(), asyncio.Event()

        async def call(remote, python, program, wish, timeout_s):
            if wish["action"] == "release":
                releasing.set()
                await allowed.wait()
                released.append(wish["action"])
            return {"fence": 1}

        async def hold():
            async with lock.hold_locks(Fleet(), SEATS, "up"):
                holding.set()
                await asyncio.Event().wait()

        monkeypatch.setattr(lock, "call", call)
        task = asyncio.create_task(hold())
        await holding.wait()
        task.cancel()
        await releasing.wait()
        for _ in range(3):
            task.cancel()
            await asyncio.sleep(0)
            await asyncio.sleep(0)
        allowed.set()
        with pytest.raises(asyncio.CancelledError):
            await task
        assert released == ["release", "release"]

    asyncio.run(main())

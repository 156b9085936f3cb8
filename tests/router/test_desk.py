"""What the router's own timer looks after, whatever requests do."""

import pytest
from router_bench import routed, until
from router_fakes import FakeEngine

from dynctl.router import desk
from dynctl.router.prefix_index import Source


@pytest.mark.source
def test_the_timer_looks_after_all_that_ages(run, monkeypatch):
    monkeypatch.setattr(desk, "_TICK_S", 0.001)

    async def main():
        engines = FakeEngine("told"), FakeEngine("silent")
        async with routed(*engines, settings={"session_ttl_s": 0.01}) as bench:
            own, worker = bench.router.desk, bench.router.desk.workers.get("told")
            gone, here = Source("gone", "g.1"), Source(worker.id, worker.incarnation)
            for source, hashes in ((gone, range(1000)), (here, range(5000, 5100))):
                own.index.begin(source)
                own.index.store(source, list(hashes))
            own.index.drop("gone")
            own.placement.sessions.sent(b"s", "whole", worker, own.loop.time())
            own.first_events._patience_s = 0.0

            await until(lambda: len(own.index) == 100)
            await until(lambda: worker.stored_lately > 0.0)
            await until(lambda: len(own.placement.sessions) == 0)
            await until(lambda: own.probes.notes["silent"].is_silent)
            assert not own.probes.notes["told"].is_silent

    run(main)

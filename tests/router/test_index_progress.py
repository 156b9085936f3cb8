"""How far engines' caches are known, and that requests do not wait for it."""

import random
import re

import pytest
from router_bench import until
from router_relays import relayed, talk
from router_sims import Sim, prompt_of, routed_sims, told

from dynctl.core.deployment import EngineInfo, EngineState
from dynctl.router.config import Settings
from dynctl.router.index_progress import exposition
from dynctl.router.prefix_index import PrefixIndex, Source
from dynctl.router.sources import relay as relay_source
from dynctl.router.worker_table import WorkerTable


def states(lines):
    text = lines if isinstance(lines, str) else "\n".join(lines)
    found = re.findall(r'index_engines\{state="(\w+)"\} (\d+)', text)
    return {state: int(number) for state, number in found if number != "0"}


def test_engines_are_counted_by_what_is_known_of_their_caches():
    table, index, reading = WorkerTable(Settings()), PrefixIndex(), set()

    def now():
        return states(exposition(table, index, reading))

    for name in "abc":
        info = EngineInfo(name, f"{name}.1", EngineState.READY, "aggregated", "d", "sim", "m")
        table.put(info)
    assert now() == {"reading": 3}
    index.begin(Source("a", "a.1"))
    index.begin(Source("b", "b.1"))
    reading.add("b")
    table.get("c").is_told = False
    assert now() == {"known": 1, "reading": 1, "untold": 1}
    reading.clear()
    index.believe("b", 0.5)
    assert now() == {"known": 1, "doubtful": 1, "untold": 1}
    index.drop("a")
    assert now() == {"reading": 1, "doubtful": 1, "untold": 1}


@pytest.mark.source
def test_a_cache_is_being_read_until_its_snapshot_is_whole_and_requests_go_on(
    run, tls, short_dir, monkeypatch
):
    class Slow(relay_source.KvFeed):
        def apply(self, frame):
            yield from super().apply(frame)
            while not go:
                yield

    go = []
    monkeypatch.setattr(relay_source, "KvFeed", Slow)

    async def main():
        async with relayed(tls, Sim("e0", short_dir), Sim("e1", short_dir)) as bench:
            await until(lambda: len(bench.desk.fleet.reading) == 2)
            assert states(bench.desk.exposition().decode()) == {"reading": 2}
            prompt = prompt_of(random.Random(1), bench.text.words, 100)
            assert len(await talk(bench, prompt, 4)) == 4
            go.append(True)
            await until(lambda: states(bench.desk.exposition().decode()) == {"known": 2})
            bench.host.remove("e1")
            await until(lambda: states(bench.desk.exposition().decode()) == {"known": 1})
            assert bench.desk.fleet.reading == set()

    run(main)


def test_an_engine_is_read_until_its_first_events(run, short_dir):
    async def main():
        async with routed_sims(Sim("e0", short_dir)) as bench:
            assert states(bench.desk.exposition().decode()) == {"reading": 1}
            body = {"model": "sim", "prompt": [7] * 100, "max_tokens": 3}
            assert (await bench.client.post("/v1/completions", body)).status == 200
            await told(bench)
            await until(lambda: states(bench.desk.exposition().decode()) == {"known": 1})

    run(main)

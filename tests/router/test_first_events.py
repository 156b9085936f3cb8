"""A router is ready once the caches of its engines were heard of; those that stay silent are named and believed."""

import json
import random
from dataclasses import replace

import pytest
from router_bench import until
from router_relays import relayed
from router_sims import Sim, generate, prompt_of, routed_sims

from dynctl.core.deployment import EngineInfo, EngineState
from dynctl.core.router_settings import Settings
from dynctl.http1.upstream import Address, Upstream
from dynctl.router.config import RelayTarget
from dynctl.router.first_events import PATIENCE_S, FirstEvents
from dynctl.router.prefix_index import PrefixIndex, Source
from dynctl.router.probes import EngineNotes
from dynctl.router.prompt import Hashers
from dynctl.router.server import Entrance
from dynctl.router.text_blocks import TEXT_RANK
from dynctl.router.worker_table import WorkerTable


class Scene:
    """Engines and what is known of them, on a clock of its own."""

    def __init__(self, *names, asks=True, relays=()):
        self.table, self.index = WorkerTable(Settings()), PrefixIndex()
        self.notes = {name: EngineNotes() for name in names}
        self.silent = dict.fromkeys(relays, "has not answered yet")
        targets = [RelayTarget(name, "127.0.0.1", 1) for name in relays]
        parts = self.table, self.index, self.notes, self.silent
        self.first = FirstEvents(*parts, targets, asks=asks)
        for name in names:
            self.put(name)

    def put(self, name, state=EngineState.READY):
        info = EngineInfo(name, "i1", state, "aggregated", "d", "sim", "m", block_size_tokens=16)
        self.table.put(info)

    def tell(self, name, *blocks, rank=0):
        source = Source(name, "i1", rank)
        if not self.index.holds(source):
            self.index.begin(source)
        self.index.store(source, blocks)

    def awaited(self, now_s):
        self.first.look(now_s)
        return self.first.awaited(now_s)


def test_all_engines_that_serve_are_waited_for_once():
    scene = Scene("a", "b")
    scene.put("loading", EngineState.STARTING)
    assert scene.awaited(0.0) == ("a", "b")
    scene.tell("a", 1)
    assert scene.awaited(1.0) == ("b",)
    scene.tell("b", 2)
    assert scene.awaited(2.0) == ()
    # From then on it is ready, whoever joins.
    scene.put("c")
    assert scene.awaited(3.0) == ()


def test_every_relay_is_waited_for_once_whatever_requests_are_placed_by():
    for is_matching in (False, True):
        scene = Scene("a", relays=("h1", "h2"))
        scene.tell("a", 1)

        def lack(now_s, scene=scene, is_matching=is_matching):
            return scene.first.lack(now_s, is_matching=is_matching)

        assert lack(100.0) == "waiting for the engines of h1, h2"
        del scene.silent["h1"]
        assert lack(101.0) == "waiting for the engines of h2"
        # It was heard of once: what becomes of it later keeps nobody from being ready.
        scene.silent["h1"] = "connection lost"
        del scene.silent["h2"]
        assert lack(102.0) == ""
        scene.silent["h2"] = "connection lost"
        assert lack(103.0) == ""


def test_a_relay_that_stays_silent_is_given_up_and_then_events_are_waited_for():
    scene = Scene("a", relays=("h1",))
    assert scene.first.lack(100.0, is_matching=True) == "waiting for the engines of h1"
    late_s = 100.0 + PATIENCE_S
    assert scene.first.lack(late_s, is_matching=True) == "waiting for the first KV events of a"
    assert scene.first.lack(late_s, is_matching=False) == ""


def test_without_an_engine_nothing_is_over():
    scene = Scene()
    assert scene.awaited(0.0) == ()
    scene.put("a")
    assert scene.awaited(1.0) == ("a",)


def test_an_empty_cache_is_told_of_where_nobody_asks_questions():
    scene = Scene("a", asks=False)
    assert scene.awaited(0.0) == ("a",)
    scene.tell("a")
    assert scene.awaited(0.1) == ()


def test_to_be_told_that_a_cache_is_empty_is_no_event_where_questions_are_asked():
    scene = Scene("a")
    scene.tell("a")
    scene.tell("a", 7, rank=TEXT_RANK)  # believed, not told

    assert scene.awaited(0.1) == ("a",)


@pytest.mark.parametrize(("fact", "value"), [("has_events_source", False), ("is_caching", False)])
def test_who_has_nothing_to_tell_is_not_waited_for(fact, value):
    scene = Scene("a")
    setattr(scene.notes["a"], fact, value)
    scene.table.get("a").is_told = scene.notes["a"].has_events_source

    assert scene.awaited(0.0) == ()


def test_who_stays_silent_is_believed_to_hold_what_it_was_sent_until_it_speaks():
    scene = Scene("a", "b")
    scene.tell("b", 1)
    worker, other = scene.table.get("a"), scene.table.get("b")
    assert scene.awaited(0.0) == scene.awaited(PATIENCE_S - 0.1) == ("a",)
    assert worker.is_told
    assert scene.awaited(PATIENCE_S) == ()
    assert (worker.is_told, other.is_told) == (False, True)
    scene.tell("a", 2)
    scene.first.look(PATIENCE_S + 1.0)
    assert worker.is_told


def test_who_was_heard_of_is_not_silent_when_its_cache_is_emptied_or_read_anew():
    scene = Scene("a")
    worker, source = scene.table.get("a"), Source("a", "i1")
    scene.tell("a", 1, 2)
    assert scene.awaited(0.0) == ()
    scene.index.clear(source)
    assert scene.index.num_stored("a") == 2  # ever
    scene.first.look(PATIENCE_S)
    assert (worker.is_told, scene.notes["a"].is_silent) == (True, False)
    scene.index.drop("a")
    scene.index.begin(source)
    scene.first.look(PATIENCE_S + 1.0)
    assert (worker.is_told, scene.notes["a"].is_silent) == (True, False)


def test_another_start_of_an_engine_has_to_speak_itself():
    scene = Scene("a")
    scene.tell("a", 1)
    scene.first.look(0.0)
    info = scene.table.get("a").info
    scene.index.drop("a")
    scene.table.put(replace(info, incarnation="i2"))
    scene.first.look(1.0)
    scene.first.look(1.0 + PATIENCE_S)
    assert not scene.table.get("a").is_told


@pytest.mark.parametrize(("parity", "left"), [("verified", 0), ("mismatch", 1)])
def test_what_was_believed_of_a_silent_engine_ends_when_it_speaks(parity, left):
    scene = Scene("a")
    scene.table.get("a").parity = parity
    scene.first.look(0.0)
    scene.first.look(PATIENCE_S)
    blocks = Hashers("").of(16).prompt(list(range(16)))
    scene.tell("a", *blocks.hashes(), rank=TEXT_RANK)
    assert scene.index.match(blocks) == {"a": 1}
    scene.tell("a", 5)
    scene.first.look(PATIENCE_S + 1.0)
    # A stranger's own events name its blocks otherwise: what it was sent goes on to stand for them.
    assert len(scene.index.match(blocks)) == left


async def ask(path, target):
    upstream = Upstream(Address(path=path))
    try:
        answer = await upstream.fetch("GET", target)
    finally:
        await upstream.close()
    return answer.status, json.loads(answer.body)


async def becomes_ready(bench, path):
    """Ask as the agent does, until it is; return what it said before."""
    told = []

    async def is_ready():
        status, body = await ask(path, "/health")
        told.append(body["status"])
        return status == 200

    while not await is_ready():
        pass
    return told


def test_a_router_waits_for_the_blocks_of_its_own_question(run, short_dir):
    async def main():
        async with routed_sims(Sim("e0", short_dir), settings={"probe_s": 60}) as bench:
            entrance, path = Entrance(bench.desk), f"{short_dir}/admin.sock"
            await entrance.open_admin(path)
            told = await becomes_ready(bench, path)
            assert bench.desk.index.num_stored("e0") > 0
            assert told[-1] == "ok"
            assert set(told[:-1]) <= {"waiting for the first KV events of e0"}
            assert (await ask(path, "/findings"))[1] == []
            await entrance.close(0.0)

    run(main)


def test_a_router_is_not_ready_before_it_knows_the_engines_of_every_host(
    run, tls, short_dir, free_ports
):
    """One that takes its predecessor's port over would send all requests to the first host that answers."""

    async def main():
        away = RelayTarget("host-b", "127.0.0.1", free_ports())
        sim = Sim("e0", short_dir)
        async with relayed(tls, sim, more=(away,)) as bench:
            desk, path = bench.desk, f"{short_dir}/admin.sock"
            entrance = Entrance(desk)
            await entrance.open_admin(path)
            assert desk.can_serve()
            status, body = await ask(path, "/health")
            assert (status, body["status"]) == (503, "waiting for the engines of host-b")
            assert not bench.router._is_ready()
            desk.fleet.silent.pop("host-b")
            await becomes_ready(bench, path)
            await entrance.close(0.0)

    run(main)


def test_an_engine_without_events_is_named_at_once_and_placed_by_what_it_was_sent(
    run, tls, short_dir
):
    async def main():
        rng = random.Random(2)
        sims = [Sim("e0", short_dir), Sim("e1", short_dir)]
        entries = {"e1": {"kv_events": None, "kv_replay": None}}
        async with relayed(tls, *sims, entries=entries, probe_s=60) as bench:
            desk, path = bench.desk, f"{short_dir}/admin.sock"
            entrance = Entrance(desk)
            await entrance.open_admin(path)
            await becomes_ready(bench, path)
            await until(lambda: not desk.workers.get("e1").is_told)
            (found,) = (await ask(path, "/findings"))[1]
            assert (found["engine"], found["cause"]) == ("e1", "no_events_source")
            # `top` reads the metrics.
            metrics = desk.exposition().decode()
            assert 'dynctl_router_findings{engine="e1",cause="no_events_source"} 1' in metrics
            # What it is sent is found there again.
            desk.workers.set_reachable("e0", is_reachable=False)
            prompt = prompt_of(rng, bench.text.words, 400)
            for _ in range(2):
                answer = await bench.client.complete(
                    model="chat-model", prompt=prompt, max_tokens=2
                )
                assert answer.status == 200
            newest = json.loads(desk.ring.to_json(1))[0]
            assert newest["engine"] == "e1"
            assert newest["overlap_tokens"] == newest["cached_tokens"] == 384
            await entrance.close(0.0)

    run(main)


def test_what_is_placed_by_load_alone_waits_for_nobody(run, short_dir):
    async def main():
        async with routed_sims(Sim("e0", short_dir), policy="least_loaded") as bench:
            assert bench.desk.can_serve()
            assert bench.desk.awaits() == ""
            await generate(bench, prompt_of(random.Random(1), bench.text.words, 100), 2)

    run(main)

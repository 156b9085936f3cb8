"""Hot prefixes reach an idle engine before load would have them copied there; only where there is room, and clients go first."""

import random
from collections import Counter
from dataclasses import replace
from types import SimpleNamespace

import pytest
from router_bench import until
from router_sims import Sim, generate, prompt_of, routed_sims, told

from dynctl.core.deployment import EngineInfo, EngineState
from dynctl.kv.hashing import pack_tokens
from dynctl.router import spreading
from dynctl.router.config import Settings, make_settings
from dynctl.router.hot import HotPrefixes
from dynctl.router.prefix_index import PrefixIndex, Source
from dynctl.router.slow_start import Joined
from dynctl.router.spreading import Copies
from dynctl.router.warming import Warmer
from dynctl.router.worker_table import WorkerTable

HOT, WARM, COLD = 71, 72, 73
INFO = EngineInfo(
    *("e0", "i", EngineState.READY, "aggregated", "d", "sim", "m"),
    block_size_tokens=16,
    kv_capacity_tokens=1600,
)
AGGREGATED = frozenset(("aggregated",))


class Fleet:
    """Three engines; the first holds all prefixes, of 320 tokens each, and has the load. Others have been idle since 0.0."""

    def __init__(self, per_minute=6, **facts):
        self.table, self.index, self.hot = WorkerTable(Settings()), PrefixIndex(), HotPrefixes()
        for name in ("e0", "e1", "e2"):
            own = facts if name != "e0" else {}
            self.table.put(replace(INFO, id=name, **own))
            self.index.begin(Source(name, "i"))
        self.index.store(Source("e0", "i"), [HOT, WARM, COLD])
        for block, starts in ((HOT, 5), (WARM, 3), (COLD, 1)):
            for _ in range(starts):
                self.hot.began(block, memoryview(pack_tokens([block] * 320)), 0.0)
        self.copies = Copies(self.table, self.index, self.hot, per_minute)
        # All serve before anything is sent: none joins the others.
        self.table.view(AGGREGATED, None, 0.0)
        self.load = [self.send("e0") for _ in range(8)]
        assert self.next(0.0) is None

    def send(self, name, now_s=0.0):
        return self[name].book(400, 400, 10, now_s, self.table.recent_unit(now_s))

    def __getitem__(self, name):
        return self.table.get(name)

    def hold(self, name, num_blocks):
        self.index.store(Source(name, "i"), range(1000, 1000 + num_blocks))

    def next(self, now_s):
        self.table.relax(now_s, self.index)
        views = [self.table.view(AGGREGATED, None, now_s).workers]
        found = self.copies.next(views, now_s)
        return None if found is None else (found[0].id, found[1].block)


def test_the_hottest_prefix_goes_to_the_emptiest_engine_once_it_has_been_idle_for_a_while():
    fleet = Fleet()
    fleet.hold("e1", 10)

    assert fleet.next(1.9) is None
    assert fleet.next(2.0) == ("e2", HOT)


def test_one_that_answers_or_has_answered_since_is_not_idle():
    fleet = Fleet()
    booking = fleet.send("e1")
    fleet.send("e2").release()

    assert fleet.next(2.0) is None
    booking.release()
    assert fleet.next(3.9) is None
    assert fleet.next(4.0) == ("e2", HOT)


@pytest.mark.parametrize(
    ("held", "facts", "is_copied"),
    [
        # 1,440 of 1,600 tokens may be held: 320 and a block more are 21 blocks.
        (69, {}, True),
        (70, {}, False),
        (0, {"kv_capacity_tokens": 0}, False),
        (0, {"model": "other"}, False),
        (0, {"block_size_tokens": 32}, False),
    ],
)
def test_only_where_room_is_known_and_blocks_are_alike(held, facts, is_copied):
    fleet = Fleet(**facts)
    for name in ("e1", "e2"):
        fleet.hold(name, held)

    assert (fleet.next(2.0) is not None) is is_copied


def test_not_where_nobody_tells_what_is_held():
    fleet = Fleet()
    fleet["e1"].is_told = False
    fleet.index.drop("e2")

    assert fleet.next(2.0) is None


def test_not_while_any_holder_has_no_more_than_its_share_or_nothing_to_do():
    fleet = Fleet()
    fleet.index.store(Source("e1", "i"), [HOT])
    # One below its share has the hottest already, so the next one is copied: there, as to the emptiest.
    assert fleet.next(2.0) == ("e2", WARM)

    for booking in fleet.load:
        booking.release()
    assert fleet.next(2.0) is None


def test_prefixes_of_which_few_conversations_began_lately_are_not_copied():
    fleet = Fleet()
    for block in (HOT, WARM):
        for name in ("e1", "e2"):
            fleet.index.store(Source(name, "i"), [block])

    assert fleet.next(2.0) is None
    fleet.hot.began(COLD, memoryview(pack_tokens([COLD] * 320)), 2.0)
    fleet.hot.began(COLD, memoryview(pack_tokens([COLD] * 320)), 2.0)
    assert fleet.next(2.0)[1] == COLD


def test_so_many_a_minute_and_what_an_engine_did_not_keep_not_again_at_once():
    fleet = Fleet(per_minute=2)
    fleet.hold("e1", 10)
    for expected in (("e2", HOT), ("e1", HOT)):
        assert fleet.next(2.0) == expected
        fleet.copies.begun(fleet[expected[0]], fleet.hot.hottest(1)[0], 2.0)

    assert fleet.next(2.0) is None
    fleet.send("e0", 61.0)
    assert fleet.next(61.9) is None
    fleet.send("e0", 62.0)
    for block in (HOT, HOT, HOT):
        fleet.hot.began(block, memoryview(b""), 62.0)
    assert fleet.next(62.0) == ("e2", HOT)


class Counted:
    """An index that counts what it is asked."""

    def __init__(self, index):
        self.index, self.asked = index, Counter()

    def __getattr__(self, name):
        self.asked[name] += 1
        return getattr(self.index, name)


def test_a_look_asks_the_index_once_for_each_prefix_however_many_engines_there_are():
    fleet = Fleet()
    for number in range(100):
        fleet.table.put(replace(INFO, id=f"n{number}"))
        fleet.index.begin(Source(f"n{number}", "i"))
    fleet.next(0.0)
    for worker in fleet.table.all()[3:]:
        worker.joined, worker.recent = None, 0.0
    # One below its share has them all: nothing is to be copied, and every prefix is looked at.
    fleet.index.store(Source("n7", "i"), [HOT, WARM])
    index = fleet.copies._index = Counted(fleet.index)
    assert fleet.next(2.0) is None
    assert index.asked == {"publishers": 2}


def test_an_engine_that_joins_or_is_kept_out_is_left_alone():
    fleet = Fleet()
    fleet["e1"].joined = Joined(30.0, 0)
    fleet["e2"].saturated(0.0, 30.0)

    assert fleet.next(2.0) is None


def test_an_idle_engine_computes_a_hot_prefix_and_is_known_to_hold_it(run, short_dir, monkeypatch):
    monkeypatch.setattr(spreading, "_IDLE_S", 0.0)

    async def main():
        rng = random.Random(3)
        sims = [Sim("e0", short_dir), Sim("e1", short_dir)]
        settings = {"warm_prefixes": 0, "probe_s": 0.0}
        async with routed_sims(*sims, settings=settings) as bench:
            desk = bench.desk
            busy, idle = desk.workers.get("e0"), desk.workers.get("e1")
            # What an engine holds is known once it has said anything.
            busy.saturated(desk.loop.time(), 60.0)
            await generate(bench, prompt_of(rng, bench.text.words, 40), 4)
            busy.saturated_until_s = 0.0
            idle.saturated(desk.loop.time(), 60.0)
            recent = idle.recent
            hot = prompt_of(rng, bench.text.words, 320)
            for _ in range(6):
                await generate(bench, hot + prompt_of(rng, bench.text.words, 40), 4)
                await told(bench)
            assert busy.num_sent
            assert idle.num_sent == 1

            now_s = desk.loop.time()
            load = busy.book(100, 0, 10, now_s, 20 * desk.workers.recent_unit(now_s))
            idle.saturated_until_s = 0.0
            metrics, prompt = desk.metrics, desk.hashers.of(16).prompt(hot)
            await until(lambda: metrics.warmed_tokens.value("idle") > 0)
            await until(lambda: desk.index.match(prompt).get("e1") == 320 // 16)

            assert metrics.warmed_tokens.value("idle") == 320
            assert metrics.warmed_tokens.value("joined") == 0
            # It is nobody's share.
            assert (idle.num_sent, idle.recent) == (1, recent)
            load.release()
            await until(lambda: idle.active_requests == 0)
            bench.assert_books_balance()

    run(main)


class Begun:
    """Stands for a group of tasks, and for the one task begun in it."""

    def __init__(self):
        self.names, self.is_over = [], True

    def create_task(self, coroutine, name):
        coroutine.close()
        self.names.append(name)
        return self

    def done(self):
        return self.is_over


@pytest.mark.source
@pytest.mark.parametrize(
    ("state", "is_begun"),
    [
        ({}, True),
        ({"line": ["somebody waits"]}, False),
        ({"is_draining": True}, False),
        ({"uses_index": False}, False),
        ({"is_over": False}, False),
    ],
)
def test_nothing_is_copied_while_anybody_waits_or_caches_do_not_decide(state, is_begun):
    fleet, group = Fleet(), Begun()
    policy = SimpleNamespace(uses_index=state.pop("uses_index", True))
    placement = SimpleNamespace(overlaps=SimpleNamespace(hot=fleet.hot), policy=policy)
    facts = {"line": [], "is_draining": False} | state
    desk = SimpleNamespace(
        **({"settings": make_settings({}), "placement": placement} | facts),
        workers=fleet.table,
        index=fleet.index,
    )
    warmer = Warmer(desk)
    views = [fleet.table.view(AGGREGATED, None, 0.0).workers]
    warmer._copy_to_idle(group, views, 0.0)
    warmer._copy_to_idle(group, views, 2.0)
    begun = ["copy:e1"] if is_begun or "is_over" in state else []
    assert group.names == begun
    group.is_over = state.get("is_over", True)
    warmer._copy_to_idle(group, views, 2.2)
    assert len(group.names) == (2 if is_begun else len(begun))


@pytest.mark.source
def test_nothing_is_looked_at_where_both_are_switched_off(run):
    async def main():
        settings = make_settings({"warm_prefixes": 0, "warm_idle": 0})
        placement = SimpleNamespace(overlaps=SimpleNamespace(hot=HotPrefixes()))
        desk = SimpleNamespace(
            settings=settings, placement=placement, workers=None, index=PrefixIndex()
        )
        await Warmer(desk).run()

    run(main)

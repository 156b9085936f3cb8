"""Blocks that engines can load from their host's memory: found, priced in time, loaded, and learned from."""

import json
import random
from dataclasses import astuple

import pytest
from router_bench import until
from router_relays import relayed, talk
from router_sims import Sim, generate, prompt_of, routed_sims

from dynctl.cli import explain
from dynctl.core.deployment import EngineInfo, EngineState
from dynctl.core.kv import HOST, STORAGE
from dynctl.core.router_settings import Settings
from dynctl.kv import wire
from dynctl.router.desk import load_policy
from dynctl.router.loading import assumed_loads, credit
from dynctl.router.metrics import Metrics
from dynctl.router.placement import Order, Placement
from dynctl.router.prefix_index import PrefixIndex, Source
from dynctl.router.prompt import Hashers, Prompt
from dynctl.router.sources.feed import KvFeed, LostError
from dynctl.router.worker_table import WorkerTable

HASHERS = Hashers("s")
SLOW = {
    "num_blocks": 80,
    "max_model_len": 1200,
    "host_blocks": 4000,
    "prefill_us_per_token": 300.0,
}
"""A prompt of 1,000 tokens takes 0.3 s to compute, 7 ms to load, and most of the device."""


def newest(bench):
    return json.loads(bench.desk.ring.to_json(1))[0]


def fleet(*names):
    settings, index = Settings(), PrefixIndex()
    table = WorkerTable(settings)
    for name in names:
        table.put(
            EngineInfo(
                *(name, "i1", EngineState.READY, "aggregated", "d", "sim", "m"),
                block_size_tokens=16,
                kv_capacity_tokens=200_000,
                max_num_seqs=64,
            )
        )
        index.begin(Source(name, "i1"))
    return table, index, Placement(table, index, load_policy("kv"), settings, random.Random(1))


def place(placement, ids, now_s=0.0):
    return placement.place(Order("r", Prompt.known(HASHERS, ids), None, 20), now_s)


# Price


def test_a_load_saves_the_prefill_it_replaces_less_its_own_time():
    loads = assumed_loads(Settings(load_setup_ms=1.0, host_load_gbytes_s=10.24))
    tokens, found = credit(160, [(HOST, 1160)], loads, 0.1, 0.1)

    assert astuple(found) == (160, 1000, pytest.approx(11.0), HOST)
    assert tokens == 890  # 100 ms of prefill less 11


def test_a_slow_load_is_worth_nothing_and_never_less():
    loads = assumed_loads(Settings(host_load_gbytes_s=0.1))
    tokens, found = credit(160, [(HOST, 1160)], loads, 0.1, 0.1)

    assert tokens == 0
    assert astuple(found) == (160, 1000, pytest.approx(100.0), HOST)
    assert credit(0, [(HOST, 16)], loads, 0.0, 0.001)[0] == 0


def test_each_medium_gives_what_faster_ones_lack():
    loads = assumed_loads(
        Settings(load_setup_ms=0.0, host_load_gbytes_s=10.24, storage_load_gbytes_s=1.024)
    )
    tokens, found = credit(100, [(HOST, 200), (STORAGE, 400)], loads, 1.0, 1.0)

    assert astuple(found) == (100, 300, pytest.approx(100 * 0.01 + 200 * 0.1), 0)
    assert tokens == 279
    assert credit(300, [(HOST, 200), (STORAGE, 300)], loads, 1.0, 1.0) == (0, None)


def test_in_a_full_cache_loaded_blocks_take_room_too():
    loads = assumed_loads(Settings(load_setup_ms=0.0, host_load_gbytes_s=10.24))

    # 90 ms saved, at 0.15 ms for what a token costs in all.
    assert credit(0, [(HOST, 1000)], loads, 0.1, 0.15)[0] == 600


def test_a_setting_of_no_speed_at_all_is_no_fault():
    loads = assumed_loads(Settings(storage_load_gbytes_s=0.0))

    assert credit(0, [(STORAGE, 1000)], loads, 0.1, 0.1)[0] == 0


def worker_and_other():
    table, _, _ = fleet("a", "b")
    return table.get("a"), table.get("b")


def test_one_stall_does_not_take_the_credit_from_all_engines():
    worker, other = worker_and_other()
    for _ in range(20):
        worker.load_took(HOST, 4000, 45.0)
    before = other.loads[HOST].at(4000)
    worker.load_took(HOST, 4000, 20_000.0)

    assert before == pytest.approx(45.0, rel=0.01)
    assert other.loads[HOST].at(4000) < 50.0
    assert worker.loads[HOST].at(4000) < 50.0


def test_the_first_loads_correct_what_was_assumed_by_any_factor():
    worker, other = worker_and_other()
    assert worker.loads[HOST].at(4000) == pytest.approx(21.5, rel=0.01)
    for _ in range(3):
        worker.load_took(HOST, 4000, 4500.0)

    assert other.loads[HOST].at(4000) == pytest.approx(4500.0, rel=0.01)


def test_loads_that_seemed_to_take_no_time_are_unlearned():
    worker, other = worker_and_other()
    for _ in range(10):
        worker.load_took(HOST, 4000, 0.0)
    assert other.loads[HOST].at(4000) == pytest.approx(0.0, abs=0.01)
    for _ in range(200):
        worker.load_took(HOST, 4000, 45.0)

    assert other.loads[HOST].at(4000) == pytest.approx(45.0, rel=0.15)


# Placing


def test_the_engine_that_can_load_is_taken_before_one_that_would_compute(capsys):
    _, index, placement = fleet("a", "b")
    ids = list(range(1601))
    host = Source("b", "i1", 0, HOST)
    index.begin(host)
    index.store(host, HASHERS.of(16).prompt(ids).hashes())
    index.store(Source("b", "i1"), HASHERS.of(16).prompt(ids[:160]).hashes())
    placed = place(placement, ids)
    (decision,) = placed.decisions

    assert decision.engine == "b"
    assert (placed.overlap_tokens, decision.device_tokens) == (1600, 160)
    assert decision.to_load.tokens == 1440
    # Booked as much prefill as the load takes, beside the token that is computed.
    assert 1 < placed.main.worker.pending_prefill_tokens < 400
    assert decision.recompute() == decision.position
    assert (placed.outlook.held, placed.outlook.predicted) == (1600, 1600)
    shown = decision.to_json()
    by_engine = {c["engine"]: c for c in shown["candidates"]}
    assert by_engine["b"]["load_tokens"] == 1440
    assert by_engine["b"]["load_ms"] == pytest.approx(shown["predicted"]["load_ms"], abs=0.001)
    assert by_engine["a"]["load_tokens"] == by_engine["a"]["load_ms"] == 0
    assert shown["predicted"]["prefill_ms"] < 10
    explain._show(shown)
    told = capsys.readouterr().out
    assert "1600 tokens expected" in told
    assert "+ load " in told
    assert "LOAD_TOKENS" in told


def test_the_device_is_worth_more_than_the_host_and_both_more_than_nothing():
    _, index, placement = fleet("device", "host", "none")
    ids = list(range(1601))
    blocks = HASHERS.of(16).prompt(ids).hashes()
    index.store(Source("device", "i1"), blocks)
    index.begin(Source("host", "i1", 0, HOST))
    index.store(Source("host", "i1", 0, HOST), blocks)
    (decision,) = place(placement, ids).decisions

    assert decision.engine == "device"
    by_name = dict(zip(("device", "host", "none"), decision.overlaps_tokens, strict=True))
    assert by_name["device"] == 1600 > by_name["host"] > 1000 > by_name["none"] == 0


def test_doubts_go_for_what_could_be_loaded_too():
    _, index, placement = fleet("a")
    ids = list(range(1601))
    index.begin(Source("a", "i1", 0, HOST))
    index.store(Source("a", "i1", 0, HOST), HASHERS.of(16).prompt(ids).hashes())
    index.believe("a", 0.5)
    placed = place(placement, ids)

    assert placed.overlap_tokens == 800


def test_a_transfer_is_not_spared_by_what_a_decode_engine_could_load():
    """Blocks that come from a prefill engine go to its device; what it offloaded is not asked for."""
    table, index, placement = fleet("p")
    table.put(
        EngineInfo(*("d", "i1", EngineState.READY, "decode", "d", "sim", "m"), block_size_tokens=16)
    )
    table.put(
        EngineInfo(
            *("p", "i2", EngineState.READY, "prefill", "d", "sim", "m"), block_size_tokens=16
        )
    )
    ids = list(range(1601))
    for name, incarnation in (("d", "i1"), ("p", "i2")):
        index.begin(Source(name, incarnation))
        index.begin(Source(name, incarnation, 0, HOST))
        index.store(Source(name, incarnation, 0, HOST), HASHERS.of(16).prompt(ids).hashes())
    decode, prefill = place(placement, ids).decisions

    assert (decode.leg, decode.overlap_tokens, decode.loadable) == ("decode", 0, None)
    assert (prefill.leg, prefill.overlap_tokens) == ("prefill", 1600)


def test_what_is_expected_begins_where_the_device_ends_and_is_taken_back_there():
    _, index, placement = fleet("a")
    ids = list(range(1601))
    index.begin(Source("a", "i1", 0, HOST))
    index.store(Source("a", "i1", 0, HOST), HASHERS.of(16).prompt(ids).hashes())
    first = place(placement, ids)
    (second,) = place(placement, ids).decisions

    assert second.device_tokens > 1400
    prompt = Prompt.known(HASHERS, ids)
    placement.unexpect(prompt, first.main.worker, first.decisions[0].device_tokens)
    assert index.match(prompt.blocks(16)) == {}


# Frames


def test_frames_of_a_slower_medium_begin_it_and_a_gap_of_the_devices_is_noticed():
    index = PrefixIndex()
    feed = KvFeed(index, Metrics(), "e", "i1")

    def apply(frame):
        for _ in feed.apply(frame):
            pass

    with pytest.raises(LostError):
        apply(wire.Delta("i1", 3, [1], []))
    apply(wire.Snapshot("i1", 3, 16, [1, 2]))
    apply(wire.Delta("i1", 4, [1], [], medium=HOST))
    apply(wire.Heartbeat("i1", 3))
    assert (index.num_blocks("e"), index.num_slower_blocks("e")) == (2, 1)
    apply(wire.Snapshot("i1", 4, 16, [7, 8, 9], medium=HOST))
    apply(wire.Delta("i1", 5, [], [7], medium=HOST))
    assert (index.num_blocks("e"), index.num_slower_blocks("e")) == (2, 2)
    with pytest.raises(LostError):
        apply(wire.Delta("i1", 4, [], [8], medium=HOST))
    index.drop("e")
    assert (index.slower, index.slower_bits) == ({}, 0)


# Whole


@pytest.mark.parametrize("describes", [0, 1])
def test_evicted_prompts_are_loaded_where_the_host_has_them_sooner_than_they_are_computed(
    run, short_dir, describes
):
    async def main():
        rng = random.Random(3)
        sims = [
            Sim(f"e{i}", short_dir, **SLOW, self_describing_kv_events=describes) for i in range(2)
        ]
        async with routed_sims(*sims) as bench:
            index, words = bench.desk.index, bench.text.words
            prompt = prompt_of(rng, words, 1000)
            blocks = bench.desk.hashers.of(16).prompt(prompt)
            said = await generate(bench, prompt, 4)
            first = newest(bench)
            home = first["engine"]
            await until(lambda: index.num_slower_blocks(home) >= 62)
            worker = bench.desk.workers.get(home)
            # A stall of this machine can make any one answer late.
            for _ in range(5):
                # Whatever else both are asked does not fit beside it.
                while home in index.match(blocks):
                    await generate(bench, prompt_of(rng, words, 1000), 4)
                num_prefills, num_loads = worker.prefill.num_seen, worker.loads[HOST].num_seen
                assert await generate(bench, prompt, 4) == said
                again = newest(bench)
                assert again["engine"] == home
                assert again["cached_tokens"] == again["overlap_tokens"] == 992
                chosen = next(c for c in again["candidates"] if c["engine"] == home)
                assert (chosen["load_tokens"], again["is_reproduced"]) == (992, True)
                # The time it took was learned as that of a load, not as that of a prefill of a few tokens.
                await until(lambda: worker.loads[HOST].num_seen == num_loads + 1)  # noqa: B023
                assert worker.prefill.num_seen == num_prefills
                if again["ttft_ms"] < 0.5 * first["ttft_ms"]:
                    break
            else:
                raise AssertionError("a load never took less than half as long as the prefill")
            bench.assert_books_balance()

    run(main)


def test_relays_tell_of_hosts_too(run, tls, short_dir):
    async def main():
        rng = random.Random(5)
        async with relayed(tls, Sim("e0", short_dir, **SLOW)) as bench:
            index, words = bench.desk.index, bench.text.words
            prompt = prompt_of(rng, words, 1000)
            await talk(bench, prompt, 2)
            await until(lambda: index.num_slower_blocks("e0") >= 62)
            while "e0" in index.match(bench.desk.hashers.of(16).prompt(prompt)):
                await talk(bench, prompt_of(rng, words, 1000), 2)
            await talk(bench, prompt, 2)
            again = newest(bench)

            assert again["cached_tokens"] == again["overlap_tokens"] == 992
            assert again["candidates"][0]["load_tokens"] == 992

    run(main)

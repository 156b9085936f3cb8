"""What the index is fed: in part believed while it is doubtful, dropped when it may be wrong, never another's (K rows)."""

import ast
import asyncio
import dataclasses
import itertools
import json
import random
import re
import time
from pathlib import Path

import pytest
from router_bench import until
from router_relays import relayed, talk
from router_sims import Sim, generate, prompt_of, routed_sims, told

import dynctl
from dynctl.core.deployment import EngineInfo, EngineState
from dynctl.core.kv import HOST, STORAGE, AllBlocksCleared, BlockRemoved, BlockStored
from dynctl.http1 import stream
from dynctl.http1.stream import Pieces
from dynctl.http1.upstream import Address, Upstream
from dynctl.kv import intake, publisher, reader, wire
from dynctl.kv.events import EventBatch
from dynctl.router.config import RelayTarget, Settings
from dynctl.router.desk import load_policy
from dynctl.router.loading import assumed_loads
from dynctl.router.metrics import Metrics
from dynctl.router.placement import Order, Placement
from dynctl.router.prefix_index import PrefixIndex, Source
from dynctl.router.prompt import Hashers, Prompt
from dynctl.router.sources import ranks, relay
from dynctl.router.sources.feed import KvFeed
from dynctl.router.sources.fleet import Fleet
from dynctl.router.sources.relay import RelaySource
from dynctl.router.sources.route import Route
from dynctl.router.worker_table import WorkerTable

HASHERS = Hashers("s")


def fleet(number, slots):
    table, index = WorkerTable(Settings()), PrefixIndex()
    for i in range(number):
        table.put(
            EngineInfo(
                *(f"e{i}", "i1", EngineState.READY, "aggregated", "d", "sim", "m"),
                block_size_tokens=16,
                kv_capacity_tokens=200_000,
                max_num_seqs=slots,
            )
        )
        index.begin(Source(f"e{i}", "i1"))
    return index, Placement(table, index, load_policy("kv"), Settings(), random.Random(1))


PACKAGE = Path(dynctl.__file__).parent


def newest(bench):
    return json.loads(bench.desk.ring.to_json(1))[0]


def states(text):
    """Engines by how their caches are known."""
    found = re.findall(r'index_engines\{state="(\w+)"\} (\d+)', text)
    return {state: int(number) for state, number in found if number != "0"}


def test_k1_what_is_known_counts_half_while_batches_are_missing(run, tls, short_dir):
    async def main():
        rng = random.Random(5)
        async with relayed(tls, Sim("e0", short_dir)) as bench:
            prompt = prompt_of(rng, bench.text.words, 160)
            await talk(bench, prompt, 2)
            await until(lambda: bench.desk.index.num_blocks("e0") == 10)
            rank = bench.host.relay._engines["e0"].source._ranks[0]
            rank._reader._judge_trust = lambda: None  # or its next look would find all well
            rank._reader._trust = 0.5
            rank.on_trust(0.5)
            await until(lambda: bench.desk.index.doubts == {"e0": 0.5})
            await talk(bench, prompt, 2)
            assert newest(bench)["overlap_tokens"] == 72
            assert newest(bench)["cached_tokens"] == 144
            rank._reader._trust = 1.0
            rank.on_trust(1.0)
            await until(lambda: not bench.desk.index.doubts)
            await talk(bench, prompt, 2)
            assert newest(bench)["overlap_tokens"] == newest(bench)["cached_tokens"] == 144

    run(main)


@pytest.mark.parametrize(
    "broken",
    [
        wire.encode(wire.Delta("i1", -5, [1], [])),
        wire.encode(wire.Delta("i9", 10**6, [1], [])),
        wire.encode(wire.Heartbeat("i1", 10**6)),
        b"\x00\x00\x00\x05X\x00\x00..",
    ],
)
def test_k2_a_stream_that_does_not_go_on_drops_what_is_known_and_begins_anew(
    run, tls, short_dir, broken, monkeypatch
):
    dropped, drop = [], PrefixIndex.drop
    monkeypatch.setattr(
        PrefixIndex, "drop", lambda index, engine: (dropped.append(engine), drop(index, engine))
    )

    async def main():
        rng = random.Random(6)
        async with relayed(tls, Sim("e0", short_dir)) as bench:
            prompt = prompt_of(rng, bench.text.words, 160)
            await talk(bench, prompt, 2)
            await until(lambda: bench.desk.index.num_blocks("e0") == 10)
            dropped.clear()
            bench.host.relay._engines["e0"].source._send(broken)
            await until(lambda: bench.desk.metrics.kv_frames.value("lost") == 1)
            assert dropped == ["e0"]
            await until(lambda: bench.desk.index.num_blocks("e0") == 10)
            await talk(bench, prompt, 2)
            assert newest(bench)["overlap_tokens"] == newest(bench)["cached_tokens"] == 144

    run(main)


class NoGroup:
    """Takes tasks and runs none."""

    def __init__(self):
        self.names = []

    def create_task(self, coroutine, name):
        coroutine.close()
        self.names.append(name)
        return asyncio.get_running_loop().create_future()


def test_k12_an_id_belongs_to_who_named_it_first_and_the_other_changes_nothing(run, caplog):
    async def main():
        table, index, settings = WorkerTable(Settings()), PrefixIndex(), Settings()
        fleet = Fleet(table, index, Metrics(), lambda: None)
        mine, other = (
            RelaySource(RelayTarget(name, "127.0.0.1", 1), None, fleet, "d", None, settings)
            for name in ("host-a", "host-b")
        )
        info = EngineInfo(
            *("e0", "i1", EngineState.READY, "aggregated", "d", "sim", "m"), block_size_tokens=16
        )
        group = NoGroup()
        mine._update([info], group)
        index.begin(Source("e0", "i1"))
        index.store(Source("e0", "i1"), [1, 2, 3])
        assert "kv:e0" in group.names
        group.names.clear()
        other._update([dataclasses.replace(info, incarnation="i2", role="decode")], group)

        assert group.names == []
        assert table.get("e0").info == info
        assert index.num_blocks("e0") == 3
        assert "host-a and by host-b" in caplog.text
        other._is_up = True
        other._failed("gone", was_up=False)
        assert table.get("e0").is_reachable
        other._update([], group)
        assert table.get("e0") is not None
        for source in (mine, other):
            await source._upstream.close()

    run(main)


def test_k8_what_an_earlier_start_held_is_void_as_soon_as_another_is_seen(run):
    async def main():
        table, index = WorkerTable(Settings()), PrefixIndex()
        fleet = Fleet(table, index, Metrics(), lambda: None)
        route = Route(Upstream(Address(host="127.0.0.1", port=1)))
        info = EngineInfo(*("e0", "i1", EngineState.READY, "aggregated", "d", "sim", "m"))
        prompt = HASHERS.of(16).prompt(range(160))
        assert fleet.saw("h", info, route)
        index.begin(Source("e0", "i1"))
        index.store(Source("e0", "i1"), prompt.hashes())
        assert not fleet.saw("h", info, route)
        assert index.match(prompt) == {"e0": 10}

        assert fleet.saw("h", dataclasses.replace(info, incarnation="i2"), route)
        assert index.match(prompt) == {}
        assert not index.store(Source("e0", "i1"), prompt.hashes())
        assert fleet.routes["e0"] is route
        await route.upstream.close()

    run(main)


def test_k9_a_cache_cleared_in_silence_misleads_each_prompt_once_at_most(run, short_dir):
    """The usage gauge tells nothing: it counts blocks in use, and falls to 0 whenever an engine idles."""

    async def main():
        rng = random.Random(7)
        sim = Sim("e0", short_dir)
        async with routed_sims(sim) as bench:
            prompts = [prompt_of(rng, bench.text.words, 100 + 16 * n) for n in range(4)]
            for prompt in prompts:
                await generate(bench, prompt, 2)
            await until(lambda: bench.desk.index.num_blocks("e0") >= 30)
            assert sim.engine.reset_prefix_cache()
            sim.engine.scheduler.cache.take_events()  # and never told
            for prompt in prompts:
                await generate(bench, prompt, 2)
                assert newest(bench)["overlap_tokens"] > newest(bench)["cached_tokens"] == 0
                blocks = bench.desk.hashers.of(16).prompt(prompt)
                await until(lambda of=blocks: bench.desk.index.match(of).get("e0") == of.num_blocks)
                await generate(bench, prompt, 2)
                assert newest(bench)["overlap_tokens"] == newest(bench)["cached_tokens"] > 80
            # Told late, it is emptied at once; what the engine stored since is stored again as it comes.
            sim.engine.publisher.publish(EventBatch(0.0, (AllBlocksCleared(),)))
            await until(lambda: bench.desk.index.num_blocks("e0") == 0)

    run(main)


def test_k19_a_long_answer_that_is_not_taken_makes_its_sender_wait(run):
    class Call:
        def __init__(self):
            self.told = []

        def pause(self):
            self.told.append("pause")

        def resume(self):
            self.told.append("resume")

    async def main():
        pieces = Pieces(1.0, "/x")
        pieces.call = call = Call()
        for number in range(100):
            pieces.on_data(b"%d" % number)
        assert call.told == ["pause"]
        await asyncio.sleep(0.02)
        assert pieces.behind_s >= 0.02
        pieces.on_end()
        assert [piece async for piece in pieces] == [b"%d" % number for number in range(100)]
        assert call.told == ["pause", "resume"]

    run(main)


def test_k19_a_sender_that_had_to_wait_may_have_more_so_one_round_taken_is_not_all(run):
    async def main():
        pieces = Pieces(1.0, "/x")
        for _ in range(3):
            for _ in range(64):
                pieces.on_data(b"1")
            for _ in range(64):
                await anext(pieces)
            assert pieces.behind_s > 0.0
        pieces.on_data(b"1")
        await anext(pieces)
        assert pieces.behind_s == 0.0

    run(main)


async def flood_of_events(sim, is_over):
    """Let an engine tell more than is taken in at each turn of the loop."""
    while not is_over():
        for number in range(50):
            sim.engine.publisher.publish(EventBatch(0.0, (BlockRemoved((number,), "GPU"),)))
        await asyncio.sleep(0)


async def flood_of_deltas(source, is_over):
    """Let a relay do that."""
    [exchange] = source._limits_bytes
    hashes = itertools.count(1)
    while not is_over():
        if exchange.unsent_bytes < 2**20:  # or the relay would cut the router off
            stored = list(itertools.islice(hashes, 8192))
            source._send(wire.encode(wire.Delta("i1", source._ranks[0].seq, stored, ())))
        await asyncio.sleep(0)


@pytest.mark.parametrize("is_relayed", [False, True])
def test_k19_who_is_heard_too_late_is_placed_by_load_and_named_until_all_is_taken_in(
    run, tls, short_dir, monkeypatch, caplog, is_relayed
):
    monkeypatch.setattr(intake, "TURN_S", 0.0)
    monkeypatch.setattr(reader, "_SLICE", 5)
    monkeypatch.setattr(stream, "_MAX_WAITING", 2)
    monkeypatch.setattr(publisher, "BUFFER_STEPS", 10**6)  # none is lost for good

    async def main():
        sims = Sim("e0", short_dir), Sim("e1", short_dir)
        async with relayed(tls, *sims) if is_relayed else routed_sims(*sims) as bench:
            ask, index = talk if is_relayed else generate, bench.desk.index
            prompt = prompt_of(random.Random(9), bench.text.words, 160)
            await ask(bench, prompt, 2)
            name = newest(bench)["engine"]
            await until(lambda: index.num_blocks(name) == 10)
            await ask(bench, prompt, 2)
            assert (newest(bench)["engine"], newest(bench)["overlap_tokens"]) == (name, 144)

            monkeypatch.setattr(reader, "BEHIND_S", 0.05)
            monkeypatch.setattr(relay, "BEHIND_S", 0.05)
            over = asyncio.Event()
            if is_relayed:
                source = bench.host.relay._engines[name].source
                flood = asyncio.create_task(flood_of_deltas(source, over.is_set))
            else:
                [sim] = [sim for sim in sims if sim.name == name]
                flood = asyncio.create_task(flood_of_events(sim, over.is_set))
            await until(lambda: index.doubts == {name: 0.0})
            await ask(bench, prompt, 2)
            assert newest(bench)["overlap_tokens"] == 0
            assert states(bench.desk.exposition().decode())["doubtful"] == 1
            over.set()
            await flood
            await until(lambda: not index.doubts)
            await ask(bench, prompt, 2)
            assert newest(bench)["overlap_tokens"] == 144
            said = [one.message for one in caplog.records if f" of {name}: " in one.message]
            assert "nothing counts as cached" in said[0]
            assert "all here again" in said[-1]

    run(main)


class Liar(Sim):
    """Publishes anything but what its cache does."""

    async def start(self, text):
        await super().start(text)
        rng, publish, words = random.Random(self.name), self.engine.publisher.publish, text.words
        known = []

        def lie(batch, **options):
            events = []
            for _ in range(rng.randrange(1, 4)):
                kind = rng.random()
                if kind < 0.6:
                    parent = rng.choice([None, *known[-20:]])
                    handles = tuple(rng.getrandbits(64) for _ in range(rng.randrange(1, 6)))
                    known.extend(handles)
                    # Now and then with tokens that clients do ask with.
                    tokens = tuple(rng.choice(words[:4]) for _ in range(16 * len(handles)))
                    events.append(BlockStored(handles, parent, tokens, 16, medium="GPU"))
                elif kind < 0.95:
                    events.append(BlockRemoved((rng.choice([*known, 5]),), "GPU"))
                else:
                    events.append(AllBlocksCleared())
            events += [event for event in batch.events if rng.random() < 0.3]
            return publish(EventBatch(batch.ts, tuple(events)), **options)

        self.engine.publisher.publish = lie


def twist(bench, prompt, rng):
    """Claim and deny a prompt's blocks on every engine."""
    hashes = bench.desk.hashers.of(16).prompt(prompt).hashes()
    for worker in bench.desk.workers.all():
        source = Source(worker.id, worker.incarnation)
        bench.desk.index.store(source, rng.sample(hashes, len(hashes) // 2))
        bench.desk.index.remove(source, rng.sample(hashes, len(hashes) // 2))


def test_k20_engines_that_lie_about_their_caches_change_no_answer(run, tls, short_dir):
    """Through relays, with prefill and decode engines beside aggregated ones' events: every token is checked."""

    async def main():
        rng = random.Random(20)
        sims = [Liar(f"e{i}", short_dir) for i in range(3)]
        async with relayed(tls, *sims) as bench:
            chain = sims[0].engine.chain
            starts = [prompt_of(rng, bench.text.words[:4], 64) for _ in range(3)]
            wrong = 0
            for number in range(30):
                prompt = rng.choice(starts) + prompt_of(rng, bench.text.words[:4], number % 40)
                twist(bench, prompt, rng)
                assert await talk(bench, prompt, 8) == chain.continuation(prompt, 8)
                wrong += newest(bench)["overlap_tokens"] != newest(bench)["cached_tokens"]
            assert wrong > 10, "the index was right, so nothing was tried"
            bench.assert_books_balance()

    run(main)


def test_k20_a_wrong_index_changes_no_answer_where_prefill_hands_over_to_decode(run, short_dir):
    async def main():
        rng = random.Random(21)
        sims = [Liar(f"e{i}", short_dir, "prefill" if i < 2 else "decode") for i in range(4)]
        async with routed_sims(*sims, settings={"conditional_prefill": 1}) as bench:
            chain = sims[0].engine.chain
            starts = [prompt_of(rng, bench.text.words[:4], 64) for _ in range(3)]
            for number in range(24):
                prompt = rng.choice(starts) + prompt_of(rng, bench.text.words[:4], number % 40)
                twist(bench, prompt, rng)
                assert await generate(bench, prompt, 6) == chain.continuation(prompt, 6)
            bench.assert_books_balance()

    run(main)


def test_k21_a_wall_clock_that_jumps_by_years_changes_nothing(run, short_dir, monkeypatch):
    jumps = random.Random(22)
    real = time.time
    monkeypatch.setattr(time, "time", lambda: real() + jumps.choice([-3e8, -3600, 3600, 3e8]))

    async def main():
        rng = random.Random(23)
        async with routed_sims(Sim("e0", short_dir), Sim("e1", short_dir)) as bench:
            prompts = [prompt_of(rng, bench.text.words, 120) for _ in range(3)]
            for turn in range(3):
                for prompt in prompts:
                    await generate(bench, prompt, 2)
                    await told(bench)
                    if turn:
                        assert newest(bench)["overlap_tokens"] == newest(bench)["cached_tokens"]
                        assert newest(bench)["cached_tokens"] == 112
            assert bench.desk.metrics.kv_frames.value("lost") == 0

    run(main)


def test_k21_no_decision_reads_a_wall_clock():
    """Times of decisions are the event loop's; only what people read is stamped."""
    stamped = {
        "router/desk.py",
        "router/doers.py",
        "router/flight.py",
        "router/short_flight.py",
        "router/decision_files.py",
    }
    for path in [*PACKAGE.glob("kv/*.py"), *PACKAGE.glob("router/**/*.py")]:
        name = str(path.relative_to(PACKAGE))
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name):
                is_wall = (node.value.id, node.attr) == ("time", "time")
                assert not is_wall or name in stamped, f"{name}:{node.lineno}"
            if isinstance(node, ast.Import | ast.ImportFrom):
                names = {alias.name for alias in node.names} | {getattr(node, "module", "")}
                # A chat template may ask for the day, as the engine's does.
                assert "datetime" not in names or name == "router/template.py", name


def test_o8_the_same_prefix_for_everyone_never_fills_one_engine_beside_an_idle_one():
    """Virtual time, three quarters of what four engines can do: full and below 30 % never last 5 s side by side."""
    index, placement = fleet(4, slots=8)
    rng, prefix = random.Random(8), list(range(2048))
    running = {f"e{i}": [] for i in range(4)}
    free_s = dict.fromkeys(running, 0.0)
    since_s, longest_s, now_s = None, 0.0, 0.0
    while now_s < 120.0:
        now_s += rng.expovariate(0.75 * 4 * 8 / 2.0)
        index.sweep(now_s)
        for bookings in running.values():
            for end_s, booking in [entry for entry in bookings if entry[0] <= now_s]:
                bookings.remove((end_s, booking))
                booking.prefill_ended(now_s)
                booking.release()
        full = any(len(bookings) >= 8 for bookings in running.values())
        idle = any(len(bookings) < 0.3 * 8 for bookings in running.values())
        since_s = (since_s or now_s) if full and idle else None
        longest_s = max(longest_s, now_s - since_s) if since_s is not None else longest_s
        tokens = prefix + [rng.randrange(1000) for _ in range(64)]
        placed = placement.place(Order("r", Prompt.known(HASHERS, tokens), None, 64), now_s)
        if not hasattr(placed, "main"):
            continue  # it would wait in the queue
        engine = placed.main.worker.id
        blocks = HASHERS.of(16).prompt(tokens)
        cached = index.match(blocks, 131).get(engine, 0) * 16
        free_s[engine] = max(free_s[engine], now_s) + (len(tokens) - cached) * 1e-4
        index.store(Source(engine, "i1"), blocks.hashes())
        running[engine].append((free_s[engine] + rng.uniform(1.0, 3.0), placed.main))
    assert longest_s <= 5.0
    assert all(running.values())


def test_k15_events_nobody_understands_end_a_source_for_a_while_and_never_the_router(
    run, short_dir, monkeypatch
):
    monkeypatch.setattr(ranks, "_RETRY_EVENTS_S", 0.5)

    async def main():
        rng = random.Random(15)
        sim = Sim("e0", short_dir)
        async with routed_sims(sim) as bench:
            prompt = prompt_of(rng, bench.text.words, 160)
            said = await generate(bench, prompt, 2)
            assert said == sim.engine.chain.continuation(prompt, 2)
            await until(lambda: bench.desk.index.num_blocks("e0") == 10)
            for number in range(30):
                frames = [b"", (100 + number).to_bytes(8, "big"), b"\xc1" * 1000]
                sim.engine.publisher._pub.send_multipart(frames)
            await until(lambda: bench.desk.index.num_blocks("e0") == 0)
            await until(lambda: bench.desk.index.doubts == {"e0": 0.0})
            assert await generate(bench, prompt, 2) == said
            assert newest(bench)["overlap_tokens"] == 0
            # Read anew, its replay tells all there was.
            await until(lambda: bench.desk.index.num_blocks("e0") == 10)
            await until(lambda: not bench.desk.index.doubts)
            assert await generate(bench, prompt, 2) == said
            assert newest(bench)["overlap_tokens"] == newest(bench)["cached_tokens"] == 144

    run(main)


def test_k9_an_engine_that_sleeps_without_a_word_is_known_to_have_nothing(run, short_dir):
    async def main():
        rng = random.Random(9)
        sim = Sim("e0", short_dir)
        async with routed_sims(sim) as bench:
            prompt = prompt_of(rng, bench.text.words, 160)
            said = await generate(bench, prompt, 2)
            await until(lambda: bench.desk.index.num_blocks("e0") == 10)
            assert sim.engine.sleep()
            await until(lambda: bench.desk.index.num_blocks("e0") == 0)
            sim.engine.wake_up()
            assert await generate(bench, prompt, 2) == said
            assert newest(bench)["overlap_tokens"] == newest(bench)["cached_tokens"] == 0
            # What it stores from then on is known again.
            await until(lambda: bench.desk.index.num_blocks("e0") == 10)

    run(main)


def test_k9_relays_look_for_themselves(run, tls, short_dir):
    async def main():
        rng = random.Random(9)
        sim = Sim("e0", short_dir)
        async with relayed(tls, sim, look_s=0.05) as bench:
            prompt = prompt_of(rng, bench.text.words, 160)
            await talk(bench, prompt, 2)
            await until(lambda: bench.desk.index.num_blocks("e0") == 10)
            assert sim.engine.sleep()
            await until(lambda: bench.desk.index.num_blocks("e0") == 0)
            sim.engine.wake_up()
            await talk(bench, prompt, 2)
            assert newest(bench)["overlap_tokens"] == newest(bench)["cached_tokens"] == 0
            await until(lambda: bench.desk.index.num_blocks("e0") == 10)

    run(main)


def test_an_idle_engine_with_a_full_cache_keeps_what_is_known_of_it(run, tls, short_dir):
    """The gauge of a simulated engine stands at 0 then, as vLLM's does."""

    async def main():
        rng = random.Random(9)
        sim = Sim("e0", short_dir)
        async with relayed(tls, sim, look_s=0.01) as bench:
            await talk(bench, prompt_of(rng, bench.text.words, 160), 2)
            await until(lambda: bench.desk.index.num_blocks("e0") == 10)
            await asyncio.sleep(0.2)
            assert sim.engine.gauges()["usage"] == 0.0
            assert bench.desk.index.num_blocks("e0") == 10

    run(main)


def test_what_an_earlier_relay_told_of_slower_media_is_gone_with_its_successors_snapshot():
    """One that has heard of no slower medium since it started would never take those blocks back."""
    index = PrefixIndex()

    def stream(*frames):
        feed = KvFeed(index, Metrics(), "e", "i1")
        for frame in frames:
            list(feed.apply(frame))
        return feed

    other_rank = wire.Snapshot("i1", 4, 16, [9], rank=1, medium=HOST)
    stream(
        wire.Snapshot("i1", 4, 16, [1]),
        wire.Snapshot("i1", 4, 16, [1, 2], medium=HOST),
        wire.Delta("i1", 5, [3], (), medium=STORAGE),
        other_rank,
    )
    assert index.num_slower_blocks("e") == 4
    feed = stream(wire.Snapshot("i1", 7, 16, [1, 5]))
    assert (index.num_blocks("e"), index.num_slower_blocks("e")) == (2, 1)

    # What the same stream tells stays, whatever is told of the device later.
    for frame in (
        wire.Delta("i1", 8, [6, 7], (), medium=HOST),
        wire.Snapshot("i1", 8, 16, [5]),
    ):
        list(feed.apply(frame))
    assert (index.num_blocks("e"), index.num_slower_blocks("e")) == (1, 3)


@pytest.mark.parametrize("medium", [3, 200, -1])
def test_a_medium_that_only_a_newer_relay_knows_is_taken_for_the_slowest(medium):
    index = PrefixIndex()
    feed = KvFeed(index, Metrics(), "e", "i1")
    for frame in (
        wire.Snapshot("i1", 4, 16, []),
        wire.Snapshot("i1", 4, 16, [1, 2], medium=medium),
        wire.Delta("i1", 5, [3], [1], medium=medium),
    ):
        list(feed.apply(frame))

    assert set(index.slower) <= set(assumed_loads(Settings()))
    assert index.holds(Source("e", "i1", 0, STORAGE))
    assert index.num_slower_blocks("e") == 2

"""K16: data-parallel ranks, each with KV events at a place of its own, are workers of their own to the router."""

import asyncio
import dataclasses
import json
import random
import re
from types import SimpleNamespace

import pytest
import zmq
from router_bench import until
from router_relays import relayed, talk
from router_sims import Sim, generate, routed_sims, told
from router_sims import prompt_of as prompt_of_words

from dynctl.cli.route import parse_engine
from dynctl.core.deployment import EngineInfo, EngineState
from dynctl.core.kv import AllBlocksCleared, BlockStored
from dynctl.errors import EngineError, UsageError
from dynctl.kv.events import EventBatch
from dynctl.kv.publisher import EventPublisher
from dynctl.router.config import EngineTarget, RouterConfig, Settings, check_config
from dynctl.router.findings import Evidence, events_fault
from dynctl.router.metrics import Metrics
from dynctl.router.prefix_index import PrefixIndex, Source
from dynctl.router.prompt import Hashers
from dynctl.router.sources.fleet import Fleet
from dynctl.router.sources.layout import ask_layout, read_layout
from dynctl.router.sources.ranks import EngineEvents
from dynctl.router.sources.split import workers_of
from dynctl.router.worker_table import WorkerTable
from dynctl.router.workers import Worker

BLOCK = 16
HASHERS = Hashers("deployment")
INFO = EngineInfo(
    *("e", "e.1", EngineState.READY, "aggregated", "d", "sim", "m"), block_size_tokens=BLOCK
)


def prompt_of(seed, num_blocks):
    rng = random.Random(seed)
    return tuple(rng.randrange(1000) for _ in range(num_blocks * BLOCK))


def stored(tokens, rank):
    handles = tuple(
        hash(tokens[: end + BLOCK]) & (2**64 - 1) for end in range(0, len(tokens), BLOCK)
    )
    return EventBatch(0.0, (BlockStored(handles, None, tokens, BLOCK),), rank)


class Scene:
    """Publishers of an engine's ranks, and what a router makes of their events."""

    def __init__(self, first_port, num_ranks=2):
        base = f"tcp://127.0.0.1:{first_port}"
        replay = f"tcp://127.0.0.1:{first_port + num_ranks}"
        self.target = EngineTarget(
            "e", "http://127.0.0.1:1", "aggregated", base, replay, "", num_ranks
        )
        self.context = zmq.Context()
        self.ranks = [
            EventPublisher(*places, context=self.context) for places in self.target.event_places
        ]
        self.index = PrefixIndex()
        self.table = WorkerTable(Settings())
        self.fleet = Fleet(self.table, self.index, Metrics(), lambda: None)

    async def __aenter__(self):
        for rank in self.ranks:
            rank.start()
        for worker in workers_of(dataclasses.replace(INFO, ranks=self.target.ranks)):
            self.fleet.saw("e", worker, None)
        self.events = EngineEvents(self.target, self.fleet, HASHERS, INFO, self.context)
        self.events.start()
        return self

    async def __aexit__(self, *_):
        self.events.close()
        for rank in self.ranks:
            rank.close()
        self.context.term()

    async def start_anew(self, rank):
        self.ranks[rank].close()
        places = self.target.event_places[rank]
        while True:
            try:
                self.ranks[rank] = EventPublisher(*places, context=self.context)
            except EngineError:  # zmq lets go of a port some time after it says so
                await asyncio.sleep(0.01)
                continue
            self.ranks[rank].start()
            return

    def held(self):
        return [self.index.num_blocks(f"e_dp{rank}") for rank in range(self.target.ranks)]

    def depths(self, tokens):
        found = self.index.match(HASHERS.of(BLOCK).prompt(tokens))
        return [found.get(f"e_dp{rank}", 0) for rank in range(self.target.ranks)]

    def num_of_others(self):
        return [health.num_other_ranks for health in self.events.healths().values()]


def test_k16_what_each_rank_holds_is_known_of_that_rank(run, free_ports):
    async def main():
        async with Scene(free_ports(4)) as scene:
            tokens = prompt_of(1, 6)
            scene.ranks[0].publish(stored(tokens[: 2 * BLOCK], 0))
            scene.ranks[1].publish(stored(tokens[: 5 * BLOCK], 1))
            await until(lambda: scene.held() == [2, 5])
            assert scene.depths(tokens) == [2, 5]
            assert scene.num_of_others() == [0, 0]

            scene.ranks[1].publish(EventBatch(0.0, (AllBlocksCleared(),), 1))
            await until(lambda: scene.held() == [2, 0])
            assert scene.depths(tokens) == [2, 0]

            scene.ranks[1].publish(stored(tokens, 1))
            await until(lambda: scene.depths(tokens) == [2, 6])
            scene.fleet.lost("e", "e_dp1")
            assert scene.held() == [2, 0]
            assert not scene.index.holds(Source("e_dp1", "e.1"))

    run(main)


def test_k16_batches_of_a_rank_not_expected_are_ignored_and_reported(run, free_ports):
    async def main():
        async with Scene(free_ports(4)) as scene:
            scene.ranks[0].publish(stored(prompt_of(1, 2), 0))
            await until(lambda: scene.held() == [2, 0])
            for wrong in (0, 2, 7):
                scene.ranks[1].publish(stored(prompt_of(wrong + 10, 3), wrong))
            scene.ranks[1].publish(stored(prompt_of(2, 4), 1))
            await until(lambda: scene.held() == [2, 4])
            assert scene.num_of_others() == [0, 3]
            assert scene.depths(prompt_of(12, 3)) == [0, 0]
            for name, health in scene.events.healths().items():
                scene.fleet.heard(name, "e.1", health)
            assert scene.fleet.notes_of("e_dp1").num_other_ranks == 3

    run(main)


def test_k16_ranks_of_a_server_beside_others_are_counted_from_its_first(run, free_ports):
    async def main():
        async with Scene(free_ports(4)) as scene:
            scene.ranks[1].publish(stored(prompt_of(1, 2), 73))
            await until(lambda: scene.held() == [0, 2])
            scene.ranks[0].publish(stored(prompt_of(2, 3), 0))
            scene.ranks[0].publish(stored(prompt_of(3, 3), 72))
            await until(lambda: scene.held() == [3, 2])
            assert scene.num_of_others() == [1, 0]

    run(main)


def test_k16_a_rank_that_starts_anew_leaves_the_others_alone(run, free_ports):
    async def main():
        async with Scene(free_ports(4)) as scene:
            for rank in (0, 1):
                for part in range(3):
                    scene.ranks[rank].publish(stored(prompt_of(rank * 10 + part, 2), rank))
            await until(lambda: scene.held() == [6, 6])
            await scene.start_anew(1)
            scene.ranks[1].publish(stored(prompt_of(99, 1), 1))
            await until(lambda: scene.held() == [6, 1])
            assert scene.depths(prompt_of(0, 2)) == [2, 0]
            assert scene.depths(prompt_of(10, 2)) == [0, 0]
            assert scene.depths(prompt_of(99, 1)) == [0, 1]

    run(main)


def test_each_rank_is_a_worker_with_its_share_and_its_side_channel():
    engine = dataclasses.replace(
        INFO, ranks=3, kv_capacity_tokens=300, max_num_seqs=8, side_channel_port=5600
    )
    workers = workers_of(engine)
    assert [worker.id for worker in workers] == ["e_dp0", "e_dp1", "e_dp2"]
    assert [worker.side_channel_port for worker in workers] == [5600, 5601, 5602]
    assert {(w.kv_capacity_tokens, w.max_num_seqs, w.ranks) for w in workers} == {(100, 8, 1)}
    assert workers_of(INFO) == (INFO,)
    without = dataclasses.replace(INFO, ranks=2)
    assert [worker.side_channel_port for worker in workers_of(without)] == [0, 0]


@pytest.mark.parametrize(("ranks", "num_workers"), [(-5, 1), (0, 1), (10**9, 64)])
def test_a_relay_that_names_ranks_there_cannot_be_makes_no_more_workers(ranks, num_workers):
    assert len(workers_of(dataclasses.replace(INFO, ranks=ranks))) == num_workers


def test_the_name_of_a_rank_is_no_other_engines():
    first = parse_engine("http://h:1,kv-events=tcp://h:5557,ranks=2,id=a", 0)
    other = parse_engine("http://h:2,id=a_dp1", 1)
    with pytest.raises(UsageError, match="two engines share an id"):
        check_config(RouterConfig("127.0.0.1:0", engines=(first, other)))


def test_ranks_on_unix_sockets_have_the_places_vllm_makes_of_the_first():
    text = "unix:/run/e,kv-events=ipc:///run/inproc-kv,kv-replay=ipc:///run/inproc-re,ranks=2"
    target = parse_engine(text, 0)
    assert target.event_places == (
        ("ipc:///run/inproc-kv", "ipc:///run/inproc-re"),
        ("ipc:///run/inproc-kv_dp1", "ipc:///run/inproc-re_dp1"),
    )
    check_config(RouterConfig("127.0.0.1:0", engines=(target,)))


def test_each_rank_has_the_next_port_and_ports_of_two_ranks_never_meet():
    text = "http://h:1,kv-events=tcp://h:5557,kv-replay=tcp://h:5600,ranks=2"
    target = parse_engine(text, 0)
    assert target.event_places == (
        ("tcp://h:5557", "tcp://h:5600"),
        ("tcp://h:5558", "tcp://h:5601"),
    )
    other = parse_engine("http://h:2,kv-events=tcp://h:5558", 1)
    with pytest.raises(UsageError, match=r"engine-0 kv-events of rank 1.*engine-1 kv-events"):
        check_config(RouterConfig("127.0.0.1:0", engines=(target, other)))
    narrow = parse_engine(text.replace("5600", "5558"), 0)
    with pytest.raises(UsageError, match="share tcp://h:5558"):
        check_config(RouterConfig("127.0.0.1:0", engines=(narrow,)))


@pytest.mark.parametrize(
    "options",
    [
        "ranks=0",
        "ranks=65",
        "ranks=2",
        "ranks=2,kv-events=ipc:///run/e.kv",
        "ranks=2,kv-events=tcp://h:x",
        "ranks=2,kv-events=tcp://h:65535",
        "ranks=2,kv-events=tcp://h:5,kv-replay=ipc:///run/e.re",
    ],
)
def test_ranks_without_ports_to_count_up_are_refused(options):
    target = parse_engine(f"http://h:1,{options}", 0)
    with pytest.raises(UsageError, match="ranks"):
        check_config(RouterConfig("127.0.0.1:0", engines=(target,)))


def test_a_number_of_ranks_that_is_none_is_refused():
    with pytest.raises(UsageError, match="ranks"):
        parse_engine("http://h:1,ranks=two", 0)


def test_an_engines_metrics_tell_its_ranks_and_what_all_of_them_hold():
    label = 'vllm:cache_config_info{block_size="16",num_gpu_blocks="100",engine="%d"} 1\n'
    text = "".join(label % rank for rank in range(3))

    class Route:
        async def fetch(self, method, path):
            assert (method, path) == ("GET", "/metrics")
            return SimpleNamespace(status=200, body=text.encode())

    layout = asyncio.run(ask_layout(Route()))
    assert (layout.num_ranks, layout.capacity_tokens, layout.block_size_tokens) == (3, 4800, 16)


@pytest.mark.parametrize("blocks", ["9" * 26, "9" * 5000, str(2**40), "0", "None"])
def test_an_engine_that_says_it_holds_more_than_there_is_has_not_said_what_it_holds(blocks):
    text = f'vllm:cache_config_info{{block_size="16",num_gpu_blocks="{blocks}"}} 1\n'
    layout = read_layout(text)
    worker = Worker(
        dataclasses.replace(INFO, kv_capacity_tokens=layout.capacity_tokens), Settings()
    )
    assert layout.block_size_tokens == worker.block_size == 16
    assert worker.capacity_tokens == worker.room.limit_tokens == 0
    assert worker.load().capacity_tokens == 0
    told = dataclasses.replace(INFO, kv_capacity_tokens=16 * 10**26)
    assert Worker(told, Settings()).capacity_tokens == 0, "a relay's table, too"


def test_ranks_nobody_reads_and_batches_of_others_are_named():
    read = Evidence("e", num_ranks=2, num_ranks_read=2, num_stored_blocks=5)
    assert events_fault(read) is None
    cause, text, hint = events_fault(Evidence("e", num_ranks=2, num_ranks_read=1))
    assert cause == "ranks"
    assert "2 data-parallel ranks" in text
    assert "ranks=N" in hint
    cause, text, _ = events_fault(
        Evidence("e", num_ranks=2, num_ranks_read=2, num_other_ranks=4, num_stored_blocks=5)
    )
    assert cause == "ranks"
    assert text.startswith("4 event batches")
    cause, text, hint = events_fault(Evidence("e", num_ranks=1, num_ranks_read=2))
    assert (cause, hint) == ("ranks", "give route ranks=1")
    assert text.startswith("it has 1 data-parallel ranks, not 2")
    # A relay does not say whose it reads.
    assert events_fault(Evidence("e", num_ranks=0, num_stored_blocks=5)) is None


def test_ranks_added_to_a_running_engine_are_noticed(run, short_dir):
    async def main():
        sim = Sim("e0", short_dir)
        async with routed_sims(sim) as bench:
            notes = bench.desk.probes.notes
            assert (notes["e0"].num_ranks, notes["e0"].num_ranks_read) == (1, 1)
            metrics = sim.engine.metrics
            render = metrics.render

            def of_two(*given):
                text = render(*given)
                (line,) = re.findall(rb"vllm:cache_config_info\{.*\n", text)
                return text + line.replace(b'engine="0"', b'engine="1"')

            metrics.render = of_two
            await until(lambda: notes["e0"].num_ranks == 2)
            for number in range(4):
                await generate(bench, [number + 5] * 64, 4)
            found = lambda: [(one.engine, one.cause) for one in bench.desk.probes.findings()]  # noqa: E731
            await until(lambda: found() == [("e0", "ranks")])

    run(main)


def test_ranks_an_engine_does_not_have_get_no_requests_and_are_named(run, short_dir):
    """It would refuse those, with a 400 that clients would take for their own."""

    async def main():
        sim = Sim("e0", short_dir, ranks=2)
        async with routed_sims(sim) as bench:
            workers, both = bench.desk.workers, sim.names

            async def start_anew(names):
                serving = lambda: tuple(w.id for w in workers.all() if w.is_serving())  # noqa: E731
                await sim.stop()
                await until(lambda: not serving())
                sim.names = names
                await sim.start(bench.text)
                await until(lambda: serving() == names)
                for number in range(8):
                    assert len(await generate(bench, [number + 5] * 64, 4)) == 4

            found = lambda: [(one.engine, one.cause) for one in bench.desk.probes.findings()]  # noqa: E731
            await start_anew(both[:1])
            await until(lambda: found() == [("e0_dp0", "ranks")])
            await start_anew(both)
            await until(lambda: found() == [])

    run(main)


async def converse(bench, say=generate, rounds=3):
    """Let four conversations go on for some turns, each turn once its router knows all caches; return what was decided."""
    rng = random.Random(5)
    chain = bench.engines[0].engine.chain
    prompts = [prompt_of_words(rng, bench.text.words, 150) for _ in range(4)]
    for _ in range(rounds):
        for i, prompt in enumerate(prompts):
            said = await say(bench, prompt, 20)
            assert said == chain.continuation(prompt, 20)
            await told(bench)
            prompts[i] = prompt + said + prompt_of_words(rng, bench.text.words, 20)
    bench.assert_books_balance()
    return json.loads(bench.desk.ring.to_json(100))


def assert_hits_are_of_the_rank_asked(bench, decisions):
    """Each turn went back to the rank of the one before it, and found there what it was said to."""
    (sim,) = bench.engines
    later = [one for one in decisions if one["prompt_tokens"] > 150]
    assert len(later) == 8
    assert all(one["overlap_tokens"] == one["cached_tokens"] > 100 for one in later)
    assert {one["engine"] for one in decisions} == {"e0_dp0", "e0_dp1"}
    by_rank = [rank.metrics.num_prompt_tokens for rank in sim.ranks]
    for name, num_tokens in zip(sim.names, by_rank, strict=True):
        assert num_tokens == sum(o["prompt_tokens"] for o in decisions if o["engine"] == name)


def test_a_prompt_goes_to_the_rank_that_holds_it(run, short_dir):
    async def main():
        # On a busy machine prefills of a millisecond look uneven; ranks that are close are to count as equal here.
        sim = Sim("e0", short_dir, ranks=2)
        async with routed_sims(sim, settings={"near_ms": 1000.0}) as bench:
            assert_hits_are_of_the_rank_asked(bench, await converse(bench))

    run(main)


def test_a_prompt_goes_to_the_rank_that_holds_it_through_a_relay(run, tls, short_dir):
    async def main():
        async with relayed(tls, Sim("e0", short_dir, ranks=2), near_ms=1000.0) as bench:
            assert_hits_are_of_the_rank_asked(bench, await converse(bench, talk))
            bench.host.remove("e0")
            await until(lambda: not bench.desk.workers.all())

    run(main)


def test_an_engine_that_comes_back_with_fewer_ranks_is_fewer_workers(run, tls, short_dir):
    async def main():
        async with relayed(tls, Sim("e0", short_dir, ranks=2)) as bench:
            names = lambda: {worker.id for worker in bench.desk.workers.all()}  # noqa: E731
            assert names() == {"e0_dp0", "e0_dp1"}
            bench.engines[0].names = ("e0",)
            bench.host.name("e0", "i2")
            await until(lambda: names() == {"e0"})
            assert len(await talk(bench, [5] * 64, 4)) == 4

    run(main)


def test_ranks_hand_over_to_ranks(run, short_dir, free_ports):
    async def main():
        sims = [
            Sim(role, short_dir, role, ranks=2, side_channel=f"127.0.0.1:{free_ports(2)}")
            for role in ("prefill", "decode")
        ]
        async with routed_sims(*sims) as bench:
            rng, chain = random.Random(6), bench.engines[0].engine.chain
            for _ in range(8):
                prompt = prompt_of_words(rng, bench.text.words, 80)
                assert await generate(bench, prompt, 6) == chain.continuation(prompt, 6)
            for sim in sims:
                assert all(rank.metrics.num_generation_tokens for rank in sim.ranks), sim.name
            bench.assert_books_balance()

    run(main)

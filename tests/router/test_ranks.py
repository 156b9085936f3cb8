"""K16: engines with several data-parallel ranks, each of which publishes its KV events on a port of its own."""

import asyncio
import dataclasses
import random
import re
from types import SimpleNamespace

import pytest
import zmq
from router_bench import until
from router_sims import Sim, generate, routed_sims

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
        self.fleet.saw("e", INFO, None)
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

    def depth(self, tokens):
        return self.index.match(HASHERS.of(BLOCK).prompt(tokens)).get("e", 0)


def test_k16_what_each_rank_holds_is_heard_and_the_engine_has_the_best_of_them(run, free_ports):
    async def main():
        async with Scene(free_ports(4)) as scene:
            tokens = prompt_of(1, 6)
            scene.ranks[0].publish(stored(tokens[: 2 * BLOCK], 0))
            scene.ranks[1].publish(stored(tokens[: 5 * BLOCK], 1))
            await until(lambda: scene.index.num_blocks("e") == 7)
            assert scene.depth(tokens) == 5
            assert scene.events.health().num_other_ranks == 0

            scene.ranks[1].publish(EventBatch(0.0, (AllBlocksCleared(),), 1))
            await until(lambda: scene.index.num_blocks("e") == 2)
            assert scene.depth(tokens) == 2

            scene.ranks[1].publish(stored(tokens, 1))
            await until(lambda: scene.depth(tokens) == 6)
            scene.fleet.lost("e", "e")
            assert scene.index.num_blocks("e") == 0
            assert not any(scene.index.holds(Source("e", "e.1", rank)) for rank in (0, 1))

    run(main)


def test_k16_batches_of_a_rank_not_expected_are_ignored_and_reported(run, free_ports):
    async def main():
        async with Scene(free_ports(4)) as scene:
            scene.ranks[0].publish(stored(prompt_of(1, 2), 0))
            await until(lambda: scene.index.num_blocks("e") == 2)
            for wrong in (0, 2, 7):
                scene.ranks[1].publish(stored(prompt_of(wrong + 10, 3), wrong))
            scene.ranks[1].publish(stored(prompt_of(2, 4), 1))
            await until(lambda: scene.index.num_blocks("e") == 6)
            assert scene.events.health().num_other_ranks == 3
            assert scene.depth(prompt_of(12, 3)) == 0
            scene.fleet.heard("e", "e.1", scene.events.health())
            assert scene.fleet.notes_of("e").num_other_ranks == 3

    run(main)


def test_k16_ranks_of_a_server_beside_others_are_counted_from_its_first(run, free_ports):
    async def main():
        async with Scene(free_ports(4)) as scene:
            scene.ranks[1].publish(stored(prompt_of(1, 2), 9))
            await until(lambda: scene.index.num_blocks("e") == 2)
            scene.ranks[0].publish(stored(prompt_of(2, 3), 0))
            scene.ranks[0].publish(stored(prompt_of(3, 3), 8))
            await until(lambda: scene.index.num_blocks("e") == 5)
            assert scene.events.health().num_other_ranks == 1

    run(main)


def test_k16_a_rank_that_starts_anew_leaves_the_others_alone(run, free_ports):
    async def main():
        async with Scene(free_ports(4)) as scene:
            for rank in (0, 1):
                for part in range(3):
                    scene.ranks[rank].publish(stored(prompt_of(rank * 10 + part, 2), rank))
            await until(lambda: scene.index.num_blocks("e") == 12)
            await scene.start_anew(1)
            scene.ranks[1].publish(stored(prompt_of(99, 1), 1))
            await until(lambda: scene.index.num_blocks("e") == 7)
            assert scene.depth(prompt_of(0, 2)) == 2
            assert scene.depth(prompt_of(10, 2)) == 0
            assert scene.depth(prompt_of(99, 1)) == 1

    run(main)


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

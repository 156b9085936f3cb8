import asyncio
import json
from pathlib import Path

import pytest
import zmq

from dynctl.core.kv import BlockRemoved
from dynctl.errors import EngineError
from dynctl.kv import events as events_module
from dynctl.kv import intake as intake_module
from dynctl.kv import publisher as publisher_module
from dynctl.kv import reader as reader_module
from dynctl.kv import sequence
from dynctl.kv.events import EventBatch
from dynctl.kv.intake import Intake
from dynctl.kv.publisher import BUFFER_STEPS, END_SEQ, EventPublisher
from dynctl.kv.reader import MAX_ERRORS_PER_MINUTE, KvEventReader

CAPTURES = Path(__file__).parent / "captures"


class Sink:
    def __init__(self):
        self.got, self.num_resets, self.failure, self.trusts = [], 0, None, []
        self.changed = asyncio.Event()

    def on_batch(self, seq, batch):
        self.got.append((seq, batch.events[0].block_hashes[0]))
        self.changed.set()

    def on_end_of_read(self):
        pass

    def on_reset(self):
        self.got.clear()
        self.num_resets += 1
        self.changed.set()

    def on_trust(self, trust):
        self.trusts.append(trust)

    def on_failed(self, reason):
        self.failure = reason
        self.changed.set()

    async def until(self, is_so):
        async with asyncio.timeout(60):
            while not is_so():
                self.changed.clear()
                await self.changed.wait()


def batch(number):
    return EventBatch(0.0, (BlockRemoved((number,), "GPU"),))


def endpoints(folder):
    return f"ipc://{folder}/kv", f"ipc://{folder}/replay"


def live_socket(context, folder):
    """A publisher's live side alone; XPUB, which tells when a subscription has reached it."""
    live = context.socket(zmq.XPUB)
    live.bind(f"ipc://{folder}/kv")
    return live


async def subscribed(live):
    async with asyncio.timeout(60):
        while not live.poll(0):
            await asyncio.sleep(0.01)
    live.recv()


async def settled(reader):
    """Until it has all it asked for: what there was, and once connected whether it is still the same engine."""
    while not reader.health.was_connected or reader.is_stale:
        await asyncio.sleep(0.01)


def test_a_reader_that_joins_late_gets_everything_in_order(tmp_path, zmq_context):
    async def main():
        sink = Sink()
        publisher = EventPublisher(*endpoints(tmp_path), "kv@a", context=zmq_context)
        publisher.start()
        for i in range(500):
            publisher.publish(batch(i))
        reader = KvEventReader(*endpoints(tmp_path), "kv@a", sink, context=zmq_context)
        reader.start()
        await sink.until(lambda: len(sink.got) == 500)
        for i in range(500, 1500):
            publisher.publish(batch(i))
            if i % 100 == 0:
                await asyncio.sleep(0)
        await sink.until(lambda: len(sink.got) == 1500)
        reader.close()
        publisher.close()

        assert sink.got == [(i, i) for i in range(1500)]
        assert reader.is_stale

    asyncio.run(main())


def test_k1_messages_lost_on_the_way_are_replayed(tmp_path, zmq_context):
    """The live socket here is a second publisher that leaves out batches; the replay socket has them all."""

    async def main():
        sink = Sink()
        full = EventPublisher(
            f"ipc://{tmp_path}/full", f"ipc://{tmp_path}/replay", "t", context=zmq_context
        )
        full.start()
        live = live_socket(zmq_context, tmp_path)
        reader = KvEventReader(*endpoints(tmp_path), "t", sink, context=zmq_context)
        reader.start()
        await subscribed(live)
        await settled(reader)
        for i in range(40):
            full.publish(batch(i))
            if i % 7 == 3 or i == 39:
                live.send_multipart([b"t", i.to_bytes(8, "big"), full._buffer[-1][1]])
        await sink.until(lambda: len(sink.got) == 40)
        reader.close()
        full.close()
        live.close(linger=0)

        assert sink.got == [(i, i) for i in range(40)]
        assert sink.num_resets == 0
        assert reader.counts.num_gaps >= 1

    asyncio.run(main())


def test_k8_a_restarted_engine_on_the_same_endpoints_replaces_the_old_one(tmp_path, zmq_context):
    async def main():
        sink = Sink()
        first = EventPublisher(*endpoints(tmp_path), "", context=zmq_context)
        first.start()
        reader = KvEventReader(*endpoints(tmp_path), "", sink, context=zmq_context)
        reader.start()
        for i in range(5):
            first.publish(batch(i))
        await sink.until(lambda: len(sink.got) == 5)
        first.close()
        second = EventPublisher(*endpoints(tmp_path), "", context=zmq_context)
        second.start()
        async with asyncio.timeout(60):
            number = 100
            while (0, 100) not in sink.got:
                second.publish(batch(number))
                number += 1
                await asyncio.sleep(0.05)
        reader.close()
        second.close()

        assert sink.num_resets == 1
        assert all(value >= 100 for _, value in sink.got)

    asyncio.run(main())


def test_an_engine_that_starts_later_is_found(tmp_path, zmq_context):
    async def main():
        sink = Sink()
        reader = KvEventReader(*endpoints(tmp_path), "", sink, context=zmq_context)
        reader.start()
        await asyncio.sleep(0.1)
        publisher = EventPublisher(*endpoints(tmp_path), "", context=zmq_context)
        publisher.start()
        publisher.publish(batch(0))
        await sink.until(lambda: sink.got == [(0, 0)])
        reader.close()
        publisher.close()

    asyncio.run(main())


@pytest.mark.parametrize("wrong", [0, 1])
def test_an_endpoint_that_makes_no_sense_is_an_error_and_leaves_nothing_open(
    tmp_path, zmq_context, wrong
):
    async def main():
        places = list(endpoints(tmp_path))
        places[wrong] = "nonsense"
        reader = KvEventReader(*places, "", Sink(), context=zmq_context)
        with pytest.raises(EngineError, match="nonsense"):
            reader.start()
        reader.close()

        assert reader.is_stale
        assert (reader._sub, reader._replay, reader._monitor, reader._timers) == (
            None,
            None,
            None,
            {},
        )

    asyncio.run(main())


def test_a_publisher_on_a_busy_address_is_an_error(zmq_context):
    first = EventPublisher("tcp://127.0.0.1:0", None, context=zmq_context)
    with pytest.raises(EngineError, match="cannot publish"):
        EventPublisher(first.endpoint, None, context=zmq_context)
    first.close()


def test_k15_a_source_of_garbage_is_given_up(tmp_path, zmq_context):
    async def main():
        sink = Sink()
        live = live_socket(zmq_context, tmp_path)
        reader = KvEventReader(f"ipc://{tmp_path}/kv", None, "", sink, context=zmq_context)
        reader.start()
        await subscribed(live)
        for i in range(3 * MAX_ERRORS_PER_MINUTE):
            live.send_multipart(
                [b"", i.to_bytes(8, "big"), b"\xc1 garbage"] if i % 2 else [b"one frame"]
            )
        await sink.until(lambda: sink.failure is not None)
        reader.close()
        live.close(linger=0)

        assert reader.num_errors == MAX_ERRORS_PER_MINUTE + 1
        assert sink.got == []

    asyncio.run(main())


@pytest.mark.parametrize("topic", ["t", "topics-8"])
@pytest.mark.parametrize("tail", [[], [b"two"], [(2).to_bytes(8, "big"), b"\xc1", b"four"]])
@pytest.mark.parametrize("is_last", [True, False])
def test_messages_of_other_shapes_cost_no_batch(tmp_path, zmq_context, topic, tail, is_last):
    """They come among others, in one read: what is lost with one that is too short is asked for again."""

    async def main():
        sink = Sink()
        full = EventPublisher(
            f"ipc://{tmp_path}/full", f"ipc://{tmp_path}/replay", topic, context=zmq_context
        )
        live = live_socket(zmq_context, tmp_path)
        reader = KvEventReader(*endpoints(tmp_path), topic, sink, context=zmq_context)
        full.start()
        reader.start()
        await subscribed(live)
        await settled(reader)
        for i in range(12):
            if i == 6 and not is_last:
                live.send_multipart([topic.encode(), *tail])
            full.publish(batch(i))
            live.send_multipart([topic.encode(), i.to_bytes(8, "big"), full._buffer[-1][1]])
        if is_last:
            live.send_multipart([topic.encode(), *tail])
        async with asyncio.timeout(60):
            while not (len(sink.got) == 12 and reader.num_errors == 1):
                await asyncio.sleep(0.01)
        reader.close()
        full.close()
        live.close(linger=0)

        assert sink.got == [(i, i) for i in range(12)]
        assert sink.num_resets == 0

    asyncio.run(main())


@pytest.mark.parametrize("topic", ["", "t", "topics-8"])
@pytest.mark.parametrize("short", [[[]], [[b"two"]], [[], []], [[], [], []], [[], [b"two"], []]])
def test_a_message_that_is_too_short_does_not_cost_the_next_one(
    tmp_path, zmq_context, topic, short
):
    """Nor is its topic, eight letters long, taken for a number. What is lost cannot be asked for here."""

    async def main():
        sink = Sink()
        live = live_socket(zmq_context, tmp_path)
        reader = KvEventReader(f"ipc://{tmp_path}/kv", None, topic, sink, context=zmq_context)
        reader.start()
        await subscribed(live)
        for i in range(6):
            if i == 3:
                for tail in short:
                    live.send_multipart([topic.encode(), *tail])
            payload = events_module.encode(batch(i))
            live.send_multipart([topic.encode(), i.to_bytes(8, "big"), payload])
        await sink.until(lambda: sink.got[-1:] == [(5, 5)])
        reader.close()
        live.close(linger=0)

        assert sink.got == [(i, i) for i in range(6)]
        assert (sink.num_resets, reader.counts.num_lost) == (0, 0)
        assert 1 <= reader.num_errors <= len(short)

    asyncio.run(main())


def test_replay_answers_in_the_shape_of_the_capture(tmp_path, zmq_context):
    """Frames as vLLM 0.32 sends them: ["", topic, seq, payload]*, then ["", "", ff*8, ""]."""
    lines = [
        json.loads(line)
        for line in (CAPTURES / "kv_events_replay_sample.jsonl").read_text().splitlines()
    ]

    async def main():
        publisher = EventPublisher(*endpoints(tmp_path), "kv@w1", context=zmq_context)
        publisher.start()
        for i in range(5):
            publisher.publish(batch(i))
        dealer = zmq_context.socket(zmq.DEALER)
        dealer.connect(f"ipc://{tmp_path}/replay")
        dealer.send_multipart([b"", (3).to_bytes(8, "big")])
        got = []
        async with asyncio.timeout(60):
            while not got or got[-1][2] != END_SEQ:
                await asyncio.sleep(0.01)
                while dealer.poll(0):
                    got.append(dealer.recv_multipart())
        dealer.close(linger=0)
        publisher.close()

        assert [frame.hex() for frame in got[-1]] == lines[-1]["end"]
        assert [(f[0], f[1].decode(), int.from_bytes(f[2], "big")) for f in got[:-1]] == [
            (b"", "kv@w1", 3),
            (b"", "kv@w1", 4),
        ]
        assert [len(f) for f in got[0][1:3]] == lines[0]["frames"][:2]

    asyncio.run(main())


def test_the_replay_buffer_is_bounded(tmp_path, zmq_context):
    publisher = EventPublisher(f"ipc://{tmp_path}/kv", None, context=zmq_context)
    for i in range(BUFFER_STEPS + 50):
        publisher.publish(batch(i))

    assert len(publisher._buffer) == BUFFER_STEPS
    publisher.close()


def test_k8_a_restart_noticed_on_connecting_loses_nothing_of_the_new_engine(tmp_path, zmq_context):
    """The rest of an answer that showed another engine is not taken for the next answer."""

    async def main():
        for number in range(5):
            folder = tmp_path / str(number)
            folder.mkdir()
            sink = Sink()
            first = EventPublisher(*endpoints(folder), "", context=zmq_context)
            first.start()
            reader = KvEventReader(*endpoints(folder), "", sink, context=zmq_context)
            reader.start()
            for i in range(5):
                first.publish(batch(i))
            await sink.until(lambda s=sink: len(s.got) == 5)
            first.close()
            second = EventPublisher(*endpoints(folder), "", context=zmq_context)
            for i in range(100, 108):
                second.publish(batch(i))
            second.start()
            await sink.until(lambda s=sink: len(s.got) == 8 and s.got[0] == (0, 100))
            assert (sink.num_resets, reader.counts.num_lost) == (1, 0)
            reader.close()
            second.close()

    asyncio.run(main())


def test_k1_a_thousand_lost_batches_come_back_and_are_doubted_until_then(tmp_path, zmq_context):
    async def main():
        sink = Sink()
        full = EventPublisher(
            f"ipc://{tmp_path}/full", f"ipc://{tmp_path}/replay", "t", context=zmq_context
        )
        live = live_socket(zmq_context, tmp_path)
        reader = KvEventReader(*endpoints(tmp_path), "t", sink, context=zmq_context)
        full.publish(batch(0))
        full.start()
        reader.start()
        await sink.until(lambda: sink.got == [(0, 0)])
        await subscribed(live)
        await settled(reader)
        assert sink.trusts == []  # the first connection is no reason to doubt what was just told
        for i in range(1, 1002):
            full.publish(batch(i))
        live.send_multipart([b"t", (1001).to_bytes(8, "big"), full._buffer[-1][1]])
        await sink.until(lambda: len(sink.got) == 1002)
        await asyncio.sleep(0)
        reader.close()
        full.close()
        live.close(linger=0)

        assert sink.got == [(i, i) for i in range(1002)]
        assert sink.num_resets == 0
        assert sink.trusts == [0.5, 1.0]

    asyncio.run(main())


def test_k6_at_most_four_replays_run_at_once_and_waiting_does_not_use_up_their_time(
    tmp_path, zmq_context, monkeypatch
):
    monkeypatch.setattr(sequence, "REPLAY_SILENCE_S", 3600.0)
    monkeypatch.setattr(reader_module, "AUDIT_S", 3600.0)

    async def main():
        intake, sinks, readers, quiet = Intake(), [], [], []
        slots = intake.slots
        for number in range(6):
            folder = tmp_path / str(number)
            folder.mkdir()
            sinks.append(Sink())
            if number < 4:  # bound, and never answering
                router = zmq_context.socket(zmq.ROUTER)
                router.bind(endpoints(folder)[1])
                quiet.append(router)
            else:
                publisher = EventPublisher(*endpoints(folder), "", context=zmq_context)
                publisher.publish(batch(number))
                publisher.start()
                quiet.append(publisher)
            reader = KvEventReader(
                *endpoints(folder), "", sinks[-1], context=zmq_context, intake=intake
            )
            reader.start()
            readers.append(reader)
            assert sum(r._replay is not None for r in readers) == min(number + 1, 4)
        for reader in readers[4:]:
            while not reader.health.was_connected:
                await asyncio.sleep(0.01)
        assert sinks[4].got == sinks[5].got == []
        # The silent ones are given up after five attempts, and the others' turn comes.
        monkeypatch.setattr(sequence, "REPLAY_SILENCE_S", 0.3)
        await sinks[4].until(lambda: sinks[4].got == [(0, 4)])
        await sinks[5].until(lambda: sinks[5].got == [(0, 5)])
        assert readers[4].counts.num_replays <= 2  # and the one on connecting
        for closable in readers:
            closable.close()
        for one in quiet:
            one.close(linger=0) if isinstance(one, zmq.Socket) else one.close()
        assert slots._free == 4
        assert not slots._holders
        assert not slots._line

    asyncio.run(main())


def test_k19_a_reader_that_cannot_keep_up_says_that_it_knows_nothing(
    tmp_path, zmq_context, monkeypatch
):
    monkeypatch.setattr(reader_module, "_SLICE", 10)
    monkeypatch.setattr(intake_module, "TURN_S", 0.0)
    monkeypatch.setattr(reader_module, "BEHIND_S", 0.05)
    # None is lost for good, however late the subscription comes.
    monkeypatch.setattr(publisher_module, "BUFFER_STEPS", 10**6)

    async def main():
        sink = Sink()
        publisher = EventPublisher(*endpoints(tmp_path), "", context=zmq_context)
        publisher.start()
        reader = KvEventReader(*endpoints(tmp_path), "", sink, context=zmq_context)
        reader.start()
        number = 0
        while not reader.health.was_connected:
            await asyncio.sleep(0.01)
        while 0.0 not in sink.trusts:
            for _ in range(50):
                publisher.publish(batch(number))
                number += 1
            await asyncio.sleep(0)
        async with asyncio.timeout(60):
            while sink.trusts[-1] != 1.0:
                await asyncio.sleep(0.01)
        reader.close()
        publisher.close()

        assert sink.trusts[-1] == 1.0
        assert sink.got == [(i, i) for i in range(number)]

    asyncio.run(main())


@pytest.mark.parametrize(
    ("payload_bytes", "num_taken"), [(10, 100), (1000, 17), (4096, 4), (100_000, 1)]
)
def test_k19_a_read_leaves_the_rest_for_later_after_so_many_bytes(
    zmq_context, payload_bytes, num_taken
):
    class Full:
        """A socket with more than is ever taken at once."""

        num_received = 0

        def recv(self, flags):
            assert flags == zmq.NOBLOCK
            self.num_received += 1
            return bytes((0, 8, payload_bytes)[(self.num_received - 1) % 3])

        def getsockopt(self, option):
            assert option == zmq.RCVMORE
            return 0

    async def main():
        reader = KvEventReader("ipc:///nobody", None, "", Sink(), context=zmq_context)
        reader._loop = asyncio.get_running_loop()
        goes_on = asyncio.Event()
        taken, is_cut = reader._take(Full(), goes_on.set, has_three=True)
        await asyncio.wait_for(goes_on.wait(), 60)

        assert (len(taken), is_cut) == (num_taken, True)
        assert [len(frame) for frame in taken[-1]] == [0, 8, payload_bytes]

    asyncio.run(main())


def test_k15_a_frame_larger_than_any_batch_does_not_get_in(tmp_path, zmq_context):
    async def main():
        sink = Sink()
        live = live_socket(zmq_context, tmp_path)
        reader = KvEventReader(f"ipc://{tmp_path}/kv", None, "", sink, context=zmq_context)
        reader.start()
        await subscribed(live)
        live.send_multipart([b"", (0).to_bytes(8, "big"), bytes(100 * 1024**2)])
        payload = events_module.encode(batch(1))
        async with asyncio.timeout(60):
            seq = 1
            while not sink.got:  # the connection is cut and made again
                live.send_multipart([b"", seq.to_bytes(8, "big"), payload])
                seq += 1
                await asyncio.sleep(0.05)
        reader.close()
        live.close(linger=0)

        assert sink.got[0][1] == 1
        assert sink.failure is None

    asyncio.run(main())

"""How many blocks a CPU second of the router takes into its index: as deltas from a relay, and as engines' own events.

Engines store prompts block by block and evict the oldest ones once full, as they do under load; every block stored is
counted once, its removal is not counted extra. "raw" is decoding, hashing and indexing of vLLM's messages; "zmq" is the
same through real sockets, reading included (the publisher's CPU is not).
Run: python benchmarks/kv_ingest.py [blocks per event …]
"""

import asyncio
import os
import random
import resource
import sys
import tempfile
import time

import uvloop
import zmq

from dynctl.core.deployment import EngineInfo, EngineState
from dynctl.core.kv import BlockRemoved, BlockStored
from dynctl.kv.events import EventBatch, decode, encode
from dynctl.kv.hashing import BlockHasher
from dynctl.kv.reader import KvEventReader
from dynctl.kv.tracker import BlockTracker
from dynctl.kv.wire import Delta, FrameReader, Snapshot
from dynctl.kv.wire import encode as encode_frame
from dynctl.router.config import Settings
from dynctl.router.metrics import Metrics
from dynctl.router.prefix_index import PrefixIndex
from dynctl.router.prompt import Hashers
from dynctl.router.sources.direct import _EventSink
from dynctl.router.sources.feed import KvFeed
from dynctl.router.sources.fleet import Fleet
from dynctl.router.worker_table import WorkerTable

BLOCK_SIZE = 16
NUM_BLOCKS = 60_000
CAPACITY = 40_000
"""Blocks an engine holds: the last third of what is stored pushes the first out."""
NUM_ENGINES = 4


def make_batches(num_per_event, seed):
    """One engine's life: prompts of 64 blocks stored in events of so many blocks; the oldest prompts are evicted, each
    from its end, as vLLM does."""
    draw = random.Random(seed)
    batches, held, number = [], [], 0
    while number < NUM_BLOCKS:
        parent, prompt = None, []
        for _ in range(max(1, 64 // num_per_event)):
            handles = tuple(draw.getrandbits(64) for _ in range(num_per_event))
            tokens = tuple(draw.randrange(150_000) for _ in range(num_per_event * BLOCK_SIZE))
            events = [BlockStored(handles, parent, tokens, BLOCK_SIZE, medium="GPU")]
            parent = handles[-1]
            prompt += handles
            number += num_per_event
            if len(held) > CAPACITY:
                gone, held = held[:num_per_event], held[num_per_event:]
                events.append(BlockRemoved(tuple(gone), "GPU"))
            batches.append(EventBatch(0.0, tuple(events)))
        held += reversed(prompt)
    return batches, number


def relayed(lives):
    """Frames of all engines, as relays send them, into one index."""
    streams, number = [], 0
    for at, (batches, num_blocks) in enumerate(lives):
        tracker = BlockTracker(BlockHasher(b"s", BLOCK_SIZE))
        wires = [encode_frame(Snapshot("i", 0, BLOCK_SIZE, []))]
        for seq, batch in enumerate(batches):
            delta = tracker.apply(batch.events, 0.0)
            wires.append(encode_frame(Delta("i", seq + 1, delta.stored, delta.removed)))
        streams.append((f"e{at}", wires))
        number += num_blocks
    index, metrics = PrefixIndex(), Metrics()
    start_s = time.process_time()
    for engine_id, wires in streams:
        feed, reader = KvFeed(index, metrics, engine_id, "i"), FrameReader()
        # Reads of about 64 KiB, as sockets give them under load.
        piece = b""
        for wire in wires:
            piece += wire
            if len(piece) >= 65_536 or wire is wires[-1]:
                for frame in reader.feed(piece):
                    for _ in feed.apply(frame):
                        pass
                piece = b""
    return number / (time.process_time() - start_s), len(index)


def raw(lives):
    """Engines' own messages: decode, hash, index."""
    payloads = [[encode(batch) for batch in batches] for batches, _ in lives]
    number = sum(num_blocks for _, num_blocks in lives)

    async def take():
        fleet = make_fleet()
        sinks = [_EventSink(fleet, Hashers("s"), info(at)) for at in range(len(lives))]
        start_s = time.process_time()
        for sink, messages in zip(sinks, payloads, strict=True):
            for seq, payload in enumerate(messages):
                sink.on_batch(seq, decode(payload))
        return number / (time.process_time() - start_s), len(fleet.index)

    return uvloop.run(take())


def make_fleet():
    workers, index, metrics = WorkerTable(Settings()), PrefixIndex(), Metrics()
    return Fleet(workers, index, metrics, lambda: None)


def info(at):
    return EngineInfo(
        id=f"e{at}",
        incarnation="i",
        state=EngineState.READY,
        role="aggregated",
        deployment="",
        kind="external",
        model="m",
        block_size_tokens=BLOCK_SIZE,
    )


def publish(endpoint, payloads, go):
    """A child that publishes everything once told to."""
    pid = os.fork()
    if pid:
        return pid
    context = zmq.Context()
    socket = context.socket(zmq.PUB)
    socket.setsockopt(zmq.SNDHWM, 0)
    socket.bind(endpoint)
    os.read(go, 1)
    for seq, payload in enumerate(payloads):
        socket.send_multipart([b"", seq.to_bytes(8, "big"), payload])
        if seq % 100 == 99:
            time.sleep(0.002)
    os.read(go, 1)
    os._exit(0)


def through_zmq(lives):
    """The same over sockets."""
    number = sum(num_blocks for _, num_blocks in lives)
    with tempfile.TemporaryDirectory(dir="/tmp") as folder:
        gates, pids, places = [], [], []
        for at, (batches, _) in enumerate(lives):
            read, write = os.pipe()
            places.append(f"ipc://{folder}/{at}")
            pids.append(publish(places[-1], [encode(batch) for batch in batches], read))
            gates.append(write)

        async def take():
            context = zmq.Context()
            fleet = make_fleet()
            readers = []
            for at, place in enumerate(places):
                sink = _EventSink(fleet, Hashers("s"), info(at))
                readers.append(KvEventReader(place, None, "", sink, context=context))
                readers[-1].start()
            await asyncio.sleep(1.0)
            before = resource.getrusage(resource.RUSAGE_SELF)
            for gate in gates:
                os.write(gate, b"x")
            lasts = [len(batches) - 1 for batches, _ in lives]
            while [reader.last_seq for reader in readers] != lasts:
                await asyncio.sleep(0.02)
            after = resource.getrusage(resource.RUSAGE_SELF)
            for gate in gates:
                os.write(gate, b"x")
            for reader in readers:
                reader.close()
            context.term()
            used_s = after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime
            return number / used_s, len(fleet.index)

        try:
            return uvloop.run(take())
        finally:
            for pid in pids:
                os.waitpid(pid, 0)


def main():
    sizes = [int(text) for text in sys.argv[1:]] or [1, 8, 64, 512]
    print(f"{'blocks/event':>12}{'relayed':>12}{'raw':>12}{'zmq':>12}   M blocks per CPU second")
    for size in sizes:
        lives = [make_batches(size, seed) for seed in range(NUM_ENGINES)]
        row = f"{size:>12}"
        for way in (relayed, raw, through_zmq):
            best, blocks = max(way(lives) for _ in range(3))
            assert blocks >= NUM_ENGINES * CAPACITY * 0.95, (way, blocks)
            row += f"{best / 1e6:12.2f}"
        print(row)


if __name__ == "__main__":
    main()

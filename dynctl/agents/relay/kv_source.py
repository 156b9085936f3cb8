"""One engine incarnation's KV events as frames of hashes, for any number of routers.

Events are read once, hashed once, and sent to all. An engine's steps that follow each other quickly are told together:
what is stored and evicted again in between is not told at all. A subscriber begins with a snapshot; one that falls
behind is cut and begins again with another snapshot.
IO: zmq sockets (through kv.reader), sockets (through http1).
"""

import asyncio
import logging
import time

import msgspec
import zmq

from dynctl.agents.protocol import RelayEntry
from dynctl.agents.relay.metrics import RelayMetrics
from dynctl.core.kv import DEVICE, device_block_size
from dynctl.core.text import clean
from dynctl.errors import EngineError
from dynctl.http1.server import Exchange
from dynctl.kv import wire
from dynctl.kv.events import EventBatch
from dynctl.kv.hashing import BlockHasher
from dynctl.kv.reader import KvEventReader, ReplaySlots, trust_text
from dynctl.kv.tracker import BlockTracker, Delta
from dynctl.kv.wire import SourceHealth

MAX_BEHIND_BYTES = 8 * 1024 * 1024
"""A subscriber may have so much unsent beyond its snapshot before it is cut."""
MERGE_S = 0.01
"""Deltas within this time of the last one go out as one; the first after a pause goes out at once."""
_MERGED_BLOCKS = 4096
"""So many blocks are not kept back: a frame of that size is as cheap per block as a larger one."""
RETRY_S = 30.0
"""After which a source that was given up is read anew."""
_UNKNOWN_BLOCK_SIZE = 16
"""Until the engine has said its own: nothing is taken in before that."""

_log = logging.getLogger("dynctl.relay")


class KvSource:
    """Reads one engine; `close` it when the incarnation ends."""

    def __init__(
        self,
        entry: RelayEntry,
        context: "zmq.Context[zmq.Socket[bytes]]",
        slots: ReplaySlots,
        metrics: RelayMetrics,
    ) -> None:
        """`slots` and `metrics` are the relay's."""
        self._entry = entry
        self._context = context
        self._slots = slots
        self._metrics = metrics
        self._incarnation = entry.info.incarnation
        self._block_size = entry.info.block_size_tokens
        self._hasher = self._new_hasher()
        self._trackers: dict[int, BlockTracker] = {0: BlockTracker(self._hasher)}
        self._seqs: dict[int, int] = {0: -1}
        """By rank: of the last frame sent of its device; where the next snapshot stands."""
        self._untold: dict[int, tuple[int, float]] = {}
        """By rank: the sequence number of the last batch not yet told, and the time the engine stamped on the first."""
        self._told_s = 0.0
        self._telling: asyncio.TimerHandle | None = None
        self._limits_bytes: dict[Exchange, int] = {}
        """Subscribers, with what each may have unsent."""
        self._wants_all: set[Exchange] = set()
        """Those of them that understand frames of slower media."""
        self._loop = asyncio.get_running_loop()
        self._reader: KvEventReader | None = None
        self._retry: asyncio.TimerHandle | None = None
        self._health = SourceHealth(0.0, was_connected=False)
        """Of the last reader, while there is none."""

    def start(self) -> None:
        """Subscribe to the engine's events."""
        entry = self._entry
        assert entry.kv_events is not None
        self._retry = None
        self._reader = KvEventReader(
            entry.kv_events,
            entry.kv_replay,
            entry.topic,
            self,
            context=self._context,
            slots=self._slots,
        )
        try:
            self._reader.start()
        except EngineError as error:
            self.on_failed(str(error))

    def close(self) -> None:
        """Stop reading and end every subscription."""
        if self._reader is not None:
            self._reader.close()
        for timer in (self._retry, self._telling):
            if timer is not None:
                timer.cancel()
        for exchange in tuple(self._limits_bytes):
            self._drop(exchange)
            exchange.finish()

    @property
    def num_subscribers(self) -> int:
        """Routers that listen."""
        return len(self._limits_bytes)

    @property
    def is_stale(self) -> bool:
        """Events are missing just now, or the source was given up."""
        return self._reader is None or self._reader.is_stale

    def subscribe(
        self, exchange: Exchange, headers: list[tuple[bytes, bytes]], *, wants_all: bool = False
    ) -> None:
        """Begin a subscription: snapshots now, then whatever happens; of the device only, unless all is wanted."""
        exchange.must_close = True
        exchange.on_gone = lambda: self._drop(exchange)
        exchange.start(200, headers)
        self._tell()
        snapshots = [self._snapshot(rank) for rank in self._trackers]
        if wants_all:
            self._wants_all.add(exchange)
            for rank, tracker in self._trackers.items():
                snapshots += [self._snapshot(rank, medium) for medium in tracker.slower_media]
        self._limits_bytes[exchange] = MAX_BEHIND_BYTES + sum(map(len, snapshots))
        for piece in (*snapshots, self._heartbeat()):
            exchange.write(piece)
            self._metrics.kv_bytes += len(piece)

    def beat(self) -> None:
        """Tell subscribers that the source lives, and whether it is up to date."""
        if self._limits_bytes:
            self._tell()
            self._send(self._heartbeat())

    def empty(self) -> bool:
        """Forget what the engine has dropped without a word; False when nothing was known of it."""
        if all(tracker.is_empty for tracker in self._trackers.values()):
            return False
        self.on_reset()
        return True

    @property
    def trust(self) -> float:
        """How far what is known of the cache is to be believed, 0 to 1."""
        return 0.0 if self._reader is None else self._reader.health.trust

    # The reader tells…

    def on_batch(self, seq: int, batch: EventBatch) -> None:
        """Hash one engine step's events."""
        self._metrics.kv_batches += 1
        if not self._block_size and not self._learn_block_size(batch):
            # Nothing of the device then, and chunks of slower media may be cut at its block size only.
            return
        rank = batch.dp_rank
        tracker = self._trackers.get(rank)
        if tracker is None:
            tracker = self._trackers[rank] = BlockTracker(self._hasher)
            self._seqs[rank] = -1
            self._send(self._snapshot(rank))
        tracker.note(batch.events, self._loop.time())
        _, since_s = self._untold.get(rank, (seq, batch.ts))
        self._untold[rank] = (seq, since_s)

    def on_end_of_read(self) -> None:
        """Tell of what the batches have changed: now, or soon with those that follow."""
        if not self._untold:
            return
        due_s = self._told_s + MERGE_S - self._loop.time()
        num_changes = sum([self._trackers[rank].num_changes for rank in self._untold])
        if due_s <= 0 or num_changes >= _MERGED_BLOCKS:
            self._tell()
        elif self._telling is None:
            self._telling = self._loop.call_later(due_s, self._tell)

    def on_trust(self, trust: float) -> None:
        """Let routers know at once: they place by what they believe."""
        _log.warning("KV events of %s: %s", self._entry.info.id, trust_text(trust))
        self.beat()

    def on_reset(self) -> None:
        """Forget everything: sequence numbers may begin anew, so a snapshot rather than a delta."""
        self._untold.clear()
        for rank, tracker in self._trackers.items():
            tracker.reset()
            self._seqs[rank] = -1
            self._send(self._snapshot(rank))
            for medium in tracker.slower_media:
                self._send(self._snapshot(rank, medium), medium)
            tracker.take_slower()

    def on_failed(self, reason: str) -> None:
        """Show an empty cache until the source can be read again."""
        _log.warning("KV events of %s are given up for now: %s", self._entry.info.id, clean(reason))
        self._health = SourceHealth(0.0) if self._reader is None else self._reader.health
        self._reader = None
        self.on_reset()
        self.beat()
        self._retry = self._loop.call_later(RETRY_S, self.start)

    # Frames…

    def _tell(self) -> None:
        """Send what has changed since the last time."""
        if self._telling is not None:
            self._telling.cancel()
            self._telling = None
        for rank, (seq, since_s) in self._untold.items():
            tracker = self._trackers[rank]
            delta = tracker.take()
            if not delta.is_empty:
                self._seqs[rank] = seq
                self._tell_of(rank, seq, delta, since_s)
            for slower in tracker.take_slower():
                self._tell_of(rank, seq, slower, since_s)
        self._untold.clear()

    def _tell_of(self, rank: int, seq: int, delta: Delta, since_s: float) -> None:
        stored, removed = delta.stored, delta.removed
        frame = wire.Delta(
            self._incarnation, seq, stored, removed, delta.cleared, rank, delta.medium
        )
        self._metrics.kv_frames["delta"] += 1
        self._metrics.kv_blocks["stored"] += len(stored)
        self._metrics.kv_blocks["removed"] += len(removed)
        self._metrics.lag(time.time() - since_s)
        self._send(wire.encode(frame), delta.medium)
        self._told_s = self._loop.time()

    def _new_hasher(self) -> BlockHasher:
        size = self._block_size or _UNKNOWN_BLOCK_SIZE
        return BlockHasher(self._entry.block_hash_seed.encode(), size)

    def _learn_block_size(self, batch: EventBatch) -> bool:
        """Take the device's block size from a batch, if it tells it; nothing was taken in before."""
        self._block_size = device_block_size(batch.events)
        if not self._block_size:
            return False
        self._hasher = self._new_hasher()
        for rank in self._trackers:
            self._trackers[rank] = BlockTracker(self._hasher)
            self._send(self._snapshot(rank))
        return True

    def _snapshot(self, rank: int, medium: int = DEVICE) -> bytes:
        hashes = self._trackers[rank].snapshot(medium)
        self._metrics.kv_frames["snapshot"] += 1
        seq, size = self._seqs[rank], self._block_size
        return wire.encode(wire.Snapshot(self._incarnation, seq, size, hashes, rank, medium))

    def _heartbeat(self) -> bytes:
        is_stale, health = self.is_stale, self._health
        if self._reader is not None:
            health = self._reader.health
            counts = [tracker.counts for tracker in self._trackers.values()]
            health = msgspec.structs.replace(
                health,
                num_keyed=sum([one.num_keyed_roots for one in counts]),
                num_other_groups=sum([one.num_other_group for one in counts]),
            )
        self._metrics.kv_frames["heartbeat"] += len(self._seqs)
        return b"".join(
            wire.encode(wire.Heartbeat(self._incarnation, seq, rank, is_stale, health))
            for rank, seq in self._seqs.items()
        )

    def _send(self, frame: bytes, medium: int = DEVICE) -> None:
        behind = []
        for exchange, limit_bytes in self._limits_bytes.items():
            if medium != DEVICE and exchange not in self._wants_all:
                continue
            exchange.write(frame)
            self._metrics.kv_bytes += len(frame)
            if exchange.unsent_bytes > limit_bytes:
                behind.append(exchange)
        for exchange in behind:
            _log.warning("router %s is behind with KV deltas: cut", exchange.request.peer_name)
            self._metrics.kv_cut += 1
            self._drop(exchange)
            exchange.abort()

    def _drop(self, exchange: Exchange) -> None:
        self._limits_bytes.pop(exchange, None)
        self._wants_all.discard(exchange)
        exchange.on_gone = None

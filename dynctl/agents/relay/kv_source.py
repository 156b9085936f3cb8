"""One engine incarnation's KV events as frames of hashes, for any number of routers.

Events are read once, hashed once, and sent to all; those of each data-parallel rank are read where it publishes, and its
frames say so. An engine's steps that follow each other quickly are told together: what is stored and evicted again in
between is not told at all. A subscriber begins with a snapshot; one that falls behind is cut and begins again with another
snapshot.
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
from dynctl.kv.intake import Intake
from dynctl.kv.ranks import RankOrder, endpoint_of
from dynctl.kv.reader import KvEventReader, trust_text
from dynctl.kv.tracker import BlockTracker, Delta
from dynctl.kv.wire import SourceHealth

MAX_BEHIND_BYTES = 8 * 1024 * 1024
"""A subscriber may have so much unsent beyond its snapshot before it is cut."""
MERGE_S = 0.01
"""Deltas within this time of the last one go out as one; the first after a pause goes out at once."""
_MERGED_BLOCKS = 4096
"""So many blocks are not kept back: a frame of that size is as cheap per block as a larger one."""
RETRY_S = 30.0
"""After which a rank that was given up is read anew."""
_UNKNOWN_BLOCK_SIZE = 16
"""Until the engine has said its own: nothing is taken in before that."""

_log = logging.getLogger("dynctl.relay")


class KvSource:
    """Reads one engine; `close` it when the incarnation ends."""

    def __init__(
        self,
        entry: RelayEntry,
        context: "zmq.Context[zmq.Socket[bytes]]",
        intake: Intake,
        metrics: RelayMetrics,
    ) -> None:
        """`intake` and `metrics` are the relay's."""
        self.entry = entry
        self.context = context
        self.intake = intake
        self.order = RankOrder()
        self._metrics = metrics
        self._incarnation = entry.info.incarnation
        self.block_size = entry.info.block_size_tokens
        self._ranks = [_Rank(self, number) for number in range(entry.info.ranks)]
        self._told_s = 0.0
        self._telling: asyncio.TimerHandle | None = None
        self._limits_bytes: dict[Exchange, int] = {}
        """Subscribers, with what each may have unsent."""
        self._wants_all: set[Exchange] = set()
        """Those of them that understand frames of slower media."""
        self._loop = asyncio.get_running_loop()

    def start(self) -> None:
        """Subscribe to the engine's events."""
        for rank in self._ranks:
            rank.start()

    def close(self) -> None:
        """Stop reading and end every subscription."""
        for rank in self._ranks:
            rank.close()
        if self._telling is not None:
            self._telling.cancel()
        for exchange in tuple(self._limits_bytes):
            self._drop(exchange)
            exchange.finish()

    @property
    def num_subscribers(self) -> int:
        """Routers that listen."""
        return len(self._limits_bytes)

    @property
    def trust(self) -> float:
        """How far what is known of the cache is to be believed, 0 to 1: as far as that of the least known rank."""
        return min(rank.trust for rank in self._ranks)

    def subscribe(
        self, exchange: Exchange, headers: list[tuple[bytes, bytes]], *, wants_all: bool = False
    ) -> None:
        """Begin a subscription: snapshots now, then whatever happens; of the device only, unless all is wanted."""
        exchange.must_close = True
        exchange.on_gone = lambda: self._drop(exchange)
        exchange.start(200, headers)
        self.tell()
        snapshots = [self._snapshot(rank) for rank in self._ranks]
        if wants_all:
            self._wants_all.add(exchange)
            for rank in self._ranks:
                snapshots += [self._snapshot(rank, medium) for medium in rank.tracker.slower_media]
        self._limits_bytes[exchange] = MAX_BEHIND_BYTES + sum(map(len, snapshots))
        for piece in (*snapshots, self._heartbeat()):
            exchange.write(piece)
            self._metrics.kv_bytes += len(piece)

    def beat(self) -> None:
        """Tell subscribers that the source lives, and whether it is up to date."""
        if self._limits_bytes:
            self.tell()
            self._send(self._heartbeat())

    def empty(self) -> bool:
        """Forget what the engine has dropped without a word; False when nothing was known of it."""
        if all(rank.tracker.is_empty for rank in self._ranks):
            return False
        for rank in self._ranks:
            rank.on_reset()
        return True

    # Ranks tell…

    def takes(self, batch: EventBatch) -> bool:
        """Count a batch; False as long as nothing can be made of any."""
        self._metrics.kv_batches += 1
        # Before the device's block size is known, chunks of slower media cannot be cut either.
        return bool(self.block_size) or self._learn_block_size(batch)

    def tell_soon(self) -> None:
        """Tell of what batches have changed: now, or soon with those that follow."""
        untold = [rank for rank in self._ranks if rank.untold is not None]
        if not untold:
            return
        due_s = self._told_s + MERGE_S - self._loop.time()
        num_changes = sum([rank.tracker.num_changes for rank in untold])
        if due_s <= 0 or num_changes >= _MERGED_BLOCKS:
            self.tell()
        elif self._telling is None:
            self._telling = self._loop.call_later(due_s, self.tell)

    def tell(self) -> None:
        """Send what has changed since the last time."""
        if self._telling is not None:
            self._telling.cancel()
            self._telling = None
        for rank in self._ranks:
            if rank.untold is None:
                continue
            seq, since_s = rank.untold
            rank.untold = None
            delta = rank.tracker.take()
            if not delta.is_empty:
                rank.seq = seq
                self._tell_of(rank, seq, delta, since_s)
            for slower in rank.tracker.take_slower():
                self._tell_of(rank, seq, slower, since_s)

    def tell_emptied(self, rank: "_Rank") -> None:
        """Send that a rank holds nothing: sequence numbers may begin anew, so a snapshot rather than a delta."""
        self._send(self._snapshot(rank))
        for medium in rank.tracker.slower_media:
            self._send(self._snapshot(rank, medium), medium)
        rank.tracker.take_slower()

    # Frames…

    def _tell_of(self, rank: "_Rank", seq: int, delta: Delta, since_s: float) -> None:
        stored, removed = delta.stored, delta.removed
        frame = wire.Delta(
            self._incarnation, seq, stored, removed, delta.cleared, rank.number, delta.medium
        )
        self._metrics.kv_frames["delta"] += 1
        self._metrics.kv_blocks["stored"] += len(stored)
        self._metrics.kv_blocks["removed"] += len(removed)
        self._metrics.lag(time.time() - since_s)
        self._send(wire.encode(frame), delta.medium)
        self._told_s = self._loop.time()

    def new_tracker(self) -> BlockTracker:
        """Make one that knows nothing, by the block size known so far."""
        size = self.block_size or _UNKNOWN_BLOCK_SIZE
        return BlockTracker(BlockHasher(self.entry.block_hash_seed.encode(), size))

    def _learn_block_size(self, batch: EventBatch) -> bool:
        """Take the device's block size from a batch, if it tells it; nothing was taken in before."""
        self.block_size = device_block_size(batch.events)
        if not self.block_size:
            return False
        for rank in self._ranks:
            rank.tracker = self.new_tracker()
            self._send(self._snapshot(rank))
        return True

    def _snapshot(self, rank: "_Rank", medium: int = DEVICE) -> bytes:
        hashes = rank.tracker.snapshot(medium)
        self._metrics.kv_frames["snapshot"] += 1
        return wire.encode(
            wire.Snapshot(self._incarnation, rank.seq, self.block_size, hashes, rank.number, medium)
        )

    def _heartbeat(self) -> bytes:
        self._metrics.kv_frames["heartbeat"] += len(self._ranks)
        return b"".join(
            wire.encode(
                wire.Heartbeat(self._incarnation, rank.seq, rank.number, rank.is_stale, rank.health)
            )
            for rank in self._ranks
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


class _Rank:
    """Reads one data-parallel rank, and anew some time after that was given up."""

    def __init__(self, source: KvSource, number: int) -> None:
        self.number = number
        self.tracker = source.new_tracker()
        self.seq = -1
        """Of the last frame sent of its device; where the next snapshot stands."""
        self.untold: tuple[int, float] | None = None
        """The sequence number of the last batch not yet told, and the time the engine stamped on the first."""
        self._source = source
        of_rank = f" (rank {number})" if source.entry.info.ranks > 1 else ""
        self._name = f"{source.entry.info.id}{of_rank}"
        self._loop = asyncio.get_running_loop()
        self._reader: KvEventReader | None = None
        self._retry: asyncio.TimerHandle | None = None
        self._last_health = SourceHealth(0.0, was_connected=False)
        """Of the last reader, while there is none."""
        self._num_of_others = 0
        """Batches that named another rank."""

    def start(self) -> None:
        """Subscribe to the rank's events."""
        source, entry = self._source, self._source.entry
        assert entry.kv_events is not None
        self._retry = None
        self._reader = KvEventReader(
            endpoint_of(entry.kv_events, self.number),
            entry.kv_replay and endpoint_of(entry.kv_replay, self.number),
            entry.topic,
            self,
            context=source.context,
            intake=source.intake,
        )
        try:
            self._reader.start()
        except EngineError as error:
            self.on_failed(str(error))

    def close(self) -> None:
        """Stop reading."""
        if self._reader is not None:
            self._reader.close()
        if self._retry is not None:
            self._retry.cancel()

    @property
    def is_stale(self) -> bool:
        """Events are missing just now, or the rank was given up."""
        return self._reader is None or self._reader.is_stale

    @property
    def trust(self) -> float:
        """How far what is known of its cache is to be believed, 0 to 1."""
        return 0.0 if self._reader is None else self._reader.health.trust

    @property
    def health(self) -> SourceHealth:
        """How well its cache is known, and what was odd so far."""
        if self._reader is None:
            return self._last_health
        counts = self.tracker.counts
        return msgspec.structs.replace(
            self._reader.health,
            num_keyed=counts.num_keyed_roots,
            num_other_ranks=self._num_of_others,
            num_other_groups=counts.num_other_group,
            num_orphans=self.tracker.orphans.num_dropped,
        )

    # The reader tells…

    def on_batch(self, seq: int, batch: EventBatch) -> None:
        """Hash one engine step's events."""
        if not self._source.order.takes(self.number, batch.dp_rank):
            self._num_of_others += 1
        elif self._source.takes(batch):
            self.tracker.note(batch.events, self._loop.time())
            self.untold = (seq, batch.ts if self.untold is None else self.untold[1])

    def on_end_of_read(self) -> None:
        """Tell of what the batches have changed."""
        self._source.tell_soon()

    def on_trust(self, trust: float) -> None:
        """Let routers know at once: they place by what they believe."""
        _log.warning("KV events of %s: %s", self._name, trust_text(trust))
        self._source.beat()

    def on_reset(self) -> None:
        """Forget everything."""
        self.untold = None
        self.tracker.reset()
        self.seq = -1
        self._source.tell_emptied(self)

    def on_failed(self, reason: str) -> None:
        """Show an empty cache until the rank can be read again."""
        _log.warning("KV events of %s are given up for now: %s", self._name, clean(reason))
        self._last_health = SourceHealth(0.0) if self._reader is None else self._reader.health
        self._reader = None
        self.on_reset()
        self._source.beat()
        self._retry = self._loop.call_later(RETRY_S, self.start)

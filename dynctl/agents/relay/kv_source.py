"""One engine incarnation's KV events as frames of hashes, for any number of routers.

Events are read once, hashed once, and sent to all. A subscriber begins with a snapshot; one that
falls behind is cut and begins again with another snapshot.
IO: zmq sockets (through kv.reader), sockets (through http1).
"""

import asyncio
import logging

import zmq

from dynctl.agents.protocol import RelayEntry
from dynctl.core.kv import BlockStored
from dynctl.core.text import clean
from dynctl.errors import EngineError
from dynctl.http1.server import Exchange
from dynctl.kv import wire
from dynctl.kv.events import EventBatch
from dynctl.kv.hashing import BlockHasher
from dynctl.kv.reader import KvEventReader
from dynctl.kv.tracker import BlockTracker

MAX_BEHIND_BYTES = 8 * 1024 * 1024
"""A subscriber may have so much unsent beyond its snapshot before it is cut."""
RETRY_S = 30.0
"""After which a source that was given up is read anew."""
_UNKNOWN_BLOCK_SIZE = 16
"""Hashes do not depend on it; used until the engine has said its own."""

_log = logging.getLogger("dynctl.relay")


class KvSource:
    """Reads one engine; `close` it when the incarnation ends."""

    def __init__(self, entry: RelayEntry, context: "zmq.Context[zmq.Socket[bytes]]") -> None:
        self._entry = entry
        self._context = context
        self._incarnation = entry.info.incarnation
        self._block_size = entry.info.block_size_tokens
        self._hasher = BlockHasher(
            entry.block_hash_seed.encode(), self._block_size or _UNKNOWN_BLOCK_SIZE
        )
        self._trackers: dict[int, BlockTracker] = {0: BlockTracker(self._hasher)}
        self._seqs: dict[int, int] = {0: -1}
        """By rank: of the last frame sent; where the next snapshot stands."""
        self._limits_bytes: dict[Exchange, int] = {}
        """Subscribers, with what each may have unsent."""
        self._loop = asyncio.get_running_loop()
        self._reader: KvEventReader | None = None
        self._retry: asyncio.TimerHandle | None = None
        self.num_cut = 0

    def start(self) -> None:
        """Subscribe to the engine's events."""
        entry = self._entry
        assert entry.kv_events is not None
        self._retry = None
        self._reader = KvEventReader(
            entry.kv_events, entry.kv_replay, entry.topic, self, context=self._context
        )
        try:
            self._reader.start()
        except EngineError as error:
            self.on_failed(str(error))

    def close(self) -> None:
        """Stop reading and end every subscription."""
        if self._reader is not None:
            self._reader.close()
        if self._retry is not None:
            self._retry.cancel()
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

    def subscribe(self, exchange: Exchange, headers: list[tuple[bytes, bytes]]) -> None:
        """Begin a subscription: snapshots now, then whatever happens."""
        exchange.must_close = True
        exchange.on_gone = lambda: self._drop(exchange)
        exchange.start(200, headers)
        snapshots = [self._snapshot(rank) for rank in self._trackers]
        self._limits_bytes[exchange] = MAX_BEHIND_BYTES + sum(map(len, snapshots))
        for snapshot in snapshots:
            exchange.write(snapshot)
        exchange.write(self._heartbeat())

    def beat(self) -> None:
        """Tell subscribers that the source lives, and whether it is up to date."""
        if self._limits_bytes:
            self._send(self._heartbeat())

    # The reader tells…

    def on_batch(self, seq: int, batch: EventBatch) -> None:
        """Hash one engine step's events and pass the change on."""
        rank = batch.dp_rank
        tracker = self._trackers.get(rank)
        if tracker is None:
            tracker = self._trackers[rank] = BlockTracker(self._hasher)
            self._seqs[rank] = -1
            self._send(self._snapshot(rank))
        if not self._block_size:
            self._learn_block_size(batch)
        delta = tracker.apply(batch.events, self._loop.time())
        if not delta.is_empty:
            self._seqs[rank] = seq
            frame = wire.Delta(
                self._incarnation, seq, delta.stored, delta.removed, delta.cleared, rank
            )
            self._send(wire.encode(frame))

    def on_reset(self) -> None:
        """Forget everything: sequence numbers may begin anew, so a snapshot rather than a delta."""
        for rank, tracker in self._trackers.items():
            tracker.reset()
            self._seqs[rank] = -1
            self._send(self._snapshot(rank))

    def on_failed(self, reason: str) -> None:
        """Show an empty cache until the source can be read again."""
        _log.warning("KV events of %s are given up for now: %s", self._entry.info.id, clean(reason))
        self._reader = None
        self.on_reset()
        self.beat()
        self._retry = self._loop.call_later(RETRY_S, self.start)

    # Frames…

    def _learn_block_size(self, batch: EventBatch) -> None:
        for event in batch.events:
            if isinstance(event, BlockStored):
                self._block_size = event.block_size
                for rank in self._trackers:
                    self._send(self._snapshot(rank))
                return

    def _snapshot(self, rank: int) -> bytes:
        hashes = self._trackers[rank].snapshot()
        return wire.encode(
            wire.Snapshot(self._incarnation, self._seqs[rank], self._block_size, hashes, rank)
        )

    def _heartbeat(self) -> bytes:
        is_stale = self.is_stale
        return b"".join(
            wire.encode(wire.Heartbeat(self._incarnation, seq, rank, is_stale))
            for rank, seq in self._seqs.items()
        )

    def _send(self, frame: bytes) -> None:
        behind = []
        for exchange, limit_bytes in self._limits_bytes.items():
            exchange.write(frame)
            if exchange.unsent_bytes > limit_bytes:
                behind.append(exchange)
        for exchange in behind:
            _log.warning("router %s is behind with KV deltas: cut", exchange.request.peer_name)
            self.num_cut += 1
            self._drop(exchange)
            exchange.abort()

    def _drop(self, exchange: Exchange) -> None:
        self._limits_bytes.pop(exchange, None)
        exchange.on_gone = None

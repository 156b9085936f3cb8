"""One engine's frames → the prefix index; says when the thread is lost and a new snapshot is needed. Pure."""

from collections.abc import Iterator, Sequence

from dynctl.core.kv import DEVICE, HOST, STORAGE
from dynctl.kv.wire import Delta, Frame, Heartbeat
from dynctl.router.metrics import Metrics
from dynctl.router.prefix_index import PrefixIndex, Source

_SLICE = 4096
"""Hashes applied before other work on the loop gets its turn: under a millisecond."""


class LostError(Exception):
    """Raised when frames do not continue what is known: another incarnation, or a part is missing."""


class KvFeed:
    """Applies one stream of frames of one incarnation."""

    def __init__(
        self, index: PrefixIndex, metrics: Metrics, engine_id: str, incarnation: str
    ) -> None:
        self._index = index
        self._metrics = metrics
        self._engine_id = engine_id
        self._incarnation = incarnation
        self._seqs: dict[Source, int] = {}
        """Last sequence number of each source; one that has none waits for its snapshot."""
        self._sources: dict[tuple[int, int], Source] = {}
        """By rank and medium."""
        self._num_since_break = 0

    def apply(self, frame: Frame) -> Iterator[None]:
        """Apply a frame, yielding between slices.

        Raises:
            LostError: when the stream is to be opened anew.
        """
        if frame.incarnation != self._incarnation:
            raise LostError(f"incarnation {frame.incarnation}, expected {self._incarnation}")
        if isinstance(frame, Heartbeat):
            self._metrics.kv_frames.add("heartbeat")
            last = self._seqs.get(self._source(frame.rank, DEVICE), frame.seq)
            if frame.seq != last:
                raise LostError(f"a quiet engine is at {frame.seq}, not where its deltas ended")
            return
        source = self._source(frame.rank, frame.medium)
        if isinstance(frame, Delta):
            self._check(source, frame.seq)
            self._metrics.kv_frames.add("delta")
            if frame.cleared:
                self._index.clear(source)
            if frame.removed:
                self._index.remove(source, frame.removed)
                self._num_since_break += len(frame.removed)
            yield from self._store(source, frame.stored)
        else:
            self._metrics.kv_frames.add("snapshot")
            self._begin(source)
            yield from self._store(source, frame.hashes)
        self._seqs[source] = frame.seq

    def _begin(self, source: Source) -> None:
        """Empty a source for its snapshot, and with a rank's first one all that an earlier stream told of the rank's media."""
        if not any(known.rank == source.rank for known in self._seqs):
            # A relay that has heard of no slower medium since it started would never take those blocks back.
            for medium in (HOST, STORAGE):
                self._index.clear(self._source(source.rank, medium))
        self._index.begin(source)

    def _source(self, rank: int, medium: int) -> Source:
        if medium not in (DEVICE, HOST):
            # A newer relay may know more media than we do: what nobody knows is taken for the slowest.
            medium = STORAGE
        source = self._sources.get((rank, medium))
        if source is None:
            source = Source(self._engine_id, self._incarnation, rank, medium)
            self._sources[rank, medium] = source
        return source

    def _check(self, source: Source, seq: int) -> None:
        last = self._seqs.get(source)
        if last is None:
            if source.medium == DEVICE:
                raise LostError("a delta before the snapshot")
            self._index.begin(source)  # a medium the engine tells of for the first time
        elif seq < last:
            raise LostError(f"sequence went back from {last} to {seq}")

    def _store(self, source: Source, hashes: Sequence[int]) -> Iterator[None]:
        for start in range(0, len(hashes), _SLICE):
            part = hashes[start : start + _SLICE] if len(hashes) > _SLICE else hashes
            # False: dropped meanwhile; the source's owner opens a new stream.
            if not self._index.store(source, part):
                raise LostError("the engine was dropped")
            self._num_since_break += len(part)
            if self._num_since_break >= _SLICE:
                # Small frames share a slice: a break costs more than to apply one of them.
                self._num_since_break = 0
                yield

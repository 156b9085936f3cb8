"""One engine's frames → the prefix index; says when the thread is lost and a new snapshot is needed. Pure."""

from collections.abc import Iterator, Sequence

from dynctl.kv.wire import Delta, Frame, Heartbeat, Snapshot
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
        self._seqs: dict[int, int] = {}
        """Last sequence number by rank; a rank without one waits for its snapshot."""

    def apply(self, frame: Frame) -> Iterator[None]:
        """Apply a frame, yielding between slices.

        Raises:
            LostError: when the stream is to be opened anew.
        """
        if frame.incarnation != self._incarnation:
            raise LostError(f"incarnation {frame.incarnation}, expected {self._incarnation}")
        source = Source(self._engine_id, self._incarnation, frame.rank)
        match frame:
            case Snapshot():
                self._metrics.kv_frames.add("snapshot")
                self._index.begin(source)
                yield from self._store(source, frame.hashes)
            case Delta():
                self._check(frame.rank, frame.seq)
                self._metrics.kv_frames.add("delta")
                if frame.cleared:
                    self._index.clear(source)
                self._index.remove(source, frame.removed)
                yield from self._store(source, frame.stored)
            case Heartbeat():
                self._metrics.kv_frames.add("heartbeat")
                if frame.seq != self._seqs.get(frame.rank, frame.seq):
                    raise LostError(f"a quiet engine is at {frame.seq}, not where its deltas ended")
                return
        self._seqs[frame.rank] = frame.seq

    def _check(self, rank: int, seq: int) -> None:
        last = self._seqs.get(rank)
        if last is None:
            raise LostError("a delta before the snapshot")
        if seq < last:
            raise LostError(f"sequence went back from {last} to {seq}")

    def _store(self, source: Source, hashes: Sequence[int]) -> Iterator[None]:
        for start in range(0, len(hashes), _SLICE):
            # False: dropped meanwhile; the source's owner opens a new stream.
            if not self._index.store(source, hashes[start : start + _SLICE]):
                raise LostError("the engine was dropped")
            yield

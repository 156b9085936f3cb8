"""One engine's frames → the prefix index; says when the thread is lost and a new snapshot is needed. Pure."""

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass

from dynctl.core.kv import DEVICE, HOST, STORAGE
from dynctl.kv.wire import Delta, Frame, Heartbeat
from dynctl.router.metrics import Metrics
from dynctl.router.prefix_index import PrefixIndex, Source
from dynctl.router.sources.split import worker_ids

_SLICE = 1024
"""Hashes applied before others have their turn."""


class LostError(Exception):
    """Raised when frames do not continue what is known: another incarnation, or a part is missing."""


@dataclass(slots=True)
class _Stream:
    """What is known of one source."""

    source: Source
    seq: int | None = None
    """Of the last frame applied; a source that has none waits for its snapshot."""


class KvFeed:
    """Applies one stream of frames of one incarnation."""

    def __init__(
        self,
        index: PrefixIndex,
        metrics: Metrics,
        engine_id: str,
        incarnation: str,
        ranks: int = 1,
    ) -> None:
        self._index = index
        self._metrics = metrics
        self.names = worker_ids(engine_id, ranks)
        """Of the engine's workers."""
        self._incarnation = incarnation
        self._streams: dict[tuple[int, int], _Stream] = {}
        """By rank and medium."""
        self._num_since_break = 0

    def name_of(self, rank: int) -> str:
        """Name the worker that frames of a rank speak of.

        Raises:
            LostError: when the engine has no such rank.
        """
        if len(self.names) == 1:
            return self.names[0]
        if not 0 <= rank < len(self.names):
            raise LostError(f"rank {rank} of an engine with {len(self.names)}")
        return self.names[rank]

    def apply(self, frame: Frame) -> Iterable[None]:
        """Apply a frame; what it returns is to be gone through: a large frame is applied in slices on the way.

        Raises:
            LostError: when the stream is to be opened anew.
        """
        if frame.incarnation != self._incarnation:
            raise LostError(f"incarnation {frame.incarnation}, expected {self._incarnation}")
        if isinstance(frame, Heartbeat):
            self._beat(frame)
            return ()
        stream = self._stream(frame.rank, frame.medium)
        if not isinstance(frame, Delta):
            self._metrics.kv_frames.add("snapshot")
            self._begin(frame.rank, stream)
            return self._store(stream, frame.hashes, frame.seq)
        self._check(stream, frame.seq)
        self._metrics.kv_frames.add("delta")
        if frame.cleared:
            self._index.clear(stream.source)
        if len(frame.removed) + len(frame.stored) > _SLICE:
            return self._change(stream, frame)
        self._remove_part(stream, frame.removed)
        self._store_part(stream, frame.stored)
        stream.seq = frame.seq
        return (None,) if self._is_break_due() else ()

    def _beat(self, frame: Heartbeat) -> None:
        self._metrics.kv_frames.add("heartbeat")
        last = self._stream(frame.rank, DEVICE).seq
        if last is not None and frame.seq != last:
            raise LostError(f"a quiet engine is at {frame.seq}, not where its deltas ended")

    def _begin(self, rank: int, stream: "_Stream") -> None:
        """Empty a source for its snapshot, and with a rank's first one all that an earlier stream told of the rank's media."""
        known = [one for (of, _), one in self._streams.items() if of == rank]
        if all(one.seq is None for one in known):
            # A relay that has heard of no slower medium since it started would never take those blocks back.
            for medium in (HOST, STORAGE):
                self._index.clear(self._stream(rank, medium).source)
        self._index.begin(stream.source)

    def _stream(self, rank: int, medium: int) -> "_Stream":
        if medium not in (DEVICE, HOST):
            # A newer relay may know more media than we do: what nobody knows is taken for the slowest.
            medium = STORAGE
        stream = self._streams.get((rank, medium))
        if stream is None:
            source = self._source(rank, medium)
            stream = self._streams[rank, medium] = _Stream(source)
        return stream

    def _source(self, rank: int, medium: int) -> Source:
        """Of several ranks each is a worker of its own, with one cache."""
        of_worker = rank if len(self.names) == 1 else 0
        return Source(self.name_of(rank), self._incarnation, of_worker, medium)

    def _check(self, stream: "_Stream", seq: int) -> None:
        if stream.seq is None:
            if stream.source.medium == DEVICE:
                raise LostError("a delta before the snapshot")
            self._index.begin(stream.source)  # a medium the engine tells of for the first time
        elif seq < stream.seq:
            raise LostError(f"sequence went back from {stream.seq} to {seq}")

    def _change(self, stream: "_Stream", frame: Delta) -> Iterator[None]:
        for start in range(0, len(frame.removed), _SLICE):
            self._remove_part(stream, frame.removed[start : start + _SLICE])
            if self._is_break_due():
                yield
        yield from self._store(stream, frame.stored, frame.seq)

    def _store(self, stream: "_Stream", hashes: Sequence[int], seq: int) -> Iterator[None]:
        for start in range(0, len(hashes), _SLICE):
            self._store_part(stream, hashes[start : start + _SLICE])
            if self._is_break_due():
                yield
        stream.seq = seq

    def _remove_part(self, stream: "_Stream", hashes: Sequence[int]) -> None:
        if hashes:
            self._index.remove(stream.source, hashes)
        self._num_since_break += len(hashes)

    def _store_part(self, stream: "_Stream", hashes: Sequence[int]) -> None:
        # False: dropped meanwhile; the source's owner opens a new stream.
        if hashes and not self._index.store(stream.source, hashes):
            raise LostError("the engine was dropped")
        self._num_since_break += len(hashes)

    def _is_break_due(self) -> bool:
        """Small frames share a slice: a break costs more than to apply one of them."""
        if self._num_since_break < _SLICE:
            return False
        self._num_since_break = 0
        return True

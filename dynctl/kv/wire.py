"""Frames from relay to router: a snapshot of block hashes, then deltas and heartbeats, length-prefixed.

    frame   := length u32 big-endian (of the rest) · kind u8 · header length u16 big-endian · header · body
    header  := msgpack array, body := hashes as little-endian u64 words

A reader leaves elements of a header that it does not know out, and takes defaults for those that are missing. Frames of
media slower than the device go only to routers that ask for them: an older one would take them for the device's.
Not here: sockets, engine events. Pure.
"""

import sys
from array import array
from collections.abc import Iterable, Iterator, Sequence

import msgspec

from dynctl.core.kv import DEVICE
from dynctl.errors import DynctlError

ALL_MEDIA = b"media=all"
"""The query of a router that understands frames of slower media; a relay that knows none ignores it."""
MAX_FRAME_BYTES = 4 * 1024**2
MAX_HASHES_PER_FRAME = 262_144
"""2 MiB of hashes; larger snapshots go on as deltas with the snapshot's sequence number."""

_LENGTH_BYTES = 4
_IS_LITTLE = sys.byteorder == "little"


class WireError(DynctlError):
    """Raised when a frame is malformed or too large: the stream cannot be read on."""


class Snapshot(msgspec.Struct, frozen=True):
    """Everything one rank has cached in one medium at `seq`; replaces what was known of that."""

    incarnation: str
    seq: int
    block_size: int
    hashes: Sequence[int]
    rank: int = 0
    medium: int = DEVICE


class Delta(msgspec.Struct, frozen=True):
    """A net change up to `seq`: apply `cleared` first, then `removed`, then `stored`."""

    incarnation: str
    seq: int
    stored: Sequence[int]
    removed: Sequence[int]
    cleared: bool = False
    rank: int = 0
    medium: int = DEVICE


class SourceHealth(msgspec.Struct, frozen=True, array_like=True):
    """What whoever reads an engine's events can say about them: evidence for the search for missing hits."""

    trust: float = 1.0
    """Share of what is known of the cache that is to be believed: less while batches are missing, 0 when hopelessly behind."""
    was_connected: bool = True
    """Whether the engine's events could be reached at all."""
    num_unreadable: int = 0
    """Messages and events nobody understood."""
    num_keyed: int = 0
    """First blocks with a LoRA, a cache salt or other extra keys."""
    other_topic: str = ""
    """The topic of its events, where it isn't the one subscribed to."""
    num_other_ranks: int = 0
    """Batches of data-parallel ranks that are not expected there, ignored."""
    num_other_groups: int = 0
    """Events of groups of layers whose blocks do not stand for a prefix, ignored."""
    num_lost: int = 0
    """Times that events were missing for good, so that all that was known of the cache was forgotten."""
    num_orphans: int = 0
    """Events of blocks whose beginnings nobody told, given up."""


class Heartbeat(msgspec.Struct, frozen=True):
    """Nothing happened; and how well the relay knows the engine's cache."""

    incarnation: str
    seq: int
    rank: int = 0
    is_stale: bool = False
    """The relay itself is missing events just now."""
    health: SourceHealth = SourceHealth()


Frame = Snapshot | Delta | Heartbeat


class _SnapshotHeader(msgspec.Struct, array_like=True):
    incarnation: str
    seq: int
    rank: int
    block_size: int
    medium: int = DEVICE


class _DeltaHeader(msgspec.Struct, array_like=True):
    incarnation: str
    seq: int
    rank: int
    num_stored: int
    num_removed: int
    cleared: bool
    medium: int = DEVICE


class _HeartbeatHeader(msgspec.Struct, array_like=True):
    incarnation: str
    seq: int
    rank: int
    is_stale: bool
    health: SourceHealth = SourceHealth()


_pack = msgspec.msgpack.Encoder().encode
_snapshot_header = msgspec.msgpack.Decoder(_SnapshotHeader)
_delta_header = msgspec.msgpack.Decoder(_DeltaHeader)
_heartbeat_header = msgspec.msgpack.Decoder(_HeartbeatHeader)


def encode(frame: Frame) -> bytes:
    """Write one frame; more hashes than a frame holds are split into several, back to back."""
    return b"".join(_encode_one(part) for part in _split(frame))


class FrameReader:
    """Cuts a byte stream into frames, however it was split on the way."""

    def __init__(self) -> None:
        self._rest = bytearray()
        self._wanted = 0
        """So many bytes complete the frame that the rest begins with."""

    def feed(self, data: bytes) -> list[Frame]:
        """Take bytes and return the frames they complete.

        Raises:
            WireError: when a frame is malformed or larger than any we send.
        """
        if self._rest:
            self._rest += data
            if len(self._rest) < self._wanted:
                return []
            data = bytes(self._rest)
            self._rest.clear()
        frames: list[Frame] = []
        start, length = 0, len(data)
        while start < length:
            body = start + _LENGTH_BYTES
            num_bytes = int.from_bytes(data[start:body], "big") if body <= length else 0
            if num_bytes > MAX_FRAME_BYTES:
                raise WireError(f"a frame of {num_bytes} bytes, more than {MAX_FRAME_BYTES}")
            end = body + num_bytes
            if end > length:
                self._rest += data[start:]
                self._wanted = end - start
                break
            frames.append(_decode_one(data[body:end]))
            start = end
        return frames


def _split(frame: Frame) -> Iterator[Frame]:
    """Yield frames of at most MAX_HASHES_PER_FRAME hashes that mean the same."""
    match frame:
        case Snapshot(incarnation, seq, block_size, hashes, rank, medium):
            size = MAX_HASHES_PER_FRAME
            yield Snapshot(incarnation, seq, block_size, hashes[:size], rank, medium)
            for start in range(size, len(hashes), size):
                part = hashes[start : start + size]
                yield Delta(incarnation, seq, part, (), rank=rank, medium=medium)
        case Delta(incarnation, seq, stored, removed, cleared, rank, medium):
            half = MAX_HASHES_PER_FRAME // 2
            if len(stored) <= half and len(removed) <= half:
                yield frame
                return
            if cleared:
                yield Delta(incarnation, seq, (), (), True, rank, medium)
            for start in range(0, len(removed), half):
                part = removed[start : start + half]
                yield Delta(incarnation, seq, (), part, rank=rank, medium=medium)
            for start in range(0, len(stored), half):
                part = stored[start : start + half]
                yield Delta(incarnation, seq, part, (), rank=rank, medium=medium)
        case Heartbeat():
            yield frame


def _encode_one(frame: Frame) -> bytes:
    match frame:
        case Snapshot(incarnation, seq, block_size, hashes, rank, medium):
            kind, header = b"S", _pack(_SnapshotHeader(incarnation, seq, rank, block_size, medium))
            body = _words(hashes)
        case Delta(incarnation, seq, stored, removed, cleared, rank, medium):
            kind, numbers = b"D", (len(stored), len(removed))
            header = _pack(_DeltaHeader(incarnation, seq, rank, *numbers, cleared, medium))
            body = _words(stored) + _words(removed)
        case Heartbeat(incarnation, seq, rank, is_stale, health):
            kind, header = b"H", _pack(_HeartbeatHeader(incarnation, seq, rank, is_stale, health))
            body = b""
    rest = kind + len(header).to_bytes(2, "big") + header + body
    return len(rest).to_bytes(_LENGTH_BYTES, "big") + rest


def _decode_one(data: bytes) -> Frame:
    """Read one frame without its length.

    Raises:
        WireError: when the kind is unknown, or header and body do not fit together.
    """
    header_end = 3 + int.from_bytes(data[1:3], "big")
    kind, header = data[:1], data[3:header_end]
    try:
        # Nearly all are deltas.
        if kind == b"D":
            d, numbers = _delta_header.decode(header), _numbers(data[header_end:])
            if d.num_stored < 0 or d.num_stored + d.num_removed != len(numbers):
                raise WireError(f"a delta with {len(numbers)} hashes")
            stored, removed = numbers, []
            if d.num_removed:
                stored, removed = numbers[: d.num_stored], numbers[d.num_stored :]
            return Delta(d.incarnation, d.seq, stored, removed, d.cleared, d.rank, d.medium)
        if kind == b"S":
            s, numbers = _snapshot_header.decode(header), _numbers(data[header_end:])
            return Snapshot(s.incarnation, s.seq, s.block_size, numbers, s.rank, s.medium)
        if kind == b"H":
            h = _heartbeat_header.decode(header)
            return Heartbeat(h.incarnation, h.seq, h.rank, h.is_stale, h.health)
    except (msgspec.DecodeError, ValueError, RecursionError) as error:
        raise WireError(f"a malformed frame: {error}") from error
    raise WireError(f"a frame of unknown kind {kind!r}")


def _words(hashes: Iterable[int]) -> bytes:
    words = array("Q", hashes)
    if not _IS_LITTLE:
        words.byteswap()
    return words.tobytes()


def _numbers(body: bytes) -> list[int]:
    words = array("Q", body)  # ValueError when it is no whole number of words
    if not _IS_LITTLE:
        words.byteswap()
    return words.tolist()

"""vLLM's KV event batches: decoding (map form of 2026, array form of 2025, both tolerant) and encoding (map form).

Unknown event tags and fields are skipped and counted, sizes are bounded, nothing is ever unpickled. A batch in the usual
form is read in one step where that is compiled (`plain_batch`); else all of it is decoded in one go in the form its first
event has; what does not fit is taken event by event.
Written from captured batches of vLLM 0.32.0 (tests/kv/captures) and its wire notes.
Not here: order and gaps (`sequence`), our hashes (`tracker`), sockets. Pure.
"""

from array import array
from collections.abc import Sequence
from typing import Annotated, Any

import msgspec

from dynctl.core.kv import (
    DEVICE,
    NO_GROUP,
    AllBlocksCleared,
    BlockRemoved,
    BlockStored,
    EngineBlockHash,
    KvEvent,
    medium_of,
)
from dynctl.errors import DynctlError
from dynctl.kv import plain_batch

MAX_PAYLOAD_BYTES = 8 * 1024**2
"""Above any batch an engine makes in one step; a larger one is refused unread."""

_MAP_FIRST_BYTES = frozenset([*range(0x80, 0x90), 0xDE, 0xDF])
_ARRAY_FIRST_BYTES = frozenset([bytes([head]) for head in (*range(0x90, 0xA0), 0xDC, 0xDD)])

_Hash = int | bytes
_Token = Annotated[int, msgspec.Meta(ge=0, le=2**32 - 1)]
_BlockSize = Annotated[int, msgspec.Meta(ge=0, le=2**20)]


class EventError(DynctlError):
    """Raised when a batch cannot be understood: not msgpack, wrong shape, or beyond the bounds."""


class EventBatch(msgspec.Struct, frozen=True, gc=False):
    """What one engine step did to its cache."""

    ts: float
    """The engine's wall clock; for people only, no decision uses it."""
    events: tuple[KvEvent, ...]
    dp_rank: int = 0
    num_unknown: int = 0
    """Events of a kind this version does not know, left out."""


class _Stored(msgspec.Struct, tag="BlockStored", tag_field="type", gc=False):
    block_hashes: list[_Hash]
    parent_block_hash: _Hash | None
    token_ids: list[_Token]
    block_size: _BlockSize
    lora_id: int | None = None
    medium: str | None = None
    lora_name: str | None = None
    extra_keys: list[list[Any] | None] | None = None
    group_idx: int | None = None
    kv_cache_spec_kind: str | None = None


class _Removed(msgspec.Struct, tag="BlockRemoved", tag_field="type", gc=False):
    block_hashes: list[_Hash]
    medium: str | None = None
    group_idx: int | None = None


class _Cleared(msgspec.Struct, tag="AllBlocksCleared", tag_field="type"):
    pass


class _StoredArray(_Stored, tag="BlockStored", array_like=True, gc=False):
    pass


class _RemovedArray(_Removed, tag="BlockRemoved", array_like=True, gc=False):
    pass


class _ClearedArray(_Cleared, tag="AllBlocksCleared", array_like=True):
    pass


class _Batch(msgspec.Struct, array_like=True):
    ts: float
    events: list[_Stored | _Removed | _Cleared]
    data_parallel_rank: int | None = None


class _BatchOfArrays(msgspec.Struct, array_like=True):
    ts: float
    events: list[_StoredArray | _RemovedArray | _ClearedArray]
    data_parallel_rank: int | None = None


class _RawBatch(msgspec.Struct, array_like=True):
    ts: float
    events: list[msgspec.Raw]
    data_parallel_rank: int | None = None


class _RawMapBatch(msgspec.Struct):
    ts: float
    events: list[msgspec.Raw]
    data_parallel_rank: int | None = None


class _MapTag(msgspec.Struct):
    type: str


class _ArrayTag(msgspec.Struct, array_like=True):
    type: str


_TAGS = frozenset(["BlockStored", "BlockRemoved", "AllBlocksCleared"])
_batches = msgspec.msgpack.Decoder(_Batch)
_batches_of_arrays = msgspec.msgpack.Decoder(_BatchOfArrays)
_raw_batches = msgspec.msgpack.Decoder(_RawBatch)
_raw_map_batches = msgspec.msgpack.Decoder(_RawMapBatch)
_map_events = msgspec.msgpack.Decoder(_Stored | _Removed | _Cleared)
_array_events = msgspec.msgpack.Decoder(_StoredArray | _RemovedArray | _ClearedArray)
_map_tags = msgspec.msgpack.Decoder(_MapTag)
_array_tags = msgspec.msgpack.Decoder(_ArrayTag)
_encoder = msgspec.msgpack.Encoder()


def decode(payload: bytes) -> EventBatch:
    """Read one batch.

    Raises:
        EventError: when it is no batch, too large, or an event of a known kind is malformed.
    """
    if len(payload) > MAX_PAYLOAD_BYTES:
        raise EventError(f"a KV event batch of {len(payload)} bytes, more than {MAX_PAYLOAD_BYTES}")
    plain = plain_batch.read(payload)
    if plain is not None:
        return EventBatch(*plain)
    try:
        batch = (_batches_of_arrays if _holds_arrays(payload) else _batches).decode(payload)
    except (msgspec.DecodeError, RecursionError):
        return _decode_slowly(payload)
    events = tuple([_to_core(event) for event in batch.events])
    return EventBatch(batch.ts, events, batch.data_parallel_rank or 0)


def _holds_arrays(payload: bytes) -> bool:
    """Tell whether the first event of a batch is an array, where the batch is written as engines do."""
    if payload[1:2] != b"\xcb":  # a time as a double, 8 bytes, then the list of events
        return False
    first = payload[10:11]
    at = 11 if first < b"\xdc" else 13 if first == b"\xdc" else 15
    return payload[at : at + 1] in _ARRAY_FIRST_BYTES


def encode(batch: EventBatch) -> bytes:
    """Write a batch as vLLM 0.32 does: an array of time, events as maps, rank."""
    events = [_from_core(event) for event in batch.events]
    return _encoder.encode(_Batch(batch.ts, events, batch.dp_rank))


def _decode_slowly(payload: bytes) -> EventBatch:
    """Decode event by event: array forms, unknown tags; anything else is an error."""
    try:
        is_map = payload[:1] != b"" and payload[0] in _MAP_FIRST_BYTES
        batch = (_raw_map_batches if is_map else _raw_batches).decode(payload)
        known = [event for event in map(_decode_event, batch.events) if event is not None]
    except (msgspec.DecodeError, RecursionError) as error:
        raise EventError(f"a KV event batch of {len(payload)} bytes: {error}") from error
    return EventBatch(
        batch.ts, tuple(known), batch.data_parallel_rank or 0, len(batch.events) - len(known)
    )


def _decode_event(raw: msgspec.Raw) -> KvEvent | None:
    view = bytes(raw)
    is_map = view[0] in _MAP_FIRST_BYTES
    if (_map_tags if is_map else _array_tags).decode(view).type not in _TAGS:
        return None
    return _to_core((_map_events if is_map else _array_events).decode(view))


def _to_core(event: _Stored | _Removed | _Cleared) -> KvEvent:
    if isinstance(event, _Stored):
        return _stored(event)
    if isinstance(event, _Removed):
        return BlockRemoved(_handles(event.block_hashes), event.medium, _group_of(event))
    return AllBlocksCleared()


def _stored(event: _Stored) -> BlockStored:
    handles, size, parent = _handles(event.block_hashes), event.block_size, event.parent_block_hash
    ids = array("I", event.token_ids)
    # Offloading connectors may name blocks without saying what is in them.
    if not size or len(ids) != len(handles) * size:
        is_bare = len(ids) == 0 and medium_of(event.medium) != DEVICE
        if not is_bare:
            raise EventError(f"{len(ids)} tokens for {len(handles)} blocks of {size}")
    extra_keys = event.extra_keys
    if extra_keys is not None and len(extra_keys) != len(handles):
        raise EventError(f"extra keys for {len(extra_keys)} of {len(handles)} blocks")
    return BlockStored(
        handles,
        None if parent is None else _handle(parent),
        ids,
        size,
        event.lora_name,
        None if extra_keys is None else tuple(extra_keys),
        event.medium,
        _group_of(event),
        event.kv_cache_spec_kind,
    )


def _group_of(event: _Stored | _Removed) -> int:
    """Take the group an event names; older engines, which name none, have one on the device."""
    group = event.group_idx
    if group is None:
        return 0 if medium_of(event.medium) == DEVICE else NO_GROUP
    return group


def _handles(values: Sequence[int | bytes]) -> tuple[EngineBlockHash, ...]:
    """Take all handles of an event; unsigned integers, the usual form, are taken as they are."""
    try:
        is_plain = min(values) >= 0  # type: ignore[operator]
    except (TypeError, ValueError):  # bytes among them, or none
        is_plain = False
    return tuple(values) if is_plain else tuple(map(_handle, values))  # type: ignore[arg-type]


def _handle(value: int | bytes) -> EngineBlockHash:
    """Take the low 64 bits of a hash in bytes, which is what vLLM's integer form holds; unsigned."""
    number = value if isinstance(value, int) else int.from_bytes(value[-8:], "big")
    return EngineBlockHash(number & 0xFFFF_FFFF_FFFF_FFFF)


def _from_core(event: KvEvent) -> _Stored | _Removed | _Cleared:
    if isinstance(event, BlockStored):
        extra_keys = event.extra_keys
        return _Stored(
            list(event.block_hashes),
            event.parent_block_hash,
            list(event.token_ids),
            event.block_size,
            None,
            event.medium,
            event.lora_name,
            None if extra_keys is None else _key_lists(extra_keys),
            _named(event.group_idx),
            event.spec_kind,
        )
    if isinstance(event, BlockRemoved):
        return _Removed(list(event.block_hashes), event.medium, _named(event.group_idx))
    return _Cleared()


def _named(group: int) -> int | None:
    return None if group == NO_GROUP else group


def _key_lists(extra_keys: tuple[object, ...]) -> list[list[Any] | None]:
    return [list(keys) if isinstance(keys, list | tuple) else None for keys in extra_keys]

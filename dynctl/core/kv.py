"""KV cache events and block hashes: names follow vLLM's prefix caching. Pure."""

from collections.abc import Sequence
from typing import Final, NewType

import msgspec

BlockHash = NewType("BlockHash", int)
"""Our 64-bit hash of a block and everything before it. Only steers: a collision costs time, never an answer."""

EngineBlockHash = NewType("EngineBlockHash", int)
"""The engine's own hash: a handle inside one incarnation, never compared with ours."""

DEVICE: Final = 0
"""A cache's medium, as a number: where blocks are used, …"""

HOST: Final = 1
"""… memory of the engine's host, from which they are loaded before use, …"""

STORAGE: Final = 2
"""… and whatever else an engine loads from: disks, other machines."""


NO_GROUP: Final = -1
"""The group of an event that names none, of a medium slower than the device: not every connector knows of groups."""


def medium_of(name: str | None) -> int:
    """Read the medium of an event.

    vLLM says GPU for the device's cache, also on a CPU machine, and its offloading connectors CPU and STORAGE; LMCache
    writes cpu. What nobody knows is taken for the slowest.
    """
    if name is None or name == "GPU":
        return DEVICE
    return HOST if name.upper() == "CPU" else STORAGE


# Structs, not dataclasses: engines make hundreds in a second, and one of these is made in a fifth of the time.


class BlockStored(msgspec.Struct, frozen=True, gc=False):
    """The engine filled blocks; `token_ids` has `block_size` × len(`block_hashes`) entries.

    Of a medium slower than the device it may have none: vLLM's offloading connector then only names blocks.
    """

    block_hashes: tuple[EngineBlockHash, ...]
    parent_block_hash: EngineBlockHash | None
    token_ids: Sequence[int]
    """An array where they were read from an event."""
    block_size: int
    lora_name: str | None = None
    extra_keys: tuple[object, ...] | None = None
    """Per block: None, or the keys that separate it from equal tokens (LoRA name, cache salt, image hashes)."""
    medium: str | None = None
    group_idx: int = 0
    """Which group of layers, in models that mix attention kinds; `NO_GROUP`: it does not say."""
    spec_kind: str | None = None
    """What kind of layers those are, in the engine's words; None: it does not say."""


class BlockRemoved(msgspec.Struct, frozen=True, gc=False):
    """The engine evicted blocks."""

    block_hashes: tuple[EngineBlockHash, ...]
    medium: str | None = None
    group_idx: int = 0


class AllBlocksCleared(msgspec.Struct, frozen=True, gc=False):
    """The engine dropped its whole cache. What its slower media still hold it does not say: that is held for gone too."""


WHOLE_PREFIX_KINDS: Final = frozenset(["full_attention", "mla_attention", "sink_full_attention"])
"""Kinds of layers that need, and keep, all of a prefix. Source: vLLM 0.32 KVCacheSpecKind; the others there are sliding
windows, chunks and states, which keep a part of it, and encoders."""


def is_of_prefix(event: BlockStored) -> bool:
    """Tell whether blocks stand for a prefix being held: those of one group of layers that keep all of it do.

    Where the engine does not say what kind of layers a group has, the first group does; so may an event without one.
    """
    kind = event.spec_kind
    return (
        event.group_idx in (0, NO_GROUP)
        if kind in (None, "unknown")
        else kind in WHOLE_PREFIX_KINDS
    )


KvEvent = BlockStored | BlockRemoved | AllBlocksCleared


def device_block_size(events: Sequence[KvEvent]) -> int:
    """Find the block size of the prefix on an engine's device in its events; 0: they do not tell it.

    Chunks of slower media, and blocks of other groups of layers, may have another size.
    """
    for event in events:
        if isinstance(event, BlockStored):
            is_on_device = medium_of(event.medium) == DEVICE
            if is_on_device and event.block_size and is_of_prefix(event):
                return event.block_size
    return 0

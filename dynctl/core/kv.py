"""KV cache events and block hashes: names follow vLLM's prefix caching. Pure."""

from dataclasses import dataclass
from typing import NewType

BlockHash = NewType("BlockHash", int)
"""Our 64-bit hash of a block and everything before it. Only steers: a collision costs time, never an answer."""

EngineBlockHash = NewType("EngineBlockHash", int)
"""The engine's own hash: a handle inside one incarnation, never compared with ours."""


@dataclass(frozen=True, slots=True)
class BlockStored:
    """The engine filled blocks; `token_ids` has `block_size` × len(`block_hashes`) entries."""

    block_hashes: tuple[EngineBlockHash, ...]
    parent_block_hash: EngineBlockHash | None
    token_ids: tuple[int, ...]
    block_size: int
    lora_name: str | None = None
    extra_keys: tuple[object, ...] | None = None
    """Per block: None, or the keys that separate it from equal tokens (LoRA name, cache salt, image hashes)."""
    medium: str | None = None
    group_idx: int = 0
    """Which group of layers, in models that mix attention kinds; group 0 stands for the prefix."""


@dataclass(frozen=True, slots=True)
class BlockRemoved:
    """The engine evicted blocks."""

    block_hashes: tuple[EngineBlockHash, ...]
    medium: str | None = None
    group_idx: int = 0


@dataclass(frozen=True, slots=True)
class AllBlocksCleared:
    """The engine dropped its whole cache."""


KvEvent = BlockStored | BlockRemoved | AllBlocksCleared

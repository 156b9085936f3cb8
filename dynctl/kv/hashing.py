"""Our block hashes: 64 bits over the whole prefix, equal in the router (from prompt tokens) and the relay (from events).

A hash covers everything before the block's end: xxHash64 over the prefix's token ids as little-endian 32-bit words,
seeded by the deployment's seed and the prefix's namespace (LoRA, cache salt, other extra keys of the first block).
So the router evaluates a prefix only where it looks (bisection over depth), and the relay extends a saved state of
137 bytes. The hash does not depend on the block size: engines with other block sizes share keys at common depths.
Measured against a chain of blocks, xxh3 and a polynomial: docs/decisions/0003-block-hash.md.
It only steers: a collision costs time, never an answer.

Not here: events, sequences, sockets. Pure.
"""

import sys
from array import array
from collections.abc import Sequence

import msgspec
import xxhash

from dynctl.core.kv import BlockHash
from dynctl.kv.running_hash import RunningHash, feed_blocks

_TOKEN_BYTES = 4
_MARK = b"\xff\xff\xff\xff"
"""Starts extra keys inside a prefix: no vocabulary has a token 2**32 - 1."""

_IS_LITTLE = sys.byteorder == "little"

PrefixState = RunningHash
"""A prefix's running hash; extended on a copy."""


def namespace(lora_name: str | None = None, keys: Sequence[object] = ()) -> bytes:
    """Say in bytes what else separates prefixes, as vLLM does: the LoRA's name and the first block's other extra keys.

    A request's `cache_salt` is `keys=(salt,)`. Without either the namespace is empty.
    """
    if lora_name is None and not keys:
        return b""
    return msgspec.msgpack.encode([lora_name, list(keys)])


def own_keys(keys: object, lora_name: str | None) -> tuple[object, ...]:
    """Take a block's extra keys without the LoRA's name, which the namespace holds already."""
    if not isinstance(keys, list | tuple):
        return ()
    return tuple(key for key in keys if lora_name is None or key != lora_name)


def pack_tokens(token_ids: Sequence[int]) -> bytes:
    """Write token ids as little-endian 32-bit words; an array of them is one of 32-bit words.

    Raises:
        OverflowError: when an id is negative or above 2**32 - 1.
    """
    words = token_ids if isinstance(token_ids, array) else array("I", token_ids)
    if not _IS_LITTLE:
        words = words[:]
        words.byteswap()
    return words.tobytes()


def unpack_tokens(token_bytes: bytes) -> list[int]:
    """Read back what `pack_tokens` wrote."""
    words = array("I", token_bytes)
    if not _IS_LITTLE:
        words.byteswap()
    return words.tolist()


class PromptBlocks:
    """The full blocks of one prompt; a hash is computed when asked for, and kept."""

    __slots__ = ("_known", "_seed", "data", "num_blocks", "stride_bytes")

    def __init__(self, token_bytes: bytes, seed: int, stride_bytes: int) -> None:
        self.data = memoryview(token_bytes)
        """The token ids as the hash takes them."""
        self._seed = seed
        self.stride_bytes = stride_bytes
        self._known: dict[int, int] = {}
        self.num_blocks = len(token_bytes) // stride_bytes

    def hash_at(self, depth: int) -> BlockHash:
        """Hash the first `depth` blocks; 1 ≤ depth ≤ num_blocks."""
        known = self._known.get(depth)
        if known is None:
            end = depth * self.stride_bytes
            known = self._known[depth] = xxhash.xxh64_intdigest(self.data[:end], self._seed)
        return BlockHash(known)

    def start(self, num_blocks: int) -> PrefixState:
        """Return the running hash of the first blocks.

        Feeding it `data` from `num_blocks * stride_bytes` on extends it, so that a look at depths in steps costs each
        byte of the prompt once, however many steps there are.
        """
        return PrefixState(self.data[: num_blocks * self.stride_bytes], self._seed)

    def hashes(self) -> list[BlockHash]:
        """Hash every depth in one pass over the prompt: (num_blocks,), shallowest first."""
        return self.hashes_from(0)

    def hashes_from(self, depth: int) -> list[BlockHash]:
        """Hash every depth beyond one: (num_blocks - depth,), shallowest first."""
        stride = self.stride_bytes
        return feed_blocks(self.start(depth), self.data[depth * stride :], stride)


class BlockHasher:
    """Hashes for one deployment: its seed covers deployment and model revision. Stateless, so shared freely."""

    __slots__ = ("_namespace_seeds", "_seed", "_stride_bytes", "block_size")

    _MAX_NAMESPACES = 4096

    def __init__(self, seed: bytes, block_size: int) -> None:
        if block_size < 1:
            raise ValueError(f"a block of {block_size} tokens")
        self._seed = len(seed).to_bytes(8, "big") + seed
        self.block_size = block_size
        self._stride_bytes = block_size * _TOKEN_BYTES
        self._namespace_seeds: dict[bytes, int] = {}

    def prompt(self, token_ids: Sequence[int], namespace: bytes = b"") -> PromptBlocks:
        """Prepare a prompt's full blocks; packing costs 6 ns a token, hashes are computed on demand."""
        return PromptBlocks(pack_tokens(token_ids), self._seed_of(namespace), self._stride_bytes)

    def again(self, blocks: PromptBlocks) -> PromptBlocks:
        """The same tokens under this hasher's seed and block size."""
        return PromptBlocks(bytes(blocks.data), self._seed_of(b""), self._stride_bytes)

    def start(self, namespace: bytes = b"") -> PrefixState:
        """Begin an empty prefix, to be extended block by block."""
        return PrefixState(b"", self._seed_of(namespace))

    def extend(
        self, state: PrefixState, block_bytes: bytes | memoryview, keys: Sequence[object] = ()
    ) -> PrefixState:
        """Return the state one block further, the given one untouched; its hash is `intdigest()`.

        `keys` are extra keys of a block that is not the first (an image that begins there, say).
        """
        further = state.copy()
        if keys:
            further.update(_MARK + msgspec.msgpack.encode(list(keys)))
        further.update(block_bytes)
        return further

    def _seed_of(self, namespace: bytes) -> int:
        seed = self._namespace_seeds.get(namespace)
        if seed is None:
            if len(self._namespace_seeds) >= self._MAX_NAMESPACES:
                self._namespace_seeds.clear()
            seed = xxhash.xxh3_64_intdigest(self._seed + namespace)
            self._namespace_seeds[namespace] = seed
        return seed

"""xxHash64 as it runs over a prefix, and its value behind each of many blocks.

A compiled wheel has the same in C beside this (`running_hash.c`), where a block takes 25 ns instead of 140: a step from Python
into the library and back costs more than hashing a block. Not here: seeds, what is hashed (`hashing`). Pure.
"""

import functools
from collections.abc import Callable

import xxhash

from dynctl.core.kv import BlockHash

RunningHash = xxhash.xxh64
"""What was fed so far; `copy` before it is fed on where somebody else goes on from there."""


def feed_blocks(state: RunningHash, words: bytes | memoryview, stride: int) -> list[BlockHash]:
    """Feed whole blocks of `stride` bytes; return the hash behind each.

    Raises:
        ValueError: when a block has no bytes.
    """
    if stride < 1:
        raise ValueError(f"blocks of {stride} bytes")
    # The loops run in C: block by block, the running hash is fed and read.
    block_at: Callable[[slice], bytes | memoryview] = words.__getitem__
    slices, digest = _slices(len(words) // stride, stride), state.intdigest
    return [BlockHash(digest()) for _ in map(state.update, map(block_at, slices))]


@functools.lru_cache(maxsize=256)
def _slices(number: int, stride: int) -> tuple[slice, ...]:
    """Where each of so many blocks lies in their words."""
    return tuple(slice(start, start + stride) for start in range(0, number * stride, stride))

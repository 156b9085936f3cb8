"""Blocks that engines will hold soon, because a prompt was just sent there: believed for a few seconds.

A prompt is noted at few depths, all multiples of one power of two, so that a match that goes by falling powers of two
meets them whatever the other prompt's length. Not here: what engines say they hold (`prefix_index`). Pure.
"""

from collections.abc import Iterator

from dynctl.kv.hashing import PromptBlocks

_AGE_S = 5.0
"""Entries live between one and two of these. A prompt that waits longer is believed no more: a guess that leaves room
for a prefill of 100,000 tokens and a queue before it."""

_MAX_POINTS = 16
"""Of a prompt; what is shared is then known to an eighth of the prompt at worst."""

_MAX_ENTRIES = 65_536
"""Of a generation: 20 MiB in all."""


class ExpectedBlocks:
    """Hash → bits of sources, in two generations."""

    __slots__ = ("_old", "_started_s", "_young")

    def __init__(self) -> None:
        self._young: dict[int, int] = {}
        self._old: dict[int, int] = {}
        self._started_s = 0.0

    def __len__(self) -> int:
        return len(self._young) + len(self._old)

    def add(self, bit: int, blocks: PromptBlocks, num_blocks: int, num_held: int) -> None:
        """Expect a prompt's first blocks from one source, of which it holds some for sure."""
        young = self._young
        for block in _points(blocks, num_blocks, num_held):
            young[block] = young.get(block, 0) | bit
        if len(young) > _MAX_ENTRIES:
            self._old, self._young = young, {}

    def withdraw(self, bit: int, blocks: PromptBlocks, num_blocks: int, num_held: int) -> None:
        """Expect it no more; another prompt's part of it that was sent there too is forgotten with it."""
        for block in _points(blocks, num_blocks, num_held):
            self.remove(block, bit)

    def sides(self) -> tuple[dict[int, int], dict[int, int]]:
        """Both generations, for who looks many times at once."""
        return self._young, self._old

    def mask_of(self, block: int) -> int:
        """Bits of the sources expected to hold a block."""
        return self._young.get(block, 0) | self._old.get(block, 0)

    def remove(self, block: int, bit: int) -> None:
        """Take one source's block away: it was there, and was evicted."""
        for side in (self._young, self._old):
            mask = side.get(block)
            if mask is not None and mask & bit:
                if left := mask & ~bit:
                    side[block] = left
                else:
                    del side[block]

    def forget(self, bits: int) -> None:
        """Take sources away altogether."""
        for side in (self._young, self._old):
            for block in [block for block, mask in side.items() if mask & bits]:
                self.remove(block, bits)

    def age(self, now_s: float) -> None:
        """Drop what is too old; call it from a timer."""
        if now_s - self._started_s >= _AGE_S:
            self._old, self._young, self._started_s = self._young, {}, now_s


def _points(blocks: PromptBlocks, num_blocks: int, num_held: int) -> Iterator[int]:
    """Yield the hashes at the depths where a prompt is noted, beyond those held."""
    stride = 1
    while stride * _MAX_POINTS < num_blocks:
        stride <<= 1
    data, bytes_of = blocks.data, blocks.stride_bytes
    depth = num_held // stride * stride
    if depth == 0 and stride > 1:
        yield blocks.start(1).intdigest()
    state = blocks.start(depth)
    while (further := depth + stride) <= num_blocks:
        state.update(data[depth * bytes_of : further * bytes_of])
        yield state.intdigest()
        depth = further

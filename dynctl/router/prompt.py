"""A request's prompt as routing needs it: how many tokens, and its blocks per block size.

Not here: tokenising (`tokens`). Pure.
"""

from collections.abc import Callable, Sequence
from typing import Final

from dynctl.kv.hashing import BlockHasher, PromptBlocks

TEXT_MARK: Final = 2**32 - 1
"""First of the numbers that stand for a text. No vocabulary has this token: text never equals tokens."""

CHARS_PER_TOKEN: Final = 4
"""Of English text under the usual vocabularies; only for prompts nobody tokenised."""

_FINE = 16
"""What prompts have in common is known to a block up to twice that many, and to so small a part of it beyond."""


class Hashers:
    """One hasher per block size, all with the deployment's seed."""

    def __init__(self, seed: str) -> None:
        self._seed = seed.encode()
        self._hashers: dict[int, BlockHasher] = {}

    def of(self, block_size: int) -> BlockHasher:
        """The hasher for engines with this block size."""
        hasher = self._hashers.get(block_size)
        if hasher is None:
            hasher = self._hashers[block_size] = BlockHasher(self._seed, block_size)
        return hasher


class Prompt:
    """One prompt; its tokens are packed when a placement first asks, then kept for retries."""

    __slots__ = (
        "_blocks",
        "_hashers",
        "_points",
        "_spell",
        "_text_blocks",
        "_token_ids",
        "num_tokens",
        "popularity",
    )

    def __init__(
        self,
        hashers: Hashers,
        token_ids: Sequence[int] | None,
        num_tokens: int,
        spell: Callable[[], Sequence[int] | None] | None = None,
    ) -> None:
        self._hashers = hashers
        self._token_ids = token_ids
        self._blocks: dict[int, PromptBlocks] = {}
        self._points: dict[int, list[tuple[int, int]]] = {}
        self._text_blocks: dict[int, PromptBlocks] | None = None
        self._spell = spell
        self.num_tokens = num_tokens
        """Exact when `is_known`, else guessed from the text's length."""
        self.popularity: float | None = None
        """Of its cached prefix (`choosing.Need`); None: not looked up yet."""

    @classmethod
    def known(
        cls,
        hashers: Hashers,
        token_ids: Sequence[int],
        spell: Callable[[], Sequence[int] | None] | None = None,
    ) -> "Prompt":
        """A prompt whose tokens are known; `spell` gives its text as numbers, if engines that count otherwise ask."""
        return cls(hashers, token_ids, len(token_ids), spell)

    @classmethod
    def guessed(cls, hashers: Hashers, num_chars: int) -> "Prompt":
        """A prompt nobody could tokenise: routed by load only."""
        return cls(hashers, None, max(1, num_chars // CHARS_PER_TOKEN))

    @property
    def is_known(self) -> bool:
        """Whether the tokens are known, so that the index can be asked."""
        return self._token_ids is not None

    @property
    def is_text(self) -> bool:
        """Whether numbers made of its text stand for its tokens."""
        ids = self._token_ids
        return ids is not None and len(ids) > 0 and ids[0] == TEXT_MARK

    def blocks(self, block_size: int) -> PromptBlocks | None:
        """The prompt in an engine's blocks; None where tokens or block size are not known."""
        found = self._blocks.get(block_size)
        if found is None:
            if self._token_ids is None or block_size < 1:
                return None
            found = self._blocks[block_size] = self._hashers.of(block_size).prompt(self._token_ids)
        return found

    def points(self, block_size: int) -> list[tuple[int, int]]:
        """The beginnings by which it is compared with prompts under way: each one's hash, and its tokens beyond the one before."""
        found = self._points.get(block_size)
        if found is None:
            blocks = self.blocks(block_size)
            found = self._points[block_size] = [] if blocks is None else _points(blocks, block_size)
        return found

    def text_blocks(self, block_size: int) -> PromptBlocks | None:
        """The prompt's text in blocks, for an engine whose tokens are not ours; None where there is no text."""
        if self._text_blocks is None:
            self._text_blocks = {}
        found = self._text_blocks.get(block_size)
        if found is None:
            ids = None if self._spell is None or block_size < 1 else self._spell()
            if ids is None:
                return None
            found = self._text_blocks[block_size] = self._hashers.of(block_size).prompt(ids)
        return found

    def num_cacheable(self, block_size: int) -> int:
        """Blocks an engine can find cached: whole ones that leave at least one token to compute."""
        return (self.num_tokens - 1) // block_size


def _points(blocks: PromptBlocks, block_size: int) -> list[tuple[int, int]]:
    """At the same depths in every prompt, the further apart the deeper: sixteen for each doubling."""
    found: list[tuple[int, int]] = []
    depth, step, bytes_of = 0, 1, blocks.stride_bytes
    state, data = blocks.start(0), blocks.data
    while depth + step <= blocks.num_blocks:
        state.update(data[depth * bytes_of : (depth + step) * bytes_of])
        depth += step
        found.append((state.intdigest(), step * block_size))
        if depth == 2 * _FINE * step:
            step *= 2
    return found

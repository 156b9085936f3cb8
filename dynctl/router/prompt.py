"""A request's prompt as routing needs it: how many tokens, and its block hashes per block size.

Not here: tokenising (`tokens`). Pure.
"""

from collections.abc import Sequence

from dynctl.kv.hashing import BlockHasher

_CHARS_PER_TOKEN = 4
"""Of English text under the usual vocabularies; only for prompts nobody tokenised."""


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
    """One prompt; hashes are computed when a placement first asks for them, then kept for retries."""

    __slots__ = ("_hashers", "_hashes", "_token_ids", "num_tokens")

    def __init__(self, hashers: Hashers, token_ids: Sequence[int] | None, num_tokens: int) -> None:
        self._hashers = hashers
        self._token_ids = token_ids
        self._hashes: dict[int, Sequence[int]] = {}
        self.num_tokens = num_tokens
        """Exact when `is_known`, else guessed from the text's length."""

    @classmethod
    def known(cls, hashers: Hashers, token_ids: Sequence[int]) -> "Prompt":
        """A prompt whose tokens are known."""
        return cls(hashers, token_ids, len(token_ids))

    @classmethod
    def guessed(cls, hashers: Hashers, num_chars: int) -> "Prompt":
        """A prompt nobody could tokenise: routed by load only."""
        return cls(hashers, None, max(1, num_chars // _CHARS_PER_TOKEN))

    @property
    def is_known(self) -> bool:
        """Whether the tokens are known, so that the index can be asked."""
        return self._token_ids is not None

    def hashes(self, block_size: int) -> Sequence[int]:
        """Hashes of the blocks an engine can find cached: whole ones that leave at least one token to compute."""
        found = self._hashes.get(block_size)
        if found is None:
            ids = self._token_ids
            if ids is None or block_size < 1:
                return ()
            blocks = self._hashers.of(block_size).prompt(ids)
            found = blocks.hashes()[: (len(ids) - 1) // block_size]
            self._hashes[block_size] = found
        return found

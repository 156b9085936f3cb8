"""Prefixes that many conversations begin with, with their tokens: what engines that join or are idle are warmed with.

Not here: sending them anywhere (`warming`). Pure.
"""

import math
from typing import NamedTuple

from dynctl.kv.hashing import pack_tokens
from dynctl.router.prompt import TEXT_MARK

_MAX_PREFIXES = 64
_MAX_BYTES = 1 << 18
"""Of one prefix: 65,536 tokens, 16 MiB for all."""

_TEXT = pack_tokens([TEXT_MARK])
"""What begins so is a text in numbers (`text_blocks`), and no engine would take it."""

_RECENT_S = 60.0
"""Age at which a start counts 1/e."""


class HotPrefix(NamedTuple):
    """A shared prefix in whole blocks."""

    block: int
    """Hash of its last block."""
    token_bytes: bytes
    """As `kv.hashing.pack_tokens` writes them."""


class HotPrefixes:
    """The hottest of the prefixes noted; the coldest gives way to a new one."""

    def __init__(self) -> None:
        self._heat: dict[int, float] = {}
        """Logarithm of a sum of weights that grow with time (`forks`)."""
        self._tokens: dict[int, bytes] = {}

    def began(self, block: int, token_bytes: memoryview, now_s: float) -> None:
        """Note a conversation that begins with a prefix others begin with too."""
        now, heat = now_s / _RECENT_S, self._heat
        if block in heat:
            heat[block] = now + math.log1p(math.exp(heat[block] - now))
            return
        if len(token_bytes) > _MAX_BYTES or token_bytes[: len(_TEXT)] == _TEXT:
            return
        if len(heat) >= _MAX_PREFIXES:
            coldest = min(heat, key=heat.__getitem__)
            del heat[coldest], self._tokens[coldest]
        heat[block] = now
        self._tokens[block] = bytes(token_bytes)

    def hottest(self, limit: int) -> list[HotPrefix]:
        """Return at most so many, hottest first."""
        blocks = sorted(self._heat, key=self._heat.__getitem__, reverse=True)[:limit]
        return [HotPrefix(block, self._tokens[block]) for block in blocks]

    def above(self, starts: float, now_s: float) -> list[HotPrefix]:
        """Return those that so many conversations began with lately, hottest first."""
        least = now_s / _RECENT_S + math.log(starts)
        return [one for one in self.hottest(len(self._heat)) if self._heat[one.block] >= least]

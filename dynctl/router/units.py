"""Cuts a rendered chat where its tokens do not depend on what came before: at the tokenizer's own special tokens.

Tokenizers take special tokens out of a text first and work on what is between them, piece by piece. So a text is cut
before each of them, every part is tokenised alone, and the ids are put together: the same as of the whole, and what
earlier turns said is found in the cache. Only plain special tokens are cut at; where a tokenizer fails the check made
when it is loaded, texts stay whole. Not here: caching, templates. Pure.
"""

import re
from array import array
from collections.abc import Sequence

from tokenizers import Tokenizer

_PROBES = (
    "",
    "Hello, world!",
    "  spaced \n out  ",
    "x",
    "\n",
    "日本語 é 👩",
    " system\nBe brief.",
    "user\n\nWhy? ",
)


class UnitCutter:
    """Cuts texts for one tokenizer."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer
        names = [
            token.content
            for token in tokenizer.get_added_tokens_decoder().values()
            if token.special
            and not (token.lstrip or token.rstrip or token.single_word or token.normalized)
        ]
        # Longest first: where one begins another, tokenizers take the longest too.
        names.sort(key=len, reverse=True)
        self._pattern = re.compile("|".join(map(re.escape, names))) if names else None
        if self._pattern is not None and not self._is_exact(names):
            self._pattern = None

    def cut(self, text: str) -> list[str]:
        """The text in parts; each but the first begins with a special token."""
        if self._pattern is None:
            return [text]
        starts = [match.start() for match in self._pattern.finditer(text)]
        if not starts or starts == [0]:
            return [text]
        if starts[0]:
            starts.insert(0, 0)
        return [text[a:b] for a, b in zip(starts, [*starts[1:], len(text)], strict=True)]

    def encode(self, parts: Sequence[str]) -> list["array[int]"]:
        """Tokenise parts, each alone, without the tokens a plain prompt is framed with."""
        found = self._tokenizer.encode_batch_fast(list(parts), add_special_tokens=False)
        # Four bytes a token instead of a list's eight and an integer object: requests hold on to this.
        return [array("I", one.ids) for one in found]

    def _is_exact(self, names: Sequence[str]) -> bool:
        for name in names[:64]:
            text = "".join(probe + name for probe in (*_PROBES, *reversed(_PROBES)))
            whole = self.encode([text])[0]
            if whole != sum(self.encode(self.cut(text)), array("I")):
                return False
        return True

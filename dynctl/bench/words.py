"""Text of a known token length: short common words, and how a server's tokenizer counts them. Pure.

Not here: asking the server (`run`). Each word is meant to be one token; what the server really counts is
measured before a run, so lengths are right for any tokenizer that counts the words alike.
"""

import random
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

COMMON: tuple[str, ...] = tuple(
    """
    time year people way day man thing woman life child world school state family student group country
    problem hand part place case week company system program question work government number night point
    home water room mother area money story fact month lot right study book eye job word business issue
    side kind head house service friend father power hour game line end member law car city community name
    president team minute idea kid body information back parent face others level office door health person
    art war history party result change morning reason research girl guy moment air teacher force education
    foot boy age policy music market sense nation plan college interest death experience effect use class
    control care field development role effort rate heart drug show leader light voice wife police mind
    price report decision son view relationship town road arm difference value building action season
    society tax director position player record paper space ground form event official matter center couple
    site project activity star table need court oil situation cost industry figure street image phone data
    picture practice piece land product doctor wall patient worker news test movie north love support
    technology step baby computer type attention film tree source hair window culture chance brother energy
    period course summer plant opportunity term letter condition choice rule daughter south husband floor
    campaign material population call economy hospital church risk fire future bank west sport board
    """.split()  # noqa: SIM905 - a block of words reads better than 235 literals
)
LETTERS: tuple[str, ...] = tuple("abcdefghijklmnopqrstuvwxyz")
CANDIDATES: tuple[str, ...] = (*COMMON[:64], *LETTERS)
"""Weighed one by one for a tokenizer that splits some common words; among so many, many cost the same."""


@dataclass(frozen=True, slots=True)
class TokenCount:
    """How a server counts a prompt: `overhead + per_word × words` tokens."""

    words: tuple[str, ...] = COMMON
    overhead_tokens: float = 0.0
    """Chat template and start token."""
    per_word_tokens: float = 1.0
    tail_tokens: float = 0.0
    """Of the overhead, what comes after the last text: the end of the user's turn and the start of the answer's."""

    @property
    def lead_tokens(self) -> float:
        """Tokens of the template, and of the word every text begins with, that all prompts of a shape share."""
        return self.overhead_tokens - self.tail_tokens + self.per_word_tokens


def fit(words: Sequence[str], short: tuple[int, int], long: tuple[int, int]) -> TokenCount:
    """Fit the count from two prompts, each (words, tokens); the longer has every word once more than the shorter."""
    per_word = (long[1] - short[1]) / (long[0] - short[0])
    if per_word <= 0:
        raise ValueError(f"{long[0]} words are {long[1]} tokens, {short[0]} words {short[1]}")
    return TokenCount(tuple(words), short[1] - per_word * short[0], per_word)


def alike(costs: Mapping[str, int]) -> tuple[str, ...]:
    """Choose the words that cost the same: the cheapest kind of which there are enough, else the most frequent one."""
    kinds: dict[int, list[str]] = {}
    for word, cost in costs.items():
        kinds.setdefault(cost, []).append(word)
    enough = [cost for cost, words in kinds.items() if len(words) >= ENOUGH_WORDS]
    chosen = min(enough) if enough else max(kinds, key=lambda cost: len(kinds[cost]))
    return tuple(kinds[chosen])


ENOUGH_WORDS = 16
"""Random text of so many words repeats no block of 16 tokens by chance."""


def text(rng: random.Random, words: Sequence[str], num_words: int) -> str:
    """Make text of so many random words.

    The first is always the same one: at the start of a text, without a space before it, a word may cost otherwise,
    and so it does in the prompts that the count was learnt from.
    """
    return " ".join([words[0], *rng.choices(words, k=num_words - 1)])

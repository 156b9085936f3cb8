"""Token ids for the prompts of a trace: equal blocks get equal tokens; and traces made from a workload's numbers.

Not here: replaying (`simulate`).
Pure.
"""

import math
import random
from array import array
from collections.abc import Sequence

from dynctl.core.workload import Workload
from dynctl.planner.trace import Call, Trace

_DIGITS = 4
_VOCABULARY = 30_000
_UNIQUE = 1 << 40
"""Block numbers from here belong to one request alone."""
MADE_BLOCK_TOKENS = 16
_SIGMA = 0.5
"""Spread of the logarithm of answers' lengths; a guess, since the inventory gives a typical one."""


class Prompts:
    """Makes prompts; `words` are the token ids to use, so that a real tokenizer's vocabulary can be kept to."""

    def __init__(self, block_tokens: int, words: Sequence[int] = ()) -> None:
        self._block_tokens = block_tokens
        self._words = words or range(_VOCABULARY)
        self._known: dict[int, array[int]] = {}

    def of(self, call: Call, number: int) -> "array[int]":
        """The token ids of one request's prompt; what no block names is its own."""
        ids = array("I")
        for block in call.blocks:
            ids += self._block(block)
        missing = call.isl_tokens - len(ids)
        own = 0
        while missing > 0:
            ids += self._block(_UNIQUE + number * 4096 + own)
            missing -= self._block_tokens
            own += 1
        return ids[: call.isl_tokens]

    def _block(self, block: int) -> "array[int]":
        known = self._known.get(block)
        if known is None:
            words, rest = self._words, block
            digits = []
            for _ in range(_DIGITS):
                rest, digit = divmod(rest, len(words))
                digits.append(words[digit])
            repeats = math.ceil(self._block_tokens / _DIGITS)
            known = (array("I", digits) * repeats)[: self._block_tokens]
            if block < _UNIQUE:
                self._known[block] = known
        return known


def make_trace(work: Workload, num_calls: int, seed: int, *, sigma: float = _SIGMA) -> Trace:
    """Draw a trace from a workload's numbers: Poisson arrivals, prompts that vary and share prefixes as it says.

    Answers vary by `sigma`, as nobody's are all alike.
    """
    rng = random.Random(seed)  # noqa: S311 - a workload, not a secret
    shared = round(work.isl_tokens * work.shared_prefix_ratio / MADE_BLOCK_TOKENS)
    prompt_sigma = math.sqrt(math.log(1 + work.isl_cv**2))
    at_s = 0.0
    calls = []
    for _ in range(num_calls):
        isl = _draw(rng, work.isl_tokens, prompt_sigma)
        osl = _draw(rng, work.osl_tokens, sigma)
        group = rng.randrange(max(1, work.num_prefixes))
        blocks = tuple(group * 1_000_000 + i for i in range(min(shared, isl // MADE_BLOCK_TOKENS)))
        calls.append(Call(at_s, isl, osl, blocks))
        at_s += rng.expovariate(work.rate_rps)
    return Trace(tuple(calls), MADE_BLOCK_TOKENS, "workload of the inventory")


def _draw(rng: random.Random, mean: int, sigma: float) -> int:
    mu = math.log(mean) - sigma**2 / 2
    return max(1, round(rng.lognormvariate(mu, sigma)))

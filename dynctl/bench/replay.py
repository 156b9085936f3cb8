"""A recorded workload sent again: prompts made from its blocks, or its texts as they are. Pure.

A block's text follows from the seed and the block's number alone, so prompts share exactly the blocks that the trace says,
and another seed shares nothing with this one. Recorded texts get a first line that names the seed, for the same reason.
Not here: when (`arrivals`), sending (`run`), reading traces (`planner.trace_lines`).
"""

import hashlib
import itertools
import random
from collections.abc import Iterable
from dataclasses import dataclass, replace
from functools import lru_cache
from urllib.parse import quote

import msgspec

from dynctl.bench.arrivals import Load
from dynctl.bench.words import TokenCount
from dynctl.bench.workload import FEWEST_WORDS, Ask, Recorded
from dynctl.planner.trace import Trace, hits, reuse

MAX_KEPT_BLOCKS = 4096
"""Of made text, so that what many prompts share is made once."""


@dataclass(frozen=True, slots=True)
class Replay:
    """A trace as a workload."""

    trace: Trace
    speed: float = 1.0
    """So many times as fast as it was recorded."""

    begins_with_system = False

    @property
    def text(self) -> str:
        """As reports name it."""
        return f"trace:{self.trace.name}"

    @property
    def longest_tokens(self) -> int | None:
        """Prompt and answer of the longest request; None for texts, whose tokens nobody has counted."""
        if any(call.messages for call in self.trace.calls):
            return None
        return max(call.isl_tokens + call.osl_tokens for call in self.trace.calls)

    @property
    def recorded(self) -> Recorded:
        """What the trace is, for results."""
        content = msgspec.json.encode((self.trace.block_tokens, self.trace.calls))
        return Recorded(
            digest=hashlib.sha256(content).hexdigest()[:16],
            num_requests=len(self.trace.calls),
            speed=self.speed,
            block_tokens=self.trace.block_tokens,
            ideal_ratio=reuse(self.trace, None),
        )

    @property
    def load(self) -> Load:
        """Its times as a schedule."""
        times_s = tuple(call.at_s / self.speed for call in self.trace.calls)
        return Load("recorded", speed=self.speed, times_s=times_s)

    @property
    def duration_s(self) -> float:
        """From the first request to one mean gap after the last."""
        num = len(self.trace.calls)
        return self.trace.duration_s / self.speed * num / max(1, num - 1) or 1.0

    def script(self, count: TokenCount, seed: int) -> "ReplayScript":
        """What writes its requests."""
        return ReplayScript(self.trace, count, seed)


def first_part(trace: Trace, until_s: float) -> Trace:
    """The requests of a trace that come within so long."""
    return replace(trace, calls=tuple(call for call in trace.calls if call.at_s < until_s))


class ReplayScript:
    """Makes the requests of a trace, in its order."""

    def __init__(self, trace: Trace, count: TokenCount, seed: int) -> None:
        self._calls = enumerate(zip(trace.calls, hits(trace), strict=True))
        self._count = count
        self._seed = seed
        self._block_words = max(1, round(trace.block_tokens / count.per_word_tokens))
        self._block = lru_cache(MAX_KEPT_BLOCKS)(self._make_block)

    def next(self) -> Ask:
        """Make the next request."""
        number, (call, hit_tokens) = next(self._calls)
        # A header holds no control characters, and few servers like others than ASCII in one.
        session = f"{self._seed}/{quote(call.session)}" if call.session else ""
        if call.messages:
            (role, text), *others = call.messages
            return Ask(
                ((role, f"replay {self._seed}\n{text}"), *others),
                call.osl_tokens,
                None,
                shared_ratio=hit_tokens / call.isl_tokens,
                session=session,
            )
        text = self._text(call.blocks, call.isl_tokens, number)
        return Ask(
            (("user", text),),
            call.osl_tokens,
            call.isl_tokens,
            shared_tokens=hit_tokens,
            session=session,
        )

    def answered(self, ask: Ask, answer: str | None) -> None:
        """Nothing depends on answers: what was recorded stands for them."""

    def _text(self, blocks: Iterable[int], isl_tokens: int, number: int) -> str:
        """Text of the prompt's length: a fixed first word, its blocks, and then words of its own."""
        wanted = (isl_tokens - self._count.overhead_tokens) / self._count.per_word_tokens
        num_words = max(FEWEST_WORDS, round(wanted))
        words = [self._count.words[0]]
        for block in blocks:
            if len(words) >= num_words:
                break
            words += self._block(block)
        if len(words) < num_words:
            rng = self._rng("own", number)
            words += rng.choices(self._count.words, k=num_words - len(words))
        return " ".join(itertools.islice(words, num_words))

    def _make_block(self, block: int) -> tuple[str, ...]:
        return tuple(self._rng("block", block).choices(self._count.words, k=self._block_words))

    def _rng(self, *parts: object) -> random.Random:
        return random.Random("/".join(map(str, (self._seed, *parts))))  # noqa: S311 - not a secret

"""The hash chain that stands for a model: token k+1 depends on every earlier token and the seed, and on nothing else.

A lost, doubled, reordered or altered token changes all later ones, so one comparison proves a whole stream. The
chain's state after a token stands for the KV cache there: blocks hold it, and prefill hands it to decode, so that a
wrong block gives a wrong answer as on a real engine.
Not here: time, blocks, text. Pure.
"""

from array import array
from collections.abc import Sequence
from dataclasses import dataclass, field

import xxhash

_TOKEN_BYTES = 4


@dataclass(frozen=True, slots=True)
class Chain:
    """One model: `words` are the tokens it may say, `eos_every` how rarely it says end-of-sequence (0: never)."""

    words: Sequence[int]
    seed: int = 0
    eos_id: int = 1
    eos_every: int = 0
    start: int = field(init=False)
    """The state before the first token."""

    def __post_init__(self) -> None:
        object.__setattr__(self, "start", xxhash.xxh3_64_intdigest(b"dynctl-sim-chain", self.seed))

    def advance(self, state: int, token_ids: Sequence[int]) -> int:
        """Return the state after these further tokens."""
        digest = xxhash.xxh3_64_intdigest
        view = memoryview(array("I", token_ids).tobytes())
        for start in range(0, len(view), _TOKEN_BYTES):
            state = digest(view[start : start + _TOKEN_BYTES], state)
        return state

    def next_token(self, state: int, can_stop: bool = True) -> int:
        """Say the token after a state; end-of-sequence only if `can_stop`."""
        if can_stop and self.eos_every and (state >> 32) % self.eos_every == 0:
            return self.eos_id
        return self.words[state % len(self.words)]

    def continuation(
        self,
        prompt_ids: Sequence[int],
        num_tokens: int,
        min_tokens: int = 0,
        *,
        ignore_eos: bool = False,
    ) -> list[int]:
        """Give what an engine must answer to a prompt: up to `num_tokens` tokens, ended by end-of-sequence."""
        state = self.advance(self.start, prompt_ids)
        out: list[int] = []
        while len(out) < num_tokens:
            can_stop = not ignore_eos and len(out) >= min_tokens
            token = self.next_token(state, can_stop)
            out.append(token)
            if can_stop and token == self.eos_id:
                break
            state = self.advance(state, (token,))
        return out

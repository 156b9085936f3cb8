"""One request inside the simulated engine: its tokens, blocks, place in the chain, and times. Pure."""

from array import array
from collections.abc import Sequence
from dataclasses import dataclass
from enum import StrEnum
from typing import Any

from dynctl.sim.cache import ROOT_HASH, FullBlock, block_hash
from dynctl.sim.chain import Chain


class Phase(StrEnum):
    """Where a request is."""

    WAITING = "waiting"
    FETCHING = "fetching"
    """Its KV is on the way from a prefill engine."""
    PREFILL = "prefill"
    DECODE = "decode"
    DONE = "done"


@dataclass(frozen=True, slots=True)
class Wish:
    """What a client asked for, validated: prompt and output fit the model."""

    id: str
    prompt_ids: Sequence[int]
    max_tokens: int
    min_tokens: int = 0
    ignore_eos: bool = False
    stop_token_ids: frozenset[int] = frozenset()
    cache_salt: str | None = None
    remote_prefill: dict[str, Any] | None = None
    """kv_transfer_params that say where the prompt's KV can be pulled from."""
    is_remote_decode: bool = False
    """Keep the blocks after the end, for a decode engine to pull."""


@dataclass(slots=True)
class Times:
    """Seconds on the engine's clock; None until it happened."""

    arrival_s: float
    scheduled_s: float | None = None
    first_token_s: float | None = None
    last_token_s: float | None = None


class SimSequence:
    """A request's state; only the scheduler changes it."""

    __slots__ = (
        "_chain",
        "_hashes",
        "_state",
        "block_ids",
        "block_states",
        "num_cached_tokens",
        "num_computed",
        "num_external_tokens",
        "num_loaded_tokens",
        "num_preemptions",
        "phase",
        "tail_state",
        "times",
        "tokens",
        "wish",
    )

    def __init__(self, wish: Wish, chain: Chain, arrival_s: float) -> None:
        self.wish = wish
        self.tokens = array("I", wish.prompt_ids)
        self.phase = Phase.WAITING
        self.block_ids: list[int] = []
        self.block_states: list[int] = []
        """The chain at the end of each full block computed so far."""
        self.tail_state = chain.start
        """The chain before the last prompt token: where a decode engine goes on."""
        self.num_computed = 0
        self.num_cached_tokens = 0
        """Prompt tokens found in this engine's caches when first admitted."""
        self.num_loaded_tokens = 0
        """Of those, from its host's memory."""
        self.num_external_tokens = 0
        """Prompt tokens that came from a prefill engine."""
        self.num_preemptions = 0
        self.times = Times(arrival_s)
        self._chain = chain
        self._state = chain.start
        self._hashes: list[int] = []

    @property
    def num_prompt(self) -> int:
        """Length of the prompt in tokens."""
        return len(self.wish.prompt_ids)

    @property
    def num_output(self) -> int:
        """Tokens said so far."""
        return len(self.tokens) - self.num_prompt

    @property
    def num_missing(self) -> int:
        """Tokens whose KV is not computed yet; 1 while decoding."""
        return len(self.tokens) - self.num_computed

    @property
    def lora_name(self) -> str | None:
        """Name of the adapter: none, the simulated engine has a single model."""
        return None

    def hashes(self, num_blocks: int, block_size: int) -> list[int]:
        """Name the first `num_blocks` blocks, all of which must be full."""
        known = self._hashes
        for i in range(len(known), num_blocks):
            ids = self.tokens[i * block_size : (i + 1) * block_size]
            known.append(block_hash(known[-1] if known else ROOT_HASH, ids, self._extra_keys(i)))
        return known[:num_blocks]

    def begin(self, block_ids: list[int], states: list[int], block_size: int) -> None:
        """Start (again) from a cached prefix: its blocks come first in `block_ids`, `states` are theirs."""
        self.block_ids = block_ids
        self.block_states = states
        self._jump(len(states) * block_size, states[-1] if states else self._chain.start)

    def receive(self, states: Sequence[int], tail_state: int) -> None:
        """Take the prompt's KV from elsewhere: all but its last token, which is computed here, is there now."""
        self.block_states += states
        self._jump(self.num_prompt - 1, tail_state)

    def compute(self, num_tokens: int, block_size: int) -> None:
        """Go on along the chain, noting the state at every block's end."""
        end = self.num_computed + num_tokens
        while self.num_computed < end:
            at = self.num_computed
            stop = min(end, (at // block_size + 1) * block_size)
            if at < self.num_prompt - 1:
                stop = min(stop, self.num_prompt - 1)
            self._jump(stop, self._chain.advance(self._state, self.tokens[at:stop]))
            if stop % block_size == 0:
                self.block_states.append(self._state)

    def full_blocks(self, first: int, block_size: int) -> list[FullBlock]:
        """Describe the full computed blocks from number `first` on."""
        last = min(len(self.block_states), self.num_computed // block_size)
        names = self.hashes(last, block_size)
        return [
            FullBlock(
                self.block_ids[i],
                names[i],
                self.block_states[i],
                tuple(self.tokens[i * block_size : (i + 1) * block_size]),
                self._extra_keys(i),
            )
            for i in range(first, last)
        ]

    def say(self) -> int:
        """Append the next token; everything before it is computed."""
        wish = self.wish
        can_stop = not wish.ignore_eos and self.num_output >= wish.min_tokens
        token = self._chain.next_token(self._state, can_stop)
        self.tokens.append(token)
        return token

    def preempt(self) -> None:
        """Lose all blocks; everything is computed again later."""
        self.begin([], [], 1)
        self.phase = Phase.WAITING
        self.num_preemptions += 1

    def _jump(self, num_computed: int, state: int) -> None:
        self.num_computed, self._state = num_computed, state
        if num_computed == self.num_prompt - 1:
            self.tail_state = state

    def _extra_keys(self, block: int) -> tuple[object, ...] | None:
        """Separate salted prompts in their first block; later ones inherit it through the parent."""
        salt = self.wish.cache_salt
        return (salt,) if block == 0 and salt is not None else None

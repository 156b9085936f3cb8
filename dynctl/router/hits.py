"""How much of the prompts was cached, beside how much could have been, and where the rest went.

Side by side: what the index predicted, what engines report, what engines find of the router's own questions when asked
a second time (`prober`: 1 wherever caches work at all), and bounds from the same traffic. Whole blocks
that leave one token to compute count; each block of a prompt is

    hit        taken from the cache of the engine that did the prefill
    routing    another engine held it: the price of balance, or of a wrong choice
    eviction   some prompt had it before, and no engine holds it any more
    cold       never seen

so that hit + routing is the bound at present contents, and + eviction the one of an unlimited cache. "Seen" is a
prefix index of prompts with a budget of its own; answers count as seen while an engine holds them. All are tokens as the
engine counts them: where it counts otherwise than we do, so much of the prompt is taken for so much of its tokens.
Not here: who was chosen (`placement`). Pure.
"""

from collections.abc import Mapping
from typing import NamedTuple

from dynctl.kv.hashing import PromptBlocks
from dynctl.router.prefix_index import PrefixIndex, Source
from dynctl.router.workers import Worker

_SEEN = Source("seen", "")
_SEEN_BYTES = 48 * 1024**2
"""Half a million blocks: 8 million tokens of distinct prompts."""


class Outlook(NamedTuple):
    """What was known of one prompt when it was placed."""

    worker: Worker
    """The engine that does the prefill."""
    blocks: PromptBlocks
    num_cacheable: int
    """Whole blocks that leave a token to compute."""
    block_size: int
    held: int
    """Tokens in the cache of the engine that had most of it."""
    predicted: int
    """Tokens in the cache of the engine taken."""
    num_tokens: int
    """Of the whole prompt, counted as its blocks are; the engine may count otherwise."""
    is_text: bool = False
    """Blocks of text stand for blocks of tokens."""


class HitBook:
    """Sums over completed requests with known tokens."""

    def __init__(self) -> None:
        self._seen = PrefixIndex(_SEEN_BYTES)
        self._seen.begin(_SEEN)
        self.num_requests = 0
        self.num_reported = 0
        self.prompt_tokens = 0
        self.tokens = dict.fromkeys(("hit", "routing", "eviction", "cold"), 0)
        self.predicted_tokens = 0
        self.reported_tokens = 0
        self.num_probes = 0
        self.probe_tokens = 0
        """Of second questions, in whole blocks …"""
        self.probe_cached_tokens = 0
        """… and of those, cached as engines say."""

    def probed(self, tokens: int, cached_tokens: int | None) -> None:
        """Take a question asked twice: how many tokens had to be cached the second time, and how many were, if the engine says."""
        self.num_probes += 1
        if cached_tokens is not None:
            self.probe_tokens += tokens
            self.probe_cached_tokens += min(cached_tokens, tokens)

    def completed(self, outlook: Outlook, prompt_tokens: int, reported: int | None) -> int:
        """Take a request's end; `reported` is None where the engine does not say, then the prediction stands.

        Returns the tokens that a cache without limit would have had.
        """
        own_tokens = outlook.num_tokens
        predicted = scaled(outlook.predicted, prompt_tokens, own_tokens)
        self.num_requests += 1
        self.prompt_tokens += prompt_tokens
        self.predicted_tokens += predicted
        if reported is not None:
            self.num_reported += 1
            self.reported_tokens += reported
        cacheable = scaled(outlook.num_cacheable * outlook.block_size, prompt_tokens, own_tokens)
        hit = min(predicted if reported is None else reported, cacheable)
        held = max(scaled(outlook.held, prompt_tokens, own_tokens), hit)
        seen = max(scaled(self._note(outlook), prompt_tokens, own_tokens), held)
        tokens = self.tokens
        tokens["hit"] += hit
        tokens["routing"] += held - hit
        tokens["eviction"] += seen - held
        tokens["cold"] += cacheable - seen
        return seen

    def _note(self, outlook: Outlook) -> int:
        """Remember a prompt; return how many of its tokens were seen before."""
        blocks = outlook.blocks
        tiers = self._seen.tiers(blocks, blocks.num_blocks)
        depth = tiers[0].depth if tiers else 0
        if depth < blocks.num_blocks:
            self._seen.store(_SEEN, blocks.hashes_from(depth))
        return min(depth, outlook.num_cacheable) * outlook.block_size

    def sums(self) -> dict[str, int]:
        """All sums by name: those of several processes can be added."""
        return {
            "requests": self.num_requests,
            "requests_reported": self.num_reported,
            "probes": self.num_probes,
            "prompt_tokens": self.prompt_tokens,
            "predicted_tokens": self.predicted_tokens,
            "reported_tokens": self.reported_tokens,
            "probe_tokens": self.probe_tokens,
            "probe_cached_tokens": self.probe_cached_tokens,
        } | {f"{part}_tokens": number for part, number in self.tokens.items()}

    def to_json(self) -> dict[str, float | int | None]:
        """The sums and what they mean."""
        return with_ratios(self.sums())


def scaled(tokens: int, counted: int, own: int) -> int:
    """So many of a prompt's `own` tokens, in those of whoever `counted` it otherwise."""
    return tokens if counted == own or not own else tokens * counted // own


def with_ratios(sums: Mapping[str, int]) -> dict[str, float | int | None]:
    """Add the ratios of prompt tokens to sums; None where there is nothing to divide by."""

    def ratio(number: int, total: int = sums["prompt_tokens"]) -> float | None:
        return round(number / total, 6) if total else None

    present = sums["hit_tokens"] + sums["routing_tokens"]
    has_reports = sums["requests_reported"] > 0
    return dict(sums) | {
        "predicted_ratio": ratio(sums["predicted_tokens"]),
        "reported_ratio": ratio(sums["reported_tokens"]) if has_reports else None,
        "probe_ratio": ratio(sums["probe_cached_tokens"], sums["probe_tokens"]),
        "bound_present_ratio": ratio(present),
        "bound_unlimited_ratio": ratio(present + sums["eviction_tokens"]),
        "lost_routing_ratio": ratio(sums["routing_tokens"]),
        "lost_eviction_ratio": ratio(sums["eviction_tokens"]),
        "lost_cold_ratio": ratio(sums["cold_tokens"]),
    }

"""How much of the prompts was cached, beside how much could have been, and where the rest went.

Side by side: what the index predicted, what engines report, what engines find of the router's own questions when asked
a second time (`prober`: 1 wherever caches work at all), and bounds from the same traffic. Whole blocks
that leave one token to compute count; each block of a prompt is

    hit        taken from the cache of the engine that did the prefill
    routing    another engine held it: the price of balance, or of a wrong choice
    eviction   some prompt had it before, and no engine holds it any more
    cold       never seen

so that hit + routing is the bound at present contents, and + eviction the one of an unlimited cache. "Seen" is a
prefix index of prompts with a budget of its own; answers count as seen while an engine holds them. Not here: who was
chosen (`placement`). Pure.
"""

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
        """Take a question asked twice: how many tokens had to be cached the second time, and how many were."""
        self.num_probes += 1
        self.probe_tokens += tokens
        self.probe_cached_tokens += min(cached_tokens or 0, tokens)

    def completed(self, outlook: Outlook, prompt_tokens: int, reported: int | None) -> None:
        """Take a request's end; `reported` is None where the engine does not say, then the prediction stands."""
        self.num_requests += 1
        self.prompt_tokens += prompt_tokens
        self.predicted_tokens += outlook.predicted
        if reported is not None:
            self.num_reported += 1
            self.reported_tokens += reported
        cacheable = outlook.num_cacheable * outlook.block_size
        hit = min(outlook.predicted if reported is None else reported, cacheable)
        held = max(outlook.held, hit)
        seen = max(self._note(outlook), held)
        tokens = self.tokens
        tokens["hit"] += hit
        tokens["routing"] += held - hit
        tokens["eviction"] += seen - held
        tokens["cold"] += cacheable - seen

    def _note(self, outlook: Outlook) -> int:
        """Remember a prompt; return how many of its tokens were seen before."""
        blocks = outlook.blocks
        tiers = self._seen.tiers(blocks, blocks.num_blocks)
        depth = tiers[0].depth if tiers else 0
        if depth < blocks.num_blocks:
            self._seen.store(_SEEN, blocks.hashes_from(depth))
        return min(depth, outlook.num_cacheable) * outlook.block_size

    def to_json(self) -> dict[str, float | int | None]:
        """Ratios of prompt tokens."""
        total, tokens = self.prompt_tokens, self.tokens

        def ratio(number: int) -> float | None:
            return round(number / total, 6) if total else None

        present = tokens["hit"] + tokens["routing"]
        return {
            "requests": self.num_requests,
            "requests_reported": self.num_reported,
            "prompt_tokens": total,
            "predicted_ratio": ratio(self.predicted_tokens),
            "reported_ratio": ratio(self.reported_tokens) if self.num_reported else None,
            "probes": self.num_probes,
            "probe_ratio": (
                round(self.probe_cached_tokens / self.probe_tokens, 6)
                if self.probe_tokens
                else None
            ),
            "bound_present_ratio": ratio(present),
            "bound_unlimited_ratio": ratio(present + tokens["eviction"]),
            "lost_routing_ratio": ratio(tokens["routing"]),
            "lost_eviction_ratio": ratio(tokens["eviction"]),
            "lost_cold_ratio": ratio(tokens["cold"]),
        }

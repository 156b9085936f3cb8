"""Is an engine's cache empty though nobody said so (K9)? Judged by its own figures.

An engine that sleeps has dropped its cache, and makes no step that would tell of it. vLLM's usage gauge counts what running
requests hold, so it stands at 0 beside a full cache whenever nothing runs: only of a gauge that was seen to stand above 0
while nothing ran, for longer than blocks are kept for others to fetch, does a 0 say that the cache is empty. Where that
is extended the gauge may stand longer; it is found out by hits of a cache that it calls empty before and after.
Not here: asking for the figures, what follows. Pure.
"""

from typing import NamedTuple

from dynctl.core.exposition import mean, parse, total

LOOK_S = 5.0
"""Between looks at an engine's figures."""

_LONGEST_HELD_S = 300.0
"""Blocks of a prompt that a prefill engine computed are in use until fetched: 30 s, extended while that is awaited."""

_SLEEP = "vllm:engine_sleep_state"
_USAGE = ("vllm:kv_cache_usage_perc", "vllm:gpu_cache_usage_perc")
_REQUESTS = ("vllm:num_requests_running", "vllm:num_requests_waiting")
_HITS = ("vllm:prefix_cache_hits_total", "vllm:gpu_prefix_cache_hits_total")
_NAMES = frozenset((_SLEEP, *_USAGE, *_REQUESTS, *_HITS))
_DROPPED = frozenset(("weights_offloaded", "discard_all"))
"""Sleep of level 1 and 2; an engine that is paused keeps its cache."""


class CacheFigures(NamedTuple):
    """What one scrape says of an engine's cache; None: nothing."""

    is_asleep: bool
    usage_ratio: float | None
    num_requests: float | None
    hit_tokens: float | None = None
    """Ever found in the cache."""


def read_figures(text: str) -> CacheFigures:
    """Read an engine's metrics.

    Raises:
        ProbeError: when a line that matters cannot be understood.
    """
    scrape = parse(text, _NAMES)
    states = [one for one in scrape.get(_SLEEP, ()) if one.labels.get("sleep_state") in _DROPPED]
    counts = [total(scrape, name) for name in _REQUESTS]
    known = [count for count in counts if count is not None]
    return CacheFigures(
        any(one.value > 0 for one in states),
        mean(scrape, *_USAGE),
        sum(known) if known else None,
        total(scrape, *_HITS),
    )


class CacheWatch:
    """Follows one incarnation's figures."""

    def __init__(self) -> None:
        self._idle_since_s: float | None = None
        """Since when nothing runs and the gauge stands above 0."""
        self._counts_idle = False
        self._is_refuted = False
        self._hits_at_0: float | None = None
        """At the last look, where the gauge stood at 0 and nothing ran."""

    def is_empty(self, figures: CacheFigures, now_s: float) -> bool:
        """Tell whether nothing is cached just now, by all that was seen so far."""
        usage, requests = figures.usage_ratio, figures.num_requests
        if usage and requests == 0:
            if self._idle_since_s is None:
                self._idle_since_s = now_s
            self._counts_idle |= now_s - self._idle_since_s > _LONGEST_HELD_S
        else:
            self._idle_since_s = None
        is_at_0 = usage == 0 and requests == 0
        if is_at_0:
            hits, before = figures.hit_tokens, self._hits_at_0
            # What was hit stayed cached behind it: a gauge that counts that would not be back at 0.
            self._is_refuted |= hits is not None and before is not None and hits > before
        self._hits_at_0 = figures.hit_tokens if is_at_0 else None
        return figures.is_asleep or (self._counts_idle and not self._is_refuted and is_at_0)

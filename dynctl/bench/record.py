"""One request of a run: its times, tokens and outcome, and the metric definitions. Pure.

All times are monotonic seconds from the start of the run. Not here: summaries over many requests (`report`).
"""

import itertools
from collections.abc import Iterator
from dataclasses import dataclass

from dynctl.bench.stream import Chunk

OK = "ok"

DEFINITIONS = {
    "ttft_ms": "scheduled arrival to first token event: first chunk with non-empty content, reasoning or "
    "tool-call delta; includes any wait in the load generator",
    "ttft_service_ms": "the same, from sending",
    "ttfo_ms": "scheduled arrival to first token event that is not reasoning",
    "tpot_ms": "per request (last token event − first token event) / (output tokens − tokens of the first event); "
    "the first event is taken as one token when the server does not count per chunk",
    "chunk_gap_ms": "gaps between successive token events, pooled over all requests; a chunk may carry several tokens",
    "itl_ms": "each chunk gap divided by the tokens that came with it, once per token, pooled; needs per-chunk usage "
    "(continuous_usage_stats)",
    "e2e_ms": "scheduled arrival to [DONE]",
    "send_lag_ms": "scheduled arrival to sending: the load generator's own delay",
    "tok_s_user": "1000 / tpot_ms, per request",
    "output_tok_s": "output tokens that arrived within the measured time / measured time",
    "spread": "the measured time in 20 windows: mean TTFT of the requests due in each, and tokens that arrived; "
    "cv: standard deviation of these over their mean",
    "goodput": "requests scheduled in the measured time that succeeded with ttft_ms within its goal and tpot_ms within "
    "the ITL goal; failed requests are bad",
    "kv_cached_ratio": "sum of usage.prompt_tokens_details.cached_tokens / sum of prompt tokens, over successful requests",
    "kv_ideal_ratio": "the same for one unlimited cache that has seen all earlier requests: whole blocks, at most "
    "(prompt tokens − 1) // block size of them",
    "kv_trace_ideal_ratio": "of a replayed trace by itself, one unlimited cache: sum over its lines of min(leading "
    "hash_ids that an earlier line has × tokens per block, input_length − 1) / sum of input_length. All lines count, a "
    "last block that is not full counts as it is long; texts are counted at 4 characters a token, in blocks of 64",
    "kv_predicted_ratio": "the router's counters over the run: predicted hit tokens / prompt tokens",
    "router": "what a dynctl router itself added before it sent a request on, by its own histograms over the run (warm-up "
    "and requests of others included): waiting from arrival to the decision (tokenising, and the wait for an engine with "
    "room), then the decision itself (hashes, index, policy, booking). p50 and p99 are linear within a bucket",
    "kinds": "of a mixed workload, requests told apart by the lengths asked for: answers per second, mean TTFT, generated "
    "tokens per second (all within the measured time), mean over answers of 1000 / tpot_ms",
    "percentiles": "exact over all samples, linear between neighbours; intervals are 95% bootstrap",
    "failed": "counted apart; no latency of a failed request enters any percentile",
}
"""What each figure means; stored in every result."""


@dataclass(frozen=True, slots=True)
class Record:
    """One request."""

    number: int
    outcome: str
    """`ok`, or the kind of failure: `connect`, `http 503`, `broken stream`, `error event`, `empty`, `timeout`,
    `unfinished` (still under way when the run ended)."""
    scheduled_s: float
    sent_s: float
    is_warmup: bool = False
    error: str = ""
    first_s: float | None = None
    first_answer_s: float | None = None
    end_s: float | None = None
    chunks: tuple[Chunk, ...] = ()
    isl_asked_tokens: int | None = None
    osl_asked_tokens: int = 0
    prompt_tokens: int | None = None
    output_tokens: int | None = None
    cached_tokens: int | None = None
    is_estimated: bool = False
    """Output tokens are the number of chunks, since the server sent no usage."""
    group: int | None = None
    shared_tokens: int = 0
    chat: int | None = None
    turn: int = 1

    @property
    def is_ok(self) -> bool:
        """Whether a whole answer came."""
        return self.outcome == OK

    @property
    def send_lag_ms(self) -> float:
        """How late the load generator sent it."""
        return (self.sent_s - self.scheduled_s) * 1e3

    @property
    def ttft_ms(self) -> float | None:
        """Time to first token, from the scheduled arrival."""
        return None if self.first_s is None else (self.first_s - self.scheduled_s) * 1e3

    @property
    def ttft_service_ms(self) -> float | None:
        """Time to first token, from sending."""
        return None if self.first_s is None else (self.first_s - self.sent_s) * 1e3

    @property
    def ttfo_ms(self) -> float | None:
        """Time to the first token that is not reasoning."""
        return (
            None if self.first_answer_s is None else (self.first_answer_s - self.scheduled_s) * 1e3
        )

    @property
    def e2e_ms(self) -> float | None:
        """Scheduled arrival to the end of the answer."""
        return None if self.end_s is None else (self.end_s - self.scheduled_s) * 1e3

    @property
    def tpot_ms(self) -> float | None:
        """Mean time per token after the first event; None when there are none."""
        if len(self.chunks) < 2 or self.output_tokens is None:
            return None
        num_first = self.chunks[0].num_tokens or 1
        num_rest = self.output_tokens - num_first
        return (
            (self.chunks[-1].at_s - self.chunks[0].at_s) * 1e3 / num_rest if num_rest > 0 else None
        )

    def chunk_gaps_ms(self) -> list[float]:
        """Gaps between successive token events."""
        return [(b.at_s - a.at_s) * 1e3 for a, b in itertools.pairwise(self.chunks)]

    def itls_ms(self) -> list[float]:
        """Time per token for each token after the first event; empty without per-chunk usage."""
        latencies: list[float] = []
        for a, b in itertools.pairwise(self.chunks):
            if a.num_tokens is None or b.num_tokens is None:
                return []
            num_tokens = b.num_tokens - a.num_tokens
            if num_tokens > 0:
                latencies += [(b.at_s - a.at_s) * 1e3 / num_tokens] * num_tokens
        return latencies

    def token_arrivals(self) -> Iterator[tuple[float, float]]:
        """When output tokens came, and how many; chunks without a count share the total evenly."""
        if not self.chunks or not self.output_tokens:
            return
        if any(chunk.num_tokens is None for chunk in self.chunks):
            for chunk in self.chunks:
                yield chunk.at_s, self.output_tokens / len(self.chunks)
            return
        before = 0
        for chunk in self.chunks:
            now = chunk.num_tokens or 0
            yield chunk.at_s, now - before
            before = now

    def tokens_between(self, since_s: float, until_s: float) -> float:
        """Output tokens that arrived in a span."""
        return sum(num for at_s, num in self.token_arrivals() if since_s <= at_s < until_s)

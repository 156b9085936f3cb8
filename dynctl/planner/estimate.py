"""TTFT, ITL and throughput of a layout under a workload, each with a band that says how it was got.

An aggregated engine shares its steps between prompts and running sequences: a step computes at most so many tokens, so
long prompts come in pieces, and a token waits for one piece. Prefill and decode pools do not share, but pay for moving
the KV cache. Prompts queue as in M/G/c, decoding is a fixed point of Little's law.
Not here: seconds of a single step (`roofline`), choosing a layout (`search`).
Pure.
"""

import math
from dataclasses import dataclass
from typing import Protocol

from dynctl.core.plan import Estimate, Figure
from dynctl.core.workload import Slo, Workload
from dynctl.planner.memory import MAX_BATCHED_TOKENS
from dynctl.planner.queueing import Queue, length_samples, little, quantile, queue_of

MAX_UTILIZATION = 0.8
"""Above this a queue grows faster than any estimate of it is good."""
ETA_TRANSFER = 0.8
TRANSFER_LATENCY_S = 0.005
QUANTILES = (0.5, 0.95, 0.99)
LEAST_RPS = 1e-3
"""A rate at which nothing waits."""
_PASSES = 3
"""Of the fixed point between running sequences, what they leave prompts of a step, and what is cached."""
_ANSWERS_CV2 = 0.3
"""How lengths of answers vary: the square of their spread over their mean. A guess."""
_FEW_SEATS = 16
"""With more of them than this nobody waits for one as long as half are free."""
_SETTLED = 0.005
"""By how much, as a share, running sequences may still change in the last pass."""


class Pace(Protocol):
    """How fast one engine is: by the roofline, or as a simulated engine declares it."""

    @property
    def kv_bytes_per_token(self) -> int:
        """KV of one token that moves from prefill to decode."""

    @property
    def host_s(self) -> float:
        """HTTP, tokenizing and scheduling of one request before its first token."""

    @property
    def stages(self) -> int:
        """Prompts a pipeline works on at once."""

    @property
    def batches(self) -> int:
        """Steps under way at once that share the running sequences: data parallel ranks and pipeline stages."""

    @property
    def source(self) -> str:
        """Where its constants come from; empty: nowhere worth a word."""

    def band(self, figure: str) -> tuple[float, float]:
        """Factors from an expected `ttft`, `tpot` or `tokens` to the ends of its 90 % band."""

    def prefill_s(self, new_tokens: float, past_tokens: float = 0.0) -> float:
        """Seconds to compute a prompt."""

    def decode_s(self, sequences: float, context_tokens: float) -> float:
        """Seconds of one step."""

    def mixed_s(self, sequences: float, context_tokens: float, new: float, past: float) -> float:
        """Seconds of one step that also computes `new` tokens of a prompt after `past` ones."""


@dataclass(frozen=True, slots=True)
class DeclaredPace:
    """A simulated engine: its flags say how fast it pretends to be."""

    prefill_base_s: float
    prefill_s_per_token: float
    step_s: float
    step_s_per_sequence: float = 0.0
    kv_bytes_per_token: int = 0
    host_s: float = 0.003
    stages: int = 1
    batches: int = 1
    source: str = ""

    def band(self, figure: str) -> tuple[float, float]:
        """What a simulated engine declares it keeps; TTFT also has the machine it runs on in it."""
        return (0.8, 1.5) if figure == "ttft" else (0.9, 1.15)

    def prefill_s(self, new_tokens: float, past_tokens: float = 0.0) -> float:  # noqa: ARG002 - cached tokens cost nothing
        """Seconds to compute a prompt."""
        return self.prefill_base_s + new_tokens * self.prefill_s_per_token

    def decode_s(self, sequences: float, context_tokens: float) -> float:  # noqa: ARG002 - context costs nothing
        """Seconds of one step."""
        return self.step_s + self.step_s_per_sequence * sequences

    def mixed_s(self, sequences: float, context_tokens: float, new: float, past: float) -> float:
        """Seconds of one step that also computes a piece of a prompt: the sum of both."""
        decoding = self.decode_s(sequences, context_tokens) if sequences else 0.0
        return decoding + self.prefill_s(new, past)


@dataclass(frozen=True, slots=True)
class Side:
    """Replicas of one role."""

    engine: Pace
    replicas: int
    max_sequences: float
    """Sequences one replica can hold: the smaller of its KV cache and its limit."""
    kv_capacity_tokens: float = math.inf
    """What one replica caches; bounds how many shared prefixes stay."""
    max_num_batched_tokens: int = MAX_BATCHED_TOKENS
    """Tokens one step computes at most, those of running sequences first; longer prompts come in pieces."""


@dataclass(frozen=True, slots=True)
class RankPace:
    """How fast one data-parallel rank is while all ranks of its engine do alike: they share steps, not sequences."""

    engine: Pace
    dp: int

    @property
    def kv_bytes_per_token(self) -> int:
        """As of the engine."""
        return self.engine.kv_bytes_per_token

    @property
    def host_s(self) -> float:
        """As of the engine: it has one server."""
        return self.engine.host_s

    @property
    def stages(self) -> int:
        """As of the engine: each rank has all stages."""
        return self.engine.stages

    @property
    def batches(self) -> int:
        """Those of one rank."""
        return self.engine.batches // self.dp

    @property
    def source(self) -> str:
        """As of the engine."""
        return self.engine.source

    def band(self, figure: str) -> tuple[float, float]:
        """As of the engine."""
        return self.engine.band(figure)

    def prefill_s(self, new_tokens: float, past_tokens: float = 0.0) -> float:
        """Seconds to compute a prompt on each rank."""
        return self.engine.prefill_s(new_tokens, past_tokens)

    def decode_s(self, sequences: float, context_tokens: float) -> float:
        """Seconds of one step with so many sequences on each rank."""
        return self.engine.decode_s(sequences * self.dp, context_tokens)

    def mixed_s(self, sequences: float, context_tokens: float, new: float, past: float) -> float:
        """Seconds of one step that also computes a piece of a prompt on each rank."""
        return self.engine.mixed_s(sequences * self.dp, context_tokens, new, past)


def by_rank(side: Side, dp: int) -> Side:
    """Engines with data-parallel ranks as requests see them: each rank is a replica with a queue and a cache of its own."""
    if dp == 1:
        return side
    return Side(
        RankPace(side.engine, dp),
        side.replicas * dp,
        side.max_sequences / dp,
        side.kv_capacity_tokens / dp,
        side.max_num_batched_tokens,
    )


@dataclass(frozen=True, slots=True)
class Layout:
    """What is priced: one aggregated side, or a prefill and a decode side."""

    prefill: Side
    decode: Side | None = None
    """None: the prefill side is aggregated and decodes too."""
    transfer_bytes_s: float = 0.0
    """Between a prefill and a decode engine, all their links together."""
    routes_by_prefix: bool = True
    """Requests go to the replica that holds their prefix, so that each replica caches its share of all prefixes."""


@dataclass(frozen=True, slots=True)
class Served:
    """How a layout serves a rate."""

    ttft_s: float
    ttft_p99_s: float
    itl_s: float
    itl_p99_s: float
    is_stable: bool
    limit: str
    """What binds first: `prefill`, `decode`, `kv cache` or `transfer`; empty when nothing does."""
    ttft_p50_s: float = 0.0
    ttft_p95_s: float = 0.0
    sequences: float = 0.0
    """In flight on one replica that decodes."""
    hit_ratio: float = 0.0
    """Share of prompt tokens found in cache."""
    transfer_s: float = 0.0
    """Moving one prompt's KV and waiting for the link; 0 where nothing moves."""


def serve(layout: Layout, work: Workload, rate_rps: float) -> Served:
    """Price a layout at a rate of requests per second."""
    if layout.decode is None:
        return _aggregated(layout, work, rate_rps)
    return _disaggregated(layout, work, rate_rps)


@dataclass(frozen=True, slots=True)
class _Prompts:
    """What computing prompts takes: samples of the length distribution with their weights, and moments."""

    samples: tuple[tuple[float, float], ...]
    """Seconds of the steps that carry a prompt's pieces."""
    mean_s: float
    cv2: float
    added_s: float
    """What a prompt adds to steps that would decode anyway, on average."""
    num_steps: float
    """Steps a prompt is spread over, on average."""


def _prompts(side: Side, work: Workload, hit: float, sequences: float) -> _Prompts:
    """Prompts of all lengths after what is cached, beside so many running sequences (0: none ever)."""
    context = work.isl_tokens + work.osl_tokens / 2
    alone = side.engine.decode_s(sequences, context) if sequences else 0.0
    budget = _piece_tokens(side, sequences)
    samples, added, steps = [], 0.0, 0.0
    for factor, weight in length_samples(work.isl_cv):
        new, past = work.isl_tokens * factor * (1 - hit), work.isl_tokens * factor * hit
        piece = min(new, budget)
        num = max(1.0, new / budget)
        # Attention grows with what lies before a piece, evenly: the middle one stands for all.
        one = side.engine.mixed_s(sequences, context, piece, past + (new - piece) / 2)
        samples.append((num * one, weight))
        added += weight * num * (one - alone)
        steps += weight * num
    mean = sum(s * w for s, w in samples)
    variance = sum(w * (s - mean) ** 2 for s, w in samples)
    return _Prompts(tuple(samples), mean, variance / mean**2 if mean else 0.0, added, steps)


def _piece_tokens(side: Side, sequences: float) -> float:
    """What a step has left for prompts."""
    return max(1.0, side.max_num_batched_tokens - sequences / side.engine.batches)


def hit_ratio(layout: Layout, work: Workload, sequences: float) -> float:
    """The share of prompt tokens found in cache: what others have sent before, as far as the cache keeps it.

    What running sequences hold for themselves is not there for prefixes; prefixes are taken to be equally popular.
    """
    side = layout.prefill
    if not work.shared_prefix_ratio or math.isinf(side.kv_capacity_tokens):
        return work.shared_prefix_ratio
    own = work.isl_tokens * (1 - work.shared_prefix_ratio) + work.osl_tokens / 2
    room = max(0.0, side.kv_capacity_tokens - sequences * own)
    spread = side.replicas if layout.routes_by_prefix else 1
    wanted = max(1, work.num_prefixes) / spread * work.isl_tokens * work.shared_prefix_ratio
    return work.shared_prefix_ratio * min(1.0, room / wanted if wanted else 1.0)


def _aggregated(layout: Layout, work: Workload, rate_rps: float) -> Served:
    side = layout.prefill
    rate = rate_rps / side.replicas
    engine = side.engine
    context = work.isl_tokens + work.osl_tokens / 2
    hit = hit_ratio(layout, work, 0.0)
    least_s = engine.decode_s(1, context)
    sequences = rate * work.osl_tokens * least_s
    for _ in range(_PASSES):
        held = max(1.0, min(sequences, side.max_sequences))
        prompts = _prompts(side, work, hit, held)
        busy = rate * prompts.added_s / engine.stages
        if busy >= MAX_UTILIZATION:
            return _unstable(prompts.mean_s + engine.host_s, least_s, "prefill")
        sequences = little(
            lambda b, busy=busy: engine.decode_s(b, context) / (1 - busy) * work.osl_tokens,  # type: ignore[misc]
            rate,
            side.max_sequences,
        )
        before, running = hit, min(sequences, side.max_sequences)
        hit = min(hit, hit_ratio(layout, work, running))
        if hit > before - _SETTLED and abs(max(1.0, running) - held) < _SETTLED * held:
            break
    step = engine.decode_s(min(sequences, side.max_sequences), context)
    serving_s = prompts.added_s / engine.stages + prompts.num_steps * step
    if rate * serving_s >= 1:
        return _unstable(prompts.mean_s + engine.host_s, step, "prefill")
    queue = queue_of(rate, serving_s, prompts.cv2, 1)
    seats = _seats(side, rate, prompts.mean_s + step / (1 - busy) * work.osl_tokens)
    fixed = step / 2 + engine.host_s
    new = work.isl_tokens * (1 - hit)
    piece = min(new, _piece_tokens(side, held))
    late = max(step, engine.mixed_s(held, context, piece, work.isl_tokens - piece))
    # A token is late when its step carries a piece: that is a share of the steps, of which (1 - busy) / step are made a second.
    share = rate * prompts.num_steps * step / (1 - busy)
    itl_p99 = max(late if share > 1 - QUANTILES[-1] else step, step / (1 - busy))
    is_stable = sequences <= side.max_sequences
    ttfts = [fixed + quantile(prompts.samples, queue, q) + seats.wait_s(q) for q in QUANTILES]
    return Served(
        ttft_s=prompts.mean_s + fixed + queue.mean_s + seats.mean_s,
        ttft_p99_s=ttfts[2],
        itl_s=step / (1 - busy),
        itl_p99_s=itl_p99,
        is_stable=is_stable,
        limit=_limit(queue, seats, is_stable=is_stable),
        ttft_p50_s=ttfts[0],
        ttft_p95_s=ttfts[1],
        sequences=sequences,
        hit_ratio=hit,
    )


def _disaggregated(layout: Layout, work: Workload, rate_rps: float) -> Served:
    decode, prefill = layout.decode, layout.prefill
    assert decode is not None
    context = work.isl_tokens + work.osl_tokens / 2
    hit = hit_ratio(layout, work, 0.0)
    prompts = _prompts(prefill, work, hit, 0.0)
    num_bytes = work.isl_tokens * prefill.engine.kv_bytes_per_token
    moving = transfer_s(num_bytes, layout.transfer_bytes_s)
    alone = decode.engine.decode_s(1, context)
    fixed = moving + prefill.engine.host_s
    servers = prefill.replicas * prefill.engine.stages
    if rate_rps * prompts.mean_s / servers >= MAX_UTILIZATION:
        return _unstable(prompts.mean_s + fixed, alone, "prefill")
    load = rate_rps * moving / min(prefill.replicas, decode.replicas)
    if load >= MAX_UTILIZATION:
        return _unstable(prompts.mean_s + fixed, alone, "transfer")
    # Transfers of one size queue for their link: M/D/1.
    moving += load * moving / (2 * (1 - load))
    rate = rate_rps / decode.replicas

    def life_s(sequences: float) -> float:
        # A transfer holds its blocks on the decode side while it runs.
        return decode.engine.decode_s(sequences, context) * work.osl_tokens + moving

    sequences = little(life_s, rate, decode.max_sequences)
    step = decode.engine.decode_s(min(sequences, decode.max_sequences), context)
    queue = queue_of(rate_rps, prompts.mean_s, prompts.cv2, servers)
    seats = _seats(decode, rate, life_s(min(sequences, decode.max_sequences)))
    fixed = moving + step + prefill.engine.host_s
    ttfts = [fixed + quantile(prompts.samples, queue, q) + seats.wait_s(q) for q in QUANTILES]
    is_stable = sequences <= decode.max_sequences
    return Served(
        ttft_s=prompts.mean_s + fixed + queue.mean_s + seats.mean_s,
        ttft_p99_s=ttfts[2],
        itl_s=step,
        itl_p99_s=step,
        is_stable=is_stable,
        limit=_limit(queue, seats, is_stable=is_stable),
        ttft_p50_s=ttfts[0],
        ttft_p95_s=ttfts[1],
        sequences=sequences,
        hit_ratio=hit,
        transfer_s=moving,
    )


def transfer_s(num_bytes: float, bytes_s: float) -> float:
    """Moving so much KV over a link of this rate that nobody else uses."""
    return TRANSFER_LATENCY_S + num_bytes / (bytes_s * ETA_TRANSFER)


def _seats(side: Side, rate_rps: float, life_s: float) -> Queue:
    """Waiting for room in the cache or among the sequences of one replica, of which each request takes its part."""
    if side.max_sequences > max(_FEW_SEATS, 2 * rate_rps * life_s):
        return Queue(0.0, 0.0)
    return queue_of(rate_rps, life_s, _ANSWERS_CV2, max(1, int(side.max_sequences)))


def _limit(queue: Queue, seats: Queue, *, is_stable: bool) -> str:
    """What binds first: room in the cache, where there is too little or more is waited for it than for computing."""
    waits_for_room = seats.wait_s(QUANTILES[-1]) > queue.wait_s(QUANTILES[-1])
    return "kv cache" if waits_for_room or not is_stable else ""


def _unstable(ttft_s: float, itl_s: float, limit: str) -> Served:
    return Served(ttft_s, math.inf, itl_s, itl_s, False, limit)


def meets(served: Served, slo: Slo) -> bool:
    """Whether the goals hold at p99."""
    if not served.is_stable:
        return False
    if slo.ttft_ms is not None and served.ttft_p99_s * 1e3 > slo.ttft_ms:
        return False
    return slo.itl_ms is None or served.itl_p99_s * 1e3 <= slo.itl_ms


def max_rate_rps(layout: Layout, work: Workload, slo: Slo) -> float:
    """The highest rate at which the goals hold; 0 when they hold at none."""
    low, high = 0.0, LEAST_RPS
    if not meets(serve(layout, work, high), slo):
        return 0.0
    while high < 1e6 and meets(serve(layout, work, high), slo):
        low, high = high, high * 4
    for _ in range(18):
        middle = (low + high) / 2
        if meets(serve(layout, work, middle), slo):
            low = middle
        else:
            high = middle
    return low


def estimate(layout: Layout, work: Workload, source: str) -> Estimate:
    """The figures of a plan: latency at the workload's rate, throughput at the highest rate the layout bears."""
    served = serve(layout, work, work.rate_rps)
    prefill = layout.prefill.engine
    decode = layout.decode.engine if layout.decode else prefill
    capacity = max_rate_rps(layout, work, Slo()) * work.osl_tokens
    why = prefill.source or source
    return Estimate(
        ttft_ms=figure(served.ttft_s * 1e3, prefill.band("ttft"), why),
        itl_ms=figure(served.itl_s * 1e3, decode.band("tpot"), decode.source or source),
        out_tokens_s=figure(capacity, decode.band("tokens"), decode.source or source),
    )


def figure(expected: float, band: tuple[float, float], source: str) -> Figure:
    """A figure with its band; `band` holds the factors to its ends."""
    low, high = band
    return Figure(rounded(expected * low), rounded(expected), rounded(expected * high), source)


def rounded(value: float) -> float:
    """Three significant digits: more would claim more than is known."""
    return float(f"{value:.3g}")

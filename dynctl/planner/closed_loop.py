"""What a benchmark with a fixed number of users sees: TTFT, time per token, throughput; of one engine or of two pools.

Every user sends its next request when the last one ends. Each step may carry one prompt besides the sequences that
decode; what does not fit the KV cache waits.
Not here: arrivals at a rate (`estimate`).
Pure.
"""

from dataclasses import dataclass

from dynctl.planner.calibration import Constants
from dynctl.planner.roofline import Load, attention_s, step_s

PREFILL_BATCH = 4
"""Prompts a prefill engine computes in one step when they wait; more would only make each of them later."""


@dataclass(frozen=True, slots=True)
class Loop:
    """One setting of a closed-loop benchmark on one engine."""

    isl_tokens: float
    osl_tokens: float
    concurrency: float
    cached_tokens: float = 0.0
    max_sequences: float = float("inf")
    """Sequences the engine's KV cache and limits hold at once."""


@dataclass(frozen=True, slots=True)
class Pass:
    """How one request fares, in seconds; `tokens_s` is of the whole engine."""

    ttft_s: float
    tpot_s: float
    tokens_s: float


def run_loop(load: Load, c: Constants, loop: Loop) -> Pass:
    """Price a closed loop; TTFT is the mean over the requests of a benchmark that starts all users at once."""
    ranks = load.parallelism.dp * load.parallelism.pp
    running = min(loop.concurrency, loop.max_sequences)
    batch = max(1.0, running / ranks)
    new, past = max(1.0, loop.isl_tokens - loop.cached_tokens), loop.cached_tokens
    context = loop.isl_tokens + loop.osl_tokens / 2
    decode = step_s(load, c, batch, context)
    mixed = step_s(load, c, batch - 1, context, new, past)
    extra = max(0.0, mixed - decode) * c.mixing
    tpot = decode + extra * (batch - 1) / loop.osl_tokens
    # A user's prompt takes one of the steps that others decode in: so many of them carry somebody else's.
    rho = min(0.95, (batch - 1) / loop.osl_tokens)
    wait = (c.queue * rho / (2 * (1 - rho)) + c.burst * (batch - 1) / 2) * mixed
    ttft = mixed + (decode / 2 if batch > 1 else 0.0) + wait + c.host_ms * 1e-3
    life = ttft + tpot * (loop.osl_tokens - 1)
    tokens = running * loop.osl_tokens / life
    if loop.concurrency > running:
        ttft += (loop.concurrency - running) / running * life
    return Pass(ttft, tpot, tokens)


@dataclass(frozen=True, slots=True)
class Pair:
    """Prefill and decode engines of a kind each, and what moves KV between them."""

    prefill: Load
    num_prefill: int
    decode: Load
    num_decode: int
    transfer_s: float = 0.0


def run_pair(pair: Pair, c: Constants, loop: Loop) -> Pass:
    """Price a closed loop over prefill and decode pools: users are either before their first token or decoding."""
    new = max(1.0, loop.isl_tokens - loop.cached_tokens)
    context = loop.isl_tokens + loop.osl_tokens / 2
    ranks = pair.decode.parallelism.dp * pair.decode.parallelism.pp

    def decode_s(users: float) -> float:
        return step_s(pair.decode, c, max(1.0, users / pair.num_decode / ranks), context)

    def prompts_s(users: float) -> tuple[float, float]:
        """Seconds of one prefill step, and requests per second with this many users before their first token."""
        waiting = users / pair.num_prefill
        batch = max(1.0, min(PREFILL_BATCH, waiting))
        one = prefill_batch_s(pair.prefill, c, batch, new, loop.cached_tokens)
        fastest = pair.num_prefill * batch / one
        return one, min(fastest, users / (one + pair.transfer_s + c.host_ms * 1e-3))

    low, high = 0.0, min(loop.concurrency, loop.max_sequences * pair.num_decode)
    for _ in range(50):
        middle = (low + high) / 2
        tokens = middle / decode_s(middle)
        _, rate = prompts_s(loop.concurrency - middle)
        if tokens < rate * loop.osl_tokens:
            low = middle
        else:
            high = middle
    decoding = max(low, 1e-6)
    tpot = decode_s(decoding)
    requests = max(1e-9, decoding / tpot / loop.osl_tokens)
    return Pass((loop.concurrency - decoding) / requests, tpot, requests * loop.osl_tokens)


def prefill_batch_s(load: Load, c: Constants, batch: float, new: float, past: float) -> float:
    """Seconds of several prompts in one step: products of all together, attention of each alone."""
    together = step_s(load, c, 0.0, 0.0, batch * new, past)
    one_long = attention_s(load, c, batch * new, past)
    return together - one_long + batch * attention_s(load, c, new, past)

"""What a benchmark with a fixed number of users sees of one aggregated engine: TTFT, time per token, throughput.

Every user sends its next request when the last one ends. Each step may carry one prompt besides the sequences that
decode; what does not fit the KV cache waits.
Not here: arrivals at a rate (`estimate`).
Pure.
"""

from dataclasses import dataclass

from dynctl.planner.calibration import Constants
from dynctl.planner.roofline import Load, step_s


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
    life = mixed + tpot * (loop.osl_tokens - 1)
    rho = min(0.95, batch * extra / life)
    wait = c.queue * rho / (2 * (1 - rho)) * extra + c.burst * (batch - 1) / 2 * extra
    ttft = mixed + (decode / 2 if batch > 1 else 0.0) + wait + c.host_ms * 1e-3
    life = ttft + tpot * (loop.osl_tokens - 1)
    tokens = running * loop.osl_tokens / life
    if loop.concurrency > running:
        ttft += (loop.concurrency - running) / running * life
    return Pass(ttft, tpot, tokens)

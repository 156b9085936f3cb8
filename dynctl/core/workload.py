"""What will be asked of a deployment, and how fast it must answer. Pure."""

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Workload:
    """Expected traffic; ISL and OSL are input and output sequence lengths in tokens."""

    isl_tokens: int = 1024
    osl_tokens: int = 128
    rate_rps: float = 1.0
    shared_prefix_ratio: float = 0.0
    """Share of each prompt that others have sent before, 0 to 1."""
    isl_cv: float = 0.0
    """Standard deviation of the prompt length over its mean; 0: all prompts are as long as the mean."""
    num_prefixes: int = 1
    """How many different shared prefixes there are; they must fit the cache to be hit."""


@dataclass(frozen=True, slots=True)
class Slo:
    """Latency goals in milliseconds at p99; None: no goal."""

    ttft_ms: float | None = None
    itl_ms: float | None = None

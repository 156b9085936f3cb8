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


@dataclass(frozen=True, slots=True)
class Slo:
    """Latency goals in milliseconds at p99; None: no goal."""

    ttft_ms: float | None = None
    itl_ms: float | None = None

"""Waiting for a server, and sequences in flight: M/G/c by Erlang's C, quantiles of its waits, Little's law, lengths.

Not here: what a server is (`estimate`).
Pure.
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import lru_cache
from statistics import NormalDist

LENGTH_QUANTILES = ((0.25, 0.5), (0.625, 0.25), (0.85, 0.2), (0.97, 0.04), (0.99, 0.01))
"""Probabilities at which a length distribution is sampled, with the weight of each sample."""


def little(life_s: Callable[[float], float], rate_rps: float, max_sequences: float) -> float:
    """Sequences in flight: the smallest B with B = rate × life(B); larger than `max_sequences` when there is none.

    Steps along the chord of the last two points, which for a life that grows ever faster never overshoots.
    """
    before, sequences = 1.0, rate_rps * life_s(1.0)
    start = sequences
    for _ in range(60):
        following = rate_rps * life_s(sequences)
        if following > max_sequences * 4 or abs(following - sequences) < 0.01 + 0.001 * sequences:
            return following
        slope = (following - start) / (sequences - before) if sequences != before else 0.0
        before, start = sequences, following
        sequences = (
            following + slope / (1 - slope) * (following - sequences)
            if 0 < slope < 0.9
            else following
        )
    return sequences


@dataclass(frozen=True, slots=True)
class Queue:
    """Waiting before service: P(W > t) = waits × exp(-t / tau)."""

    waits: float
    tau_s: float

    @property
    def mean_s(self) -> float:
        """How long one waits on average."""
        return self.waits * self.tau_s

    def wait_s(self, q: float) -> float:
        """The quantile of waiting."""
        tail = 1 - q
        return self.tau_s * math.log(self.waits / tail) if self.waits > tail else 0.0


def queue_of(rate_rps: float, service_s: float, cv2: float, servers: int) -> Queue:
    """Waiting in M/G/c, by Erlang's C and the spread of service times; beyond saturation it has no end."""
    load = rate_rps * service_s
    rho = load / servers
    if rho >= 1:
        return Queue(1.0, math.inf)
    if rho <= 0:
        return Queue(0.0, 0.0)
    return Queue(_erlang_c(servers, load), (1 + cv2) / 2 * service_s / (servers * (1 - rho)))


def quantile(samples: Sequence[tuple[float, float]], queue: Queue, q: float) -> float:
    """The quantile of waiting plus computing, which are independent; samples are service times with their weights."""
    tail = 1 - q
    if math.isinf(queue.tau_s):
        return math.inf
    if len(samples) == 1:
        return samples[0][0] + queue.wait_s(q)

    def beyond(t: float) -> float:
        return sum(
            w
            * (
                1.0
                if t < s
                else queue.waits * math.exp(-(t - s) / queue.tau_s)
                if queue.tau_s
                else 0.0
            )
            for s, w in samples
        )

    low, high = 0.0, max(s for s, _ in samples) + 20 * queue.tau_s + 1e-9
    for _ in range(40):
        middle = (low + high) / 2
        if beyond(middle) > tail + 1e-12:
            low = middle
        else:
            high = middle
    return high


def _erlang_c(servers: int, load: float) -> float:
    """The chance that a request must wait."""
    blocking = 1.0
    for k in range(1, servers + 1):
        blocking = load * blocking / (k + load * blocking)
    rho = load / servers
    return blocking / (1 - rho + rho * blocking)


@lru_cache(maxsize=64)
def length_samples(cv: float) -> tuple[tuple[float, float], ...]:
    """Factors on the mean length with weights, of a log-normal distribution with this coefficient of variation."""
    if cv <= 0:
        return ((1.0, 1.0),)
    sigma = math.sqrt(math.log(1 + cv * cv))
    normal = NormalDist()
    raw = [(math.exp(sigma * normal.inv_cdf(q)), w) for q, w in LENGTH_QUANTILES]
    mean = sum(x * w for x, w in raw)
    return tuple((x / mean, w) for x, w in raw)

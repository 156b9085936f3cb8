"""Which side of a deployment is full, prefill or decode, by figures and limits that are shown with the verdict. Pure."""

from collections.abc import Iterable
from dataclasses import dataclass

from dynctl.core.workload import Slo
from dynctl.telemetry.figures import PoolFigures

WAITING_PER_ENGINE = 1.0
"""From here on requests queue for the engines themselves, not for the next step."""
KV_FULL = 0.9
"""From here on an engine begins to preempt or to make others wait."""


@dataclass(frozen=True, slots=True)
class Evidence:
    """One figure against its limit."""

    role: str
    what: str
    """`waiting` (requests per ready engine), `kv` (ratio), `ttft` or `itl` (p99, seconds)."""
    value: float | None
    limit: float
    """At or above it the side is full."""

    @property
    def is_over(self) -> bool:
        """Whether this says that the side is full."""
        return self.value is not None and self.value >= self.limit


@dataclass(frozen=True, slots=True)
class Balance:
    """A verdict and what it rests on."""

    verdict: str
    """`prefill bound`, `decode bound`, `both are full`, `balanced`; of one pool `full` or `has room`; empty: not known."""
    evidence: tuple[Evidence, ...]


def balance(pools: Iterable[PoolFigures], slo: Slo) -> Balance:
    """Judge the pools of one deployment."""
    by_role = {pool.role: pool for pool in pools}
    evidence = tuple(one for pool in by_role.values() for one in _of_pool(pool, slo))
    known = {one.role for one in evidence if one.value is not None}
    over = {one.role for one in evidence if one.is_over}
    if not known or known != set(by_role):
        return Balance("", evidence)
    if "prefill" in by_role and "decode" in by_role:
        verdict = {
            frozenset(): "balanced",
            frozenset({"prefill"}): "prefill bound",
            frozenset({"decode"}): "decode bound",
        }.get(frozenset(over & {"prefill", "decode"}), "both are full")
    else:
        verdict = "full" if over else "has room"
    return Balance(verdict, evidence)


def _of_pool(pool: PoolFigures, slo: Slo) -> list[Evidence]:
    waiting = None
    if pool.waiting is not None and pool.num_ready:
        waiting = pool.waiting / pool.num_ready
    found = [Evidence(pool.role, "waiting", waiting, WAITING_PER_ENGINE)]
    if pool.role != "decode" and slo.ttft_ms is not None:
        ttft_s = pool.ttft.p99_s if pool.ttft else None
        found.append(Evidence(pool.role, "ttft", ttft_s, slo.ttft_ms / 1e3))
    if pool.role != "prefill":
        found.append(Evidence(pool.role, "kv", pool.kv_usage_ratio, KV_FULL))
        if slo.itl_ms is not None:
            itl_s = pool.itl.p99_s if pool.itl else None
            found.append(Evidence(pool.role, "itl", itl_s, slo.itl_ms / 1e3))
    return found

"""Routers' sums of hits since their start → ratios of prompt tokens, over all routers of a deployment. None: not known. Pure."""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

import msgspec

from dynctl.core.kv_links import LINK_CLASSES
from dynctl.errors import ProbeError


@dataclass(frozen=True, slots=True)
class HitFigures:
    """Where the prompts of all requests so far were found, and where not."""

    requests: float
    prompt_tokens: float
    predicted_ratio: float | None
    """Expected by the router."""
    reported_ratio: float | None
    """Found, as engines report."""
    probe_ratio: float | None
    """Of the router's own questions, asked a second time: 1 wherever caches work at all."""
    bound_present_ratio: float | None
    """In the cache of any engine, …"""
    bound_unlimited_ratio: float | None
    """… or seen before."""
    lost_routing_ratio: float | None
    lost_eviction_ratio: float | None
    lost_cold_ratio: float | None
    moved: Mapping[str, tuple[float, float | None]]
    """Tokens and bytes of KV handed over, by class of link; bytes only where their size is known."""


def sums(body: bytes) -> Mapping[str, float]:
    """Read a router's answer to `/hits`: its numbers; a newer router may tell other things beside them.

    Raises:
        ProbeError: when it is no object, or holds numbers of no size.
    """
    try:
        found = msgspec.json.decode(body, type=dict[str, Any])
        return {
            name: float(value)
            for name, value in found.items()
            if isinstance(value, int | float) and not isinstance(value, bool)
        }
    except (msgspec.DecodeError, OverflowError, RecursionError) as error:
        raise ProbeError(f"the router's hits are not understood: {error}") from error


def hit_figures(by_router: Iterable[Mapping[str, float]]) -> HitFigures | None:
    """Add up the sums of several routers; None without any."""
    told = list(by_router)
    if not told:
        return None

    def total(name: str) -> float:
        return sum(one.get(name, 0.0) for one in told)

    def ratio(*names: str, of: str = "prompt_tokens") -> float | None:
        whole = total(of)
        return sum(map(total, names)) / whole if whole else None

    return HitFigures(
        requests=total("requests"),
        prompt_tokens=total("prompt_tokens"),
        predicted_ratio=ratio("predicted_tokens"),
        reported_ratio=ratio("reported_tokens") if total("requests_reported") else None,
        probe_ratio=ratio("probe_cached_tokens", of="probe_tokens"),
        bound_present_ratio=ratio("hit_tokens", "routing_tokens"),
        bound_unlimited_ratio=ratio("hit_tokens", "routing_tokens", "eviction_tokens"),
        lost_routing_ratio=ratio("routing_tokens"),
        lost_eviction_ratio=ratio("eviction_tokens"),
        lost_cold_ratio=ratio("cold_tokens"),
        moved={link: _moved(told, link) for link in LINK_CLASSES},
    )


def _moved(told: list[Mapping[str, float]], link: str) -> tuple[float, float | None]:
    tokens = sum(one.get(f"moved_{link}_tokens", 0.0) for one in told)
    sizes = [one[name] for one in told if (name := f"moved_{link}_bytes") in one]
    return tokens, sum(sizes) if sizes else None

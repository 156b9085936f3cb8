"""What blocks in a slower medium are worth: a load takes time, and saves that of computing them.

An engine loads what its device lacks and computes the rest. The time of a load is learned per engine and medium (`rates`);
its credit is the prefill it saves, never less than none, in tokens of the engine's device: so policies need not know
of media. Not here: which blocks are where (`prefix_index`). Pure.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from dynctl.core.kv import HOST, STORAGE
from dynctl.core.router_settings import Settings
from dynctl.router.rates import Line

_SCALE_TOKENS = 4096.0
_LEAST_GBYTES_S = 0.001
_USUAL_BYTES = 100 * 1024
"""Of a token's KV, where the model's is not known."""

_NUM_IN_FULL = 3
"""What is assumed of a medium may be off by orders of magnitude: the first loads count as they are."""

_OUTLIER = 2.0
"""From then on a load counts as at most this many times what was expected, as a prefill does: one stall must not take
the credit from all engines."""

_LEAST_BOUND_MS = 10.0
"""So much counts whatever was expected: loads that seemed to take no time at all must not bound all later ones to none."""


@dataclass(frozen=True, slots=True)
class Loadable:
    """What one engine has of a prompt beside its device."""

    device_tokens: int
    """On the device, from the prompt's beginning."""
    tokens: int
    """Behind those, to be loaded."""
    load_ms: float
    """What that costs at most: the load, or computing them."""
    medium: int
    """Where they are; 0: in several media."""

    @property
    def held_tokens(self) -> int:
        """All that need not be computed."""
        return self.device_tokens + self.tokens


class Held(NamedTuple):
    """What engines have of a prompt, by their positions."""

    tokens: list[int]
    """On the device; what would be loaded counts as many tokens as its load saves the time of."""
    loadable: list[Loadable | None] | None = None
    """None for an engine that would load nothing; None at all where that goes for all."""


def assumed_loads(settings: Settings) -> dict[int, Line]:
    """Milliseconds a load takes by its tokens, until learned; by medium."""
    num_bytes = settings.kv_bytes_per_token or _USUAL_BYTES
    rates = {HOST: settings.host_load_gbytes_s, STORAGE: settings.storage_load_gbytes_s}
    return {
        medium: Line(
            *(settings.load_setup_ms, num_bytes / max(rate, _LEAST_GBYTES_S) / 1e6, _SCALE_TOKENS),
            weight=0.05,
            outlier=math.inf,  # bounded before it is learned (`counted_ms`)
        )
        for medium, rate in rates.items()
    }


def counted_ms(line: Line, usual: Line, tokens: int, ms: float) -> float:
    """Say what a load counts as for an engine's line, or for the `usual` one itself, which it is held to."""
    if usual.num_seen < _NUM_IN_FULL:
        return ms
    return min(ms, max(_OUTLIER * line.at(tokens), _LEAST_BOUND_MS))


def credit(
    device_tokens: int,
    depths: Sequence[tuple[int, int]],
    loads: Mapping[int, Line],
    ms_per_token: float,
    uncached_ms_per_token: float,
) -> tuple[int, Loadable | None]:
    """Say what blocks beside the device save, in its tokens, and what would be loaded.

    `depths` says per medium, the fastest first, how many of the prompt's tokens it has; the first that has a block gives
    it. A token costs `ms_per_token` to compute and `uncached_ms_per_token` with the room it takes, which a loaded one
    takes too.
    """
    reached, load_ms, source = device_tokens, 0.0, 0
    for medium, depth in depths:
        tokens = depth - reached
        if tokens > 0:
            line = loads[medium]
            load_ms += min(line.base + line.slope * tokens, ms_per_token * tokens)
            source = medium if reached == device_tokens else 0
            reached = depth
    tokens = reached - device_tokens
    if not tokens:
        return 0, None
    saved = int((tokens * ms_per_token - load_ms) / uncached_ms_per_token)
    return saved, Loadable(device_tokens, tokens, load_ms, source)

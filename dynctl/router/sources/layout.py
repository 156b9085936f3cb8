"""What an engine says of its own cache: block size, capacity, whether it is used at all. IO: sockets."""

from collections.abc import Mapping
from dataclasses import dataclass

from dynctl.core.exposition import parse
from dynctl.errors import ProbeError
from dynctl.http1.upstream import UpstreamError
from dynctl.router.sources.route import Route

_CACHE = "vllm:cache_config_info"

_MAX_DIGITS = 15
"""What is longer counts nothing that there is."""


@dataclass(frozen=True, slots=True)
class CacheLayout:
    """0 and None: it does not say."""

    block_size_tokens: int = 0
    capacity_tokens: int = 0
    is_caching: bool | None = None
    num_ranks: int = 0
    """Data-parallel ranks: each has a cache of its own."""


async def ask_layout(route: Route) -> CacheLayout:
    """Read it from the engine's metrics; nothing is known of an engine that has none.

    Raises:
        UpstreamError: when the engine does not answer at all.
    """
    answer = await route.fetch("GET", "/metrics")
    if answer.status != 200:
        return CacheLayout()
    try:
        return read_layout(answer.body.decode("utf-8", "replace"))
    except ProbeError:
        return CacheLayout()


def read_layout(text: str) -> CacheLayout:
    """Read it from metrics.

    Raises:
        ProbeError: when a line that matters cannot be understood.
    """
    samples = parse(text, {_CACHE}).get(_CACHE, ())
    labels = samples[0].labels if samples else {}
    caching = labels.get("enable_prefix_caching")
    return CacheLayout(
        _number(labels, "block_size"),
        sum([_capacity_tokens(sample.labels) for sample in samples]),
        None if caching is None else caching != "False",
        len({sample.labels.get("engine") for sample in samples}),
    )


def _capacity_tokens(labels: Mapping[str, str]) -> int:
    size = _number(labels, "block_size")
    return _number(labels, "kv_cache_size_tokens") or size * _number(labels, "num_gpu_blocks")


async def is_caching(route: Route) -> bool | None:
    """Tell whether an engine uses its prefix cache; None: it does not say, or not now."""
    try:
        return (await ask_layout(route)).is_caching
    except UpstreamError:
        return None


def _number(labels: Mapping[str, str], name: str) -> int:
    text = labels.get(name, "")
    return int(text) if text.isdecimal() and len(text) <= _MAX_DIGITS else 0

"""An engine's data-parallel ranks as what they are to a router: workers, each with a cache and a queue of its own.

vLLM has one HTTP server for all of them, and a request names its rank in a header; without it the engine spreads requests
by load, and a prompt's cache may lie with another rank than the request. An engine with one rank is one worker and gets no
header. Pure.
"""

from dataclasses import replace

from dynctl.core.deployment import EngineInfo
from dynctl.kv.ranks import MAX_RANKS


def num_ranks(info: EngineInfo) -> int:
    """Ranks of an engine, within what there is."""
    return min(max(info.ranks, 1), MAX_RANKS)


def worker_ids(engine_id: str, ranks: int) -> tuple[str, ...]:
    """Name an engine's workers, by rank."""
    if ranks == 1:
        return (engine_id,)
    return tuple([f"{engine_id}_dp{rank}" for rank in range(ranks)])


def workers_of(info: EngineInfo) -> tuple[EngineInfo, ...]:
    """Split an engine into its workers, by rank: each with its share of the KV memory, and its own side channel."""
    ranks = num_ranks(info)
    if ranks == 1:
        return (info,)
    return tuple(
        [
            replace(
                info,
                id=name,
                kv_capacity_tokens=info.kv_capacity_tokens // ranks,
                side_channel_port=info.side_channel_port and info.side_channel_port + rank,
                ranks=1,
            )
            for rank, name in enumerate(worker_ids(info.id, ranks))
        ]
    )

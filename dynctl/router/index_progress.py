"""How far the caches of engines are known: after a router's start, an engine's, or a stream that has to be read anew.

    known      what the engine holds is known, and followed
    doubtful   batches are missing or come too late: what is known counts in part
    reading    nothing was heard of it yet, or its snapshot is still read
    untold     nobody tells: it is believed to hold what it was sent

An engine that is read is a candidate like all others, by what was read so far. Pure.
"""

from collections.abc import Collection, Iterable

from dynctl.router.metrics import gauge
from dynctl.router.prefix_index import PrefixIndex
from dynctl.router.worker_table import WorkerTable
from dynctl.router.workers import Worker

_STATES = ("known", "doubtful", "reading", "untold")


def exposition(table: WorkerTable, index: PrefixIndex, reading: Collection[str]) -> Iterable[str]:
    """The metrics' lines; `reading` names engines whose snapshot is not whole yet."""
    counts: dict[tuple[str, ...], float] = dict.fromkeys([(state,) for state in _STATES], 0.0)
    for worker in table.all():
        counts[(_state(worker, index, reading),)] += 1
    yield from gauge("index_engines", "Engines by how their cache is known.", counts, ("state",))


def _state(worker: Worker, index: PrefixIndex, reading: Collection[str]) -> str:
    if not worker.is_told:
        return "untold"
    if worker.id in reading or not index.is_told_of(worker.id):
        return "reading"
    return "doubtful" if index.doubts.get(worker.id, 1.0) < 1.0 else "known"

"""GPU groups inside one host, from the link of every pair: NVLink islands, tensor-parallel groups, nearest NICs.

Not here: which group gets which replica (`placement`), how links were found (`discovery`).
Pure.
"""

import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cache, lru_cache
from itertools import combinations

from dynctl.core.hardware import Host

Links = Sequence[Sequence[str | None]]
"""Square matrix of link labels in GPU order; None where unknown."""

_PCIE_RANK = {"PIX": 5, "PXB": 4, "PHB": 3, "NODE": 2, "SYS": 1, "SOC": 1}
"""Nearest first, in the order of the legend of `nvidia-smi topo -m`; SOC is the old name of SYS."""
_NVLINK = re.compile(r"^NV(\d{1,2})$")
_NVLINK_WEIGHT = 1000
_MAX_STEPS = 4000
"""Of the search for islands. Real boards need some dozens; a matrix made to be hard would take for ever."""
_EXACT_GPUS = 12
"""Up to here every grouping is weighed; larger hosts are cut into islands or NUMA nodes first."""


@lru_cache(maxsize=256)
def num_nvlinks(label: str | None) -> int:
    """Return how many NVLinks a label stands for: 18 for `NV18`, 0 for a PCIe path or an unknown one."""
    match = _NVLINK.match(label or "")
    return int(match[1]) if match else 0


def link_rank(label: str | None) -> int:
    """Order labels: more NVLinks first, then PIX, PXB, PHB, NODE, SYS; 0 when unknown."""
    return num_nvlinks(label) * _NVLINK_WEIGHT or _PCIE_RANK.get(label or "", 0)


def nvlink_islands(links: Links) -> tuple[tuple[int, ...], ...]:
    """Cut the GPUs into disjoint sets of which every pair has NVLink, the largest first; positions, not indexes.

    Where that would take too long, the sets still hold NVLinked GPUs only, but larger ones might exist.
    """
    budget = iter(range(_MAX_STEPS))
    joined = [
        frozenset(j for j in range(len(links)) if j != i and num_nvlinks(links[i][j]))
        for i in range(len(links))
    ]
    left = frozenset(i for i in range(len(links)) if joined[i])
    islands = []
    while left:
        island = _largest_clique(joined, left, links, budget)
        if len(island) < 2:
            break
        islands.append(island)
        left -= frozenset(island)
    return tuple(sorted(islands, key=lambda island: (-len(island), island)))


def _largest_clique(
    joined: Sequence[frozenset[int]], left: frozenset[int], links: Links, budget: Iterator[int]
) -> tuple[int, ...]:
    """The largest clique; among equals the one with most links, then the lowest numbers.

    Each step takes one of the budget; when that is used up, every branch ends at the first clique it finds.
    """
    found: list[tuple[int, ...]] = []

    def grow(clique: tuple[int, ...], candidates: frozenset[int], seen: frozenset[int]) -> None:
        if not candidates:
            if not seen and clique:
                found.append(tuple(sorted(clique)))
            return
        pivot = max(candidates | seen, key=lambda i: len(joined[i] & candidates))
        is_hurried = next(budget, None) is None
        for node in sorted(candidates - joined[pivot])[: 1 if is_hurried else None]:
            grow((*clique, node), candidates & joined[node], seen & joined[node])
            candidates, seen = candidates - {node}, seen | {node}

    grow((), left, frozenset())
    most = max(map(len, found), default=0)
    largest = [clique for clique in found if len(clique) == most]
    strength = {
        clique: sum(link_rank(links[a][b]) for a, b in combinations(clique, 2))
        for clique in largest
    }
    return min(largest, key=lambda clique: (-strength[clique], clique), default=())


@dataclass(frozen=True, slots=True)
class Near:
    """What breaks ties between equally linked groups, per GPU in matrix order."""

    numa: tuple[object, ...] = ()
    """`Gpu.place`; None: unknown."""
    nics: tuple[frozenset[str], ...] = ()


def near_of(host: Host, members: Sequence[int] | None = None) -> Near:
    """What breaks ties between GPU groups of a host; `members` are positions in `host.gpus`, None: all."""
    chosen = range(len(host.gpus)) if members is None else members
    nics = dict(host.gpu_nics)
    return Near(
        tuple(host.gpus[i].place for i in chosen),
        tuple(frozenset(nics.get(host.gpus[i].index, ())) for i in chosen) if nics else (),
    )


Score = tuple[int, int, int, int, int]


def group_score(links: Links, near: Near, group: Sequence[int]) -> Score:
    """Weigh one group, larger is better: whole on NVLink, sum of link ranks, one NUMA node, a shared near NIC."""
    pairs = [links[a][b] for a, b in combinations(group, 2)]
    numa = {near.numa[i] for i in group} if near.numa else set()
    nics = [near.nics[i] for i in group] if near.nics else []
    return (
        int(bool(pairs) and all(num_nvlinks(label) for label in pairs)),
        sum(link_rank(label) for label in pairs),
        int(len(numa) == 1 and None not in numa),
        int(bool(nics) and bool(frozenset.intersection(*nics))),
        min((link_rank(label) for label in pairs), default=0),
    )


def tp_groups(links: Links, near: Near, size: int) -> tuple[tuple[int, ...], ...]:
    """Cut the GPUs into as many disjoint groups of `size` as there can be, so that all together are linked best.

    Groups come best first. Among equal groupings the one with the lowest numbers wins.
    """
    if size < 1 or size > len(links):
        return ()
    if size == 1:
        return tuple((i,) for i in range(len(links)))
    groups = [
        tuple(members[i] for i in group)
        for members in _portions(links, near, size)
        for group in _best_grouping(_cut(links, members), _cut_near(near, members), size)
    ]

    def quality(group: tuple[int, ...]) -> tuple[int, int, tuple[int, ...]]:
        whole, total, *_ = group_score(links, near, group)
        return -whole, -total, group

    return tuple(sorted(groups, key=quality))


def _portions(links: Links, near: Near, size: int) -> list[tuple[int, ...]]:
    """Parts of a large host that are grouped one by one, so that the exact search stays small."""
    everyone = tuple(range(len(links)))
    if len(everyone) <= _EXACT_GPUS:
        return [everyone]
    parts: list[tuple[int, ...]] = []
    rest: list[int] = []
    by_numa: dict[object, list[int]] = {}
    for i in everyone:
        by_numa.setdefault(near.numa[i] if near.numa else None, []).append(i)
    step = max(size, _EXACT_GPUS - _EXACT_GPUS % size)
    for members in by_numa.values():
        usable = len(members) - len(members) % size
        parts += [tuple(members[i : min(i + step, usable)]) for i in range(0, usable, step)]
        rest.extend(members[usable:])
    parts += [tuple(rest[i : i + size]) for i in range(0, len(rest) - len(rest) % size, size)]
    return parts


def _cut(links: Links, members: Sequence[int]) -> Links:
    return [[links[a][b] for b in members] for a in members]


def _cut_near(near: Near, members: Sequence[int]) -> Near:
    return Near(
        tuple(near.numa[i] for i in members) if near.numa else (),
        tuple(near.nics[i] for i in members) if near.nics else (),
    )


def _best_grouping(links: Links, near: Near, size: int) -> tuple[tuple[int, ...], ...]:
    """Dynamic programming over the set of GPUs still to place; the lowest one opens the next group or stays out."""
    count = len(links)
    if count < size:
        return ()
    scores = {
        group: group_score(links, near, group)[:4] for group in combinations(range(count), size)
    }

    @cache
    def best(
        mask: int, skips: int
    ) -> tuple[tuple[int, int, int, int], tuple[tuple[int, ...], ...]]:
        members = [i for i in range(count) if mask >> i & 1]
        if len(members) < size:
            return (0, 0, 0, 0), ()
        first, others = members[0], members[1:]
        top: tuple[tuple[int, int, int, int], tuple[tuple[int, ...], ...]] | None = None
        for partners in combinations(others, size - 1):
            group = (first, *partners)
            rest, chosen = best(mask & ~sum(1 << i for i in group), skips)
            mine = scores[group]
            total = (rest[0] + mine[0], rest[1] + mine[1], rest[2] + mine[2], rest[3] + mine[3])
            if top is None or total > top[0]:
                top = total, (group, *chosen)
        if skips:
            skipped = best(mask & ~(1 << first), skips - 1)
            if top is None or (len(skipped[1]), skipped[0]) > (len(top[1]), top[0]):
                top = skipped
        assert top is not None
        return top

    return best((1 << count) - 1, count % size)[1]


def nearest(labels: Sequence[str | None]) -> tuple[int, ...]:
    """Return the positions of the nearest of several devices, by the best class seen; empty when none is known."""
    ranks = [link_rank(label) for label in labels]
    best = max(ranks, default=0)
    return tuple(i for i, rank in enumerate(ranks) if rank == best) if best else ()

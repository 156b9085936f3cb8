"""NVML and what tools print, as one: NVML first, what it does not tell from the tools, and where they disagree.

Of what a GPU is, NVML's word counts. Of how it fares and how fast it is joined to others the worse one does: a fault
that only one of them shows is one.
Not here: how either is read (`probes/`).
Pure.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import fields, replace
from itertools import combinations
from typing import Any, TypeVar

from dynctl.core.machine import GpuHealth
from dynctl.core.units import MIB, format_bytes
from dynctl.discovery.bounds import MAX_GPUS
from dynctl.discovery.facts import (
    GpuFacts,
    HostFacts,
    NvlinkGpu,
    NvmlFacts,
    QueryFacts,
    QueryGpu,
    SmiFacts,
    TopoFacts,
)
from dynctl.discovery.linkage import Square
from dynctl.discovery.pcitree import bus_key
from dynctl.planner.grouping import link_rank

T = TypeVar("T")

QUERIES = ("nvidia_smi_qx", "nvidia_smi_q", "nvidia_smi_table")
"""Tools that print the same facts, the best first."""
_LASTING = ("has_persistence", "has_ecc", "has_ecc_pending", "num_remapped", "has_remap_failed", "pcie_width_max", "compute_mode", "fabric_state", "fabric_clique")  # fmt: skip
"""Health that does not change between two questions."""
_SILENT = (None, ())
_WORSE: dict[str, Callable[[Sequence[Any]], Any]] = {
    "has_persistence": min,
    "num_uncorrected": max,
    "num_remapped": max,
    "is_remap_pending": max,
    "has_remap_failed": max,
    "is_reset_required": max,
    "pcie_width": min,
    "fabric_state": lambda states: next((s for s in states if s != "Completed"), states[0]),
    "fabric_status": lambda words: next((w for w in words if w != "Success"), words[0]),
}
"""Which of several answers counts; the first one for all others."""


def queries_of(found: HostFacts) -> tuple[QueryFacts, ...]:
    """Records of the GPUs from every source that has any, the best first."""
    nvml = found.fact("nvml", NvmlFacts)
    every = [nvml.query] if nvml else []
    every += [query for name in QUERIES if (query := found.fact(name, QueryFacts))]
    return tuple(query for query in every if query.gpus)


def health_of(records: Sequence[QueryGpu]) -> GpuHealth:
    """Each fact from the first record that tells it, or from the one that tells the worse."""
    told: dict[str, Any] = {}
    for each in fields(GpuHealth):
        values = [getattr(record.health, each.name) for record in records]
        known = [value for value in values if value not in _SILENT]
        told[each.name] = _WORSE.get(each.name, _first)(known) if known else values[0]
    # ECC on and off belong together: a change that waits is news, whoever tells it.
    for health in (record.health for record in records):
        if None not in (health.has_ecc, health.has_ecc_pending) and health.has_ecc != health.has_ecc_pending:  # fmt: skip
            told |= {"has_ecc": health.has_ecc, "has_ecc_pending": health.has_ecc_pending}
            break
    return GpuHealth(**told)


def _first(values: Sequence[Any]) -> Any:  # noqa: ANN401 - of any of the facts
    return values[0]


def nvlinks_of(found: HostFacts) -> tuple[NvlinkGpu, ...]:
    """NVLinks of each GPU; a rate that NVML does not tell comes from `nvidia-smi`."""
    printed = _printed_nvlinks(found)
    nvml = found.fact("nvml", NvmlFacts) or NvmlFacts()
    by_uuid = {gpu.uuid: gpu for gpu in printed}
    merged = [
        _rated(gpu, by_uuid.get(gpu.uuid))
        for gpu in nvml.nvlink
        if gpu.rates_bytes_s or gpu.uuid not in by_uuid
    ]
    told = {gpu.uuid for gpu in merged if gpu}
    return (*(gpu for gpu in merged if gpu), *(gpu for gpu in printed if gpu.uuid not in told))


def _printed_nvlinks(found: HostFacts) -> tuple[NvlinkGpu, ...]:
    printed = found.facts.get("nvidia_smi_nvlink")
    return tuple(g for g in printed if isinstance(g, NvlinkGpu)) if isinstance(printed, tuple) else ()  # fmt: skip


def _rated(gpu: NvlinkGpu, printed: NvlinkGpu | None) -> NvlinkGpu | None:
    """None when nobody tells the rate of an active link. A GPU all of whose links are down may just have no bridge."""
    if not any(rate is not None for rate in gpu.rates_bytes_s):
        return replace(gpu, rates_bytes_s=(), says_inactive=bool(gpu.rates_bytes_s))
    known = max((rate or 0 for rate in printed.rates_bytes_s), default=0) if printed else 0
    rates = tuple(rate if rate is None else rate or known for rate in gpu.rates_bytes_s)
    if 0 in rates:
        return None
    if printed is not None and printed.says_inactive:
        return printed
    if printed is not None and len(printed.rates_bytes_s) == len(rates):
        pairs = zip(rates, printed.rates_bytes_s, strict=True)
        rates = tuple(None if None in pair else pair[0] for pair in pairs)
    return replace(gpu, rates_bytes_s=rates)


def topo_of(found: HostFacts) -> TopoFacts:
    """The matrix, cell by cell; only `topo -m` knows of NICs."""
    printed = found.fact("nvidia_smi_topo", TopoFacts) or TopoFacts((), ())
    nvml = found.fact("nvml", NvmlFacts)
    if nvml is None or not nvml.topo.gpu_indexes:
        return printed
    indexes = tuple(sorted({*nvml.topo.gpu_indexes, *printed.gpu_indexes}))[:MAX_GPUS]
    sources = (nvml.topo, printed)
    ours, theirs = _cells(nvml.topo, nvml.topo.links), _cells(printed, printed.links)
    p2p = _cells(printed, printed.p2p)

    return replace(
        printed,
        gpu_indexes=indexes,
        links=tuple(
            tuple(_slower(ours.get((a, b)), theirs.get((a, b))) for b in indexes) for a in indexes
        ),
        nic_links=tuple(
            _row(printed.gpu_indexes, printed.nic_links, i) or (None,) * len(printed.nic_names)
            for i in indexes
        )
        if printed.nic_names
        else (),
        cpu_affinity=_either([(s.gpu_indexes, s.cpu_affinity) for s in sources], indexes),
        numa_affinity=_either([(s.gpu_indexes, s.numa_affinity) for s in sources], indexes),
        gpu_numa_id=tuple(_row(printed.gpu_indexes, printed.gpu_numa_id, i) for i in indexes),
        p2p=tuple(tuple(p2p.get((a, b)) for b in indexes) for a in indexes) if p2p else (),
    )


def _slower(ours: str | None, theirs: str | None) -> str | None:
    """NVML tells the links of each GPU, not how many a pair shares by way of switches: of two counts the printed one stands."""
    if ours is None or theirs is None:
        return ours or theirs
    if _is_same_kind(ours, theirs):
        return theirs
    return min(ours, theirs, key=link_rank)


def _is_same_kind(a: str, b: str) -> bool:
    return a == b or (a.startswith("NV") and b.startswith("NV"))


def _cells(source: TopoFacts, square: Square) -> dict[tuple[int, int], str | None]:
    """A matrix by the GPUs' indexes."""
    rows = zip(source.gpu_indexes, square, strict=False)
    return {(a, b): cell for a, row in rows for b, cell in zip(source.gpu_indexes, row, strict=True)}  # fmt: skip


def _row(indexes: Sequence[int], rows: Sequence[T], index: int) -> T | None:
    at = indexes.index(index) if index in indexes else len(rows)
    return rows[at] if at < len(rows) else None


def _either(
    sources: Sequence[tuple[Sequence[int], Sequence[str | None]]], wanted: Sequence[int]
) -> tuple[str | None, ...]:
    rows = [[_row(indexes, cells, i) for i in wanted] for indexes, cells in sources]
    return tuple(next((cell for cell in cells if cell is not None), None) for cells in zip(*rows, strict=True))  # fmt: skip


def p2p_of(found: HostFacts) -> dict[str, TopoFacts]:
    """Peer-to-peer matrices by capability, NVML's first."""
    printed = found.facts.get("nvidia_smi_p2p")
    matrices = {n: f for n, f in printed.items() if isinstance(f, TopoFacts)} if isinstance(printed, dict) else {}  # fmt: skip
    nvml = found.fact("nvml", NvmlFacts)
    return matrices | dict(nvml.p2p) if nvml else matrices


def differences(found: HostFacts) -> Iterator[str]:
    """What NVML and the tools tell differently, in words."""
    nvml = found.fact("nvml", NvmlFacts)
    if nvml is None or not nvml.query.gpus or nvml.is_cut:
        return
    ours = {gpu.uuid: gpu for gpu in nvml.query.gpus}
    smi = found.fact("nvidia_smi_csv", SmiFacts)
    if smi and smi.gpus:
        yield from _uuids(set(ours), {gpu.uuid for gpu in smi.gpus})
        versions = {nvml.query.driver_version, smi.gpus[0].driver_version} - {None}
        if len(versions) > 1:
            yield f"driver version: {nvml.query.driver_version}, {smi.gpus[0].driver_version}"
        for card in smi.gpus:
            if gpu := ours.get(card.uuid):
                yield from _cards(gpu, card)
    for query in queries_of(found)[1:]:
        for record in query.gpus:
            if gpu := ours.get(record.uuid):
                yield from _health(gpu, record)
    printed = {gpu.uuid: gpu for gpu in _printed_nvlinks(found)}
    for links in nvml.nvlink:
        if not links.rates_bytes_s:
            continue
        counts = [sum(rate is not None for rate in g.rates_bytes_s) for g in (links, printed.get(links.uuid)) if g]  # fmt: skip
        if len(set(counts)) > 1:
            yield f"active NVLinks of GPU{links.index}: {counts[0]}, {counts[1]}"
    yield from _matrices(nvml.topo, found.fact("nvidia_smi_topo", TopoFacts))


def _uuids(ours: set[str | None], theirs: set[str | None]) -> Iterator[str]:
    if ours != theirs:
        yield f"GPUs: {len(ours)}, {len(theirs)}; not in both: {', '.join(sorted(map(str, ours ^ theirs))[:4])}"


def _cards(gpu: QueryGpu, card: GpuFacts) -> Iterator[str]:
    sizes = gpu.memory_bytes, card.memory_bytes
    if sizes[0] and sizes[1] and sizes[0] // MIB != sizes[1] // MIB:
        yield f"memory of GPU{gpu.index}: {format_bytes(sizes[0])}, {format_bytes(sizes[1])}"
    if gpu.index != card.index:
        yield f"index of {gpu.uuid}: {gpu.index}, {card.index}"
    if gpu.pci_bus_id and card.pci_bus_id and bus_key(gpu.pci_bus_id) != bus_key(card.pci_bus_id):
        yield f"PCI address of GPU{gpu.index}: {gpu.pci_bus_id}, {card.pci_bus_id}"
    if gpu.is_mig is not None and gpu.is_mig != card.is_mig:
        yield f"MIG mode of GPU{gpu.index}: {'on' if gpu.is_mig else 'off'}, {'on' if card.is_mig else 'off'}"


def _health(gpu: QueryGpu, record: QueryGpu) -> Iterator[str]:
    for name in _LASTING:
        one, other = getattr(gpu.health, name), getattr(record.health, name)
        if one is not None and other is not None and one != other:
            yield f"{name} of GPU{gpu.index}: {one}, {other}"


def _matrices(ours: TopoFacts, printed: TopoFacts | None) -> Iterator[str]:
    if printed is None:
        return
    odd = []
    both = _cells(ours, ours.links), _cells(printed, printed.links)
    for a, b in combinations(ours.gpu_indexes, 2):
        cells = both[0].get((a, b)), both[1].get((a, b))
        if cells[0] and cells[1] and not _is_same_kind(cells[0], cells[1]):
            odd.append(f"GPU{a}–GPU{b} {cells[0]}, {cells[1]}")
    if odd:
        more = f" and {len(odd) - 4} more pairs" if len(odd) > 4 else ""
        yield f"links: {'; '.join(odd[:4])}{more}"

"""The GPUs of a host, from whichever tools told of them, and the links between them.

Not here: which GPUs there are (`identity`), NICs (`nics`), what a user must be told (`judge`).
Pure.
"""

import re
from dataclasses import replace

from dynctl.core.hardware import Gpu, GpuState
from dynctl.core.inventory import SimulatedGpus
from dynctl.core.machine import GpuHealth
from dynctl.core.text import clean
from dynctl.core.units import format_bytes, whole
from dynctl.discovery.bounds import MAX_GPUS
from dynctl.discovery.facts import AmdFacts, PciFacts, QueryFacts, QueryGpu, TopoFacts
from dynctl.discovery.identity import UNNAMED, identified
from dynctl.discovery.merge import health_of
from dynctl.discovery.pcitree import bus_key
from dynctl.discovery.sources import GpuSources
from dynctl.planner.peaks import find_spec

Links = tuple[tuple[str | None, ...], ...]


def gpus_of(
    sources: GpuSources, host_name: str, simulated: SimulatedGpus | None
) -> tuple[tuple[Gpu, ...], Links]:
    """Describe the GPUs and every pair's link; what nothing tells is unknown."""
    gpus = identified(sources)[:MAX_GPUS]
    if not gpus and simulated is not None:
        return _simulated(host_name, simulated)
    if not gpus and sources.amd is not None and sources.amd.links:
        return _amd(sources.amd), sources.amd.links
    if simulated is not None and gpus and all(_is_blank(gpu) for gpu in gpus):
        gpus = tuple(_declared(gpu, host_name, simulated) for gpu in gpus)
    gpus = tuple(_with_links(_with_query(_with_places(gpu, sources), sources), sources) for gpu in gpus)  # fmt: skip
    where = {index: i for i, index in enumerate(sources.topo.gpu_indexes)}
    links = tuple(
        tuple(
            "X" if a.index == b.index else _link(sources.topo, where.get(a.index), where.get(b.index))
            for b in gpus
        )
        for a in gpus
    )  # fmt: skip
    return gpus, links


def _link(topo: TopoFacts, a: int | None, b: int | None) -> str | None:
    return None if a is None or b is None else topo.links[a][b]


def _is_blank(gpu: Gpu) -> bool:
    return gpu.name == UNNAMED and gpu.memory_bytes == 0 and gpu.uuid == f"unknown-{gpu.index}"


def _declared(gpu: Gpu, host_name: str, wish: SimulatedGpus) -> Gpu:
    """A matrix alone tells no product and no memory; the inventory may."""
    return replace(
        gpu,
        uuid=f"SIM-{host_name}-{gpu.index}",
        name=wish.name,
        memory_bytes=wish.memory_bytes,
        memory_used_bytes=0,
        state=GpuState.FREE,
        is_simulated=True,
    )


def _with_places(gpu: Gpu, sources: GpuSources) -> Gpu:
    """NUMA node, CPUs and MIG slices."""
    topo = sources.topo
    at = topo.gpu_indexes.index(gpu.index) if gpu.index in topo.gpu_indexes else -1
    numa = topo.numa_affinity[at] if at >= 0 and topo.numa_affinity else None
    cpus = topo.cpu_affinity[at] if at >= 0 and topo.cpu_affinity else None
    listed = next((g for g in sources.listed if g.uuid == gpu.uuid), None)
    return replace(
        gpu,
        numa_node=_numa(gpu, numa, topo, sources.pci),
        numa_affinity=clean(numa, 200) if numa else None,
        cpu_affinity=clean(cpus, 1000) if cpus else None,
        mig_slices=tuple(clean(profile, 40) for profile in listed.slices) if listed else (),
    )


def _numa(gpu: Gpu, text: str | None, topo: TopoFacts, pci: PciFacts) -> int | None:
    """What the driver says, else what the bus says.

    A list of nodes counts by its first only where each GPU has another one, or memory of GPUs forms the others.
    """
    if text is not None and (node := whole(text)) is not None:
        return node
    bus = {bus_key(address): node for address, node in pci.nodes}
    bus |= {bus_key(card.bus_id): card.numa_node for card in pci.gpus}
    if gpu.pci_bus_id is not None and (node := bus.get(bus_key(gpu.pci_bus_id))) is not None:
        return node
    lists = set(topo.numa_affinity)
    is_apart = len(lists) == len(topo.numa_affinity) or None not in topo.gpu_numa_id
    if text is not None and None not in lists and len(lists) > 1 and is_apart:
        first = re.match(r"\d{1,4}", text)
        return int(first[0]) if first else None
    return None


def _with_query(gpu: Gpu, sources: GpuSources) -> Gpu:
    """Health, by UUID or bus address; and the MIG devices where their profiles are not listed."""
    records = [r for query in sources.queries if (r := _record_of(gpu, query))]
    if not records:
        return gpu
    health = health_of(records)
    clique = health.fabric_clique
    health = replace(
        health,
        bad_readings=tuple(clean(reading, 40) for reading in health.bad_readings),
        fabric_clique=clean(clique, 80) if clique else None,
    )
    profiles = next((r.mig_profiles for r in records if r.mig_profiles), ())
    sizes = next((r.mig_memory_bytes for r in records if r.mig_memory_bytes), ())
    slices = tuple(clean(p, 40) for p in profiles) or tuple(format_bytes(size) for size in sizes)
    return replace(gpu, health=health, mig_slices=gpu.mig_slices or slices)


def _record_of(gpu: Gpu, query: QueryFacts) -> QueryGpu | None:
    for record in query.gpus:
        same_bus = (
            record.pci_bus_id is not None
            and gpu.pci_bus_id is not None
            and bus_key(record.pci_bus_id) == bus_key(gpu.pci_bus_id)
        )
        if record.uuid == gpu.uuid or same_bus:
            return record
    return None


def _with_links(gpu: Gpu, sources: GpuSources) -> Gpu:
    """The rates of its NVLinks; where all are inactive none is known to be there."""
    for found in sources.nvlink:
        if found.uuid == gpu.uuid or found.index == gpu.index:
            return replace(gpu, nvlink_rates_bytes_s=found.rates_bytes_s)
    return gpu


def _simulated(host_name: str, wish: SimulatedGpus) -> tuple[tuple[Gpu, ...], Links]:
    """Declared GPUs, joined the way boards of that product are."""
    spec = find_spec(wish.name)
    label = f"NV{spec.num_nvlinks}" if spec and spec.num_nvlinks else "SYS"
    count = range(wish.count)
    gpus = tuple(
        Gpu(
            index=i,
            uuid=f"SIM-{host_name}-{i}",
            name=wish.name,
            memory_bytes=wish.memory_bytes,
            memory_used_bytes=0,
            is_simulated=True,
        )
        for i in count
    )
    return gpus, tuple(tuple("X" if a == b else label for b in count) for a in count)


def _amd(facts: AmdFacts) -> tuple[Gpu, ...]:
    return tuple(
        Gpu(
            index=i,
            uuid=f"amd-{i}",
            name=clean(name or "AMD GPU", 80),
            memory_bytes=0,
            numa_node=facts.numa_nodes[i],
            state=GpuState.UNKNOWN,
            health=GpuHealth(),
        )
        for i, name in enumerate(facts.names)
    )

"""The GPUs of a host, from whichever tools told of them, and the links between them.

Not here: NICs (`nics`), what a user must be told (`judge`).
Pure.
"""

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from dynctl.core.hardware import Gpu, GpuProcess, GpuState
from dynctl.core.inventory import SimulatedGpus
from dynctl.core.machine import GpuHealth
from dynctl.core.text import clean
from dynctl.core.units import GIB, format_bytes
from dynctl.discovery.bounds import MAX_GPUS, MAX_ITEMS
from dynctl.discovery.facts import (
    AmdFacts,
    GpuFacts,
    GpuProcessFacts,
    HostFacts,
    ListedGpu,
    NvlinkGpu,
    NvmlFacts,
    PciFacts,
    QueryFacts,
    QueryGpu,
    SmiFacts,
    SystemFacts,
    TopoFacts,
)
from dynctl.discovery.merge import QUERIES, health_of, nvlinks_of, queries_of, topo_of
from dynctl.discovery.pcitree import bus_key
from dynctl.planner.peaks import find_spec

Links = tuple[tuple[str | None, ...], ...]
UNNAMED = "NVIDIA GPU"


@dataclass(frozen=True, slots=True)
class GpuSources:
    """Everything of one host that tells of GPUs."""

    nvml: NvmlFacts | None
    smi: SmiFacts | None
    query: QueryFacts | None
    """The longest of what `nvidia-smi -q` printed."""
    queries: tuple[QueryFacts, ...]
    """Records of every source, the best first."""
    listed: tuple[ListedGpu, ...]
    nvlink: tuple[NvlinkGpu, ...]
    topo: TopoFacts
    peers: frozenset[int]
    """Indexes of GPUs that a peer-to-peer matrix names."""
    amd: AmdFacts | None
    pci: PciFacts
    system: SystemFacts
    own_pids: frozenset[int]
    is_smi_broken: bool
    """nvidia-smi was asked and could not answer."""
    is_capture: bool = False

    @classmethod
    def of(cls, found: HostFacts, own_pids: frozenset[int]) -> "GpuSources":
        """Take them out of a host's facts."""
        queries = [q for name in QUERIES if isinstance(q := found.facts.get(name), QueryFacts)]
        listed = found.facts.get("nvidia_smi_list")
        return cls(
            nvml=found.fact("nvml", NvmlFacts),
            smi=_bounded(found.fact("nvidia_smi_csv", SmiFacts)),
            query=max((q for q in queries if q.gpus), key=lambda q: len(q.gpus), default=None),
            queries=queries_of(found),
            listed=tuple(g for g in listed if isinstance(g, ListedGpu)) if isinstance(listed, tuple) else (),
            nvlink=nvlinks_of(found),
            topo=topo_of(found),
            peers=_peers(found),
            amd=found.fact("rocm_smi", AmdFacts),
            pci=found.fact("pci", PciFacts) or PciFacts(),
            system=found.fact("system", SystemFacts) or SystemFacts(),
            own_pids=own_pids,
            is_smi_broken="nvidia_smi_csv" in found.failures,
            is_capture=found.is_capture,
        )  # fmt: skip


def _bounded(smi: SmiFacts | None) -> SmiFacts | None:
    if smi is None:
        return None
    return replace(smi, gpus=smi.gpus[:MAX_GPUS], processes=smi.processes[:MAX_ITEMS])


def _peers(found: HostFacts) -> frozenset[int]:
    matrices = found.facts.get("nvidia_smi_p2p")
    facts = matrices.values() if isinstance(matrices, dict) else ()
    return frozenset(i for one in facts if isinstance(one, TopoFacts) for i in one.gpu_indexes)


def gpus_of(
    sources: GpuSources, host_name: str, simulated: SimulatedGpus | None
) -> tuple[tuple[Gpu, ...], Links]:
    """Describe the GPUs and every pair's link; what nothing tells is unknown."""
    gpus = _identified(sources)[:MAX_GPUS]
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


def _identified(sources: GpuSources) -> tuple[Gpu, ...]:
    """Which GPUs there are, by the best source that names any."""
    nvml, smi = sources.nvml, sources.smi
    if nvml is not None and (nvml.query.gpus or nvml.broken):
        return _by_nvml(nvml, sources)
    if smi is not None and (smi.gpus or smi.broken):
        return _and_others(_by_csv(smi, sources), sources)
    if sources.query is not None:
        gpus = tuple(_by_query(gpu, sources) for gpu in sources.query.gpus)
        return _and_others(gpus, sources)
    cards = [card for card in sources.pci.gpus if card.vendor == "nvidia"]
    if sources.is_smi_broken and cards:
        return tuple(
            _unknown(i, f"unknown-{card.bus_id}", bus_id=card.bus_id)
            for i, card in enumerate(sorted(cards, key=lambda card: card.bus_id))
        )
    named = {g.index: (g.uuid, g.name) for g in sources.nvlink}
    named |= {g.index: (g.uuid, g.name) for g in sources.listed}
    for index in (*sources.topo.gpu_indexes, *sorted(sources.peers)):
        named.setdefault(index, (f"unknown-{index}", UNNAMED))
    if not sources.listed and not sources.nvlink and sources.is_smi_broken:
        return ()
    slices = {g.index: g.slices for g in sources.listed}
    return tuple(
        replace(
            _unknown(index, uuid, name),
            state=GpuState.MIG if slices.get(index) else GpuState.UNKNOWN,
        )
        for index, (uuid, name) in sorted(named.items())
    )


def _and_others(gpus: tuple[Gpu, ...], sources: GpuSources) -> tuple[Gpu, ...]:
    """Captures may be of some GPUs only: those that another tool names are there as well."""
    if not sources.is_capture:
        return gpus
    named = {g.index: (g.uuid, g.name) for g in sources.nvlink}
    named |= {g.index: (g.uuid, g.name) for g in sources.listed}
    for index in (*sources.topo.gpu_indexes, *sources.peers):
        named.setdefault(index, (f"unknown-{index}", UNNAMED))
    seen = {gpu.index for gpu in gpus}
    others = [_unknown(i, uuid, name) for i, (uuid, name) in named.items() if i not in seen]
    return tuple(sorted((*gpus, *others), key=lambda gpu: gpu.index))


def _unknown(index: int, uuid: str, name: str = UNNAMED, bus_id: str | None = None) -> Gpu:
    """A GPU that is there, but of unknown state; never taken for none."""
    return Gpu(index, uuid, clean(name, 80), 0, pci_bus_id=bus_id, state=GpuState.UNKNOWN)


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


def _by_csv(smi: SmiFacts, sources: GpuSources) -> tuple[Gpu, ...]:
    broken = dict(smi.broken)
    slices = {g.uuid: len(g.slices) for g in sources.listed}
    gpus = []
    for card in smi.gpus:
        rows = [p for p in smi.processes if p.gpu_uuid == card.uuid]
        processes = tuple(process_of(row, sources.own_pids) for row in rows)
        memory = card.memory_bytes
        state = _state(card, processes, broken, slices)
        if state is GpuState.FREE and not card.is_use_known and not smi.processes:
            state = GpuState.UNKNOWN
        gpus.append(
            Gpu(
                index=card.index,
                uuid=card.uuid,
                name=clean(card.name, 80),
                memory_bytes=sources.system.memory_bytes if memory is None else memory,
                memory_used_bytes=card.memory_used_bytes,
                pci_bus_id=card.pci_bus_id,
                state=state,
                processes=processes,
            )
        )
    return _with_broken(gpus, smi.broken)


def _by_nvml(nvml: NvmlFacts, sources: GpuSources) -> tuple[Gpu, ...]:
    """As NVML tells; where it stopped or has no memory to tell (unified memory), as nvidia-smi does.

    A GPU is free only when nothing that was asked says otherwise.
    """
    printed = _by_csv(sources.smi, sources) if sources.smi else ()
    by_uuid = {gpu.uuid: gpu for gpu in printed}
    by_uuid |= {f"index-{gpu.index}": gpu for gpu in printed if gpu.uuid == f"unknown-{gpu.index}"}
    gpus = []
    for record in nvml.query.gpus:
        other = by_uuid.get(record.uuid or "") or by_uuid.get(f"index-{record.index}")
        rows = record.processes
        if not rows and sources.smi:
            rows = tuple(p for p in sources.smi.processes if p.gpu_uuid == record.uuid)
        gpu = _by_query(replace(record, processes=rows), sources)
        gpu = gpu if record.memory_bytes or other is None else other
        if gpu.state is GpuState.FREE and other is not None:
            gpu = replace(gpu, state=other.state)
        elif gpu.state is GpuState.FREE and sources.is_smi_broken:
            gpu = replace(gpu, state=GpuState.UNKNOWN)
        gpus.append(gpu)
    seen = {gpu.index for gpu in gpus} | {index for index, _ in nvml.broken}
    uuids = {gpu.uuid for gpu in gpus}
    gpus += [gpu for gpu in printed if gpu.index not in seen and gpu.uuid not in uuids]
    return _with_broken(gpus, nvml.broken)


def _with_broken(gpus: list[Gpu], broken: Sequence[tuple[int, str]]) -> tuple[Gpu, ...]:
    """Those that are counted but do not answer are there as well."""
    seen = {gpu.index for gpu in gpus}
    for index, text in broken:
        if index >= 0 and index not in seen:
            is_lost = "lost" in text.lower() or "handle" in text
            gpu = _unknown(index, f"unknown-{index}")
            gpus.append(replace(gpu, state=GpuState.LOST if is_lost else GpuState.UNKNOWN))
    return tuple(sorted(gpus, key=lambda gpu: gpu.index))


def _by_query(gpu: QueryGpu, sources: GpuSources) -> Gpu:
    card = GpuFacts(
        gpu.index,
        gpu.uuid or f"unknown-{gpu.index}",
        gpu.name or UNNAMED,
        gpu.pci_bus_id,
        gpu.memory_bytes,
        gpu.memory_used_bytes,
        bool(gpu.is_mig),
    )
    processes = tuple(process_of(row, sources.own_pids) for row in gpu.processes)
    state = _state(card, processes, {}, {})
    if gpu.memory_used_bytes is None and state is GpuState.FREE:
        state = GpuState.UNKNOWN
    return Gpu(
        card.index,
        card.uuid,
        clean(card.name, 80),
        card.memory_bytes or 0,
        card.memory_used_bytes,
        card.pci_bus_id,
        state=state,
        processes=processes,
    )


def process_of(process: GpuProcessFacts, own_pids: frozenset[int]) -> GpuProcess:
    """A process on a GPU, and whether it is ours."""
    return GpuProcess(
        pid=process.pid,
        name=clean(process.name or "hidden", 80),
        user=process.user,
        memory_bytes=process.memory_bytes,
        is_ours=process.is_tagged or process.pid in own_pids,
    )


def _state(
    card: GpuFacts,
    processes: Sequence[GpuProcess],
    broken: Mapping[int, str],
    slices: Mapping[str, int],
) -> GpuState:
    """Lost, cut into slices, held by strangers, or free; memory nobody admits to holding counts as a stranger's."""
    if card.index in broken:
        return GpuState.LOST if "lost" in broken[card.index].lower() else GpuState.UNKNOWN
    if card.is_mig or slices.get(card.uuid):
        return GpuState.MIG
    if any(not process.is_ours for process in processes):
        return GpuState.BUSY
    if not processes and card.memory_used_bytes is not None and card.memory_bytes:
        allowed = max(GIB, card.memory_bytes // 40)
        if card.memory_used_bytes > allowed:
            return GpuState.BUSY
    return GpuState.FREE


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
        mig_slices=tuple(clean(s.profile, 40) for s in listed.slices) if listed else (),
    )


def _numa(gpu: Gpu, text: str | None, topo: TopoFacts, pci: PciFacts) -> int | None:
    """What the driver says, else what the bus says; a list of nodes counts by its first only where lists differ."""
    if text is not None and text.isdecimal():
        return int(text)
    bus = {bus_key(address): node for address, node in pci.nodes}
    bus |= {bus_key(card.bus_id): card.numa_node for card in pci.gpus}
    if gpu.pci_bus_id is not None and (node := bus.get(bus_key(gpu.pci_bus_id))) is not None:
        return node
    if text is not None and len(set(topo.numa_affinity)) == len(topo.numa_affinity) > 1:
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

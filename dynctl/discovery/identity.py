"""Which GPUs a host has, and in what state: by the best source that names any.

Not here: places, links and health of those that were found (`gpus`).
Pure.
"""

from collections.abc import Mapping, Sequence
from dataclasses import replace

from dynctl.core.hardware import Gpu, GpuProcess, GpuState
from dynctl.core.text import clean
from dynctl.core.units import GIB
from dynctl.discovery.facts import (
    GpuFacts,
    GpuProcessFacts,
    NvmlFacts,
    QueryGpu,
    SmiFacts,
)
from dynctl.discovery.sources import GpuSources

UNNAMED = "NVIDIA GPU"


def identified(sources: GpuSources) -> tuple[Gpu, ...]:
    """Which GPUs there are, by the best source that names any."""
    nvml, smi = sources.nvml, sources.smi
    if nvml is not None and (nvml.query.gpus or nvml.broken):
        return _by_nvml(nvml, sources)
    if smi is not None and (smi.gpus or smi.broken):
        return _and_others(_by_csv(smi, sources), sources)
    if sources.query is not None:
        gpus = tuple(_by_query(gpu, sources) for gpu in sources.query.gpus)
        return _and_others(gpus, sources)
    if sources.is_smi_broken and (on_bus := _on_bus(sources)):
        return on_bus
    if not sources.listed and not sources.nvlink and sources.is_smi_broken:
        return ()
    slices = {g.index: g.slices for g in sources.listed}
    return tuple(
        replace(
            _unknown(index, uuid, name),
            state=GpuState.MIG if slices.get(index) else GpuState.UNKNOWN,
        )
        for index, (uuid, name) in sorted(_named(sources).items())
    )


def _named(sources: GpuSources) -> dict[int, tuple[str, str]]:
    """UUID and name of every GPU that a list, its links or a matrix names, by its index."""
    named = {g.index: (g.uuid, g.name) for g in sources.nvlink}
    named |= {g.index: (g.uuid, g.name) for g in sources.listed}
    for index in (*sources.topo.gpu_indexes, *sources.peers):
        named.setdefault(index, (f"unknown-{index}", UNNAMED))
    return named


def _on_bus(sources: GpuSources) -> tuple[Gpu, ...]:
    """Cards on the bus, in the order the driver counts them in; of their state nothing is known."""
    cards = sorted(card.bus_id for card in sources.pci.gpus if card.vendor == "nvidia")
    return tuple(_unknown(i, f"unknown-{bus}", bus_id=bus) for i, bus in enumerate(cards))


def _and_others(gpus: tuple[Gpu, ...], sources: GpuSources) -> tuple[Gpu, ...]:
    """Captures may be of some GPUs only: those that another tool names are there as well."""
    if not sources.is_capture:
        return gpus
    seen = {gpu.index for gpu in gpus}
    others = [
        _unknown(i, uuid, name) for i, (uuid, name) in _named(sources).items() if i not in seen
    ]
    return tuple(sorted((*gpus, *others), key=lambda gpu: gpu.index))


def _unknown(index: int, uuid: str, name: str = UNNAMED, bus_id: str | None = None) -> Gpu:
    """A GPU that is there, but of unknown state; never taken for none."""
    return Gpu(index, uuid, clean(name, 80), 0, pci_bus_id=bus_id, state=GpuState.UNKNOWN)


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
    if nvml.is_cut:
        seen |= {gpu.index for gpu in gpus}
        gpus += [gpu for gpu in _on_bus(sources) if gpu.index not in seen]
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

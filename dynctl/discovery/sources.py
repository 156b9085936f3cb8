"""Everything of one host that tells of its GPUs, gathered. Pure."""

from dataclasses import dataclass, replace

from dynctl.discovery.bounds import MAX_GPUS, MAX_ITEMS
from dynctl.discovery.facts import (
    AmdFacts,
    HostFacts,
    ListedGpu,
    NvlinkGpu,
    NvmlFacts,
    PciFacts,
    QueryFacts,
    SmiFacts,
    SystemFacts,
    TopoFacts,
)
from dynctl.discovery.merge import QUERIES, nvlinks_of, queries_of, topo_of


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

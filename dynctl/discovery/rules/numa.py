"""NUMA nodes and CPU sets. Pure."""

import re
from collections import Counter

from dynctl.discovery.affinity import EMPTY
from dynctl.discovery.rules.case import Case, Found, Rule, gpus_in_words


def affinity(case: Case) -> Found:
    """Nodes that are unknown, shared by all, or split unevenly."""
    topo, host = case.topo, case.host
    if len(topo.gpu_indexes) > 1 and topo.numa_affinity and len(set(topo.numa_affinity)) == 1:
        if topo.numa_affinity[0] is None:
            if all(gpu.numa_node is None for gpu in host.gpus):
                by_cpus = " (CPU affinity tells them apart)" if any(topo.cpu_affinity) else ""
                yield "numa-unknown", f"the NUMA node of the GPUs is unknown{by_cpus}"
        elif not topo.numa_affinity[0].isdecimal():
            yield (
                "numa-shared",
                f"NUMA affinity is {topo.numa_affinity[0]} for every GPU (restricted CPU set or virtual machine): not used for pinning",
            )
    nodes = [gpu.numa_node for gpu in host.gpus if gpu.numa_node is not None]
    sizes = sorted(Counter(nodes).values())
    if len(sizes) > 1 and sizes[0] != sizes[-1]:
        yield (
            "numa-uneven",
            f"GPUs are split {' + '.join(map(str, sizes))} over NUMA nodes: some groups must cross the socket link",
        )


def cpu_sets(case: Case) -> Found:
    """CPU lists that say more of the job than of the machine."""
    topo = case.topo
    cpus = dict(zip(topo.gpu_indexes, topo.cpu_affinity, strict=False))
    empty = [index for index, cell in cpus.items() if cell == EMPTY]
    if empty and len(empty) < len(cpus):
        yield (
            "cpu-affinity-empty",
            f"{gpus_in_words(empty)}: CPU affinity is empty: the CPU set has no core on their NUMA node; not used for pinning",
        )
    cells = {cell for cell in cpus.values() if cell}
    if len(cpus) > 1 and len(cells) == 1 and _num_cpus(next(iter(cells))) <= 2:
        yield (
            "cpuset-restricted",
            f"every GPU has CPU affinity {next(iter(cells))}: seen from a restricted CPU set, distances of NICs may be wrong too",
        )


def _num_cpus(text: str) -> int:
    total = 0
    for part in text.split(","):
        match = re.fullmatch(r"(\d{1,5})(?:-(\d{1,5}))?", part)
        if match is None:
            return 1 << 16
        total += int(match[2] or match[1]) - int(match[1]) + 1
    return total


def memory_nodes(case: Case) -> Found:
    """Nodes without CPUs."""
    own = sorted({node for node in case.topo.gpu_numa_id if node is not None})
    if own:
        yield (
            "gpu-memory-node",
            f"GPU memory forms NUMA nodes of its own ({', '.join(map(str, own))}): pin processes to nodes that have CPUs",
        )
    bare = [node.index for node in case.host.numa_nodes if not node.cpus]
    if bare and len(bare) < len(case.host.numa_nodes):
        shown = ", ".join(map(str, bare[:16])) + (" …" if len(bare) > 16 else "")
        yield (
            "numa-memory-only",
            f"NUMA nodes {shown} have memory and no CPUs: no process is pinned to them",
        )


RULES: tuple[Rule, ...] = (affinity, cpu_sets, memory_nodes)

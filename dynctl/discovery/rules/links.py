"""Links between the GPUs of a host. Pure."""

from itertools import combinations

from dynctl.core.hardware import Host
from dynctl.discovery.facts import PciFacts
from dynctl.discovery.linkage import as_nvlink
from dynctl.discovery.pcitree import PciTree
from dynctl.discovery.rules.case import Case, Found, Rule, gpus_in_words
from dynctl.planner.grouping import num_nvlinks

_SOCKETS = {"SYS", "SOC"}


def damage(case: Case) -> Found:
    """What was damaged in the matrix."""
    for note in case.topo.notes[:5]:
        yield "topology-damaged", f"topo -m: {note}"


def nvlink(case: Case) -> Found:
    """How far NVLink reaches."""
    host, count = case.host, len(case.host.gpus)
    if count < 2:
        return
    links = as_nvlink(host.gpu_links)
    pairs = [links[a][b] for a, b in combinations(range(count), 2)]
    unknown = sum(1 for label in pairs if label is None)
    if unknown and case.topo.gpu_indexes:
        yield (
            "links-unknown",
            f"the link of {unknown} of {len(pairs)} GPU pairs is unknown: taken as the slowest when planning",
        )
    elif unknown and not case.found.is_capture and not any(gpu.is_simulated for gpu in host.gpus):
        yield "links-unknown", "how the GPUs are linked is unknown: taken as the slowest"
    joined = [label for label in pairs if num_nvlinks(label)]
    if unknown == len(pairs):
        return
    if not joined:
        path = "across the socket link" if _SOCKETS & set(pairs) else "over PCIe"
        if _SOCKETS & set(pairs) and len(set(pairs)) > 1:
            path = "over PCIe, for some pairs across the socket link"
        yield "no-nvlink", f"no NVLink between GPUs: tensor parallelism runs {path}"
    elif any(label is not None and not num_nvlinks(label) for label in pairs):
        yield from _partial(host, pairs)
    if len({num_nvlinks(label) for label in joined}) > 1:
        most = max(num_nvlinks(label) for label in joined)
        best = [
            f"{{{host.gpus[a].index},{host.gpus[b].index}}}"
            for a, b in combinations(range(count), 2)
            if num_nvlinks(links[a][b]) == most
        ]
        yield (
            "nvlink-mixed",
            f"pairs differ in NVLinks; NV{most} joins {' '.join(best[:16])}: use these for tp=2, assume no fixed numbering",
        )


def _partial(host: Host, pairs: list[str | None]) -> Found:
    islands = " and ".join("{" + ",".join(map(str, i)) + "}" for i in host.nvlink_islands)
    inside = {index for island in host.nvlink_islands for index in island}
    links = as_nvlink(host.gpu_links)
    alone = [
        gpu.index
        for a, gpu in enumerate(host.gpus)
        if gpu.index not in inside and not any(num_nvlinks(cell) for cell in links[a])
    ]
    slow = "the socket link (SYS)" if _SOCKETS & set(pairs) else "PCIe"
    text = f"NVLink joins {islands}, not all: tp={len(host.gpus)} crosses {slow}"
    if alone:
        text += f"; {gpus_in_words(alone)} without NVLink to the others: leave out of larger groups"
    yield "nvlink-partial", text


def flat(case: Case) -> Found:
    """Matrices in which the class of a link tells nothing."""
    host, count = case.host, len(case.host.gpus)
    pairs = {host.gpu_links[a][b] for a, b in combinations(range(count), 2)}
    if count > 2 and pairs == {"PHB"}:
        yield (
            "topology-flat",
            "every pair is PHB: one host bridge, or the flat bus of a virtual machine, which hides what is near what",
        )
    elif count > 2 and len(pairs) == 1 and pairs <= _SOCKETS:
        yield (
            "topology-flat",
            "every pair is SYS: the link class gives no groups, NUMA nodes decide",
        )


def peers(case: Case) -> Found:
    """Pairs between which the driver refuses direct copies, and NVLinks that are down."""
    for name, square in case.host.p2p:
        if name in {"nvlink", "atomics"}:
            continue
        refused = sorted(
            {cell for row in square for cell in row if cell and cell not in {"OK", "X"}}
        )
        if refused:
            yield (
                "p2p-off",
                f"peer-to-peer is not supported between some GPUs ({', '.join(refused)}): copies go through host memory",
            )
            return


def inactive(case: Case) -> Found:
    """NVLinks that are down although others of the same GPU, or of its neighbours, are up."""
    totals = [len(g.nvlink_rates_bytes_s) for g in case.host.gpus if g.nvlink_rates_bytes_s]
    for gpu in case.host.gpus:
        rates = gpu.nvlink_rates_bytes_s
        if rates and gpu.dead_nvlinks:
            yield (
                "nvlink-inactive",
                f"GPU{gpu.index}: NVLink {', '.join(map(str, gpu.dead_nvlinks))} of {len(rates)} inactive",
            )
        elif rates is not None and not rates and totals and max(totals) >= 12:
            # Bridged cards may stay alone; on a board with NVSwitch every GPU has its links.
            yield (
                "nvlink-inactive",
                f"GPU{gpu.index}: no NVLink is active, others have {max(totals)}",
            )


def redirected(case: Case) -> Found:
    """Bridges above GPUs or RDMA devices that send requests between them up to the root."""
    devices = [gpu.pci_bus_id for gpu in case.host.gpus]
    devices += [nic.pci_bus_id for nic in case.host.nics if nic.kind != "ethernet"]
    tree = PciTree(case.found.fact("pci", PciFacts) or PciFacts())
    above = {bridge for address in devices if address for bridge in tree.above(address)}
    if (
        case.host.gpus
        and len(devices) > 1
        and (odd := sorted(above & set(case.host.acs_bridges or ())))
    ):
        more = f" and {len(odd) - 4} more" if len(odd) > 4 else ""
        yield (
            "acs-on",
            f"PCI bridges {', '.join(odd[:4])}{more} redirect requests between devices (ACS): copies between GPUs and to NICs crawl or hang",
        )


def imex(case: Case) -> Found:
    """NVLink between hosts needs a daemon beside it."""
    host = case.host
    cliques = sorted({gpu.health.fabric_clique for gpu in host.gpus if gpu.health.fabric_clique})
    state = host.fabric.imex_domain_state
    if cliques and state != "UP":
        found = (
            f"its domain is {state}"
            if state
            else f"nvidia-imex is {host.fabric.imex_state or 'not there'}"
        )
        yield (
            "imex-down",
            f"NVLink reaches other hosts (clique {', '.join(cliques)}), but {found}: their GPU memory cannot be mapped",
        )
    away = [node for node in host.fabric.imex_nodes if node.state != "READY"]
    if away:
        named = ", ".join(f"{node.address} {node.state}" for node in away[:8])
        yield (
            "imex-node-away",
            f"{len(away)} of {len(host.fabric.imex_nodes)} hosts of the IMEX domain are not ready: {named}",
        )


RULES: tuple[Rule, ...] = (damage, nvlink, flat, peers, inactive, redirected, imex)

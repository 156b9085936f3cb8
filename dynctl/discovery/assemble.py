"""Facts of all hosts and what the inventory says of them, put together into a Topology.

Not here: GPUs (`gpus`), the network (`nics`), what a user must be told about it (`judge`).
Pure.
"""

import ipaddress
import re
from collections.abc import Mapping, Sequence
from dataclasses import replace

from dynctl.core.hardware import Gpu, Host, HostFailure, Topology
from dynctl.core.inventory import HostEntry
from dynctl.core.machine import Clock, EngineSoftware, Software
from dynctl.core.text import clean
from dynctl.discovery import facts as known
from dynctl.discovery.bounds import MAX_ITEMS, cleaned
from dynctl.discovery.facts import (
    HostFacts,
    PythonFacts,
    QueryFacts,
    SmiFacts,
    SystemFacts,
    TopoFacts,
)
from dynctl.discovery.gpus import gpus_of
from dynctl.discovery.identity import process_of
from dynctl.discovery.judge import judge_host, judge_topology
from dynctl.discovery.linkage import Square, as_nvlink
from dynctl.discovery.merge import QUERIES, p2p_of
from dynctl.discovery.nics import gpu_nic_links, nearest_nics, nics_of
from dynctl.discovery.sources import GpuSources
from dynctl.planner.grouping import nvlink_islands

MIN_PYTHON = (3, 11)


def assemble(
    entries: Sequence[HostEntry],
    facts: Mapping[str, HostFacts],
    failures: Sequence[HostFailure],
    own_pids: Mapping[str, frozenset[int]],
) -> Topology:
    """Put hosts together, in the inventory's order."""
    reached = [entry for entry in entries if entry.name in facts]
    is_alone = all(entry.is_local for entry in entries)
    hosts = tuple(
        assemble_host(entry, facts[entry.name], own_pids.get(entry.name, frozenset()), is_alone)
        for entry in reached
    )
    return Topology(hosts, tuple(failures), judge_topology(hosts))


def assemble_host(
    entry: HostEntry, found: HostFacts, own_pids: frozenset[int], is_alone: bool
) -> Host:
    """Describe one host; what a failed probe would have told stays unknown and is a warning."""
    sources = GpuSources.of(found, own_pids)
    system, topo = sources.system, sources.topo
    gpus, links = gpus_of(sources, entry.name, entry.simulated_gpus)
    nics = nics_of(found, system, topo)[:MAX_ITEMS]
    nic_names, nic_links = gpu_nic_links(gpus, nics, topo, sources.pci)
    python = choose_python(system.pythons, entry.python)
    host = Host(
        name=entry.name,
        address=entry.address,
        data_address=entry.data_address or _data_address(entry, system, is_alone),
        is_local=entry.is_local,
        gpus=gpus,
        gpu_links=links,
        nvlink_islands=tuple(
            tuple(gpus[i].index for i in island) for island in nvlink_islands(as_nvlink(links))
        ),
        gpu_nics=nearest_nics(gpus, nics, nic_names, nic_links, may_lack_some=topo.may_lack_nics),
        nics=nics,
        num_cpus=system.num_cpus,
        cpu_slots=entry.cpu_slots,
        memory_bytes=system.memory_bytes,
        disk_free_bytes=system.disk_free_bytes,
        boot_id=clean(system.boot_id, 64),
        machine_id=clean(system.machine_id, 64),
        python=python.path if python else None,
        python_version=python.version if python else None,
        platform=_platform(system),
        has_systemd_system=system.has_systemd,
        has_systemd_user=system.has_systemd_user,
        has_linger=system.has_linger,
        is_root=system.uid == 0,
        labels=entry.labels,
        extra=_extra(found, system),
        are_gpus_known=bool(gpus) or _says_none(found, sources),
        nic_names=nic_names,
        gpu_nic_links=nic_links,
        p2p=_p2p(found, gpus, topo),
    )
    return judge_host(cleaned(_with_machine(host, found, sources)), found, topo, entry)


def _says_none(found: HostFacts, sources: GpuSources) -> bool:
    """Whether no GPUs in the facts means that there are none: captures may be of other things."""
    is_absent = sources.smi is not None and not sources.smi.is_installed
    is_refused = found.kinds.get("nvidia_smi_csv") in {"gpu_lost", "no_usable_gpu"}
    return not found.is_capture or is_absent or is_refused


def _with_machine(host: Host, found: HostFacts, sources: GpuSources) -> Host:
    """What lies beside GPUs and NICs."""
    system = sources.system
    session = found.fact("session", known.SessionFacts) or known.SessionFacts()
    network = found.fact("network", known.NetworkFacts) or known.NetworkFacts()
    numa = found.fact("numa", known.NumaFacts)
    fabric = found.fact("fabric", known.FabricFacts)
    held = fabric.fabric if fabric else host.fabric
    imex = found.fact("imex", known.ImexFacts) or known.ImexFacts()
    acs = found.fact("acs", known.AcsFacts)
    smi = sources.smi
    return replace(
        host,
        numa_nodes=numa.nodes if numa else (),
        num_cpus_nominal=system.num_cpus_nominal if system.host_name else None,
        memory_nominal_bytes=system.memory_nominal_bytes or None,
        shm_bytes=session.shm_bytes,
        shm_free_bytes=session.shm_free_bytes,
        session_limits=session.limits,
        unit_limits=session.unit_limits,
        agent_limits=session.agent_limits,
        sshd=session.sshd,
        routes=network.routes,
        listening_ports=network.listening_ports,
        fabric=replace(
            held,
            num_switches=max(held.num_switches, sources.pci.num_switches),
            imex_domain_state=imex.domain_state,
            imex_nodes=tuple(
                replace(node, address=clean(node.address, 64), state=clean(node.state, 40))
                for node in imex.nodes
            ),
        ),
        acs_bridges=acs.redirecting if acs else None,
        software=_software(found, sources),
        clock=found.fact("clock", Clock),
        unplaced_processes=tuple(
            process_of(process, sources.own_pids)
            for process in (smi.processes if smi else ())
            if not process.gpu_uuid
        ),
    )


def _software(found: HostFacts, sources: GpuSources) -> Software:
    facts = found.fact("software", known.SoftwareFacts)
    software = facts.software if facts else Software()
    queries = [nvml.query] if (nvml := sources.nvml) else []
    queries += [q for name in QUERIES if (q := found.fact(name, QueryFacts))]
    smi = sources.smi
    driver = next((q.driver_version for q in queries if q.driver_version), None)
    if driver is None and smi and smi.gpus:
        driver = smi.gpus[0].driver_version
    engines = found.facts.get("engines")
    return replace(
        software,
        driver_version=clean(driver, 40) if driver else None,
        ofed_version=_text(found, "ofed"),
        ucx_version=_text(found, "ucx"),
        cuda_version=next((clean(q.cuda_version, 20) for q in queries if q.cuda_version), None),
        engines=tuple(_cleaned(e) for e in engines if isinstance(e, EngineSoftware))
        if isinstance(engines, tuple)
        else (),
    )


def _text(found: HostFacts, probe: str) -> str | None:
    fact = found.fact(probe, str)
    return clean(fact, 100) if fact else None


def _cleaned(engine: EngineSoftware) -> EngineSoftware:
    return replace(
        engine,
        python=clean(engine.python, 200),
        packages=tuple((clean(n, 60), clean(v, 60)) for n, v in engine.packages),
        error=clean(engine.error) if engine.error else None,
    )


def _p2p(found: HostFacts, gpus: Sequence[Gpu], topo: TopoFacts) -> tuple[tuple[str, Square], ...]:
    """Peer-to-peer matrices in `gpus` order; one found beside the topology matrix is of unknown capability."""
    squares = {name: (facts.gpu_indexes, facts.links) for name, facts in p2p_of(found).items()}
    if topo.p2p and not squares:
        squares["status"] = (topo.gpu_indexes, topo.p2p)
    return tuple((name, _in_order(gpus, *square)) for name, square in squares.items())


def _in_order(gpus: Sequence[Gpu], indexes: Sequence[int], square: Square) -> Square:
    where = {index: i for i, index in enumerate(indexes)}

    def cell(a: int, b: int) -> str | None:
        return square[where[a]][where[b]] if a in where and b in where else None

    return tuple(tuple(cell(a.index, b.index) for b in gpus) for a in gpus)


def _extra(found: HostFacts, system: SystemFacts) -> tuple[tuple[str, str], ...]:
    extra = {"host_name": clean(system.host_name), "kernel": clean(system.kernel), "user": clean(system.user)}  # fmt: skip
    if found.identity:
        extra["host_key"] = clean(found.identity)
    smi = found.fact("nvidia_smi_csv", SmiFacts)
    if smi and smi.gpus and smi.gpus[0].driver_version:
        extra["driver"] = clean(smi.gpus[0].driver_version)
    extra |= {
        name: clean(repr(fact), 2000)
        for name, fact in found.facts.items()
        if name not in known.PLACED_PROBES
    }
    return tuple(sorted(extra.items()))


def choose_python(pythons: Sequence[PythonFacts], wanted: str | None) -> PythonFacts | None:
    """The interpreter the inventory names, else the first usable one: the host's own python3 comes first."""
    usable = [p for p in pythons if p.implementation == "cpython" and p.minor >= MIN_PYTHON]
    if wanted is not None:
        name = wanted.removeprefix("~")
        return next((p for p in usable if p.path == wanted or p.path.endswith(name)), None)
    return usable[0] if usable else None


def _platform(system: SystemFacts) -> str:
    libc = re.match(r"(glibc|musl)-(\d+\.\d+)", system.libc)
    return f"{libc[1]}-{libc[2]}-{clean(system.arch, 20)}" if libc and system.arch else ""


def _data_address(entry: HostEntry, system: SystemFacts, is_alone: bool) -> str:
    """Where other hosts reach this one: the address our own connection came in on; loopback when there is no other host."""
    if is_alone:
        return "127.0.0.1"
    if system.ssh_address and not entry.is_local:
        return system.ssh_address
    up = [net for net in system.nets if net.state != "down" and net.is_physical] or list(
        system.nets
    )
    addresses = [
        a for net in sorted(up, key=lambda n: -(n.rate_bits_s or 0)) for a in net.addresses
    ]
    ranked = sorted(addresses, key=_address_order)
    return ranked[0] if ranked else ("127.0.0.1" if entry.is_local else entry.address)


def _address_order(text: str) -> int:
    """Private IPv4 first, then private IPv6, then the rest."""
    try:
        address = ipaddress.ip_address(text)
    except ValueError:
        return 9
    return (0 if address.is_private else 2) + (0 if address.version == 4 else 1)

"""Builders of evidence with good defaults: two healthy GPU hosts with a prefill/decode plan between them."""

from dynctl.agents.protocol import AgentStatus
from dynctl.checks.evidence import Evidence
from dynctl.core.audit import HostAudit
from dynctl.core.deployment import EngineState, UnitStatus
from dynctl.core.hardware import Gpu, Host, HostWarning, Nic, Topology
from dynctl.core.inventory import DeploymentWish, EngineSpec, HostEntry, Inventory, RouterWish
from dynctl.core.links import LinkEnd, LinkKind, LinkMeasurement, LinkPoint, RoundTrip
from dynctl.core.machine import UNLIMITED, EngineSoftware, GpuHealth, Limits, Software
from dynctl.core.plan import (
    Parallelism,
    Plan,
    PlannedDeployment,
    PlannedGpu,
    PlannedHost,
    Pool,
    Replica,
    Role,
    RouterPlan,
)
from dynctl.core.units import GIB

NOW = 1_800_000_000.0
PYTHON = "/opt/engine/bin/python"


def uuid(index, name="a"):
    return f"GPU-{name}-0000000{index}"


def gpu(index, host="a", health=None, **change):
    known = {
        "index": index,
        "uuid": uuid(index, host),
        "name": "NVIDIA H100 80GB HBM3",
        "memory_bytes": 80 * GIB,
        "memory_used_bytes": 0,
        "pci_bus_id": f"00000000:{index + 1:02X}:00.0",
        "numa_node": 0,
        "health": GpuHealth(**(health or {})),
    }
    return Gpu(**(known | change))


def gpus(count=2, host="a", **change):
    return tuple(gpu(i, host, **change) for i in range(count))


def links(count, label="NV18"):
    return tuple(tuple("X" if a == b else label for b in range(count)) for a in range(count))


def nic(name="mlx5_0", **change):
    known = {
        "kind": "infiniband",
        "state": "up",
        "rate_bits_s": 400 * 10**9,
        "rate_max_bits_s": 400 * 10**9,
        "port": 1,
        "physical": "linkup",
        "card": "MT4129",
        "num_lanes": 4,
    }
    return Nic(name=name, **(known | change))


def eth(name="eth0", address="10.0.0.1", **change):
    known = {
        "kind": "ethernet",
        "state": "up",
        "netdev": name,
        "addresses": (address,),
        "mtu_bytes": 9000,
    }
    return Nic(name=name, **(known | change))


def host(name="a", **change):
    number = {"a": 1, "b": 2, "c": 3, "d": 4}[name]
    known = {
        "name": name,
        "address": f"192.168.0.{number}",
        "data_address": f"10.0.0.{number}",
        "gpus": gpus(2, name),
        "gpu_links": links(2),
        "nvlink_islands": ((0, 1),),
        "nics": (nic(), eth(address=f"10.0.0.{number}")),
        "gpu_nics": ((0, ("mlx5_0",)), (1, ("mlx5_0",))),
        "nic_names": ("mlx5_0",),
        "gpu_nic_links": (("PIX",), ("PXB",)),
        "num_cpus": 64,
        "num_cpus_nominal": 64,
        "memory_bytes": 512 * GIB,
        "memory_nominal_bytes": 512 * GIB,
        "disk_free_bytes": 200 * GIB,
        "shm_bytes": 256 * GIB,
        "shm_free_bytes": 256 * GIB,
        "machine_id": f"machine-{name}",
        "python": "/usr/bin/python3",
        "python_version": "3.11.2",
        "is_root": True,
        "has_systemd_system": True,
        "has_linger": False,
        "session_limits": Limits(UNLIMITED, 1048576),
        "software": software(),
    }
    return Host(**(known | change))


def software(packages=(("vllm", "0.33.0"), ("nixl", "1.5.1"), ("torch", "2.9.0+cu128")), **change):
    engine = EngineSoftware(PYTHON, "3.12.3", tuple(packages))
    known = {
        "driver_version": "580.95.05",
        "module_version": "580.95.05",
        "cuda_version": "13.0",
        "modules": ("nvidia", "nvidia_peermem", "mlx5_ib"),
        "memory_peers": ("nv_mem",),
        "has_dmabuf": False,
        "engines": (engine,),
    }
    return Software(**(known | change))


def warned(code, text="as the probe said it", **change):
    return host(warnings=(HostWarning(code, text),), **change)


def wish(**change):
    engine = {"kind": "vllm", "python": PYTHON} | {
        key: change.pop(key)
        for key in list(change)
        if key in ("kind", "args", "env", "device", "allow_old_version")
    }
    router = {
        key: change.pop(key)
        for key in list(change)
        if key in ("listen", "policy", "tls_cert", "tls_key")
    }
    known = {
        "name": "chat",
        "model": "/models/chat",
        "engine": EngineSpec(**engine),
        "router": RouterWish(**router),
    }
    return DeploymentWish(**(known | change))


def replica(id_="chat-prefill-0", role=Role.PREFILL, on="a", indexes=(0,), **change):
    known = {
        "gpus": tuple(PlannedGpu(uuid(i, on), i) for i in indexes),
        "side_channel_port": 18820,
        "nics": ("mlx5_0",),
    }
    return Replica(id=id_, role=role, host_name=on, **(known | change))


def split_plan(*replicas, router="a", listen="127.0.0.1:8000", hosts=("a", "b"), **change):
    made = replicas or (replica(), replica("chat-decode-0", Role.DECODE, "b"))
    pools = tuple(Pool(r.role, Parallelism(tp=max(1, len(r.gpus))), (r,)) for r in made)
    planned = PlannedDeployment(
        "chat", "/models/chat", "vllm", pools, RouterPlan(router, listen, "kv")
    )
    addresses = {"a": "10.0.0.1", "b": "10.0.0.2"}
    return Plan(
        cluster="lab",
        hosts=tuple(
            PlannedHost(n, f"machine-{n}", change.get("address", addresses[n]), 18800)
            for n in hosts
        ),
        deployments=(planned,),
        digest=change.get("digest", "sha256:1111"),
    )


def evidence(
    *hosts,
    plan=None,
    wishes=None,
    links=(),
    path="inventory.yaml",
    api_keys=(),
    entries=None,
    **change,
):
    hosts = hosts or (host("a"), host("b", gpus=gpus(2, "b")))
    known = {
        "inventory": Inventory(
            "lab",
            entries or tuple(HostEntry(h.name, h.address) for h in hosts),
            tuple(wishes) if wishes is not None else (wish(),),
            api_keys=api_keys,
            path=path,
        ),
        "topology": Topology(tuple(hosts), links=tuple(links)),
        "now_unix_s": NOW,
        "plan": plan,
        "roots": {h.name: "/root/.dynctl/lab" for h in hosts},
        "identities": {h.name: f"key-{h.name}" for h in hosts},
        "audits": {h.name: HostAudit() for h in hosts},
    }
    return Evidence(**(known | change))


def b_host(**change):
    return host("b", **({"gpus": gpus(2, "b")} | change))


def planned(*hosts, **change):
    """Evidence with the plan: prefill on `a`, decode on `b`."""
    found = list(hosts) or [host("a"), b_host()]
    if len(found) == 1:
        found.append(b_host())
    links = (link("a", "b"), link("b", "a"))
    return evidence(*found, **({"plan": split_plan(), "links": links} | change))


def audited(plan=None, on="a", **facts):
    """Evidence in which one host was looked at and the others are empty."""
    base = planned() if plan is None else evidence(plan=plan)
    audits = dict(base.audits) | {on: HostAudit(**facts)}
    return planned(audits=audits) if plan is None else evidence(plan=plan, audits=audits)


def status(*units, **change):
    known = {
        "version": "0.1.0",
        "cluster": "lab",
        "host_name": "a",
        "generation": 1,
        "fence": 1,
        "plan_digest": "sha256:1111",
        "bundle": "b1",
        "boot_id": "boot",
        "pid": 4242,
        "started_unix_s": NOW - 7200,
        "units": tuple(units),
    }
    return AgentStatus(**(known | change))


def unit(id_="chat-prefill-0", state=EngineState.READY, **change):
    known = {"kind": "engine", "incarnation": "abc123", "pid": 999, "started_unix_s": NOW - 3600}
    return UnitStatus(id=id_, state=state, **(known | change))


def link(start="a", end="b", gbit_s=90.0, nominal=100, p95=None, **change):
    rate = gbit_s * 1e9 / 8
    point = LinkPoint(2**26, 4, 50, rate, rate, rate if p95 is None else p95 * 1e9 / 8, rate)
    known = {
        "kind": LinkKind.TCP,
        "measured_unix_s": NOW - 60,
        "points": (point,),
        "round_trip": RoundTrip(64, 500, 50e-6, 70e-6, 90e-6, 5e-6),
        "source": LinkEnd("10.0.0.1", "eth0", "eth0", "eth0", nominal * 10**9 if nominal else None),
        "target": LinkEnd("10.0.0.2", "eth0", "eth0", "eth0", nominal * 10**9 if nominal else None),
    }
    return LinkMeasurement(source_name=start, target_name=end, **(known | change))

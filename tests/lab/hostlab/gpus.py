"""GPU machines as text: the one file that the fake NVML, nvidia-smi and sysfs of a host read.

A record per line, `kind` then `key=value` fields, all separated by tabs:

    driver   version=570.133.20 cuda=12.8
    gpu      index=0 uuid=GPU-… name=NVIDIA H100 80GB HBM3 memory_mib=81559 …
    process  gpu=0 pid=4711 name=/usr/bin/python3 memory_mib=40000
    nic      index=0 name=mlx5_0 rate=400 …
    link     a=GPU0 b=GPU1 kind=NV18 pcie=NODE

It may be changed while a host runs: every reader looks again at each call.
Pure.
"""

import uuid
from collections.abc import Callable
from dataclasses import dataclass, replace

TOPOLOGY_PATH = "/etc/dynctl-lab/gpus.tsv"


@dataclass(frozen=True, slots=True)
class FakeGpu:
    """One GPU and what it shows."""

    index: int
    uuid: str
    name: str = "NVIDIA H100 80GB HBM3"
    memory_mib: int = 81559
    reserved_mib: int = 551
    used_mib: int = 1
    """Without what its processes hold."""
    bus_id: str = "00000000:1B:00.0"
    numa: int = 0
    cpus: str = "0-47,96-143"
    util: int = 0
    power_mw: int = 70_350
    power_limit_mw: int = 700_000
    temperature: int = 33
    nvlinks: int = 18
    nvlink_gb_s: str = "26.562"
    mig: str = "disabled"
    """`disabled`, `enabled` or `na` (cannot)."""
    state: str = "ok"
    """`ok` or `lost` (fell off the bus)."""
    ecc_errors: int = 0


@dataclass(frozen=True, slots=True)
class FakeProcess:
    """A process that holds GPU memory."""

    gpu: int
    pid: int
    name: str
    memory_mib: int


@dataclass(frozen=True, slots=True)
class FakeNic:
    """One RDMA device."""

    index: int
    name: str
    rate_gb_s: int = 400
    state: str = "ACTIVE"
    link_layer: str = "InfiniBand"
    netdev: str = ""
    numa: int = 0
    bus_id: str = "0000:18:00.0"


@dataclass(frozen=True, slots=True)
class GpuMachine:
    """All of one host."""

    gpus: tuple[FakeGpu, ...]
    nics: tuple[FakeNic, ...] = ()
    links: tuple[tuple[str, str, str, str], ...] = ()
    """(a, b, what `topo -m` shows, what PCIe alone would be), each pair once."""
    processes: tuple[FakeProcess, ...] = ()
    driver: str = "570.133.20"
    cuda: str = "12.8"
    fault: str = ""
    """`mismatch` or `unloaded`: the driver cannot be talked to."""

    def text(self) -> str:
        """Return the file's content."""
        lines = [_record("driver", version=self.driver, cuda=self.cuda, fault=self.fault)]
        for gpu in self.gpus:
            held = sum(p.memory_mib for p in self.processes if p.gpu == gpu.index)
            fields = {name: getattr(gpu, name) for name in FakeGpu.__slots__}
            lines.append(_record("gpu", **fields | {"used_mib": gpu.used_mib + held}))
        for process in self.processes:
            fields = {name: getattr(process, name) for name in FakeProcess.__slots__}
            lines.append(_record("process", **fields))
        for nic in self.nics:
            lines.append(_record("nic", **{name: getattr(nic, name) for name in FakeNic.__slots__}))
        for a, b, kind, pcie in self.links:
            lines.append(_record("link", a=a, b=b, kind=kind, pcie=pcie))
        return "\n".join(lines) + "\n"


def _record(kind: str, /, **fields: object) -> str:
    return "\t".join([kind, *(f"{name}={value}" for name, value in fields.items())])


def hgx_h100(seed: str) -> GpuMachine:
    """Eight H100 SXM on NVSwitch, each behind one PCIe switch with a 400 Gb/s port."""
    buses = ("1B", "43", "52", "61", "9D", "C3", "D1", "DF")
    nic_buses = ("18", "40", "4F", "5E", "9A", "C0", "CE", "DC")
    gpus = tuple(
        FakeGpu(
            index=i,
            uuid=gpu_uuid(seed, i),
            bus_id=f"00000000:{bus}:00.0",
            numa=i // 4,
            cpus="0-47,96-143" if i < 4 else "48-95,144-191",
            temperature=30 + i,
            power_mw=69_000 + 450 * i,
        )
        for i, bus in enumerate(buses)
    )
    nics = tuple(
        FakeNic(i, f"mlx5_{i}", netdev=f"ib{i}", numa=i // 4, bus_id=f"0000:{bus.lower()}:00.0")
        for i, bus in enumerate(nic_buses)
    )
    links = []
    for i in range(8):
        for j in range(8):
            pcie = "NODE" if i // 4 == j // 4 else "SYS"
            if i < j:
                links.append((f"GPU{i}", f"GPU{j}", "NV18", pcie))
                links.append((f"NIC{i}", f"NIC{j}", pcie, pcie))
            near = "PIX" if i == j else pcie
            links.append((f"GPU{i}", f"NIC{j}", near, near))
    return GpuMachine(gpus, nics, tuple(links))


def hgx_h100_one_busy(seed: str) -> GpuMachine:
    """Like `hgx_h100`, with somebody else's training job on GPU 3."""
    machine = hgx_h100(seed)
    busy = tuple(replace(g, util=97, power_mw=612_000) if g.index == 3 else g for g in machine.gpus)
    job = FakeProcess(gpu=3, pid=1, name="/opt/train/bin/python", memory_mib=70_214)
    return replace(machine, gpus=busy, processes=(job,))


def hgx_h100_all_busy(seed: str) -> GpuMachine:
    """Like `hgx_h100`, with somebody else's job on every GPU."""
    machine = hgx_h100(seed)
    jobs = tuple(
        FakeProcess(gpu=g.index, pid=1, name="/opt/train/bin/python", memory_mib=70_214)
        for g in machine.gpus
    )
    return replace(machine, processes=jobs)


def l40s_pair(seed: str) -> GpuMachine:
    """Two L40S on two sockets without NVLink, one 100 Gb/s RoCE port."""
    gpus = tuple(
        FakeGpu(
            index=i,
            uuid=gpu_uuid(seed, i),
            name="NVIDIA L40S",
            memory_mib=46_068,
            reserved_mib=400,
            bus_id=f"00000000:{bus}:00.0",
            numa=i,
            cpus=("0-31", "32-63")[i],
            power_mw=35_000,
            power_limit_mw=350_000,
            nvlinks=0,
            mig="na",
        )
        for i, bus in enumerate(("41", "C1"))
    )
    nic = FakeNic(0, "mlx5_0", rate_gb_s=100, link_layer="Ethernet", netdev="ens1f0", numa=1)
    links = (
        ("GPU0", "GPU1", "SYS", "SYS"),
        ("GPU0", "NIC0", "SYS", "SYS"),
        ("GPU1", "NIC0", "NODE", "NODE"),
    )
    return GpuMachine(gpus, (nic,), links)


def l40s_pair_one_busy(seed: str) -> GpuMachine:
    """Like `l40s_pair`, with somebody else's job on the second GPU."""
    job = FakeProcess(gpu=1, pid=1, name="/opt/train/bin/python", memory_mib=38_000)
    return replace(l40s_pair(seed), processes=(job,))


def gpu_uuid(seed: str, index: int) -> str:
    """Return a GPU UUID that is the same for the same host and index, and differs otherwise."""
    return f"GPU-{uuid.uuid5(uuid.NAMESPACE_URL, f'dynctl-lab:{seed}:{index}')}"


PRESETS: dict[str, Callable[[str], GpuMachine]] = {
    "hgx-h100": hgx_h100,
    "hgx-h100-one-busy": hgx_h100_one_busy,
    "hgx-h100-all-busy": hgx_h100_all_busy,
    "l40s-pair": l40s_pair,
    "l40s-pair-one-busy": l40s_pair_one_busy,
}

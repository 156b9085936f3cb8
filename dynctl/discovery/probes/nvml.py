"""NVML itself: GPUs, their memory, processes and health, NVLinks and what is at their other ends, peer-to-peer.

A small program (`onhost/nvml`) asks through ctypes, so that it works at the first look, before anything is installed.
What it tells comes from the driver without being printed for people in between, so it wins over `nvidia-smi`.
Pure.
"""

from collections.abc import Sequence
from typing import Annotated, Any, TypeVar

import msgspec
from msgspec import Meta, Struct

from dynctl.core.command import Completed
from dynctl.core.machine import GpuHealth
from dynctl.core.text import clean
from dynctl.discovery.bounds import MAX_GPUS
from dynctl.discovery.facts import (
    GpuProcessFacts,
    NvlinkGpu,
    NvmlFacts,
    QueryFacts,
    QueryGpu,
    TopoFacts,
)
from dynctl.discovery.onhost import source
from dynctl.discovery.pcitree import bus_key
from dynctl.discovery.probe import (
    TIMEOUT_STATUS,
    Probe,
    ToolError,
    fail,
    text_of,
)
from dynctl.discovery.script import quote
from dynctl.errors import ProbeError

T = TypeVar("T")

_SCRIPT = f"""
program={quote(source("nvml"))}
case $DYNCTL_PYTHON in '~/'*) DYNCTL_PYTHON=$HOME/${{DYNCTL_PYTHON#??}} ;; esac
for python in "$DYNCTL_PYTHON" python3 /usr/libexec/platform-python; do
  command -v "$python" >/dev/null 2>&1 || continue
  "$python" -IS -c 'import sys; sys.version_info < (3, 8) and sys.exit(127); exec(sys.argv[1])' "$program"
  status=$?
  [ $status -eq 127 ] || exit $status
done
exit 127
"""
_NEEDS = """(
  for file in /usr/lib/*/libnvidia-ml.so.1 /usr/lib/*/nvidia/current/libnvidia-ml.so.1 /usr/lib64/libnvidia-ml.so.1 /usr/lib/wsl/lib/libnvidia-ml.so.1 \\
    /usr/local/nvidia/lib64/libnvidia-ml.so.1 /run/opengl-driver/lib/libnvidia-ml.so.1; do [ -e "$file" ] && exit 0; done
  IFS=:; for dir in $LD_LIBRARY_PATH; do [ -e "$dir/libnvidia-ml.so.1" ] && exit 0; done
  [ -e /proc/driver/nvidia ] && grep -qs libnvidia-ml.so.1 /etc/ld.so.cache
)"""
"""Where the library may be, without starting a process on hosts that have none."""

_NOT_LOADED = 9
_FAULTS = {
    4: ("no_permission", "the user may not open /dev/nvidia*: add it to the group that may"),
    15: ("gpu_lost", "a GPU fell off the bus: reboot the host"),
    18: (
        "driver_library_mismatch",
        "the NVIDIA kernel module and library differ: reboot, or reload the module",
    ),
}
_OTHER_FAULT = "nvml_failed", "run nvidia-smi on the host and follow what it says"
_CLASSES = {10: "PIX", 20: "PXB", 30: "PHB", 40: "NODE", 50: "SYS"}
"""`nvmlGpuTopologyLevel_t` in the labels of `topo -m`."""
_P2P = ("OK", "CNS", "GNS", "TNS", "DR", "NS", "U")
"""`nvmlGpuP2PStatus_t` in the labels of `topo -p2p`."""
_P2P_NAMES = ("read", "write", "nvlink")
_TO_GPU, _TO_SWITCH = 0, 2
_REASONS = {
    0x04: "sw_power_cap",
    0x08: "hw_slowdown",
    0x20: "sw_thermal_slowdown",
    0x40: "hw_thermal_slowdown",
    0x80: "hw_power_brake_slowdown",
}
_COMPUTE_MODES = ("Default", "Exclusive_Thread", "Prohibited", "Exclusive_Process")
_FABRIC_STATES = {1: "Not Started", 2: "In Progress", 3: "Completed"}

Number = Annotated[int, Meta(ge=0, le=(1 << 63) - 1)]
Index = Annotated[int, Meta(ge=0, lt=1024)]
Text = Annotated[str, Meta(max_length=4096)]


class _Driver(Struct):
    driver: Text | None
    cuda: Number | None
    count: Index | None


class _Failure(Struct):
    failed: Number
    said: Text


class _Pair(Struct):
    pair: tuple[Index, Index]
    ancestor: Number | None
    p2p: tuple[Number | None, Number | None, Number | None]


class _Health(Struct):
    persistence: Number | None
    ecc: Number | None
    ecc_pending: Number | None
    uncorrected: Number | None
    remapped: Number | None
    remap_pending: Number | None
    remap_failed: Number | None
    pages_pending: Number | None
    reasons: Number | None
    celsius: Number | None
    milliwatts: Number | None
    limit_milliwatts: Number | None
    pcie_generation: Number | None
    pcie_generation_max: Number | None
    pcie_width: Number | None
    pcie_width_max: Number | None
    compute_mode: Number | None
    fabric: tuple[Number, Number, Annotated[str, Meta(pattern="^[0-9a-f]{32}$")], Number] | None


class _Link(Struct, array_like=True):
    is_active: bool
    bytes_s: Number | None
    far_kind: Number | None
    far_bus_id: Text | None


class _Process(Struct, array_like=True):
    pid: Number
    name: Text | None
    user: Text | None
    used_bytes: Number | None
    is_tagged: bool


class _Gpu(Struct):
    gpu: Index
    uuid: Text | None
    name: Text | None
    bus_id: Text | None
    memory: tuple[Number, Number] | None
    cpus: Text | None
    numa_nodes: Text | None
    mig: Number | None
    slices: Annotated[tuple[tuple[Text | None, Number | None], ...], Meta(max_length=64)]
    links: Annotated[tuple[_Link, ...], Meta(max_length=64)]
    processes: Annotated[tuple[_Process, ...], Meta(max_length=1024)] | None
    health: _Health


class _LostGpu(Struct):
    gpu: Index
    failed: Number
    said: Text


def parse(done: Completed) -> NvmlFacts:
    """Read the lines.

    Raises:
        ProbeError: when the driver hangs or refuses, no Python is there, or a line is none of the program's.
    """
    driver, gpus, lost, pairs, is_whole = _Driver(None, None, None), [], [], [], False
    # What follows the last line break is a line that was being written when the program was stopped.
    for number, line in enumerate(text_of(done).split("\n")[:-1], 1):
        if not line.strip():
            continue
        said = _line(number, line)
        if "pair" in said:
            pairs.append(_as(number, line, said, _Pair))
        elif "gpu" in said and "failed" in said:
            lost.append(_as(number, line, said, _LostGpu))
        elif "gpu" in said:
            gpus.append(_as(number, line, said, _Gpu))
        elif "failed" in said:
            failure = _as(number, line, said, _Failure)
            if failure.failed == _NOT_LOADED:
                return NvmlFacts()
            raise ToolError(
                f"NVML: {clean(failure.said, 160)}", *_FAULTS.get(failure.failed, _OTHER_FAULT)
            )
        elif "end" in said:
            is_whole = True
        else:
            driver = _as(number, line, said, _Driver)
    if not is_whole and not gpus:
        raise _nothing(done)
    gpus, lost = gpus[:MAX_GPUS], lost[:MAX_GPUS]
    return NvmlFacts(
        query=QueryFacts(
            None if driver.count is None else driver.count - len(lost),
            tuple(_record(gpu) for gpu in gpus),
            driver.driver,
            None if driver.cuda is None else f"{driver.cuda // 1000}.{driver.cuda % 1000 // 10}",
        ),
        broken=tuple((gpu.gpu, gpu.said) for gpu in lost),
        nvlink=tuple(_nvlink(gpu) for gpu in gpus),
        topo=_topo(gpus, pairs),
        p2p=_p2p(gpus, pairs),
        is_cut=not is_whole,
    )


def _line(number: int, line: str) -> dict[str, Any]:
    try:
        said = msgspec.json.decode(line)
    except (msgspec.DecodeError, UnicodeError, RecursionError) as error:
        raise fail("NVML", number, line, "no JSON") from error
    if not isinstance(said, dict):
        raise fail("NVML", number, line, "no object")
    return said


def _as(number: int, line: str, said: dict[str, Any], kind: type[T]) -> T:
    try:
        return msgspec.convert(said, kind)
    except msgspec.ValidationError as error:
        raise fail("NVML", number, line, clean(str(error), 200)) from error


def _nothing(done: Completed) -> ProbeError:
    if done.exit_status == TIMEOUT_STATUS:
        return ToolError("NVML did not answer within its limit: the driver hangs", "timeout", "reboot the host")  # fmt: skip
    said = clean(done.stderr.decode("utf-8", "replace")[-400:], 200)
    return ProbeError(f"NVML ended with status {done.exit_status}: {said or 'nothing was said'}")


def _record(gpu: _Gpu) -> QueryGpu:
    uuid = gpu.uuid or ""
    total, used = gpu.memory or (None, None)
    return QueryGpu(
        index=gpu.gpu,
        pci_bus_id=gpu.bus_id,
        uuid=gpu.uuid,
        name=gpu.name,
        memory_bytes=total,
        memory_used_bytes=used,
        is_mig=_switch(gpu.mig),
        mig_profiles=tuple((name or "").rpartition("MIG ")[2] for name, _ in gpu.slices),
        mig_memory_bytes=tuple(size for _, size in gpu.slices if size is not None),
        health=_health(gpu.health),
        processes=tuple(
            GpuProcessFacts(uuid, p.pid, p.name, p.user, p.used_bytes, p.is_tagged)
            for p in gpu.processes or ()
        ),
    )


def _health(said: _Health) -> GpuHealth:
    state, status, cluster, clique = said.fabric or (0, 0, "", 0)
    is_on = state in _FABRIC_STATES
    pending = [_switch(n) for n in (said.remap_pending, said.pages_pending) if n is not None]
    return GpuHealth(
        has_persistence=_switch(said.persistence),
        has_ecc=_switch(said.ecc),
        has_ecc_pending=_switch(said.ecc_pending),
        num_uncorrected=said.uncorrected,
        num_remapped=said.remapped,
        is_remap_pending=any(pending) if pending else None,
        has_remap_failed=_switch(said.remap_failed),
        throttle_reasons=tuple(name for bit, name in _REASONS.items() if (said.reasons or 0) & bit),
        temperature_celsius=None if said.celsius is None else float(said.celsius),
        power_w=None if said.milliwatts is None else said.milliwatts / 1000,
        power_limit_w=None if said.limit_milliwatts is None else said.limit_milliwatts / 1000,
        pcie_generation=said.pcie_generation,
        pcie_generation_max=said.pcie_generation_max,
        pcie_width=said.pcie_width,
        pcie_width_max=said.pcie_width_max,
        compute_mode=_at(_COMPUTE_MODES, said.compute_mode),
        fabric_state=_FABRIC_STATES.get(state),
        fabric_status=(f"error {status}" if status else "Success") if is_on else None,
        fabric_clique=f"{_uuid(cluster)}/{clique}" if is_on and set(cluster) - {"0"} else None,
    )


def _uuid(digits: str) -> str:
    return "-".join((digits[:8], digits[8:12], digits[12:16], digits[16:20], digits[20:]))


def _switch(number: int | None) -> bool | None:
    return None if number is None else number != 0


def _at(names: Sequence[str], number: int | None) -> str | None:
    return None if number is None or number >= len(names) else names[number]


def _nvlink(gpu: _Gpu) -> NvlinkGpu:
    """A rate of 0 is an active link whose rate nobody tells."""
    rates = tuple((link.bytes_s or 0) if link.is_active else None for link in gpu.links)
    return NvlinkGpu(gpu.gpu, gpu.name or "", gpu.uuid or "", rates)


def _topo(gpus: Sequence[_Gpu], pairs: Sequence[_Pair]) -> TopoFacts:
    """The matrix as `topo -m` labels it."""
    told = {frozenset(pair.pair): pair for pair in pairs}
    known = frozenset(bus_key(gpu.bus_id) for gpu in gpus if gpu.bus_id)

    def label(a: _Gpu, b: _Gpu) -> str | None:
        if a is b:
            return "X"
        pair = told.get(frozenset((a.gpu, b.gpu)))
        count = _num_links(a, b, known, pair)
        if count is None or pair is None:
            return None
        return f"NV{count}" if count else _CLASSES.get(pair.ancestor or 0)

    return TopoFacts(
        gpu_indexes=tuple(gpu.gpu for gpu in gpus),
        links=tuple(tuple(label(a, b) for b in gpus) for a in gpus),
        cpu_affinity=tuple(gpu.cpus for gpu in gpus),
        numa_affinity=tuple(gpu.numa_nodes or None for gpu in gpus),
    )


def _num_links(a: _Gpu, b: _Gpu, known: frozenset[str], pair: _Pair | None) -> int | None:
    """How many NVLinks join two GPUs: links from one to the other, or by switches as many as both have.

    None where some link ends at what is not known here, as in virtual machines that renumber the bus.
    """
    active = [[link for link in gpu.links if link.is_active] for gpu in (a, b)]
    ends = [(link.far_kind, bus_key(link.far_bus_id or "")) for links in active for link in links]
    if any(kind != _TO_SWITCH and (kind != _TO_GPU or far not in known) for kind, far in ends):
        return None
    direct = sum(1 for link in active[0] if link.far_kind == _TO_GPU and bus_key(link.far_bus_id or "") == bus_key(b.bus_id or ""))  # fmt: skip
    by_switch = min(sum(link.far_kind == _TO_SWITCH for link in links) for links in active)
    # A switch may keep its GPUs apart (partitions): then the driver allows no access by NVLink.
    is_open = pair is not None and pair.p2p[2] in {0, None}
    return direct or (by_switch if is_open else 0)


def _p2p(gpus: Sequence[_Gpu], pairs: Sequence[_Pair]) -> tuple[tuple[str, TopoFacts], ...]:
    indexes = tuple(gpu.gpu for gpu in gpus)
    told = {frozenset(pair.pair): pair.p2p for pair in pairs}

    def cell(a: int, b: int, what: int) -> str | None:
        return "X" if a == b else _at(_P2P, told.get(frozenset((a, b)), (None,) * 3)[what])

    squares = [
        (name, tuple(tuple(cell(a, b, what) for b in indexes) for a in indexes))
        for what, name in enumerate(_P2P_NAMES)
    ]
    return tuple(
        (name, TopoFacts(indexes, square))
        for name, square in squares
        if any(cell not in {None, "X"} for row in square for cell in row)
    )


PROBE = Probe(_SCRIPT, parse, needs=_NEEDS)

"""Asks NVML what it knows of this machine: JSON lines for the driver, each GPU, each pair of GPUs, and the end.

Sent whole to hosts, where some Python is all that need be there. A line is written as soon as it is known, so that a
driver that hangs on one GPU still tells of those before it. What a driver or a GPU does not answer is null.
Structures and numbers are those of nvml.h as nvidia-ml-py 13 declares them.
Not here: what the answers mean (`probes/nvml`).
IO: libnvidia-ml.so.1, /proc, stdout.
"""

# ruff: noqa: ANN401 - a C library takes and fills in what it likes
from __future__ import annotations

import ctypes
import json
import sys
from collections.abc import Sequence
from ctypes import byref, c_char, c_int, c_int64, c_uint, c_uint8, c_ulong, c_ulonglong, c_void_p
from pathlib import Path
from typing import Any, TypeVar

T = TypeVar("T")

SUCCESS, LIBRARY_NOT_FOUND, FUNCTION_NOT_FOUND = 0, 12, 13
MAX_GPUS, MAX_LINKS, MAX_PROCESSES, AFFINITY_WORDS = 64, 36, 512, 32
LINK_SPEED, COMMON_LINK_SPEED = 164, 90
"""Field values in MB/s: of one link, which older drivers do not know, and of all active ones."""
P2P_READ, P2P_WRITE, P2P_NVLINK = 0, 1, 2
UNCORRECTED, VOLATILE, ON_DIE, NODE_SCOPE = 1, 0, 0, 0
UNKNOWN_SIZE = (1 << 64) - 1
NAME = "libnvidia-ml.so.1"
PLACES = (
    "usr/lib/*",
    "usr/lib/*/nvidia/current",
    "usr/local/nvidia/lib64",
    "run/opengl-driver/lib",
)
"""Where the library lies on hosts whose linker does not know it."""


class Memory(ctypes.Structure):
    """`nvmlMemory_t`."""

    _fields_ = [("total", c_ulonglong), ("free", c_ulonglong), ("used", c_ulonglong)]


class MemoryV2(ctypes.Structure):
    """`nvmlMemory_v2_t`."""

    _fields_ = [
        ("version", c_uint),
        ("total", c_ulonglong),
        ("reserved", c_ulonglong),
        ("free", c_ulonglong),
        ("used", c_ulonglong),
    ]


class Pci(ctypes.Structure):
    """`nvmlPciInfo_t`, third version."""

    _fields_ = [
        ("legacy", c_char * 16),
        ("domain", c_uint),
        ("bus", c_uint),
        ("device", c_uint),
        ("device_id", c_uint),
        ("subsystem_id", c_uint),
        ("bus_id", c_char * 32),
    ]


class Process(ctypes.Structure):
    """`nvmlProcessInfo_v2_t`, which the third version of the calls takes as well."""

    _fields_ = [
        ("pid", c_uint),
        ("used", c_ulonglong),
        ("instance", c_uint),
        ("compute", c_uint),
    ]


class FieldValue(ctypes.Structure):
    """`nvmlFieldValue_t`."""

    _fields_ = [
        ("field", c_uint),
        ("scope", c_uint),
        ("timestamp", c_int64),
        ("latency", c_int64),
        ("kind", c_uint),
        ("result", c_uint),
        ("value", c_ulonglong),
    ]


class Fabric(ctypes.Structure):
    """`nvmlGpuFabricInfo_t`."""

    _fields_ = [
        ("cluster", c_uint8 * 16),
        ("status", c_uint),
        ("clique", c_uint),
        ("state", c_uint8),
    ]


class FabricV2(ctypes.Structure):
    """`nvmlGpuFabricInfo_v2_t`."""

    _fields_ = [
        ("version", c_uint),
        ("cluster", c_uint8 * 16),
        ("status", c_uint),
        ("clique", c_uint),
        ("state", c_uint8),
        ("health", c_uint),
    ]


def versioned(made: Any, number: int) -> Any:
    """Fill in size and version, as newer calls want them."""
    made.version = ctypes.sizeof(made) | number << 24
    return made


class Nvml:
    """The library. A question without an answer gives None."""

    def __init__(self) -> None:
        self.library: ctypes.CDLL | None = None
        paths = [path for place in PLACES for path in Path("/").glob(f"{place}/{NAME}")]
        for path in [NAME, *map(str, paths)]:
            try:
                self.library = ctypes.CDLL(path)
                break
            except OSError:
                continue

    def call(self, name: str, *args: Any) -> int:
        """Call a function and return its code."""
        if self.library is None:
            return LIBRARY_NOT_FOUND
        function = getattr(self.library, name, None)
        return FUNCTION_NOT_FOUND if function is None else int(function(*args))

    def fill(self, made: T, name: str, *args: Any) -> T | None:
        """Let a function fill in its last argument."""
        return made if self.call(name, *args, byref(made)) == SUCCESS else None  # type: ignore[arg-type]

    def number(self, name: str, *args: Any) -> int | None:
        """The unsigned int a function tells."""
        found = self.fill(c_uint(), name, *args)
        return None if found is None else found.value

    def long(self, name: str, *args: Any) -> int | None:
        """The unsigned long long a function tells."""
        found = self.fill(c_ulonglong(), name, *args)
        return None if found is None else found.value

    def numbers(self, count: int, name: str, *args: Any) -> list[int | None]:
        """The unsigned ints a function tells at once."""
        made = [c_uint() for _ in range(count)]
        code = self.call(name, *args, *(byref(each) for each in made))
        return [each.value if code == SUCCESS else None for each in made]

    def text(self, name: str, *args: Any) -> str | None:
        """The text a function tells."""
        room = ctypes.create_string_buffer(256)
        code = self.call(name, *args, room, c_uint(len(room)))
        return room.value.decode("utf-8", "replace") if code == SUCCESS else None

    def error(self, code: int) -> str:
        """A code in words."""
        tell = getattr(self.library, "nvmlErrorString", None)
        if tell is None:
            return f"no {NAME} can be loaded" if self.library is None else f"error {code}"
        tell.restype = ctypes.c_char_p
        return (tell(code) or b"?").decode("utf-8", "replace")


def say(line: dict[str, Any]) -> None:
    """Print a line at once."""
    sys.stdout.write(json.dumps(line) + "\n")
    sys.stdout.flush()


def bits(words: Sequence[int]) -> str:
    """Numbers of the bits that are set, in the kernel's list format: `0-31,64-95`."""
    numbers = [i for i in range(64 * len(words)) if words[i // 64] >> i % 64 & 1]
    parts, at = [], 0
    while at < len(numbers):
        end = at
        while end + 1 < len(numbers) and numbers[end + 1] == numbers[end] + 1:
            end += 1
        parts.append(f"{numbers[at]}" if end == at else f"{numbers[at]}-{numbers[end]}")
        at = end + 1
    return ",".join(parts)


def memory_of(nvml: Nvml, gpu: c_void_p) -> list[int] | None:
    """Total and used bytes. Newer drivers tell their own reserve apart; the first version counts it as used."""
    found = nvml.fill(versioned(MemoryV2(), 2), "nvmlDeviceGetMemoryInfo_v2", gpu)
    found = found or nvml.fill(Memory(), "nvmlDeviceGetMemoryInfo", gpu)
    return None if found is None else [found.total, found.used]


def bus_of(found: Pci | None) -> str | None:
    """The address out of a PCI record."""
    return None if found is None else (found.bus_id or found.legacy).decode("ascii", "replace")


def affinity_of(nvml: Nvml, gpu: c_void_p) -> tuple[str | None, str | None]:
    """CPUs and NUMA nodes of the host near a GPU; the second call wants its scope after the answer."""
    size, cpus, nodes = (
        c_uint(AFFINITY_WORDS),
        (c_ulong * AFFINITY_WORDS)(),
        (c_ulong * AFFINITY_WORDS)(),
    )
    has_cpus = nvml.call("nvmlDeviceGetCpuAffinity", gpu, size, byref(cpus)) == SUCCESS
    code = nvml.call("nvmlDeviceGetMemoryAffinity", gpu, size, byref(nodes), c_uint(NODE_SCOPE))
    return bits(list(cpus)) if has_cpus else None, bits(list(nodes)) if code == SUCCESS else None


def links_of(nvml: Nvml, gpu: c_void_p) -> list[list[Any]]:
    """Per NVLink whether it is active, its rate, and the kind and bus address of what is at its other end."""
    links: list[list[Any]] = []
    for number in range(MAX_LINKS):
        at = c_uint(number)
        state = nvml.number("nvmlDeviceGetNvLinkState", gpu, at)
        if state is None:
            break
        kind = far = rate = None
        if state:
            kind = nvml.number("nvmlDeviceGetNvLinkRemoteDeviceType", gpu, at)
            far = bus_of(nvml.fill(Pci(), "nvmlDeviceGetNvLinkRemotePciInfo_v2", gpu, at))
            rate = speed(nvml, gpu, LINK_SPEED, number) or speed(nvml, gpu, COMMON_LINK_SPEED, 0)
        links.append([bool(state), rate, kind, far])
    return links


def speed(nvml: Nvml, gpu: c_void_p, field: int, scope: int) -> int | None:
    """Bytes a second by a field value."""
    asked = FieldValue(field=field, scope=scope)
    code = nvml.call("nvmlDeviceGetFieldValues", gpu, c_int(1), byref(asked))
    # The value is an unsigned int in a union of eight bytes.
    value = asked.value & 0xFFFFFFFF if code == SUCCESS == asked.result else 0
    return value * 10**6 or None


def processes_of(nvml: Nvml, gpu: c_void_p) -> list[list[Any]] | None:
    """Every process with memory on the GPU, once; None where the driver does not tell."""
    found: dict[int, int] = {}
    is_known = False
    for kind in ("Compute", "Graphics"):
        for version in ("v3", "v2"):
            rows, count = (Process * MAX_PROCESSES)(), c_uint(MAX_PROCESSES)
            name = f"nvmlDeviceGet{kind}RunningProcesses_{version}"
            if nvml.call(name, gpu, byref(count), rows) == SUCCESS:
                is_known = True
                found.update((row.pid, row.used) for row in rows[: min(count.value, MAX_PROCESSES)])
                break
    return [process(nvml, pid, used) for pid, used in sorted(found.items())] if is_known else None


def process(nvml: Nvml, pid: int, used: int) -> list[Any]:
    """A process: pid, name, user, bytes, and whether it carries our tag."""
    user, is_tagged = None, False
    try:
        user = Path(f"/proc/{pid}").owner()
        environ = Path(f"/proc/{pid}/environ").read_bytes()
        is_tagged = any(v.startswith(b"DYNCTL_INCARNATION=") for v in environ.split(b"\0"))
    except (OSError, KeyError):
        pass
    name = nvml.text("nvmlSystemGetProcessName", c_uint(pid))
    return [pid, name, user, None if used == UNKNOWN_SIZE else used, is_tagged]


def slices_of(nvml: Nvml, gpu: c_void_p) -> list[list[Any]]:
    """Name and bytes of each MIG device."""
    found = []
    for number in range(nvml.number("nvmlDeviceGetMaxMigDeviceCount", gpu) or 0):
        device = c_void_p()
        name = "nvmlDeviceGetMigDeviceHandleByIndex"
        if nvml.call(name, gpu, c_uint(number), byref(device)) == SUCCESS:
            memory = memory_of(nvml, device)
            found.append([nvml.text("nvmlDeviceGetName", device), memory and memory[0]])
    return found


def fabric_of(nvml: Nvml, gpu: c_void_p) -> list[Any] | None:
    """State, status, cluster and clique in the NVLink fabric."""
    found = nvml.fill(versioned(FabricV2(), 2), "nvmlDeviceGetGpuFabricInfoV", gpu)
    found = found or nvml.fill(Fabric(), "nvmlDeviceGetGpuFabricInfo", gpu)
    if found is None:
        return None
    return [found.state, found.status, bytes(found.cluster).hex(), found.clique]


def health_of(nvml: Nvml, gpu: c_void_p) -> dict[str, Any]:
    """How a GPU fares, in NVML's own numbers."""
    ecc = nvml.numbers(2, "nvmlDeviceGetEccMode", gpu)
    rows = nvml.numbers(4, "nvmlDeviceGetRemappedRows", gpu)
    reasons = nvml.long("nvmlDeviceGetCurrentClocksEventReasons", gpu)
    if reasons is None:
        reasons = nvml.long("nvmlDeviceGetCurrentClocksThrottleReasons", gpu)
    ecc_errors = "nvmlDeviceGetTotalEccErrors", gpu, c_uint(UNCORRECTED), c_uint(VOLATILE)
    return {
        "persistence": nvml.number("nvmlDeviceGetPersistenceMode", gpu),
        "ecc": ecc[0],
        "ecc_pending": ecc[1],
        "uncorrected": nvml.long(*ecc_errors),
        "remapped": rows[1],
        "remap_pending": rows[2],
        "remap_failed": rows[3],
        "pages_pending": nvml.number("nvmlDeviceGetRetiredPagesPendingStatus", gpu),
        "reasons": reasons,
        "celsius": nvml.number("nvmlDeviceGetTemperature", gpu, c_uint(ON_DIE)),
        "milliwatts": nvml.number("nvmlDeviceGetPowerUsage", gpu),
        "limit_milliwatts": nvml.number("nvmlDeviceGetEnforcedPowerLimit", gpu),
        "pcie_generation": nvml.number("nvmlDeviceGetCurrPcieLinkGeneration", gpu),
        "pcie_generation_max": nvml.number("nvmlDeviceGetMaxPcieLinkGeneration", gpu),
        "pcie_width": nvml.number("nvmlDeviceGetCurrPcieLinkWidth", gpu),
        "pcie_width_max": nvml.number("nvmlDeviceGetMaxPcieLinkWidth", gpu),
        "compute_mode": nvml.number("nvmlDeviceGetComputeMode", gpu),
        "fabric": fabric_of(nvml, gpu),
    }


def tell_gpu(nvml: Nvml, index: int, gpu: c_void_p) -> None:
    """Print one GPU."""
    cpus, nodes = affinity_of(nvml, gpu)
    say(
        {
            "gpu": index,
            "uuid": nvml.text("nvmlDeviceGetUUID", gpu),
            "name": nvml.text("nvmlDeviceGetName", gpu),
            "bus_id": bus_of(nvml.fill(Pci(), "nvmlDeviceGetPciInfo_v3", gpu)),
            "memory": memory_of(nvml, gpu),
            "cpus": cpus,
            "numa_nodes": nodes,
            "mig": nvml.numbers(2, "nvmlDeviceGetMigMode", gpu)[0],
            "slices": slices_of(nvml, gpu),
            "links": links_of(nvml, gpu),
            "processes": processes_of(nvml, gpu),
            "health": health_of(nvml, gpu),
        }
    )


def tell_pair(nvml: Nvml, a: tuple[int, c_void_p], b: tuple[int, c_void_p]) -> None:
    """Print how near two GPUs are, and whether one may read, write, and reach by NVLink the other's memory."""
    allowed = [
        nvml.number("nvmlDeviceGetP2PStatus", a[1], b[1], c_uint(what))
        for what in (P2P_READ, P2P_WRITE, P2P_NVLINK)
    ]
    ancestor = nvml.number("nvmlDeviceGetTopologyCommonAncestor", a[1], b[1])
    say({"pair": [a[0], b[0]], "ancestor": ancestor, "p2p": allowed})


def main() -> None:
    """Ask and print everything."""
    nvml = Nvml()
    code = nvml.call("nvmlInit_v2")
    if code != SUCCESS:
        say({"failed": code, "said": nvml.error(code)})
        return
    count = nvml.number("nvmlDeviceGetCount_v2")
    driver = nvml.text("nvmlSystemGetDriverVersion")
    say(
        {"driver": driver, "cuda": nvml.number("nvmlSystemGetCudaDriverVersion_v2"), "count": count}
    )
    gpus = []
    for index in range(min(count or 0, MAX_GPUS)):
        gpu = c_void_p()
        code = nvml.call("nvmlDeviceGetHandleByIndex_v2", c_uint(index), byref(gpu))
        if code == SUCCESS:
            tell_gpu(nvml, index, gpu)
            gpus.append((index, gpu))
        else:
            say({"gpu": index, "failed": code, "said": nvml.error(code)})
    for a in gpus:
        for b in gpus:
            if a[0] < b[0]:
                tell_pair(nvml, a, b)
    nvml.call("nvmlShutdown")
    say({"end": True})


if __name__ == "__main__":
    main()

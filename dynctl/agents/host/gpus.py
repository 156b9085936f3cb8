"""NVML: which GPUs there are, how busy they are, who holds them. A host without its library has no GPUs.

Not here: leases (`leases`). NVML calls may hang when a GPU is lost, so they run in a thread with a time limit.
Fields that a GPU or driver does not answer are None.
IO: NVML.
"""

import asyncio
import pwd
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from dynctl.agents.host import processes
from dynctl.core.snapshot import GpuSample
from dynctl.core.units import format_bytes

_LIMIT_S = 5.0


@dataclass(frozen=True, slots=True)
class GpuHolder:
    """A process with memory on a GPU."""

    uuid: str
    pid: int
    name: str
    user: str | None
    memory_bytes: int | None


@dataclass(frozen=True, slots=True)
class GpuReading:
    """All GPUs at one instant."""

    samples: tuple[GpuSample, ...] = ()
    holders: tuple[GpuHolder, ...] = ()
    lost: tuple[int, ...] = ()
    """Indexes that NVML counts but cannot open: fallen off the bus."""
    error: str = ""
    """Why nothing could be read; empty also where there simply is no NVML."""


class GpuReader:
    """Asks NVML, one question at a time."""

    def __init__(self) -> None:
        self._lock = asyncio.Lock()
        self._pending: asyncio.Future[GpuReading] | None = None

    async def read(self) -> GpuReading:
        """Read all GPUs; a hanging driver gives an error, not a hanging caller."""
        async with self._lock:
            if self._pending is None:
                self._pending = asyncio.ensure_future(asyncio.to_thread(read_now))
            try:
                async with asyncio.timeout(_LIMIT_S):
                    reading = await asyncio.shield(self._pending)
            except TimeoutError:
                # The thread cannot be ended; the next caller waits for the same one.
                return GpuReading(error=f"NVML did not answer within {_LIMIT_S:g} s")
            self._pending = None
            return reading


def read_now() -> GpuReading:
    """Read all GPUs, blocking."""
    try:
        import pynvml  # noqa: PLC0415 - hosts without GPUs never load it
    except ImportError:
        return GpuReading()
    try:
        pynvml.nvmlInit()
    except (pynvml.NVMLError_LibraryNotFound, pynvml.NVMLError_DriverNotLoaded):
        return GpuReading()
    except pynvml.NVMLError as error:
        return GpuReading(error=f"NVML: {error}")
    try:
        return _read(pynvml)
    except pynvml.NVMLError as error:
        return GpuReading(error=f"NVML: {error}")
    finally:
        pynvml.nvmlShutdown()


def _read(nvml: Any) -> GpuReading:  # noqa: ANN401 - the library has no types
    samples, holders, lost = [], [], []
    for index in range(nvml.nvmlDeviceGetCount()):
        handle = _may(nvml, nvml.nvmlDeviceGetHandleByIndex, index)
        uuid = None if handle is None else _may(nvml, nvml.nvmlDeviceGetUUID, handle)
        if uuid is None:
            lost.append(index)
            continue
        samples.append(_sample(nvml, handle, index, _text(uuid)))
        for process in _may(nvml, nvml.nvmlDeviceGetComputeRunningProcesses, handle) or ():
            memory_bytes = getattr(process, "usedGpuMemory", None)
            who = _who(process.pid)
            holders.append(GpuHolder(_text(uuid), process.pid, *who, memory_bytes))
    return GpuReading(tuple(samples), tuple(holders), tuple(lost))


def _memory(nvml: Any, handle: Any) -> Any:  # noqa: ANN401
    """Memory in use as nvidia-smi tells it: NVML's first version counts the driver's reserve as used."""
    version = getattr(nvml, "nvmlMemory_v2", None)
    newer = None if version is None else _may(nvml, nvml.nvmlDeviceGetMemoryInfo, handle, version)
    return _may(nvml, nvml.nvmlDeviceGetMemoryInfo, handle) if newer is None else newer


def _sample(nvml: Any, handle: Any, index: int, uuid: str) -> GpuSample:  # noqa: ANN401
    memory = _memory(nvml, handle)
    rates = _may(nvml, nvml.nvmlDeviceGetUtilizationRates, handle)
    power = _may(nvml, nvml.nvmlDeviceGetPowerUsage, handle)
    celsius = _may(nvml, nvml.nvmlDeviceGetTemperature, handle, nvml.NVML_TEMPERATURE_GPU)
    return GpuSample(
        index=index,
        uuid=uuid,
        name=_text(_may(nvml, nvml.nvmlDeviceGetName, handle) or "GPU"),
        util_ratio=None if rates is None else rates.gpu / 100,
        memory_used_bytes=None if memory is None else int(memory.used),
        memory_bytes=None if memory is None else int(memory.total),
        power_w=None if power is None else power / 1000,
        temperature_celsius=None if celsius is None else float(celsius),
    )


def _may(nvml: Any, function: Callable[..., Any], *args: Any) -> Any:  # noqa: ANN401
    """Call NVML; None where this GPU or driver has no answer."""
    try:
        return function(*args)
    except nvml.NVMLError:
        return None


def foreign_holders(
    reading: GpuReading, uuids: Collection[str], own_pids: Collection[int]
) -> tuple[GpuHolder, ...]:
    """Those that hold one of these GPUs, are none of ours and still live."""
    return tuple(
        holder
        for holder in reading.holders
        if holder.uuid in uuids and holder.pid not in own_pids and _lives(holder.pid)
    )


def describe(holders: Sequence[GpuHolder]) -> str:
    """Name holders for a person: pid, program, user, memory."""
    parts = []
    for holder in holders:
        memory = "" if holder.memory_bytes is None else f", {format_bytes(holder.memory_bytes)}"
        user = f" of {holder.user}" if holder.user else ""
        parts.append(f"{holder.name} (pid {holder.pid}{user}{memory})")
    return ", ".join(parts)


def _who(pid: int) -> tuple[str, str | None]:
    name = processes.name_of(pid)
    try:
        owner = (Path("/proc") / str(pid)).stat().st_uid
    except OSError:
        return name, None
    try:
        return name, pwd.getpwuid(owner).pw_name
    except KeyError:
        return name, str(owner)


def _lives(pid: int) -> bool:
    """NVML lists a process some moments longer than it lives."""
    try:
        text = (Path("/proc") / str(pid) / "stat").read_text("utf-8", "replace")
    except FileNotFoundError:
        # In a container NVML may speak of the machine's PIDs, which cannot be seen from here.
        return not _is_outermost()
    except ProcessLookupError:  # it ended between open and read
        return False
    return text[text.rfind(")") + 2] not in "ZX"


def _is_outermost() -> bool:
    """Tell whether we see all PIDs of the machine: the first process namespace has this inode.

    Source: PROC_PID_INIT_INO in include/linux/proc_ns.h.
    """
    try:
        return Path("/proc/self/ns/pid").stat().st_ino == 0xEFFFFFFC
    except OSError:
        return True


def _text(value: str | bytes) -> str:
    """Older drivers' bindings give bytes."""
    return value.decode("utf-8", "replace") if isinstance(value, bytes) else value

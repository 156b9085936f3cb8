"""GPU facts and refusals through a stand-in for NVML."""

import asyncio
import os
import subprocess
import sys
import types

import pytest

from dynctl.agents.host import gpus
from dynctl.core.deployment import EngineState as S
from dynctl.core.plan import PlannedGpu


class NvmlError(Exception):
    pass


class NotFoundError(NvmlError):
    pass


def fake_nvml(holders=(), *, present=("GPU-a", "GPU-b"), broken=()):
    """A module with the calls we make; `holders` are (uuid, pid, bytes), `broken` handles raise."""
    nvml = types.ModuleType("pynvml")
    nvml.NVMLError = NvmlError
    nvml.NVMLError_LibraryNotFound = NotFoundError
    nvml.NVMLError_DriverNotLoaded = NotFoundError
    nvml.NVML_TEMPERATURE_GPU = 0

    def handle(index):
        if index in broken:
            raise NvmlError("GPU is lost")
        return present[index]

    def unsupported(*_):
        raise NvmlError("Not Supported")

    nvml.nvmlInit = lambda: None
    nvml.nvmlShutdown = lambda: None
    nvml.nvmlDeviceGetCount = lambda: len(present)
    nvml.nvmlDeviceGetHandleByIndex = handle
    nvml.nvmlDeviceGetUUID = lambda h: h.encode()
    nvml.nvmlDeviceGetName = lambda h: "NVIDIA H100"
    nvml.nvmlDeviceGetMemoryInfo = lambda h: types.SimpleNamespace(used=5 << 30, total=80 << 30)
    nvml.nvmlDeviceGetUtilizationRates = lambda h: types.SimpleNamespace(gpu=37)
    nvml.nvmlDeviceGetPowerUsage = unsupported
    nvml.nvmlDeviceGetTemperature = lambda h, kind: 41
    nvml.nvmlDeviceGetComputeRunningProcesses = lambda h: [
        types.SimpleNamespace(pid=pid, usedGpuMemory=size)
        for uuid, pid, size in holders
        if uuid == h
    ]
    return nvml


@pytest.fixture
def nvml(monkeypatch):
    def use(*args, **fields):
        monkeypatch.setitem(sys.modules, "pynvml", fake_nvml(*args, **fields))

    return use


def test_host_without_nvml_has_no_gpus_and_no_error(monkeypatch):
    monkeypatch.setitem(sys.modules, "pynvml", None)
    assert gpus.read_now() == gpus.GpuReading()

    nvml = fake_nvml()

    def absent():
        raise NotFoundError

    nvml.nvmlInit = absent
    monkeypatch.setitem(sys.modules, "pynvml", nvml)
    assert gpus.read_now() == gpus.GpuReading()


def test_fields_a_gpu_does_not_answer_are_none(nvml):
    nvml()

    sample = gpus.read_now().samples[0]

    assert (sample.uuid, sample.util_ratio, sample.temperature_celsius) == ("GPU-a", 0.37, 41.0)
    assert sample.power_w is None


def test_lost_gpu_is_counted_and_the_others_are_read(nvml):
    nvml(broken=(0,))

    reading = gpus.read_now()

    assert reading.lost == (0,)
    assert [sample.uuid for sample in reading.samples] == ["GPU-b"]


def test_hanging_driver_gives_an_error_not_a_hanging_agent(monkeypatch):
    monkeypatch.setattr(gpus, "_LIMIT_S", 0.05)
    release = asyncio.Event()

    async def body():
        reader = gpus.GpuReader()
        loop = asyncio.get_running_loop()

        def hang():
            asyncio.run_coroutine_threadsafe(release.wait(), loop).result()
            return gpus.GpuReading(lost=(1,))

        monkeypatch.setattr(gpus, "read_now", hang)
        assert "did not answer" in (await reader.read()).error
        release.set()
        monkeypatch.setattr(gpus, "_LIMIT_S", 60.0)
        assert (await reader.read()).lost == (1,)

    asyncio.run(body())


@pytest.fixture
def stranger():
    process = subprocess.Popen(["sleep", "600"])
    yield process.pid
    process.kill()
    process.wait()


def test_gpu_held_by_a_stranger_is_refused_naming_it(supervised, engine, tools, nvml, stranger):
    nvml(holders=[("GPU-b", stranger, 12 << 30)])

    async def body(supervisor):
        wish = engine(device="gpu", gpus=(PlannedGpu("GPU-b", 1),))
        await supervisor.apply(tools.host_slice(wish))
        await tools.until(supervisor, lambda: tools.state(supervisor) is S.FAILED)

        (status,) = supervisor.status.units
        assert "GPU GPU-b is in use by sleep" in status.last_error
        assert f"pid {stranger}" in status.last_error
        assert "12 GiB" in status.last_error
        assert status.pid is None

    supervised(body)


def test_dead_holder_that_nvml_still_lists_is_no_obstacle(
    supervised, engine, tools, nvml, stranger, ended
):
    os.kill(stranger, 9)
    ended(stranger)
    nvml(holders=[("GPU-a", stranger, 1)])

    async def body(supervisor):
        wish = engine(device="gpu", gpus=(PlannedGpu("GPU-a", 0),))
        await supervisor.apply(tools.host_slice(wish))
        await tools.until(supervisor, lambda: tools.state(supervisor) is S.READY)
        await supervisor.shutdown(now=True)

    supervised(body)


def test_gpu_that_is_not_there_is_refused(supervised, engine, tools, nvml):
    nvml()

    async def body(supervisor):
        wish = engine(device="gpu", gpus=(PlannedGpu("GPU-z", 0),))
        await supervisor.apply(tools.host_slice(wish))
        await tools.until(supervisor, lambda: tools.state(supervisor) is S.FAILED)
        assert "GPU GPU-z is not on this host" in supervisor.status.units[0].last_error

    supervised(body)

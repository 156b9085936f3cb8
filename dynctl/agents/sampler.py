"""One host's figures now: GPUs from NVML, engines, routers and relays from their own `/metrics`.

Asked for, never on its own: an agent nobody watches costs nothing. Not here: rates, history.
IO: sockets, NVML.
"""

import asyncio
import time
from dataclasses import replace
from typing import TypeVar

from dynctl.agents import ask
from dynctl.agents.host.gpus import GpuReader
from dynctl.agents.programs import EngineProgram, RelayProgram, RouterProgram
from dynctl.agents.records import unit_status
from dynctl.agents.root import Run
from dynctl.agents.supervisor import Supervisor
from dynctl.core.deployment import EngineState
from dynctl.core.exposition import relay_sample, router_sample
from dynctl.core.snapshot import (
    EngineSample,
    GpuSample,
    HostSnapshot,
    RelaySample,
    RouterSample,
)
from dynctl.errors import ProbeError
from dynctl.http1.upstream import UpstreamError

_FRESH_S = 0.4
"""A sample this young is given to the next asker too, so that many watchers cost one."""
_SERVING = (EngineState.READY, EngineState.DRAINING)

Key = tuple[str, str]
S = TypeVar("S", EngineSample, RouterSample, RelaySample)


class Sampler:
    """Takes samples of one supervisor's host."""

    def __init__(self, supervisor: Supervisor) -> None:
        self._supervisor = supervisor
        self._gpu_reader = GpuReader()
        self._lock = asyncio.Lock()
        self._last: HostSnapshot | None = None
        self._last_s = 0.0
        self._engines: dict[Key, tuple[float, EngineSample]] = {}
        """By id and incarnation, with the time it was taken: an older one is shown with its age."""
        self._routers: dict[Key, tuple[float, RouterSample]] = {}
        self._relays: dict[Key, tuple[float, RelaySample]] = {}
        self._gpus: tuple[float, tuple[GpuSample, ...]] = (0.0, ())

    async def sample(self) -> HostSnapshot:
        """Ask everything at once; what does not answer keeps its last figures and says how old they are."""
        async with self._lock:
            if self._last is None or time.monotonic() - self._last_s > _FRESH_S:
                self._last = await self._take()
                self._last_s = time.monotonic()
            return self._last

    async def _take(self) -> HostSnapshot:
        units = [unit for unit in self._supervisor.units.values() if not unit.is_aside]
        engines: dict[Key, tuple[EngineProgram, Run]] = {}
        routers: dict[Key, tuple[RouterProgram, Run]] = {}
        relays: dict[Key, Run] = {}
        for unit in units:
            if unit.run is None or unit.life.state not in _SERVING:
                continue
            key = (unit.program.id, unit.run.incarnation)
            if isinstance(unit.program, EngineProgram):
                engines[key] = (unit.program, unit.run)
            elif isinstance(unit.program, RouterProgram):
                routers[key] = (unit.program, unit.run)
            elif isinstance(unit.program, RelayProgram):
                relays[key] = unit.run
        self._engines = {k: v for k, v in self._engines.items() if k in engines}
        self._routers = {k: v for k, v in self._routers.items() if k in routers}
        self._relays = {k: v for k, v in self._relays.items() if k in relays}
        async with asyncio.TaskGroup() as group:
            for key, (engine, run) in engines.items():
                group.create_task(self._ask_engine(key, engine, run), name=f"sample:{key[0]}")
            for key, (router, run) in routers.items():
                group.create_task(self._ask_router(key, router, run), name=f"sample:{key[0]}")
            for key, run in relays.items():
                group.create_task(self._ask_relay(key, run), name=f"sample:{key[0]}")
            error = group.create_task(self._ask_gpus(), name="sample:gpus")
        now_s = time.monotonic()
        wanted = self._supervisor.slice
        return HostSnapshot(
            host_name=wanted.host_name if wanted else "",
            # What does not change is for `status`: samples travel every second.
            units=tuple(replace(unit_status(unit), command="") for unit in units),
            gpus=self._gpus[1],
            engines=tuple(_aged(*self._engines[k], now_s) for k in engines if k in self._engines),
            routers=tuple(_aged(*self._routers[k], now_s) for k in routers if k in self._routers),
            error=error.result(),
            relays=tuple(_aged(*self._relays[k], now_s) for k in relays if k in self._relays),
        )

    async def _ask_engine(self, key: Key, program: EngineProgram, run: Run) -> None:
        try:
            sample = await program.sample(run)
        except (UpstreamError, ProbeError):
            return
        self._engines[key] = (time.monotonic(), sample)

    async def _ask_router(self, key: Key, program: RouterProgram, run: Run) -> None:
        try:
            text = await ask.metrics(run.at)
            sample = router_sample(text, program.id, program.deployment)
        except (UpstreamError, ProbeError):
            return
        self._routers[key] = (time.monotonic(), sample)

    async def _ask_relay(self, key: Key, run: Run) -> None:
        try:
            sample = relay_sample(await ask.metrics(run.at), *key)
        except (UpstreamError, ProbeError):
            return
        self._relays[key] = (time.monotonic(), sample)

    async def _ask_gpus(self) -> str:
        """Read the GPUs; returns why it could not."""
        reading = await self._gpu_reader.read()
        if not reading.error:
            self._gpus = (time.monotonic(), reading.samples)
        return reading.error


def _aged(taken_s: float, sample: S, now_s: float) -> S:
    return replace(sample, age_s=now_s - taken_s)

"""`watch`: ask every host's agent at a steady pace and yield Snapshots; a slow or dead host delays no other.

Not here: rates and percentiles (`history`), what an agent reports. IO: HTTP through the given sources, clock.
"""

import asyncio
import time
from collections.abc import AsyncIterator, Mapping
from dataclasses import dataclass, replace
from types import TracebackType
from typing import Protocol, Self

from dynctl.core.snapshot import HostSnapshot, Snapshot
from dynctl.errors import DynctlError
from dynctl.files import reason
from dynctl.telemetry.answers import Answers, Asks
from dynctl.telemetry.inquiry import UnitSource, inquire

PERIOD_S = 1.0
ANSWER_TIMEOUT_S = 5.0
"""A host that has not answered by then is reported as such, and asked again."""


class Source(UnitSource, Protocol):
    """Something that reports one host, such as `SteadyAgent`."""

    async def sample(self) -> HostSnapshot:
        """Return the host now; raises DynctlError when it cannot be asked."""
        ...


class Watched(Protocol):
    """Snapshots one after another, and answers to what a screen needs beyond them."""

    def __aiter__(self) -> AsyncIterator[Snapshot]:
        """Begin."""
        ...

    async def answer(self, asks: Asks) -> Answers:
        """Ask; what fails is told in the answers."""
        ...


@dataclass(slots=True)
class _Known:
    """The last a host said, and when."""

    host: HostSnapshot
    received_s: float | None
    """Monotonic; None: it has never answered."""
    error: str


class Watch:
    """An open watch: iterate for Snapshots, one per period. Made by `watch`."""

    def __init__(
        self, cluster: str, sources: Mapping[str, Source | DynctlError], period_s: float
    ) -> None:
        self._cluster = cluster
        self._sources = dict(sources)
        self._period_s = period_s
        self._known = {
            name: _Known(HostSnapshot(name), None, _first_error(name, source))
            for name, source in sources.items()
        }
        self._tasks: list[asyncio.Task[None]] = []
        self._next_s = 0.0
        self._answered = asyncio.Event()

    async def __aenter__(self) -> Self:
        self._tasks = [
            asyncio.create_task(self._poll(name, source), name=f"watch:{name}")
            for name, source in self._sources.items()
            if not isinstance(source, DynctlError)
        ]
        return self

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)

    def __aiter__(self) -> AsyncIterator[Snapshot]:
        return self

    async def __anext__(self) -> Snapshot:
        """Wait for the next tick; the first one comes as soon as every host has answered or failed, or a period passed."""
        now_s = time.monotonic()
        if self._next_s == 0.0:
            await self._first_answers()
            self._next_s = time.monotonic()
        elif self._next_s > now_s:
            await asyncio.sleep(self._next_s - now_s)
        # A reader that was away does not get a burst of late ticks.
        self._next_s = max(self._next_s, time.monotonic() - self._period_s) + self._period_s
        for task in self._tasks:
            if task.done():
                task.result()
        return self._snapshot()

    async def answer(self, asks: Asks) -> Answers:
        """Ask what a screen needs beyond snapshots, of the hosts that answered last time; what fails is told with its cause."""
        hosts = {
            name: source
            for name, source in self._sources.items()
            if not isinstance(source, DynctlError) and not self._known[name].error
        }
        routers = {
            router.id: source
            for name, source in hosts.items()
            for router in self._known[name].host.routers
        }
        return await inquire(asks, routers, hosts)

    async def _first_answers(self) -> None:
        try:
            async with asyncio.timeout(self._period_s):
                while any(
                    k.received_s is None and k.error == _NO_ANSWER for k in self._known.values()
                ):
                    self._answered.clear()
                    await self._answered.wait()
        except TimeoutError:
            pass

    def _snapshot(self) -> Snapshot:
        now_s = time.monotonic()
        return Snapshot(
            self._cluster,
            time.time(),
            tuple(_aged(known, now_s) for known in self._known.values()),
        )

    async def _poll(self, name: str, source: Source) -> None:
        known = self._known[name]
        while True:
            started_s = time.monotonic()
            try:
                async with asyncio.timeout(ANSWER_TIMEOUT_S):
                    known.host = replace(await source.sample(), host_name=name)
                known.received_s, known.error = time.monotonic(), ""
            except TimeoutError:
                known.error = f"no answer within {ANSWER_TIMEOUT_S:.0f} s"
            except DynctlError as error:
                known.error = _why(name, error)
            except OSError as error:
                known.error = reason(error) or type(error).__name__
            self._answered.set()
            await asyncio.sleep(max(0.05, started_s + self._period_s - time.monotonic()))


_NO_ANSWER = "no answer yet"


def _first_error(name: str, source: Source | DynctlError) -> str:
    return _why(name, source) if isinstance(source, DynctlError) else _NO_ANSWER


def _why(name: str, error: DynctlError) -> str:
    """Why a host does not answer, without its name: whoever shows it says which it is."""
    return error.message.removeprefix(f"{name}: ")


def _aged(known: _Known, now_s: float) -> HostSnapshot:
    """The last known state with its age now, and why there is no newer one."""
    age_s = 0.0 if known.received_s is None else now_s - known.received_s
    return replace(
        known.host, age_s=known.host.age_s + age_s, error=known.error or known.host.error
    )


def watch(
    cluster: str, sources: Mapping[str, Source | DynctlError], period_s: float = PERIOD_S
) -> Watch:
    """Watch hosts: `async with watch(…) as snapshots: async for snapshot in snapshots`.

    `sources` maps host names to who reports them, or to why nobody can.
    """
    return Watch(cluster, sources, period_s)

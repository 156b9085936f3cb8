"""All pairs of hosts, round after round; in a round no host is in two tests. IO: hosts, clock."""

import asyncio
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from dynctl.core.links import LinkKind, LinkMeasurement
from dynctl.core.units import KIB, MIB
from dynctl.errors import DynctlError
from dynctl.linktest.answers import failed, nixl_measurements, tcp_measurements
from dynctl.linktest.pair import Ports, Seat, run_pair
from dynctl.linktest.schedule import rounds

ROUND_TRIP_BYTES = 64
NIXL_START_S = 60.0
"""Importing NIXL on a busy host, and the kinds beyond the first; a limit, not what it takes."""


@dataclass(frozen=True, slots=True)
class Pace:
    """How long a pair may take, and which points are wanted: message bytes and streams at once."""

    round_trip_s: float
    throughput_s: float
    points: tuple[tuple[int, int], ...]

    @property
    def expected_s(self) -> float:
        """How long a pair takes on a link that is not very slow."""
        return self.round_trip_s + self.throughput_s


FULL = Pace(
    0.3,
    1.7,
    # The points that tell most come first: a slow link gets no further within its time.
    (
        (64 * KIB, 1), (MIB, 1), (MIB, 4), (16 * MIB, 1), (16 * MIB, 4), (64 * KIB, 4),
    ),
)  # fmt: skip
QUICK = Pace(0.1, 0.4, ((64 * KIB, 1), (MIB, 4)))


@dataclass(frozen=True, slots=True)
class Program:
    """A way to measure: the hosts that can do it, and how its answer becomes measurements."""

    name: str
    kinds: tuple[LinkKind, ...]
    seats: Mapping[str, Seat]
    read: Callable[[str, str, bytes, float], list[LinkMeasurement]]
    extra_s: float = 0.0
    """Time it needs before it measures."""


Told = Callable[[int, int, Sequence[LinkMeasurement]], None]
"""Called after each round with its number from 1, how many there are, and what it measured."""


def tcp(seats: Mapping[str, Seat]) -> Program:
    """TCP by the host's own Python."""
    return Program("tcp", (LinkKind.TCP,), seats, tcp_measurements)


def nixl(seats: Mapping[str, Seat]) -> Program:
    """NIXL by the engine's Python; kinds with GPU memory come by themselves where both ends have it."""
    return Program("nixl_pull", (LinkKind.NIXL_DRAM,), seats, nixl_measurements, NIXL_START_S)


async def measure(
    host_names: Sequence[str],
    programs: Sequence[Program],
    pace: Pace,
    ports: Ports,
    told: Told = lambda *_: None,
) -> list[LinkMeasurement]:
    """Measure every pair with every program both its hosts can run; a pair that fails is there with its cause."""
    found: list[LinkMeasurement] = []
    drawn = rounds(host_names)
    for number, pairs in enumerate(drawn, 1):
        made: list[LinkMeasurement] = []
        for program in programs:
            able = [p for p in pairs if p[0] in program.seats and p[1] in program.seats]
            made += await _round(program, able, pace, ports)
        found += made
        told(number, len(drawn), made)
    return found


async def _round(
    program: Program, pairs: Sequence[tuple[str, str]], pace: Pace, ports: Ports
) -> list[LinkMeasurement]:
    async with asyncio.TaskGroup() as tasks:
        running = [
            tasks.create_task(_one(program, near, far, pace, ports), name=f"link:{near}:{far}")
            for near, far in pairs
        ]
    return [link for task in running for link in task.result()]


async def _one(
    program: Program, near: str, far: str, pace: Pace, ports: Ports
) -> list[LinkMeasurement]:
    wish = {
        "round_trip_bytes": ROUND_TRIP_BYTES,
        "round_trip_s": pace.round_trip_s,
        "throughput_s": pace.throughput_s,
        "points": pace.points,
        "max_streams": max(num_streams for _, num_streams in pace.points),
    }
    seats = program.seats
    now_s = time.time()
    expected_s = pace.expected_s * len(program.kinds) + program.extra_s
    try:
        line = await run_pair(program.name, seats[near], seats[far], ports, wish, expected_s)
        return program.read(near, far, line, now_s)
    except DynctlError as error:
        return [m for kind in program.kinds for m in failed(near, far, kind, now_s, error.message)]

"""Whole layouts of one deployment: how many engines of which option, aggregated or prefill and decode apart, priced.

Aggregated engines are independent; options of several GPU kinds share the rate by what each bears. Prefill and decode
are matched to the rate inside a cell: one host, or the hosts whose network is at least so fast.
Not here: choosing among layouts (`choosing`), taking GPUs (`placement`).
Pure.
"""

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

from dynctl.core.inventory import DeploymentWish
from dynctl.core.model import Model
from dynctl.core.plan import Figure, Role
from dynctl.core.workload import Slo
from dynctl.planner.calibration import Calibration
from dynctl.planner.estimate import (
    LEAST_RPS,
    Layout,
    Served,
    Side,
    max_rate_rps,
    meets,
    serve,
)
from dynctl.planner.options import Option, engines_of
from dynctl.planner.pairing import pair_fault
from dynctl.planner.placement import Group, natural
from dynctl.planner.transfer import Fabric, Speed

MAX_SPEEDS = 8
"""Network speeds at which host sets are cut."""
_MANY = 128
"""So many engines of one role that only the other one binds."""
MAX_SIZES = 10
"""Options of one GPU kind tried on each side of prefill/decode."""


@dataclass(frozen=True, slots=True, eq=False)
class Part:
    """So many engines of one option in one role."""

    role: Role
    option: Option
    count: int
    groups: tuple[Group, ...]
    """Where they may be, best first."""

    @property
    def num_gpus(self) -> int:
        """GPUs taken."""
        return self.count * self.option.size

    @property
    def name(self) -> str:
        """`2 × tp4 on NVIDIA H100 (NV18)`."""
        return f"{self.count} × {self.option.name}"


@dataclass(frozen=True, slots=True, eq=False)
class Choice:
    """One layout and how it serves the wished rate."""

    parts: tuple[Part, ...]
    served: Served
    rate_rps: float
    """The highest rate within the goals."""
    speed: Speed | None = None
    """Between prefill and decode at worst; None: aggregated."""
    where: str = ""
    gain: Figure | None = None
    """Prefill/decode over aggregated engines, in rate per GPU; None: aggregated ones, or these serve nothing."""

    @property
    def num_gpus(self) -> int:
        """GPUs taken in all."""
        return sum(part.num_gpus for part in self.parts)

    @property
    def is_split(self) -> bool:
        """Whether prefill and decode are apart."""
        return self.speed is not None

    @property
    def name(self) -> str:
        """What it is made of."""
        if self.is_split:
            return " + ".join(f"{part.role.value} {part.name}" for part in self.parts)
        return " + ".join(part.name for part in self.parts)


@dataclass(slots=True)
class Pricer:
    """Prices layouts of one deployment, and counts how many: a search that must end early says so."""

    wish: DeploymentWish
    fabric: Fabric
    left: int
    """How many more layouts may be priced."""
    calibration: Calibration

    _borne: dict[tuple[str, int, int, float], float] = field(default_factory=dict)

    @property
    def is_spent(self) -> bool:
        """Whether the search has to stop at the best so far."""
        return self.left <= 0

    def serve(self, layout: Layout, rate_rps: float | None = None) -> Served:
        """Price at a rate, None: the wished one."""
        self.left -= 1
        work = self.wish.workload
        return serve(layout, work, work.rate_rps if rate_rps is None else rate_rps)

    def meets(self, layout: Layout, rate_rps: float | None = None) -> bool:
        """Whether the goals hold."""
        return meets(self.serve(layout, rate_rps), self.wish.slo)

    def max_rate_rps(self, layout: Layout) -> float:
        """The highest rate within the goals."""
        rate = max_rate_rps(layout, self.wish.workload, self.wish.slo)
        self.left -= 24 if rate else 1
        return rate

    def bears(self, key: tuple[str, int, int, float], layout: Layout) -> float:
        """The highest rate within the goals of a layout that is asked for again and again."""
        if key not in self._borne:
            self._borne[key] = self.max_rate_rps(layout)
        return self._borne[key]

    def side(self, option: Option, count: int) -> Side:
        """Engines of an option as the estimate sees them."""
        return engines_of(self.wish, option, count)

    def alone(self, option: Option, count: int) -> Layout:
        """Aggregated engines."""
        return Layout(self.side(option, count))

    def apart(self, p: Option, num_p: int, d: Option, num_d: int, bytes_s: float) -> Layout:
        """Prefill and decode engines."""
        return Layout(self.side(p, num_p), self.side(d, num_d), bytes_s)


def aggregated(pricer: Pricer, option: Option, rate_rps: float) -> Choice | None:
    """The fewest engines of an option that serve a rate; None when there are not enough.

    The caller has priced one engine: `rate_rps` is the most it serves within the goals.
    """
    if rate_rps <= 0:
        return None
    wanted = pricer.wish.workload.rate_rps
    count = max(1, math.ceil(wanted / rate_rps - 1e-9))
    if count > len(option.groups):
        return None
    served = pricer.serve(pricer.alone(option, count))
    part = Part(Role.AGGREGATED, option, count, option.groups)
    return Choice((part,), served, rate_rps * count)


def mixed(pricer: Pricer, rates: Sequence[tuple[Option, float]]) -> Choice | None:
    """Engines of several options together, the best per GPU first; None when all of them do not serve the rate.

    Every option but the last gives all engines it still has room for, each on GPUs of its own.
    """
    ranked = sorted(
        ((o, rate) for o, rate in rates if rate > 0),
        key=lambda each: (-each[1] / each[0].size, each[0].kind, each[0].size),
    )
    wanted = left = pricer.wish.workload.rate_rps
    used: set[tuple[str, int]] = set()
    taken: list[tuple[Part, float]] = []
    for option, rate in ranked:
        free = [g for g in option.groups if used.isdisjoint(_gpus_of(g))]
        count = min(len(free), math.ceil(left / rate - 1e-9)) if left > 1e-9 else 0
        if count:
            used.update(gpu for group in free[:count] for gpu in _gpus_of(group))
            taken.append((Part(Role.AGGREGATED, option, count, tuple(free)), rate * count))
            left -= rate * count
    if left > 1e-9 or len(taken) < 2:
        return None
    total = sum(most for _, most in taken)
    served = [
        pricer.serve(pricer.alone(part.option, part.count), wanted * most / total)
        for part, most in taken
    ]
    worst = max(served, key=lambda s: s.ttft_p99_s)
    return Choice(tuple(part for part, _ in taken), worst, total)


def _gpus_of(group: Group) -> list[tuple[str, int]]:
    return [(group.host.name, position) for position in group.positions]


@dataclass(frozen=True, slots=True, eq=False)
class Cell:
    """Where prefill and decode of one layout may be, and how fast KV moves there at worst."""

    prefill: tuple[Group, ...]
    decode: tuple[Group, ...]
    speed: Speed
    where: str

    def has(self, p: Option, num_p: int, d: Option, num_d: int) -> bool:
        """Whether so many engines find room."""
        if p.kind != d.kind:
            return num_p <= len(self.prefill) and num_d <= len(self.decode)
        big, small = max(p.size, d.size), min(p.size, d.size)
        num_big, num_small = (num_p, num_d) if p.size >= d.size else (num_d, num_p)
        room = len(self.prefill) if p.size >= d.size else len(self.decode)
        return num_big + math.ceil(num_small / (big // small)) <= room


def cells(pricer: Pricer, p: Option, d: Option) -> Iterator[Cell]:
    """Single hosts that hold both roles, then host sets by the speed of their network, the fastest first."""
    by_host: dict[str, tuple[list[Group], list[Group]]] = {}
    for at, groups in enumerate((p.groups, d.groups)):
        for group in groups:
            by_host.setdefault(group.host.name, ([], []))[at].append(group)
    alone: list[Cell] = []
    for name in sorted(by_host, key=natural):
        ours, theirs = by_host[name]
        if ours and theirs and len(ours) + len(theirs) > 2 - (p.kind != d.kind):
            speed = _speed_inside(pricer, ours, theirs)
            _keep(alone, Cell(tuple(ours), tuple(theirs), speed, f"inside {name}"))
    yield from alone
    if len(by_host) > 1:
        yield from _host_sets(pricer, p, d)


def _keep(kept: list[Cell], cell: Cell) -> None:
    """Keep a host unless another one has as much room and speed."""

    def covers(one: Cell, other: Cell) -> bool:
        return (
            len(one.prefill) >= len(other.prefill)
            and len(one.decode) >= len(other.decode)
            and one.speed.bytes_s >= other.speed.bytes_s
        )

    if not any(covers(other, cell) for other in kept):
        kept[:] = [other for other in kept if not covers(cell, other)]
        kept.append(cell)


def _speed_inside(pricer: Pricer, ours: Sequence[Group], theirs: Sequence[Group]) -> Speed:
    if ours[0].gpus[0].name != theirs[0].gpus[0].name:
        return pricer.fabric.pair(ours[0], theirs[0])
    return min(
        (pricer.fabric.inside(group) for group in {id(g): g for g in (*ours, *theirs)}.values()),
        key=lambda speed: speed.bytes_s,
    )


def _host_sets(pricer: Pricer, p: Option, d: Option) -> Iterator[Cell]:
    groups = (*p.groups, *d.groups)
    speeds = sorted({pricer.fabric.reach(group).bytes_s for group in groups}, reverse=True)
    if len(speeds) > MAX_SPEEDS:
        speeds = [*speeds[: MAX_SPEEDS - 1], speeds[-1]]
    for least in speeds:
        fast = [g for g in p.groups if pricer.fabric.reach(g).bytes_s >= least]
        near = [g for g in d.groups if pricer.fabric.reach(g).bytes_s >= least]
        kept = {g.host.name for g in pricer.fabric.joined([*fast, *near], least * 0.5)}
        fast = [g for g in fast if g.host.name in kept]
        near = [g for g in near if g.host.name in kept]
        if fast and near:
            speed = _worst_between(pricer, fast, near, least)
            yield Cell(tuple(fast), tuple(near), speed, "over hosts")


def _worst_between(
    pricer: Pricer, ours: Sequence[Group], theirs: Sequence[Group], least_bytes_s: float
) -> Speed:
    if pricer.fabric.has_measurements:
        return pricer.fabric.worst(ours, theirs)
    slowest = min((*ours, *theirs), key=lambda group: pricer.fabric.reach(group).bytes_s)
    return Speed(least_bytes_s, pricer.fabric.reach(slowest).how)


def split(pricer: Pricer, p: Option, d: Option, cell: Cell, most_gpus: int) -> Choice | None:
    """Rate matching: add prefill engines until TTFT holds, decode engines until ITL and capacity hold."""
    if not cell.has(p, 1, d, 1) or not pricer.meets(
        pricer.apart(p, 1, d, 1, cell.speed.bytes_s), LEAST_RPS
    ):
        return None
    found = _grow(pricer, p, d, cell, most_gpus)
    if found is None:
        return None
    num_p, num_d = _shrink(pricer, p, d, cell, found)
    layout = pricer.apart(p, num_p, d, num_d, cell.speed.bytes_s)
    return Choice(
        (
            Part(Role.PREFILL, p, num_p, cell.prefill),
            Part(Role.DECODE, d, num_d, cell.decode),
        ),
        pricer.serve(layout),
        pricer.max_rate_rps(layout),
        cell.speed,
        cell.where,
    )


def _grow(
    pricer: Pricer, p: Option, d: Option, cell: Cell, most_gpus: int
) -> tuple[int, int] | None:
    """Add engines to the side that binds, in growing steps; one by one once a step overshot the room."""
    num_p, num_d = 1, 1
    is_careful = False
    while cell.has(p, num_p, d, num_d) and not pricer.is_spent:
        if num_p * p.size + num_d * d.size > most_gpus:
            return None
        served = pricer.serve(pricer.apart(p, num_p, d, num_d, cell.speed.bytes_s))
        if meets(served, pricer.wish.slo):
            return num_p, num_d
        wants_p, wants_d = _binding(served, pricer.wish.slo)
        if not (wants_p or wants_d):
            return None
        more_p = wants_p * (1 if is_careful else max(1, num_p // 4))
        more_d = wants_d * (1 if is_careful else max(1, num_d // 4))
        if not cell.has(p, num_p + more_p, d, num_d + more_d):
            if max(more_p, more_d) > 1:
                is_careful = True
                continue
            if more_p and more_d:
                # Links bind, and there is no room for one more at either end: the end with fewer links first.
                more_p, more_d = (1, 0) if num_p < num_d else (0, 1)
                if not cell.has(p, num_p + more_p, d, num_d + more_d):
                    more_p, more_d = more_d, more_p
        num_p, num_d = num_p + more_p, num_d + more_d
    return None


def _binding(served: Served, slo: Slo) -> tuple[bool, bool]:
    """Whether prefill, decode or both need more engines."""
    is_late = slo.ttft_ms is not None and served.ttft_p99_s * 1e3 > slo.ttft_ms
    is_slow = slo.itl_ms is not None and served.itl_p99_s * 1e3 > slo.itl_ms
    if served.limit == "kv cache" or (is_slow and served.limit != "prefill"):
        return False, True
    if served.limit == "transfer":
        return True, True
    return served.limit == "prefill" or is_late, False


def _shrink(
    pricer: Pricer, p: Option, d: Option, cell: Cell, found: tuple[int, int]
) -> tuple[int, int]:
    """Take back engines that large steps added beyond need."""
    num_p, num_d = found
    is_smaller = True
    while is_smaller and not pricer.is_spent:
        is_smaller = False
        for fewer_p, fewer_d in ((num_p, num_d - 1), (num_p - 1, num_d)):
            if min(fewer_p, fewer_d) >= 1 and pricer.meets(
                pricer.apart(p, fewer_p, d, fewer_d, cell.speed.bytes_s)
            ):
                num_p, num_d = fewer_p, fewer_d
                is_smaller = True
                break
    return num_p, num_d


def gpus_per_rps(pricer: Pricer, p: Option, d: Option, cell: Cell) -> tuple[float, float] | None:
    """GPUs that many well matched prefill and decode engines take per request a second; None: they serve nothing."""
    speed, num = cell.speed.bytes_s, min(_MANY // 4, len(cell.prefill))
    ours = pricer.bears(("p", id(p), num, speed), pricer.apart(p, num, d, _MANY, speed))
    theirs = pricer.bears(("d", id(d), 1, speed), pricer.apart(p, _MANY, d, 1, speed))
    if ours <= 0 or theirs <= 0:
        return None
    return p.size * num / ours, d.size / theirs


def pairs(options: Sequence[Option], model: Model) -> Iterator[tuple[Option, Option]]:
    """Options that may hand over to each other, equal ones first."""
    sizes: dict[object, list[Option]] = {}
    for option in options:
        mine = sizes.setdefault(option.kind, [])
        if len(mine) < MAX_SIZES:
            mine.append(option)
    chosen = [option for mine in sizes.values() for option in mine]
    yield from ((option, option) for option in chosen)
    for p in chosen:
        for d in chosen:
            if p is not d and not pair_fault(model, p.kind, p.parallelism, d.kind, d.parallelism):
                yield p, d

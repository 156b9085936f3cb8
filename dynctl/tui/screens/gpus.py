"""GPUs: a heat map of hosts by GPU, and a row for each GPU with the engine on it. Pure."""

from collections.abc import Callable
from dataclasses import dataclass
from itertools import groupby

from dynctl.core.snapshot import GpuSample
from dynctl.core.units import GIB
from dynctl.telemetry.figures import STALE_S, EngineFigures, HostFigures
from dynctl.tui.columns import Column, choose, header, row
from dynctl.tui.draw import MISSING, Line, Span, line, percent, rule, whole
from dynctl.tui.listing import filter_note, listing
from dynctl.tui.panels.gpus import LEGEND, heat_map
from dynctl.tui.screen import Screen
from dynctl.tui.view import View, passes


@dataclass(frozen=True, slots=True)
class _Gpu:
    """One GPU, where it is and who uses it."""

    host: HostFigures
    gpu: GpuSample
    engine: EngineFigures | None

    @property
    def is_old(self) -> bool:
        return self.host.age_s > STALE_S


_Figure = Callable[[_Gpu], float | None]


def _memory(one: _Gpu) -> float | None:
    used, size = one.gpu.memory_used_bytes, one.gpu.memory_bytes
    return None if used is None or not size else used / size


METRICS: tuple[tuple[str, _Figure], ...] = (
    ("use", lambda one: one.gpu.util_ratio),
    ("memory", _memory),
    ("KV in use", lambda one: one.engine.kv_usage_ratio if one.engine else None),
)
"""What the heat map shows, as shares of the most there can be."""


def rows(view: View, width: int, height: int) -> list[Line]:
    """Draw heat map and table; on hosts without GPUs there is neither."""
    known = _gpus(view)
    if not known:
        return [rule(width), line(Span(" no GPUs on these hosts", "dim"))][:height]
    name, figure = METRICS[view.choices.metric % len(METRICS)]
    drawn = [
        rule(width),
        line(
            Span(f" GPU {name}", "title"),
            Span(f"  host × GPU, {LEGEND}   m: another figure", "dim"),
        ),
    ]
    by_host = [
        (group[0].host, [figure(one) for one in group])
        for group in (list(found) for _, found in groupby(known, key=lambda one: one.host.name))
    ]
    drawn += heat_map(by_host, width, max(1, height // 3))
    listed = _listed(view)
    columns = choose(_columns(listed), width)
    drawn += [rule(width), header(columns)]

    def draw(one: _Gpu) -> Line:
        drawn_row = row(columns, one)
        return tuple(Span(s.text, s.style or "dim") for s in drawn_row) if one.is_old else drawn_row

    size = (width, height - len(drawn))
    return [*drawn, *listing(view, listed, draw, size, "GPUs", filter_note(view))][:height]


def _gpus(view: View) -> list[_Gpu]:
    overview = view.overview
    if overview is None:
        return []
    users = {(e.host_name, index): e for e in overview.engines for index in e.gpu_indices}
    return [
        _Gpu(host, gpu, users.get((host.name, gpu.index)))
        for host in overview.hosts
        for gpu in host.gpus
    ]


def _listed(view: View) -> list[_Gpu]:
    wanted = view.choices.place.filter
    return [one for one in _gpus(view) if passes(_fields(one), wanted)]


def _fields(one: _Gpu) -> dict[str, str]:
    return {
        "host": one.host.name,
        "name": one.gpu.name,
        "engine": one.engine.id if one.engine else "",
        "role": one.engine.role if one.engine else "",
    }


def _columns(listed: list[_Gpu]) -> list[Column[_Gpu]]:
    host_width = max([4, *(len(one.host.name) for one in listed)])
    model_width = max([5, *(len(one.gpu.name) for one in listed)])
    engine_width = max([6, *(len(one.engine.id) for one in listed if one.engine)])

    def fresh(show: Callable[[_Gpu], str]) -> Callable[[_Gpu, int], Span]:
        return lambda one, _: Span(MISSING if one.is_old else show(one))

    return [
        Column("HOST", min(host_width, 8), lambda one, _: Span(one.host.name), is_right=False,
               is_flexible=True, max_width=min(host_width, 24)),
        Column("GPU", 3, lambda one, _: Span(str(one.gpu.index))),
        Column("MODEL", min(model_width, 10), lambda one, _: Span(one.gpu.name), drop=2, is_right=False,
               is_flexible=True, max_width=min(model_width, 32)),
        Column("UTIL", 5, fresh(lambda one: percent(one.gpu.util_ratio))),
        Column("MEM GiB", 11, fresh(_memory_text)),
        Column("W", 5, fresh(lambda one: whole(one.gpu.power_w)), drop=3),
        Column("°C", 4, fresh(lambda one: whole(one.gpu.temperature_celsius)), drop=4),
        Column("ENGINE", min(engine_width, 14), lambda one, _: Span(one.engine.id if one.engine else MISSING),
               is_right=False, is_flexible=True, max_width=min(engine_width, 40)),
        Column("KV%", 4, fresh(lambda one: percent(one.engine.kv_usage_ratio if one.engine else None, ""))),
        Column("AGE", 5, lambda one, _: Span(f"{one.host.age_s:.0f}s", "bad" if one.is_old else ""), drop=1),
    ]  # fmt: skip


def _memory_text(one: _Gpu) -> str:
    used, size = one.gpu.memory_used_bytes, one.gpu.memory_bytes
    return MISSING if used is None or size is None else f"{used / GIB:.1f}/{size / GIB:.0f}"


def _engine(view: View) -> str:
    listed = _listed(view)
    if not listed:
        return ""
    engine = listed[min(view.choices.place.cursor, len(listed) - 1)].engine
    return engine.id if engine else ""


SCREEN = Screen(
    "gpus",
    rows,
    num_rows=lambda view: len(_listed(view)),
    num_metrics=len(METRICS),
    engine=_engine,
)

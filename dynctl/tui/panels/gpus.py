"""GPU use as a heat map, one row of eighths per host. Pure."""

from dynctl.core.snapshot import GpuSample
from dynctl.telemetry.figures import STALE_S, HostFigures
from dynctl.tui.draw import EIGHTHS, Line, Span, cell, line, percent, whole
from dynctl.tui.view import View


def rows(view: View, width: int, height: int) -> list[Line]:
    """Draw the title, the hottest GPU, and as many hosts as there is room for."""
    hosts = view.overview.hosts if view.overview else ()
    drawn = [
        line(Span("GPU use", "title"), Span("  host × GPU, 0 ▁▂▃▄▅▆▇█ 100%, ✕ no data", "dim"))
    ]
    with_gpus = [host for host in hosts if host.gpus]
    if not with_gpus:
        return [*drawn, line(Span(" no GPUs on these hosts", "dim"))][:height]
    name_width = min(20, width // 3, max(len(host.name) for host in with_gpus))
    drawn += [_host(host, name_width) for host in with_gpus]
    hottest = max(
        ((gpu.util_ratio or 0.0, host.name, gpu) for host in with_gpus for gpu in host.gpus),
        key=lambda found: found[0],
    )
    drawn[height - 1 :] = [_hottest(*hottest[1:])]
    return drawn[:height]


def _host(host: HostFigures, name_width: int) -> Line:
    is_old = host.age_s > STALE_S
    blocks = "".join(
        "✕" if is_old or g.util_ratio is None else _block(g.util_ratio) for g in host.gpus
    )
    note = f"  {host.age_s:.0f}s old" if is_old else ""
    return line(
        " ",
        cell(host.name, name_width),
        " ",
        Span(blocks, "dim" if is_old else ""),
        Span(note, "bad"),
    )


def _block(ratio: float) -> str:
    return EIGHTHS[max(1, min(8, round(ratio * 8)))]


def _hottest(host_name: str, gpu: GpuSample) -> Line:
    degrees = (
        f"  {whole(gpu.temperature_celsius)} °C" if gpu.temperature_celsius is not None else ""
    )
    return line(
        f" busiest {cell(host_name, 12).strip()}:{gpu.index}  {percent(gpu.util_ratio)}{degrees}"
    )

"""GPU use as a heat map, one row of eighths per host. Pure."""

from collections.abc import Sequence

from dynctl.core.snapshot import GpuSample
from dynctl.telemetry.figures import STALE_S, HostFigures
from dynctl.tui.draw import EIGHTHS, Line, Span, cell, line, percent, whole
from dynctl.tui.view import View

LEGEND = "0 ▁▂▃▄▅▆▇█ 100%, · not known, ✕ old"
Shares = Sequence[float | None]
"""By GPU; None: not known."""


def rows(view: View, width: int, height: int) -> list[Line]:
    """Draw the title, the hottest GPU, and as many hosts as there is room for."""
    hosts = view.overview.hosts if view.overview else ()
    drawn = [line(Span("GPU use", "title"), Span(f"  host × GPU, {LEGEND}", "dim"))]
    with_gpus = [host for host in hosts if host.gpus]
    if not with_gpus:
        return [*drawn, line(Span(" no GPUs on these hosts", "dim"))][:height]
    uses = [(host, [gpu.util_ratio for gpu in host.gpus]) for host in with_gpus]
    drawn += heat_map(uses, width, max(0, height - 2))
    hottest = max(
        ((gpu.util_ratio or 0.0, host.name, gpu) for host in with_gpus for gpu in host.gpus),
        key=lambda found: found[0],
    )
    return [*drawn, _hottest(*hottest[1:])][:height]


def heat_map(hosts: Sequence[tuple[HostFigures, Shares]], width: int, height: int) -> list[Line]:
    """Draw one row per host, several beside each other where there are more than lines."""
    if not hosts or height <= 0:
        return []
    name_width = min(20, width // 3, max(len(host.name) for host, _ in hosts))
    most = max(len(shares) for _, shares in hosts)
    cell_width = name_width + most + 12
    num_columns = max(1, min(width // cell_width, -(-len(hosts) // height)))
    num_rows = -(-len(hosts) // num_columns)
    drawn = [
        tuple(
            span
            for host, shares in hosts[at::num_rows]
            for span in _host(host, shares, name_width, most)
        )
        for at in range(num_rows)
    ]
    if num_rows > height:
        left = sum(len(hosts[at::num_rows]) for at in range(height - 1, num_rows))
        drawn[height - 1 :] = [line(Span(f" … {left} more hosts", "dim"))]
    return drawn


def _host(host: HostFigures, shares: Shares, name_width: int, most: int) -> Line:
    is_old = host.age_s > STALE_S
    blocks = "".join("✕" if is_old else "·" if s is None else _block(s) for s in shares)
    note = f"  {min(host.age_s, 99999):.0f}s old" if is_old else ""
    return line(
        " ",
        cell(host.name, name_width),
        " ",
        Span(f"{blocks:<{most}}", "dim" if is_old else ""),
        Span(f"{note:<10}", "bad"),
    )


def _block(ratio: float) -> str:
    return EIGHTHS[max(1, round(max(0.0, min(1.0, ratio)) * 8))]


def _hottest(host_name: str, gpu: GpuSample) -> Line:
    degrees = (
        f"  {whole(gpu.temperature_celsius)} °C" if gpu.temperature_celsius is not None else ""
    )
    return line(
        f" busiest {cell(host_name, 12).strip()}:{gpu.index}  {percent(gpu.util_ratio)}{degrees}"
    )

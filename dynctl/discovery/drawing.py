"""Hosts drawn for a terminal: the matrix of GPU links in boxes of NUMA nodes, islands, groups and nearest NICs.

At most 80 columns wide, whatever the host; colours only where they are asked for.
Pure.
"""

from collections.abc import Sequence

from dynctl.core.hardware import Gpu, Host, Topology
from dynctl.discovery.view import groups_of

WIDTH = 80
_LABEL = 8
_COLOURS = {"NV": "32", "XGMI": "32", "PIX": "36", "PXB": "36", "PHB": "34", "NODE": "33", "SYS": "31", "SOC": "31", "?": "35"}  # fmt: skip
"""Green for NVLink, then from near to far cyan, blue, yellow, red; magenta for what is unknown."""


def drawings(
    topology: Topology, *, is_coloured: bool = False
) -> list[tuple[list[str], tuple[str, ...]]]:
    """Each different drawing once, with the hosts that have it."""
    found: dict[tuple[str, ...], list[str]] = {}
    for host in topology.hosts:
        if drawn := tuple(drawing(host, is_coloured=is_coloured)):
            found.setdefault(drawn, []).append(host.name)
    return [(names, drawn) for drawn, names in found.items()]


def drawing(host: Host, *, is_coloured: bool = False) -> list[str]:
    """Draw one host; nothing for a host without GPUs."""
    if not host.gpus:
        return []
    cell = 1 + max(
        len(f"GPU{host.gpus[-1].index}"), *(len(c or "?") for row in host.gpu_links for c in row)
    )
    room = (WIDTH - _LABEL - 10) // cell
    lines: list[str] = []
    for start in range(0, len(host.gpus), room):
        columns = range(start, min(start + room, len(host.gpus)))
        is_last = columns[-1] == len(host.gpus) - 1
        lines += _block(host, columns, cell, has_nics=is_last, is_coloured=is_coloured)
    return lines + _footer(host)


def _block(
    host: Host, columns: range, cell: int, *, has_nics: bool, is_coloured: bool
) -> list[str]:
    width = _LABEL + cell * len(columns)
    head = " " * _LABEL + "".join(f"GPU{host.gpus[i].index}".rjust(cell) for i in columns)
    lines = [head + ("  nearest NICs" if has_nics and host.gpu_nics else "")]
    nearest = dict(host.gpu_nics)
    place: object = _block
    for i, gpu in enumerate(host.gpus):
        if gpu.numa_node != place:
            if place is not _block:
                lines.append("└" + "─" * (width - 1))
            place = gpu.numa_node
            lines.append(_rule(gpu, width))
        cells = "".join(_paint(host.gpu_links[i][k], cell, is_coloured) for k in columns)
        nics = _fit(nearest.get(gpu.index, ()), WIDTH - width - 2) if has_nics else ""
        lines.append(f"│ {f'GPU{gpu.index}':<{_LABEL - 2}}{cells}" + (f"  {nics}" if nics else ""))
    lines.append("└" + "─" * (width - 1))
    return lines


def _rule(gpu: Gpu, width: int) -> str:
    title = "NUMA node unknown" if gpu.numa_node is None else f"NUMA {gpu.numa_node}"
    return f"┌ {title} ".ljust(width, "─")


def _paint(link: str | None, width: int, is_coloured: bool) -> str:
    text = (link or "?").rjust(width)
    code = _COLOURS.get("NV" if (link or "").startswith("NV") else link or "?")
    return f"\x1b[{code}m{text}\x1b[0m" if is_coloured and code else text


def _fit(names: Sequence[str], room: int) -> str:
    """As many names as there is room for, and how many more there are."""
    text = ",".join(names)
    if len(text) <= room:
        return text
    for shown in range(len(names) - 1, 0, -1):
        text = ",".join(names[:shown]) + f" +{len(names) - shown}"
        if len(text) <= room:
            return text
    return f"{len(names)}"[:room]


def _footer(host: Host) -> list[str]:
    def sets(groups: Sequence[Sequence[int]]) -> list[str]:
        return ["{" + ",".join(map(str, group)) + "}" for group in groups]

    lines = []
    if host.nvlink_islands:
        lines += _wrapped("NVLink islands", sets(host.nvlink_islands))
    for size, groups in groups_of(host).items():
        lines += _wrapped(f"groups of {size}", sets(groups))
    return lines


def _wrapped(title: str, words: Sequence[str]) -> list[str]:
    lines, line = [], f"{title:<14}"
    for word in words:
        if len(line) + 1 + len(word) > WIDTH and line.strip():
            lines.append(line)
            line = " " * 14
        line += f" {word}"
    return [part[:WIDTH] for part in [*lines, line]]

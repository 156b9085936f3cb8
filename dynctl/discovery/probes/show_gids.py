"""`show_gids`: the address table of every RDMA port, which RoCE needs one usable entry of.

Two columns are called DEV and the IPv4 cell may be empty, so that rows are read by what their words look like.
Pure.
"""

import re
from collections.abc import Iterable

from dynctl.core.command import Completed
from dynctl.core.machine import Gid
from dynctl.discovery.facts import RdmaFacts, RdmaPort
from dynctl.discovery.probe import ABSENT_STATUS, Probe, fail, text_of

_SCRIPT = "exec show_gids"
_ROW = re.compile(
    r"\s*([\w.-]{1,64})\s+(\d{1,3})\s+(\d{1,3})\s+([0-9a-f]{4}(?::[0-9a-f]{4}){7})"
    r"(?:\s+(\d{1,3}(?:\.\d{1,3}){3}))?(?:\s+(v[12]))?(?:\s+([\w.@-]{1,64}))?\s*\Z",
    re.IGNORECASE,
)


def parse(done: Completed) -> RdmaFacts:
    """Read the tables; without the closing count the output was cut.

    Raises:
        ProbeError: when there is output and no line of it is a row or the count.
    """
    text = text_of(done)
    gids: dict[tuple[str, int], dict[int, Gid]] = {}
    for line in text.split("\n"):
        if match := _ROW.match(line[:400]):
            gid = Gid(int(match[3]), match[4].lower(), (match[6] or "ib").lower(), match[5], match[7])  # fmt: skip
            gids.setdefault((match[1], int(match[2])), {})[gid.index] = gid
    count = re.search(r"n_gids_found=(\d{1,6})", text)
    if text.strip() and not gids and count is None and done.exit_status != ABSENT_STATUS:
        raise fail("show_gids", 1, text[:200], "no row in the output")
    return RdmaFacts(
        tuple(
            RdmaPort(
                device=device,
                port=port,
                state="unknown",
                physical=None,
                rate_bits_s=None,
                link_layer=_layer(rows.values()),
                netdev=next((g.netdev for g in rows.values() if g.netdev), None),
                gids=tuple(rows.values()),
            )
            for (device, port), rows in gids.items()
        ),
        is_cut=bool(gids) and (count is None or int(count[1]) != sum(map(len, gids.values()))),
    )


def _layer(gids: Iterable[Gid]) -> str:
    """The tool says v1 for InfiniBand as well; only Ethernet has version 2 or a network device beside an address."""
    return "ethernet" if any(gid.version == "v2" or gid.netdev for gid in gids) else "unknown"


PROBE = Probe(
    _SCRIPT,
    parse,
    needs="[ -d /sys/class/infiniband ] && command -v show_gids",
    marks=re.compile(r"(?m)^\s*DEV\s+PORT\s+INDEX\s+GID\b|^n_gids_found=\d"),
)

"""`ibdev2netdev`, short and `-v`: which network device an RDMA port belongs to, and whether that is up. Pure."""

import re

from dynctl.core.command import Completed
from dynctl.discovery.facts import RdmaFacts, RdmaPort
from dynctl.discovery.probe import ABSENT_STATUS, Probe, fail, text_of

_SCRIPT = "exec ibdev2netdev"
_ROW = re.compile(
    r"\s*(?:([0-9a-f]{4}:[0-9a-f]{2}:[0-9a-f]{2}\.[0-9a-f])\s+)?([\w.-]{1,64})\s+(?:\((MT\d{1,6})\b.{0,200}?)?"
    r"port\s+(\d{1,3}).{0,40}?==>\s*([\w.@-]{1,64})\s*\((\w{1,20})\)",
    re.IGNORECASE,
)


def parse(done: Completed) -> RdmaFacts:
    """Read the rows in the order of the output.

    Raises:
        ProbeError: when there is output and no line of it is a row.
    """
    text = text_of(done)
    rows = [match for line in text.split("\n") if (match := _ROW.match(line[:600]))]
    ports = [
        RdmaPort(
            device=row[2],
            port=int(row[4]),
            state=_state(row[5], row[6]),
            physical=None,
            rate_bits_s=None,
            link_layer="unknown",
            netdev=row[5],
            hca_type=row[3],
            pci_bus_id=row[1].lower() if row[1] else None,
        )
        for row in rows
    ]
    if text.strip() and not ports and done.exit_status != ABSENT_STATUS:
        raise fail("ibdev2netdev", 1, text[:200], "no row in the output")
    return RdmaFacts(tuple(ports))


def _state(netdev: str, word: str) -> str:
    """IP over InfiniBand may be down, or not in use at all, on a port that is up."""
    if word.lower() == "down" and netdev.startswith("ib"):
        return "unknown"
    return {"up": "active", "down": "down"}.get(word.lower(), "unknown")


PROBE = Probe(
    _SCRIPT,
    parse,
    needs="[ -d /sys/class/infiniband ] && command -v ibdev2netdev",
    marks=re.compile(r"(?m)\bport +\d+.{0,40}==> *[\w.@-]+ +\(\w+\)"),
)

"""`rdma link` of iproute2: state of every RDMA port and the network device it belongs to. Pure."""

import re

from dynctl.core.command import Completed
from dynctl.discovery import rdma
from dynctl.discovery.facts import RdmaFacts, RdmaPort
from dynctl.discovery.probe import ABSENT_STATUS, Probe, fail, text_of

_SCRIPT = "exec rdma link show"
_LINK = re.compile(
    r"\s*(?:(?:\d+/\d+: )?link ([\w.-]{1,64})/(\d{1,3})|\d+/\d+: ([\w.-]{1,64})/(\d{1,3}):)\s+(.{0,400})"
)
"""Iproute2 before 5.0 says `0/1: mlx5_0/1:` instead of `link mlx5_0/1`."""
_FIELD = re.compile(r"\b(state|physical_state|netdev)\s+([\w.@-]{1,64})")


def parse(done: Completed) -> RdmaFacts:
    """Read the ports in the order of the output.

    Raises:
        ProbeError: when there is output and no line of it is a link.
    """
    text = text_of(done)
    ports = []
    for line in text.split("\n"):
        match = _LINK.match(line[:600])
        if match is None:
            continue
        values = dict(_FIELD.findall(match[5]))
        ports.append(
            RdmaPort(
                device=match[1] or match[3],
                port=int(match[2] or match[4]),
                state=rdma.port_state(values.get("state", "")),
                physical=rdma.physical_state(values.get("physical_state")),
                rate_bits_s=None,
                link_layer="unknown",
                netdev=values.get("netdev"),
            )
        )
    if text.strip() and not ports and done.exit_status != ABSENT_STATUS:
        raise fail("rdma link", 1, text[:200], "no link in the output")
    return RdmaFacts(tuple(ports))


PROBE = Probe(
    _SCRIPT,
    parse,
    needs="[ -d /sys/class/infiniband ] && command -v rdma",
    marks=re.compile(
        r"(?m)^\s*(?:(?:\d+/\d+: )?link [\w.-]+/\d+|\d+/\d+: [\w.-]+/\d+:) .*\bstate [A-Z]"
    ),
)

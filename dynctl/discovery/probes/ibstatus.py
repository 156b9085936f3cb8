"""`ibstatus`: RDMA ports with state, rate, width and link layer. The name of the speed tells nothing of the layer. Pure."""

import re

from dynctl.core.command import Completed
from dynctl.discovery import rdma
from dynctl.discovery.facts import RdmaFacts, RdmaPort
from dynctl.discovery.probe import ABSENT_STATUS, Probe, fail, text_of

_SCRIPT = "exec ibstatus"
_DEVICE = re.compile(r"\s*Infiniband device '([\w.-]{1,64})' port (\d{1,3}) status", re.IGNORECASE)
_PAIR = re.compile(r"\s*([a-z][a-z_ ]{1,30}):\s*(\S.{0,200}?)\s*\Z")


def parse(done: Completed) -> RdmaFacts:
    """Read the ports in the order of the output.

    Raises:
        ProbeError: when there is output without any port, or a rate is no number.
    """
    text = text_of(done)
    ports: dict[tuple[str, int], dict[str, str]] = {}
    into: dict[str, str] | None = None
    for number, line in enumerate((raw[:500] for raw in text.split("\n")), 1):
        if found := _DEVICE.match(line):
            into = ports.setdefault((found[1], int(found[2])), {})
        elif (pair := _PAIR.match(line)) and into is not None:
            key = pair[1].strip()
            if key == "rate" and rdma.rate_bits_s(pair[2]) is None:
                raise fail("ibstatus", number, line, "the rate is no number")
            into.setdefault(key, pair[2])
    if text.strip() and not ports and done.exit_status != ABSENT_STATUS:
        raise fail("ibstatus", 1, text[:200], "no port in the output")
    return RdmaFacts(tuple(_port(d, n, values) for (d, n), values in ports.items()))


def _port(device: str, number: int, values: dict[str, str]) -> RdmaPort:
    return RdmaPort(
        device=device,
        port=number,
        state=rdma.port_state(values.get("state", "")),
        physical=rdma.physical_state(values.get("phys state")),
        rate_bits_s=rdma.rate_bits_s(values.get("rate", "")),
        link_layer=values.get("link_layer", "unknown").lower(),
        num_lanes=rdma.num_lanes(values.get("rate", "")),
    )


PROBE = Probe(
    _SCRIPT,
    parse,
    needs="[ -d /sys/class/infiniband ] && command -v ibstatus",
    marks=re.compile(r"(?mi)^\s*Infiniband device '[\w.-]+' port \d+ status"),
)

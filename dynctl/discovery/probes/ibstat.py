"""`ibstat`: RDMA devices and ports. It stops at the first device it cannot open; what came before is kept. Pure."""

import re

from dynctl.core.command import Completed
from dynctl.discovery import rdma
from dynctl.discovery.facts import RdmaFacts, RdmaPort
from dynctl.discovery.probe import ABSENT_STATUS, Probe, fail, text_of

_SCRIPT = "exec ibstat"
_DEVICE = re.compile(r"\s*CA '([\w.-]{1,64})'")
_PORT = re.compile(r"\s*Port (\d{1,3}):\s*\Z")
_PAIR = re.compile(r"\s*([A-Za-z][\w ]{1,40}):\s*(\S.{0,200}?)\s*\Z")
_PANIC = re.compile(r"ib(?:panic|warn)\b.{0,60}?: (.{0,200}?'([\w.-]{1,64})'.{0,200})")


def parse(done: Completed) -> RdmaFacts:
    """Read the ports in the order of the output.

    Raises:
        ProbeError: when there is output without any device, or a rate is no number.
    """
    text = text_of(done)
    devices: dict[str, dict[str, str]] = {}
    ports: dict[tuple[str, int], dict[str, str]] = {}
    failed: list[tuple[str, str]] = []
    device, into = None, None
    both = text + "\n" + done.stderr.decode("utf-8", "replace")
    for number, line in enumerate((raw[:500] for raw in both.split("\n")), 1):
        if found := _DEVICE.match(line):
            device = found[1]
            into = devices.setdefault(device, {})
        elif (port := _PORT.match(line)) and device is not None:
            into = ports.setdefault((device, int(port[1])), {})
        elif panic := _PANIC.search(line):
            failed.append((panic[2], panic[1]))
        elif (pair := _PAIR.match(line)) and into is not None:
            key = pair[1].strip().lower()
            if key == "rate" and rdma.rate_bits_s(pair[2]) is None:
                raise fail("ibstat", number, line, "the rate is no number")
            into.setdefault(key, pair[2])
    if text.strip() and not devices and not failed and done.exit_status != ABSENT_STATUS:
        raise fail("ibstat", 1, text[:200], "no device in the output")
    return RdmaFacts(
        tuple(_port(d, n, values, devices[d]) for (d, n), values in ports.items()), tuple(failed)
    )


def _port(device: str, number: int, values: dict[str, str], owner: dict[str, str]) -> RdmaPort:
    return RdmaPort(
        device=device,
        port=number,
        state=rdma.port_state(values.get("state", "")),
        physical=rdma.physical_state(values.get("physical state")),
        rate_bits_s=rdma.rate_bits_s(values.get("rate", "")),
        link_layer=values.get("link layer", "unknown").lower(),
        hca_type=owner.get("ca type"),
        system_guid=rdma.same_guid(owner.get("system image guid", "")) or None,
    )


PROBE = Probe(
    _SCRIPT,
    parse,
    needs="[ -d /sys/class/infiniband ] && command -v ibstat",
    marks=re.compile(r"(?m)^\s*CA '[\w.-]+'|^\s*ibpanic:"),
)

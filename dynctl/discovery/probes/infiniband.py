"""`/sys/class/infiniband`: RDMA devices with state, rate, link layer, NUMA node and network device.

Printed as `path:value` lines, which is also what `grep . FILES` prints, so that captures made by hand are readable.
Source: Documentation/ABI/stable/sysfs-class-infiniband of the Linux kernel.
Pure.
"""

import re
from collections.abc import Mapping

from dynctl.core.command import Completed
from dynctl.discovery.facts import RdmaPort
from dynctl.discovery.probe import Probe, fail, text_of

_SCRIPT = r"""
base=${DYNCTL_SYSFS:-/sys}/class/infiniband
[ -d "$base" ] || exit 0
show() { [ -r "$1" ] && { read -r value <"$1" || [ -n "$value" ]; } 2>/dev/null && echo "$1:$value"; value=; }
for device in "$base"/*; do
  [ -e "$device" ] || continue
  echo "$device/present:1"
  show "$device/hca_type"
  show "$device/node_guid"
  show "$device/sys_image_guid"
  show "$device/device/numa_node"
  bus=$(sed -n 's/^PCI_SLOT_NAME=//p' "$device/device/uevent" 2>/dev/null)
  [ -n "$bus" ] && echo "$device/pci:$bus"
  for net in "$device"/device/net/*; do
    [ -e "$net" ] && echo "$device/netdev:${net##*/}"
  done
  for port in "$device"/ports/*; do
    [ -d "$port" ] || continue
    for name in state phys_state rate link_layer lid counters/link_downed gid_attrs/ndevs/0; do
      show "$port/$name"
    done
  done
done 2>/dev/null
exit 0
"""
_LINE = re.compile(r"^\S*/infiniband/([\w.-]{1,64})/([\w./-]{1,80}):(.{0,200})$")
_PORT = re.compile(r"^ports/(\d{1,3})/(.+)$")
_RATE = re.compile(r"^\s*(\d{1,5}(?:\.\d+)?)\s*Gb/sec")


def parse(done: Completed) -> tuple[RdmaPort, ...]:
    """Read the ports, in the order devices were listed.

    Raises:
        ProbeError: when a rate is no rate, or there is output and no line of it is of the tree.
    """
    devices: dict[str, dict[str, str]] = {}
    ports: dict[tuple[str, int], dict[str, str]] = {}
    lines: dict[tuple[str, int], int] = {}
    unread = None
    for number, line in enumerate(text_of(done).split("\n"), 1):
        match = _LINE.match(line[:400])
        if match is None:
            unread = unread or ((number, line) if line.strip() else None)
            continue
        device, path, value = match.groups()
        devices.setdefault(device, {})
        if port := _PORT.match(path):
            key = device, int(port[1])
            ports.setdefault(key, {})[port[2]] = value.strip()
            lines.setdefault(key, number)
        else:
            devices[device].setdefault(path, value.strip())
    if unread and not devices:
        raise fail("/sys/class/infiniband", unread[0], unread[1], "no line of the tree")
    return tuple(
        _port(device, port, values, devices[device], lines[device, port])
        for (device, port), values in ports.items()
    )


def _port(
    device: str, port: int, values: Mapping[str, str], owner: Mapping[str, str], line: int
) -> RdmaPort:
    numa = owner.get("device/numa_node", "-1")
    layer = values.get("link_layer", "").lower()
    return RdmaPort(
        device=device,
        port=port,
        state=_word(values.get("state")) or "unknown",
        physical=_word(values.get("phys_state")),
        rate_bits_s=_rate(values.get("rate"), line),
        link_layer=layer or "unknown",
        numa_node=int(numa) if re.fullmatch(r"\d{1,4}", numa) else None,
        netdev=values.get("gid_attrs/ndevs/0") or owner.get("netdev"),
        hca_type=owner.get("hca_type"),
        pci_bus_id=owner.get("pci"),
    )


def _word(value: str | None) -> str | None:
    """`4: ACTIVE` is `active`."""
    return value.rpartition(":")[2].strip().lower() or None if value else None


def _rate(value: str | None, line: int) -> int | None:
    if value is None or not value:
        return None
    match = _RATE.match(value)
    if match is None:
        raise fail("/sys/class/infiniband rate", line, value, "not a rate in Gb/sec")
    return int(float(match[1]) * 1e9)


PROBE = Probe(_SCRIPT, parse)

"""`/sys/class/infiniband`: RDMA devices with state, rate, link layer, NUMA node and network device.

Printed as `path:value` lines, which is also what `grep . FILES` prints, so that captures made by hand are readable.
Source: Documentation/ABI/stable/sysfs-class-infiniband of the Linux kernel.
Pure.
"""

import re
from collections.abc import Mapping

from dynctl.core.command import Completed
from dynctl.core.machine import Gid
from dynctl.discovery import rdma
from dynctl.discovery.facts import RdmaPort
from dynctl.discovery.probe import Probe, fail, integer, text_of

_SCRIPT = r"""
base=${DYNCTL_SYSFS:-/sys}/class/infiniband
[ -d "$base" ] || exit 0
# One process for all the small files: `grep -H` prints path:value.
grep -Hs . "$base"/*/hca_type "$base"/*/sys_image_guid "$base"/*/device/numa_node \
  "$base"/*/ports/*/state "$base"/*/ports/*/phys_state "$base"/*/ports/*/rate "$base"/*/ports/*/link_layer \
  "$base"/*/ports/*/lid "$base"/*/ports/*/counters/link_downed \
  "$base"/*/ports/*/gids/[0-9] "$base"/*/ports/*/gids/1[0-5] \
  "$base"/*/ports/*/gid_attrs/types/[0-9] "$base"/*/ports/*/gid_attrs/types/1[0-5] \
  "$base"/*/ports/*/gid_attrs/ndevs/[0-9] "$base"/*/ports/*/gid_attrs/ndevs/1[0-5] 2>/dev/null |
  grep -v ':0000:0000:0000:0000:0000:0000:0000:0000$'
grep -Hs '^PCI_SLOT_NAME=' "$base"/*/device/uevent
for device in "$base"/*; do
  [ -e "$device" ] || continue
  echo "$device/present:1"
  for net in "$device"/device/net/*; do
    [ -e "$net" ] && echo "$device/netdev:${net##*/}"
  done
done 2>/dev/null
exit 0
"""
_LINE = re.compile(r"^\S*/infiniband/([\w.-]{1,64})/([\w./-]{1,80}):(.{0,200})$")
_PORT = re.compile(r"^ports/(\d{1,3})/(.+)$")
_RATE = re.compile(r"^\s*(\d{1,5}(?:\.\d+)?)\s*Gb/sec")
_GID = re.compile(r"gids/(\d{1,3})\Z")


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
        state=rdma.port_state(values.get("state", "")),
        physical=_word(values.get("phys_state")),
        rate_bits_s=_rate(values.get("rate"), line),
        link_layer=layer or "unknown",
        numa_node=int(numa) if re.fullmatch(r"\d{1,4}", numa) else None,
        netdev=values.get("gid_attrs/ndevs/0") or owner.get("netdev"),
        hca_type=owner.get("hca_type"),
        pci_bus_id=owner.get("pci") or _slot(owner.get("device/uevent")),
        num_lanes=rdma.num_lanes(values.get("rate", "")),
        system_guid=rdma.same_guid(owner.get("sys_image_guid", "")) or None,
        num_link_downed=integer(values.get("counters/link_downed"), 12),
        gids=_gids(values),
    )


def _slot(uevent: str | None) -> str | None:
    match = re.fullmatch(r"PCI_SLOT_NAME=([0-9a-fA-F:.]{7,16})", uevent or "")
    return match[1].lower() if match else None


def _gids(values: Mapping[str, str]) -> tuple[Gid, ...]:
    found = []
    for path, gid in values.items():
        match = _GID.match(path)
        if match is None or not re.fullmatch(r"[0-9a-f:]{15,39}", gid):
            continue
        kind = values.get(f"gid_attrs/types/{match[1]}", "")
        version = "v2" if "v2" in kind else "v1" if "v1" in kind and "RoCE" in kind else "ib"
        if values.get("link_layer", "").lower() == "infiniband":
            version = "ib"
        netdev = values.get(f"gid_attrs/ndevs/{match[1]}")
        found.append(Gid(int(match[1]), gid, version, _mapped(gid), netdev))
    return tuple(sorted(found, key=lambda gid: gid.index))


def _mapped(gid: str) -> str | None:
    """The IPv4 address in `0000:…:ffff:0a60:531a`."""
    match = re.fullmatch(
        r"(?:0000:){5}ffff:([0-9a-f]{2})([0-9a-f]{2}):([0-9a-f]{2})([0-9a-f]{2})", gid
    )
    return ".".join(str(int(part, 16)) for part in match.groups()) if match else None


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


PROBE = Probe(
    _SCRIPT,
    parse,
    needs='[ -d "${DYNCTL_SYSFS:-/sys}/class/infiniband" ]',
    marks=re.compile(r"(?m)^\S*/class/infiniband/[\w.-]+/\S+:"),
)

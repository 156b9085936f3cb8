"""`ibv_devinfo`, short and `-v`: RDMA devices as verbs see them, with the active MTU. Pure."""

import re

from dynctl.core.command import Completed
from dynctl.core.machine import Gid
from dynctl.discovery import rdma
from dynctl.discovery.facts import RdmaFacts, RdmaPort
from dynctl.discovery.probe import ABSENT_STATUS, Probe, fail, integer, text_of

_SCRIPT = "exec ibv_devinfo"
_DEVICE = re.compile(r"\s*hca_id:\s*([\w.-]{1,64})")
_PORT = re.compile(r"\s*port:\s*(\d{1,3})\s*\Z")
_PAIR = re.compile(r"\s*([a-z][a-z_]{1,30}):\s*(\S.{0,200}?)\s*\Z")
_GID = re.compile(r"\s*GID\[\s*(\d{1,3})\]:\s*([0-9a-f:.]{3,60})(?:,\s*(RoCE v[12]|IB/RoCE v1))?", re.IGNORECASE)  # fmt: skip


def parse(done: Completed) -> RdmaFacts:
    """Read the ports in the order of the output.

    Raises:
        ProbeError: when there is output that names neither a device nor says that there is none.
    """
    text = text_of(done)
    devices: dict[str, dict[str, str]] = {}
    ports: dict[tuple[str, int], dict[str, str]] = {}
    gids: dict[tuple[str, int], dict[int, Gid]] = {}
    device, key = "", None
    into: dict[str, str] | None = None
    for line in (raw[:500] for raw in text.split("\n")):
        if found := _DEVICE.match(line):
            device, key = found[1], None
            into = devices.setdefault(device, {})
        elif (port := _PORT.match(line)) and device:
            key = device, int(port[1])
            into = ports.setdefault(key, {})
        elif (gid := _GID.match(line)) and key is not None:
            version = (gid[3] or "ib").lower().rpartition("v")[2]
            index, kind = int(gid[1]), {"1": "v1", "2": "v2"}.get(version, "ib")
            gids.setdefault(key, {})[index] = Gid(index, gid[2].lower(), kind)
        elif (pair := _PAIR.match(line)) and into is not None:
            into.setdefault(pair[1], pair[2])
    said = text + done.stderr.decode("utf-8", "replace")
    if text.strip() and not devices and done.exit_status != ABSENT_STATUS:
        if "No IB devices found" in said:
            return RdmaFacts()
        raise fail("ibv_devinfo", 1, text[:200], "no device in the output")
    return RdmaFacts(
        tuple(
            _port(d, n, values, devices[d], [*gids.get((d, n), {}).values()])
            for (d, n), values in ports.items()
        )
    )


def _port(
    device: str, number: int, values: dict[str, str], owner: dict[str, str], gids: list[Gid]
) -> RdmaPort:
    part = integer(owner.get("vendor_part_id"), 6)
    is_mellanox = owner.get("vendor_id", "").lower() in {"0x02c9", "0x15b3"}
    return RdmaPort(
        device=device,
        port=number,
        state=rdma.port_state(values.get("state", "")),
        physical=None,
        rate_bits_s=None,
        link_layer=values.get("link_layer", "unknown").lower(),
        hca_type=f"MT{part}" if part and is_mellanox else None,
        system_guid=rdma.same_guid(owner.get("sys_image_guid", "")) or None,
        mtu_bytes=integer(values.get("active_mtu", "").partition(" ")[0], 6),
        gids=tuple(gids),
    )


PROBE = Probe(
    _SCRIPT,
    parse,
    needs="[ -d /sys/class/infiniband ] && command -v ibv_devinfo",
    marks=re.compile(r"(?m)^\s*hca_id:\s*[\w.-]+"),
)

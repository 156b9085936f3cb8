"""Which network device a connection uses, and what it can do: netlink and sysfs, so no tool has to be there.

Runs on the host, standard library only. IO: sockets (netlink), files (sysfs).
"""

import contextlib
import ipaddress
import re
import socket
import struct
from collections.abc import Iterator
from pathlib import Path

_SYSFS = Path("/sys")
_NETLINK_TIMEOUT_S = 2.0
# linux/rtnetlink.h, linux/if_addr.h, linux/netlink.h
_RTM_NEWADDR, _RTM_GETADDR, _RTM_NEWROUTE, _RTM_GETROUTE = 20, 22, 24, 26
_NLM_F_REQUEST, _NLM_F_DUMP = 0x1, 0x300
_NLMSG_ERROR, _NLMSG_DONE = 2, 3
_RTA_DST, _RTA_OIF, _IFA_ADDRESS, _IFA_LOCAL = 1, 4, 1, 2


def end_of(connection: socket.socket, data_address: str) -> dict[str, object]:
    """Describe this end of a connection: address, device, route, rate, MTU."""
    address = plain(connection.getsockname()[0])
    interface = interface_of(address)
    # Both ends on one machine talk over the loopback device, whatever addresses they use.
    route = route_interface(plain(connection.getpeername()[0]))
    used = route or interface
    return {
        "address": address,
        "interface": interface,
        "route_interface": route,
        "data_interface": interface_of(data_address),
        "rate_bits_s": net_rate(used),
        "mtu_bytes": _integer(f"class/net/{used}/mtu") if used else None,
    }


def plain(address: str) -> str:
    """An address without scope, and an IPv4 one not dressed as IPv6."""
    bare = ipaddress.ip_address(address.partition("%")[0])
    mapped = getattr(bare, "ipv4_mapped", None)
    return str(mapped or bare)


def interface_of(address: str) -> str | None:
    """Name the network device that has an address."""
    try:
        wanted = ipaddress.ip_address(plain(address)).packed
    except ValueError:
        return None
    family = socket.AF_INET if len(wanted) == 4 else socket.AF_INET6
    body = struct.pack("=BBBBI", family, 0, 0, 0, 0)
    for kind, payload in _ask(_RTM_GETADDR, _NLM_F_DUMP, body):
        if kind == _RTM_NEWADDR and len(payload) >= 8:
            found = dict(_attributes(payload[8:]))
            if wanted in (found.get(_IFA_LOCAL), found.get(_IFA_ADDRESS)):
                return _name(struct.unpack_from("=I", payload, 4)[0])
    # All of 127.0.0.0/8 is local although only 127.0.0.1 is listed.
    return "lo" if ipaddress.ip_address(wanted).is_loopback else None


def route_interface(address: str) -> str | None:
    """Name the device that packets to an address leave by, as the kernel would choose now."""
    try:
        wanted = ipaddress.ip_address(plain(address)).packed
    except ValueError:
        return None
    family = socket.AF_INET if len(wanted) == 4 else socket.AF_INET6
    body = struct.pack("=BBBBBBBBI", family, len(wanted) * 8, 0, 0, 0, 0, 0, 0, 0)
    body += struct.pack("=HH", 4 + len(wanted), _RTA_DST) + wanted
    for kind, payload in _ask(_RTM_GETROUTE, 0, body):
        if kind == _RTM_NEWROUTE and len(payload) >= 12:
            index = dict(_attributes(payload[12:])).get(_RTA_OIF)
            if index is not None and len(index) == 4:
                return _name(struct.unpack("=I", index)[0])
    return None


def net_rate(interface: str | None) -> int | None:
    """The negotiated rate of a network device in bits per second; None where nobody tells."""
    if interface is None:
        return None
    mbits = _integer(f"class/net/{interface}/speed")
    if mbits is not None and 0 < mbits < 1 << 31:
        return mbits * 1_000_000
    ports = sorted((_SYSFS / "class/net" / interface / "device/infiniband").glob("*/ports/*/rate"))
    rates = [rate for rate in (_infiniband_rate(port) for port in ports) if rate]
    # A multi-port device lists ports that this network device does not use: then nobody tells.
    return rates[0] if len(set(rates)) == 1 else None


def rdma_rate(device: str, port: str) -> int | None:
    """The negotiated rate of an RDMA port such as `mlx5_0`, `1`, in bits per second."""
    return _infiniband_rate(_SYSFS / "class/infiniband" / device / "ports" / port / "rate")


def traffic_bytes(interface: str | None) -> int | None:
    """All bytes a device has received and sent since it was made."""
    if interface is None:
        return None
    counts = [_integer(f"class/net/{interface}/statistics/{n}_bytes") for n in ("rx", "tx")]
    return None if None in counts else sum(count or 0 for count in counts)


def _infiniband_rate(path: Path) -> int | None:
    """`400 Gb/sec (4X NDR)`."""
    match = re.match(r"([0-9]+(?:\.[0-9]+)?) Gb/sec", _text(path))
    return int(float(match[1]) * 1e9) if match else None


def _integer(path: str) -> int | None:
    text = _text(_SYSFS / path)
    return int(text) if re.fullmatch(r"[0-9]{1,19}", text) else None


def _text(path: Path) -> str:
    # Reading the speed of a device that is down is an error, not an empty file.
    with contextlib.suppress(OSError, UnicodeDecodeError):
        return path.read_text()[:200].strip()
    return ""


def _name(index: int) -> str | None:
    with contextlib.suppress(OSError):
        return socket.if_indextoname(index)
    return None


def _ask(kind: int, flags: int, body: bytes) -> Iterator[tuple[int, bytes]]:
    """Send one request to the kernel's routing tables and give the answers, type and payload."""
    try:
        netlink = socket.socket(socket.AF_NETLINK, socket.SOCK_RAW, 0)
    except OSError:
        return
    with netlink, contextlib.suppress(OSError):
        netlink.settimeout(_NETLINK_TIMEOUT_S)
        head = struct.pack("=IHHII", 16 + len(body), kind, _NLM_F_REQUEST | flags, 1, 0)
        netlink.send(head + body)
        while True:
            data = netlink.recv(1 << 18)
            while len(data) >= 16:
                size, answer, answer_flags = struct.unpack_from("=IHH", data)
                if size < 16 or answer in (_NLMSG_ERROR, _NLMSG_DONE):
                    return
                yield answer, data[16:size]
                if not answer_flags & 0x2:  # not one of several
                    return
                data = data[(size + 3) & ~3 :]


def _attributes(data: bytes) -> Iterator[tuple[int, bytes]]:
    while len(data) >= 4:
        size, kind = struct.unpack_from("=HH", data)
        if size < 4:
            return
        yield kind, data[4:size]
        data = data[(size + 3) & ~3 :]

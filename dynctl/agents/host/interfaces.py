"""The network interfaces of this host by their addresses, asked of the kernel (netlink, `man 7 rtnetlink`).

IO: sockets.
"""

import ipaddress
import socket
import struct

from dynctl.errors import DynctlError

Address = ipaddress.IPv4Address | ipaddress.IPv6Address

_REQUEST = struct.Struct("=IHHIIBBBBI")
"""nlmsghdr and ifaddrmsg."""
_HEADER = struct.Struct("=IHHII")
_ADDRESS = struct.Struct("=BBBBI")
_ATTRIBUTE = struct.Struct("=HH")
_RTM_NEWADDR, _RTM_GETADDR = 20, 22
_REQUEST_DUMP = 0x301
_DONE, _ERROR = 3, 2
_IFA_ADDRESS, _IFA_LOCAL = 1, 2
_ANSWER_S = 5.0


def name_of(address: str) -> str:
    """Return the name of the interface that has an address.

    Raises:
        DynctlError: when none has.
    """
    try:
        wanted = ipaddress.ip_address(address)
    except ValueError as error:
        raise DynctlError(f"{address!r} is no IP address", "correct data_address") from error
    found = addresses()
    if wanted in found:
        return found[wanted]
    if wanted.is_loopback:
        # All of 127.0.0.0/8 is the loopback interface's, and it lists one of them.
        return "lo"
    raise DynctlError(
        f"address {address} is not one of this host's",
        "correct data_address in the inventory, then dynctl plan and dynctl up",
    )


def addresses() -> dict[Address, str]:
    """List this host's addresses with the interfaces that have them."""
    found: dict[Address, str] = {}
    with socket.socket(socket.AF_NETLINK, socket.SOCK_RAW, socket.NETLINK_ROUTE) as netlink:
        netlink.settimeout(_ANSWER_S)
        request = (_REQUEST.size, _RTM_GETADDR, _REQUEST_DUMP, 1, 0, socket.AF_UNSPEC, 0, 0, 0, 0)
        netlink.sendall(_REQUEST.pack(*request))
        is_done = False
        while not is_done:
            answer = netlink.recv(1 << 16)
            while answer:
                length, kind, _, _, _ = _HEADER.unpack_from(answer)
                if kind in (_DONE, _ERROR):
                    is_done = True
                    break
                if kind == _RTM_NEWADDR:
                    found |= _read(answer[_HEADER.size : length])
                answer = answer[_aligned(length) :]
    return found


def _read(message: bytes) -> dict[Address, str]:
    """Read one address: of a point-to-point interface the local one."""
    *_, index = _ADDRESS.unpack_from(message)
    attributes = {}
    rest = message[_ADDRESS.size :]
    while len(rest) >= _ATTRIBUTE.size:
        length, kind = _ATTRIBUTE.unpack_from(rest)
        attributes[kind] = rest[_ATTRIBUTE.size : length]
        rest = rest[_aligned(length) :]
    packed = attributes.get(_IFA_LOCAL) or attributes.get(_IFA_ADDRESS)
    return {ipaddress.ip_address(packed): socket.if_indextoname(index)} if packed else {}


def _aligned(length: int) -> int:
    return (length + 3) & ~3

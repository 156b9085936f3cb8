"""Network namespaces on one bridge: the operator's, an outsider's and one per host.

All addresses live inside these namespaces; the machine's own network is not touched.
A thread enters a namespace with `inside(name)`; what it starts or opens there belongs there.
IO: ip, nft, tc, sockets.
"""

import ctypes
import errno
import os
import selectors
import socket
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from hostlab.shell import LabError, run

PREFIX = "10.88.0"
OPERATOR_ADDRESS = f"{PREFIX}.1"
OUTSIDER_ADDRESS = f"{PREFIX}.250"
_CLONE_NEWNET = 0x40000000
_LIBC = ctypes.CDLL(None, use_errno=True)


def host_address(index: int) -> str:
    """Return the address of the lab's host number `index`, from 0."""
    return f"{PREFIX}.{11 + index}"


@contextmanager
def inside(namespace: str) -> Iterator[None]:
    """Move the calling thread into a network namespace for the block.

    Sockets, threads and processes made in the block belong to the namespace.
    """
    before = os.open("/proc/thread-self/ns/net", os.O_RDONLY | os.O_CLOEXEC)
    try:
        target = os.open(f"/run/netns/{namespace}", os.O_RDONLY | os.O_CLOEXEC)
        try:
            _setns(target)
        finally:
            os.close(target)
        try:
            yield
        finally:
            _setns(before)
    finally:
        os.close(before)


def _setns(fd: int) -> None:
    if _LIBC.setns(fd, _CLONE_NEWNET) != 0:
        number = ctypes.get_errno()
        raise LabError(f"setns: {os.strerror(number)}")


def add_hub(namespace: str) -> None:
    """Make the operator's namespace with the bridge all hosts hang on."""
    run(["ip", "netns", "add", namespace])
    run(["ip", "-n", namespace, "link", "set", "lo", "up"])
    run(["ip", "-n", namespace, "link", "add", "lab0", "type", "bridge"])
    run(["ip", "-n", namespace, "addr", "add", f"{OPERATOR_ADDRESS}/24", "dev", "lab0"])
    run(["ip", "-n", namespace, "link", "set", "lab0", "up"])


def add_member(hub: str, namespace: str, address: str) -> None:
    """Make a namespace with `eth0` on the hub's bridge; it has no route to anywhere else."""
    run(["ip", "netns", "add", namespace])
    port = _port(address)
    peer = ["peer", "name", "eth0", "netns", namespace]
    run(["ip", "-n", hub, "link", "add", port, "type", "veth", *peer])
    run(["ip", "-n", hub, "link", "set", port, "master", "lab0", "up"])
    run(["ip", "-n", namespace, "link", "set", "lo", "up"])
    run(["ip", "-n", namespace, "addr", "add", f"{address}/24", "dev", "eth0"])
    run(["ip", "-n", namespace, "link", "set", "eth0", "up"])


def _port(address: str) -> str:
    return f"port{address.rpartition('.')[2]}"


def set_link(hub: str, address: str, *, up: bool) -> None:
    """Plug or pull the cable of a host at the bridge's side."""
    run(["ip", "-n", hub, "link", "set", _port(address), "up" if up else "down"])


def drop_packets(namespace: str, peers: tuple[str, ...] | None) -> None:
    """Drop silently what a host sends to and gets from `peers`, or everything when None."""
    rules = {
        "input": "iif lo accept; drop"
        if peers is None
        else f"ip saddr {{{', '.join(peers)}}} drop",
        "output": "oif lo accept; drop"
        if peers is None
        else f"ip daddr {{{', '.join(peers)}}} drop",
    }
    chains = "".join(
        f"chain {hook} {{ type filter hook {hook} priority -300; {rule}; }}\n"
        for hook, rule in rules.items()
    )
    allow_again(namespace)
    run(
        ["ip", "netns", "exec", namespace, "nft", "-f", "-"], stdin=f"table inet cut {{\n{chains}}}"
    )


def allow_again(namespace: str) -> None:
    """Undo `drop_packets`."""
    # Added first, so that deleting it never fails; older nft has no `destroy`.
    undo = "add table inet cut\ndelete table inet cut\n"
    run(["ip", "netns", "exec", namespace, "nft", "-f", "-"], stdin=undo)


def throttle(hub: str, namespace: str, address: str, bits_s: int | None) -> None:
    """Limit a host's link to `bits_s` in both directions; None takes the limit away."""
    for where, device in ((namespace, "eth0"), (hub, _port(address))):
        run(["tc", "-n", where, "qdisc", "del", "dev", device, "root"], check=False)
        if bits_s is not None:
            burst = str(max(32_000, bits_s // 800))
            shape = ["tbf", "rate", f"{bits_s}bit", "burst", burst, "latency", "400ms"]
            run(["tc", "-n", where, "qdisc", "add", "dev", device, "root", *shape])


def scan_ports(namespace: str, address: str, timeout_s: float = 60.0) -> list[int]:
    """Return every TCP port of `address` that accepts a connection, seen from a namespace."""
    with inside(namespace):
        return _scan(address, time.monotonic() + timeout_s)


def _scan(address: str, deadline_s: float, window: int = 500) -> list[int]:
    """Connect to all 65,535 ports with at most `window` attempts in the air."""
    found: list[int] = []
    waiting = iter(range(1, 65536))
    in_air = 0
    with selectors.DefaultSelector() as selector:
        is_done = False
        while in_air or not is_done:
            while in_air < window and not is_done:
                port = next(waiting, None)
                if port is None:
                    is_done = True
                    break
                sock = socket.socket(socket.AF_INET, socket.SOCK_STREAM | socket.SOCK_NONBLOCK)
                result = sock.connect_ex((address, port))
                if result == errno.EINPROGRESS:
                    selector.register(sock, selectors.EVENT_WRITE, port)
                    in_air += 1
                    continue
                if result == 0:
                    found.append(port)
                sock.close()
            for key, _ in selector.select(0.5):
                sock = key.fileobj  # type: ignore[assignment]
                if sock.getsockopt(socket.SOL_SOCKET, socket.SO_ERROR) == 0:
                    found.append(key.data)
                selector.unregister(sock)
                sock.close()
                in_air -= 1
            if time.monotonic() > deadline_s:
                for key in list(selector.get_map().values()):
                    key.fileobj.close()  # type: ignore[union-attr]
                raise LabError(
                    f"{address}: ports not all answered; is a firewall dropping packets?"
                )
    return sorted(found)


def listening(pid: int) -> list[tuple[str, int]]:
    """Return (address, port) of every listening TCP socket in the network namespace of a process."""
    found = set()
    for name, is_v6 in (("tcp", False), ("tcp6", True)):
        path = Path(f"/proc/{pid}/net/{name}")
        for line in path.read_text().splitlines()[1:]:
            fields = line.split()
            if fields[3] == "0A":  # TCP_LISTEN
                raw, _, port = fields[1].partition(":")
                found.add((_decode(raw, is_v6), int(port, 16)))
    return sorted(found)


def _decode(raw: str, is_v6: bool) -> str:
    # The kernel prints each 32-bit word in the machine's byte order.
    words = [bytes.fromhex(raw[i : i + 8])[::-1] for i in range(0, len(raw), 8)]
    return socket.inet_ntop(socket.AF_INET6 if is_v6 else socket.AF_INET, b"".join(words))

"""Connections of a link test: a door on one address, opened for one token, and JSON messages on the first lane.

The token never travels: both ends prove with an HMAC over fresh random numbers that they have it. The door closes as
soon as all lanes are in; who fails the proof is disconnected and told nothing.
Runs on the host, standard library only. IO: sockets, threads.
"""

import errno
import hmac
import itertools
import json
import os
import socket
import struct
import sys
import threading
import time
from typing import Any

NONCE_BYTES = 32
PROOF_BYTES = 32
HELLO_TIMEOUT_S = 3.0
"""How long a stranger may take to prove itself."""
ANSWER_TIMEOUT_S = 15.0
"""How long we wait for the door's answer: strangers may stand before us."""
CONNECT_TIMEOUT_S = 5.0
STALL_TIMEOUT_S = 5
"""A peer that says nothing for this long in the middle of a test has vanished."""
MAX_MESSAGE_BYTES = 1 << 20
MAX_STRANGERS = 64
"""Connections in the middle of their proof."""
_LOOK_S = 0.02


class LinkError(Exception):
    """Raised when the test cannot go on; the text is for the operator."""


def tell(answer: dict[str, object]) -> None:
    """Print one JSON line and flush it."""
    sys.stdout.write(json.dumps(answer) + "\n")
    sys.stdout.flush()


def open_door(address: str, first_port: int, last_port: int) -> socket.socket:
    """Listen on one address, on the highest free port of a range: planned ports are taken from its low end.

    Raises:
        LinkError: when the address is not this host's, or no port of the range is free.
    """
    family = socket.AF_INET6 if ":" in address else socket.AF_INET
    for port in range(last_port, first_port - 1, -1):
        door = socket.socket(family, socket.SOCK_STREAM)
        try:
            door.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            door.bind((address, port))
            door.listen(MAX_STRANGERS)
        except OSError as error:
            door.close()
            if error.errno != errno.EADDRINUSE:
                raise LinkError(f"cannot listen on {address}:{port}: {error.strerror}") from error
        else:
            return door
    raise LinkError(f"no port from {first_port} to {last_port} is free on {address}")


class _Lanes:
    """The connections that have proved themselves, by lane."""

    def __init__(self, token: bytes, num_lanes: int) -> None:
        self.token = token
        self.num_lanes = num_lanes
        self.proved: dict[int, socket.socket] = {}
        self.is_complete = threading.Event()
        self.lock = threading.Lock()
        self.slots = threading.BoundedSemaphore(MAX_STRANGERS)

    def check(self, connection: socket.socket) -> None:
        """Ask a new connection for its proof; keep it or close it."""
        try:
            lane = _ask_proof(connection, self.token)
        except (LinkError, OSError):
            connection.close()
        else:
            self._keep(lane, connection)
        finally:
            self.slots.release()

    def _keep(self, lane: int, connection: socket.socket) -> None:
        with self.lock:
            if self.is_complete.is_set() or lane in self.proved or lane >= self.num_lanes:
                connection.close()
                return
            self.proved[lane] = connection
            if len(self.proved) == self.num_lanes:
                self.is_complete.set()


def admit(
    door: socket.socket, token: bytes, num_lanes: int, timeout_s: float
) -> list[socket.socket]:
    """Let in whoever proves the token until all lanes are there; the door is closed then, or when time is up.

    Raises:
        LinkError: when not all lanes came in time.
    """
    lanes = _Lanes(token, num_lanes)
    deadline_s = time.monotonic() + timeout_s
    with door:
        door.settimeout(_LOOK_S)
        while not lanes.is_complete.is_set() and time.monotonic() < deadline_s:
            # While strangers hold every slot, others wait in the kernel's queue.
            if not lanes.slots.acquire(timeout=_LOOK_S):
                continue
            try:
                connection, _ = door.accept()
            except TimeoutError:
                lanes.slots.release()
                continue
            threading.Thread(target=lanes.check, args=(connection,), daemon=True).start()
    with lanes.lock:
        if not lanes.is_complete.is_set():
            lanes.is_complete.set()
            for connection in lanes.proved.values():
                connection.close()
            raise LinkError(f"nobody with the token came within {timeout_s:.0f} s")
    return [lanes.proved[lane] for lane in range(num_lanes)]


def _ask_proof(connection: socket.socket, token: bytes) -> int:
    deadline_s = time.monotonic() + HELLO_TIMEOUT_S
    nonce = os.urandom(NONCE_BYTES)
    connection.settimeout(HELLO_TIMEOUT_S)
    connection.sendall(nonce)
    hello = _receive(connection, 1 + NONCE_BYTES + PROOF_BYTES, deadline_s)
    lane, their_nonce, proof = hello[:1], hello[1 : 1 + NONCE_BYTES], hello[1 + NONCE_BYTES :]
    said = lane + nonce + their_nonce
    if not hmac.compare_digest(proof, hmac.digest(token, b"knock" + said, "sha256")):
        raise LinkError("wrong token")
    connection.sendall(hmac.digest(token, b"enter" + said, "sha256"))
    _settle(connection)
    return lane[0]


def knock(address: str, port: int, token: bytes, lane: int) -> socket.socket:
    """Connect one lane to the other end's door and prove the token; the other end has to prove it as well.

    Raises:
        LinkError: when nobody is there, or it is not the one we were sent to.
    """
    where = f"{address}:{port}"
    try:
        connection = socket.create_connection((address, port), timeout=CONNECT_TIMEOUT_S)
    except TimeoutError as error:
        raise LinkError(f"no answer from {where} within {CONNECT_TIMEOUT_S:.0f} s") from error
    except OSError as error:
        raise LinkError(f"cannot connect to {where}: {error.strerror or error}") from error
    try:
        _prove(connection, token, lane, where)
    except OSError as error:
        connection.close()
        raise LinkError(f"{where} refused us: {error.strerror or error}") from error
    except LinkError:
        connection.close()
        raise
    return connection


def _prove(connection: socket.socket, token: bytes, lane: int, where: str) -> None:
    deadline_s = time.monotonic() + ANSWER_TIMEOUT_S
    their_nonce = _receive(connection, NONCE_BYTES, deadline_s)
    nonce = os.urandom(NONCE_BYTES)
    said = bytes([lane]) + their_nonce + nonce
    proof = hmac.digest(token, b"knock" + said, "sha256")
    connection.sendall(bytes([lane]) + nonce + proof)
    answer = _receive(connection, PROOF_BYTES, deadline_s)
    if not hmac.compare_digest(answer, hmac.digest(token, b"enter" + said, "sha256")):
        raise LinkError(f"{where} is not the listener we started")
    _settle(connection)


def _settle(connection: socket.socket) -> None:
    """Blocking calls with the kernel's own time limits: cheaper per call than Python's."""
    connection.settimeout(None)
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    limit = struct.pack("ll", STALL_TIMEOUT_S, 0)
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVTIMEO, limit)
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_SNDTIMEO, limit)


def _receive(connection: socket.socket, num_bytes: int, deadline_s: float) -> bytes:
    """Receive exactly so many bytes before a point in time, however slowly they drip."""
    data = b""
    while len(data) < num_bytes:
        left_s = deadline_s - time.monotonic()
        if left_s <= 0:
            raise LinkError("the other end did not prove itself in time")
        connection.settimeout(left_s)
        piece = connection.recv(num_bytes - len(data))
        if not piece:
            raise LinkError("the other end refused us")
        data += piece
    return data


def fill(connection: socket.socket, view: memoryview) -> None:
    """Receive until the view is full.

    Raises:
        LinkError: when the other end closed, broke the connection or says nothing any more.
    """
    at = 0
    while at < len(view):
        try:
            got = connection.recv_into(view[at:])
        except OSError as error:
            raise lost(error) from error
        if not got:
            raise LinkError("the other end closed the connection in the middle of the test")
        at += got


def pour(connection: socket.socket, data: bytes | memoryview) -> None:
    """Send all of it.

    Raises:
        LinkError: when the other end broke the connection or takes nothing any more.
    """
    try:
        connection.sendall(data)
    except OSError as error:
        raise lost(error) from error


def lost(error: OSError) -> LinkError:
    """Say what became of a connection."""
    if isinstance(error, BlockingIOError):
        return LinkError(f"the other end vanished: nothing for {STALL_TIMEOUT_S} s")
    return LinkError(f"the connection broke in the middle of the test: {error.strerror or error}")


def send_message(connection: socket.socket, message: dict[str, Any]) -> None:
    """Send one JSON object, its length first."""
    text = json.dumps(message).encode()
    pour(connection, struct.pack("!I", len(text)) + text)


def receive_message(connection: socket.socket) -> dict[str, Any]:
    """Receive one JSON object.

    Raises:
        LinkError: when the connection ends, or what came is none.
    """
    head = bytearray(4)
    fill(connection, memoryview(head))
    (size,) = struct.unpack("!I", head)
    if size > MAX_MESSAGE_BYTES:
        raise LinkError("the other end sent nonsense")
    text = bytearray(size)
    fill(connection, memoryview(text))
    try:
        message = json.loads(bytes(text))
    except ValueError as error:
        raise LinkError("the other end sent nonsense") from error
    if not isinstance(message, dict):
        raise LinkError("the other end sent nonsense")
    return message


def percentiles(times_s: list[float]) -> dict[str, Any]:
    """Count and percentiles by nearest rank."""
    ordered = sorted(times_s)
    last = len(ordered) - 1
    ranks = {name: ordered[min(last, int(len(ordered) * q))] for name, q in _RANKS}
    return {"num_messages": len(ordered), **ranks}


_RANKS = (("p50_s", 0.50), ("p95_s", 0.95), ("p99_s", 0.99))


def jitter(times_s: list[float]) -> float:
    """Mean difference from one time to the next; the largest 1 % are left out, a busy processor makes those."""
    steps = sorted(abs(b - a) for a, b in itertools.pairwise(times_s))
    kept = steps[: max(1, len(steps) * 99 // 100)]
    return sum(kept) / len(kept) if kept else 0.0

"""Measure TCP between two hosts: round trips of small messages, then confirmed messages of several sizes both ways.

The one that connects drives, the one that listens follows. Every message counts only when the other end has confirmed
all of it, so a figure is what an application gets, with no clock but the sender's.
Runs on the host, standard library only. IO: sockets, threads, files (procfs).
"""

import concurrent.futures
import contextlib
import os
import signal
import socket
import struct
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from dynctl.linktest.onhost import netdev, wire
from dynctl.linktest.onhost.wire import LinkError

_MORE, _END, _GOT = b"m", b"e", b"g"
_CHUNK_BYTES = 1 << 20
_WARM_UP = 20
_MAX_MESSAGES = 20_000
_MIN_POINT_S = 0.02
_MIN_TICKS = 10
_ADMIT_TIMEOUT_S = 20.0
_TCP_INFO_BYTES = 160


def main(wish: dict[str, Any]) -> None:
    """Listen or connect as `wish` says; the answer, or the error, is the last line on stdout."""
    # Whatever hangs, this process and its listener are gone by then.
    signal.alarm(int(wish["deadline_s"]))
    token = bytes.fromhex(wish["token"])
    try:
        if wish["role"] == "listen":
            listen(wish, token)
            wire.tell({"done": True})
        else:
            wire.tell(connect(wish, token))
    except LinkError as error:
        wire.tell({"error": str(error)})


def listen(wish: dict[str, Any], token: bytes) -> None:
    """Open the door, tell its port, and do what the other end asks until it says goodbye."""
    door = wire.open_door(wish["address"], wish["first_port"], wish["last_port"])
    wire.tell({"port": door.getsockname()[1]})
    lanes = wire.admit(door, token, 1 + wish["max_streams"], _ADMIT_TIMEOUT_S)
    with contextlib.ExitStack() as stack:
        for lane in lanes:
            stack.enter_context(lane)
        while follow(lanes, wish["address"]):
            pass


def follow(lanes: list[socket.socket], data_address: str) -> bool:
    """Do one thing the other end asks; False when it was the last."""
    control, streams = lanes[0], lanes[1:]
    asked = wire.receive_message(control)
    what = asked.get("do")
    if what == "echo":
        echo(control)
    elif what == "take":
        busy = on_all(streams[: asked["num_streams"]], lambda s: take(s, asked["message_bytes"]))
        wire.send_message(control, {"busy_ratio": busy.ratio})
    elif what == "give":
        wire.send_message(control, give_all(streams, asked))
    elif what == "tell":
        wire.send_message(control, told(lanes, data_address))
    else:
        return False
    return True


def connect(wish: dict[str, Any], token: bytes) -> dict[str, Any]:
    """Connect all lanes, measure, and return everything both ends know."""
    with contextlib.ExitStack() as stack:
        lanes = [
            stack.enter_context(wire.knock(wish["address"], wish["port"], token, lane))
            for lane in range(1 + wish["max_streams"])
        ]
        control = lanes[0]
        wire.send_message(control, {"do": "echo"})
        here_before, started_s = netdev.traffic_bytes(_device(control)), time.monotonic()
        trips = ping(control, wish["round_trip_bytes"], wish["round_trip_s"])
        here = told(lanes, wish["data_address"])
        here["end"]["other_bytes_s"] = _others(here_before, control, started_s, trips)
        points = measure(lanes, wish)
        wire.send_message(control, {"do": "tell"})
        there = wire.receive_message(control)
        here |= {"retransmits": retransmits(lanes)}
        wire.send_message(control, {"do": "bye"})
    return {"round_trip": trips, "points": points, "here": here, "there": there}


def _device(connection: socket.socket) -> str | None:
    return netdev.route_interface(netdev.plain(connection.getpeername()[0]))


def _others(
    before: int | None, control: socket.socket, started_s: float, trips: dict[str, Any]
) -> float | None:
    """Bytes per second on our device that were not the round trips just made."""
    device = _device(control)
    after = netdev.traffic_bytes(device)
    if before is None or after is None or device == "lo":
        return None
    # Payload, TCP, IP and Ethernet headers, there and back.
    ours = trips["num_messages"] * 2 * (trips["message_bytes"] + 66)
    took_s = max(1e-3, time.monotonic() - started_s)
    return float(max(0, after - before - ours) / took_s)


def told(lanes: list[socket.socket], data_address: str) -> dict[str, Any]:
    """What this end knows of the connection."""
    return {
        "end": netdev.end_of(lanes[0], data_address),
        "retransmits": retransmits(lanes),
    }


def retransmits(lanes: list[socket.socket]) -> list[int]:
    """Segments with data that were sent again, and all that were sent. Source: struct tcp_info, linux/tcp.h."""
    again = sent = 0
    for lane in lanes:
        info = lane.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, _TCP_INFO_BYTES)
        if len(info) < _TCP_INFO_BYTES:  # kernels before 4.6
            continue
        again += struct.unpack_from("=I", info, 100)[0]
        sent += struct.unpack_from("=I", info, 156)[0]
    return [again, sent]


def echo(connection: socket.socket) -> None:
    """Send back what comes until the end is told."""
    head = bytearray(4)
    wire.fill(connection, memoryview(head))
    (size,) = struct.unpack("!I", head)
    message = memoryview(bytearray(min(size, wire.MAX_MESSAGE_BYTES)))
    while True:
        wire.fill(connection, message)
        wire.pour(connection, message)
        if message[:1] == _END:
            return


def ping(connection: socket.socket, message_bytes: int, for_s: float) -> dict[str, Any]:
    """Time round trips, one after the other."""
    wire.pour(connection, struct.pack("!I", message_bytes))
    message = memoryview(bytearray(_MORE * message_bytes))
    trips: list[float] = []
    end_s = time.perf_counter() + for_s
    num_cold = _WARM_UP
    while True:
        started_s = time.perf_counter()
        wire.pour(connection, message)
        wire.fill(connection, message)
        now_s = time.perf_counter()
        if num_cold and now_s < end_s:
            num_cold -= 1
            continue
        trips.append(now_s - started_s)
        if now_s >= end_s or len(trips) >= _MAX_MESSAGES:
            break
    last = memoryview(bytearray(_END * message_bytes))
    wire.pour(connection, last)
    wire.fill(connection, last)
    told = {"message_bytes": message_bytes, "jitter_s": wire.jitter(trips)}
    return {**told, **wire.percentiles(trips)}


def measure(lanes: list[socket.socket], wish: dict[str, Any]) -> list[dict[str, Any]]:
    """Measure every size and number of streams in both directions within the time allowed.

    What would take much longer than its share, by the rate seen so far, is left out: slow links get fewer points.
    """
    control, streams = lanes[0], lanes[1:]
    wanted = [(d, size, n) for size, n in wish["points"] for d in ("out", "in")]
    rates: dict[str, float] = {}
    points: list[dict[str, Any]] = []
    end_s = time.monotonic() + wish["throughput_s"]
    for number, (direction, size, num_streams) in enumerate(wanted):
        share_s = max(_MIN_POINT_S, (end_s - time.monotonic()) / (len(wanted) - number))
        if direction in rates and size * num_streams / rates[direction] > 3 * share_s:
            continue
        asked = {"message_bytes": size, "num_streams": num_streams, "for_s": share_s}
        if direction == "out":
            wire.send_message(control, {"do": "take", **asked})
            point = give_all(streams, asked)
            theirs = wire.receive_message(control)["busy_ratio"]
        else:
            wire.send_message(control, {"do": "give", **asked})
            busy = on_all(streams[:num_streams], lambda s, size=size: take(s, size))  # type: ignore[misc]
            point, theirs = wire.receive_message(control), busy.ratio
        point["busy_ratio"] = max(point["busy_ratio"], theirs)
        rates[direction] = max(point["bytes_s"], 1.0)
        points.append({"direction": direction, **point})
    return points


def give_all(streams: list[socket.socket], asked: dict[str, Any]) -> dict[str, Any]:
    """Send messages on so many streams at once, for a time; at least one each."""
    used = streams[: asked["num_streams"]]
    size = asked["message_bytes"]
    # Random, so that nothing on the way can compress it.
    message = memoryview(_MORE + os.urandom(min(size, _CHUNK_BYTES) - 1))
    pieces = [message[: min(_CHUNK_BYTES, size - at)] for at in range(0, size, _CHUNK_BYTES)]
    started_s = time.perf_counter()
    times: list[float] = []
    busy = on_all(used, lambda s: times.extend(give(s, pieces, started_s + asked["for_s"])))
    took_s = time.perf_counter() - started_s
    return {
        "message_bytes": size,
        "num_streams": len(used),
        "bytes_s": len(times) * size / took_s,
        "busy_ratio": busy.ratio,
        **wire.percentiles(times),
    }


def give(stream: socket.socket, pieces: list[memoryview], end_s: float) -> list[float]:
    """Send messages until a point in time, each after the one before was confirmed; return how long each took."""
    times: list[float] = []
    got = memoryview(bytearray(1))
    while True:
        started_s = time.perf_counter()
        for piece in pieces:
            wire.pour(stream, piece)
        wire.fill(stream, got)
        now_s = time.perf_counter()
        times.append(now_s - started_s)
        if now_s >= end_s or len(times) >= _MAX_MESSAGES:
            break
    wire.pour(stream, _END)
    return times


def take(stream: socket.socket, message_bytes: int) -> None:
    """Receive messages and confirm each, until the end is told."""
    view = memoryview(bytearray(min(_CHUNK_BYTES, message_bytes)))
    while True:
        wire.fill(stream, view[:1])
        if view[:1] == _END:
            return
        left = message_bytes - 1
        while left:
            try:
                got = stream.recv_into(view[: min(len(view), left)])
            except OSError as error:
                raise wire.lost(error) from error
            if not got:
                raise LinkError("the other end closed the connection in the middle of the test")
            left -= got
        wire.pour(stream, _GOT)


class Busy:
    """How much of the time threads wanted a processor, and how much the kernel's network work took of one."""

    def __init__(self) -> None:
        self.ratios: list[float] = []
        self._interrupts = _interrupt_ticks()
        self._softirq = 0.0

    def end(self) -> None:
        """Look at the interrupt times again."""
        for cpu, (now, total) in _interrupt_ticks().items():
            before, total_before = self._interrupts.get(cpu, (now, total))
            if total - total_before >= _MIN_TICKS:
                self._softirq = max(self._softirq, (now - before) / (total - total_before))

    @property
    def ratio(self) -> float:
        """The larger of the two."""
        mean = sum(self.ratios) / len(self.ratios) if self.ratios else 0.0
        return min(1.0, max(mean, self._softirq))


def on_all(streams: list[socket.socket], work: Callable[[socket.socket], object]) -> Busy:
    """Do the same on all streams at once, each in a thread."""
    busy = Busy()

    def one(stream: socket.socket) -> None:
        before_s, started_s = _wanted_s(), time.perf_counter()
        work(stream)
        busy.ratios.append((_wanted_s() - before_s) / (time.perf_counter() - started_s))

    with concurrent.futures.ThreadPoolExecutor(max(1, len(streams))) as pool:
        for done in [pool.submit(one, stream) for stream in streams]:
            done.result()
    busy.end()
    return busy


def _wanted_s() -> float:
    """Time this thread has run or was waiting for a processor."""
    with contextlib.suppress(OSError, ValueError):
        ran, waited = Path("/proc/thread-self/schedstat").read_text().split()[:2]
        return (int(ran) + int(waited)) / 1e9
    return time.thread_time()


def _interrupt_ticks() -> dict[str, tuple[int, int]]:
    """Per processor, ticks in interrupts and their deferred work, and all ticks. Source: proc(5), /proc/stat."""
    found = {}
    with contextlib.suppress(OSError, ValueError):
        for line in Path("/proc/stat").read_text().splitlines():
            name, *numbers = line.split()
            if name.startswith("cpu") and name != "cpu":
                ticks = [int(number) for number in numbers[:8]]
                found[name] = ticks[5] + ticks[6], sum(ticks)
    return found

"""Measure NIXL between two hosts as engines use it: each end in turn pulls (READ) from the other's memory, over UCX.

What both need to know of each other goes over a door that only the token opens. Runs on the host in the engine's
Python, with nothing but the standard library and nixl. API: nixl 1.5.1, nixl._api.nixl_agent.
IO: sockets, threads (in NIXL), memory, GPU.
"""

import base64
import contextlib
import ctypes
import importlib
import os
import signal
import socket
import struct
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from dynctl.linktest.onhost import netdev, nixl_memory, ucx_log, wire
from dynctl.linktest.onhost.nixl_memory import Region
from dynctl.linktest.onhost.wire import LinkError

_ADMIT_TIMEOUT_S = 60.0
_PREPARE_TIMEOUT_S = 90
"""Importing nixl takes seconds, more where other work holds the processors."""
_STALL_S = 15.0
_MIN_POINT_S = 0.02
_MAX_MESSAGES = 20_000
_POLLS_PER_YIELD = 100
_WARM_UP_S = 0.02
_ONE_MACHINE = {"self", "sysv", "posix", "cma", "knem", "xpmem"}
"""Transports within a machine. GPU IPC is none of them: between hosts it is NVLink."""
# Name of the measurement, memory pulled into, memory pulled from.
KINDS = (
    ("nixl-dram", "DRAM", "DRAM"),
    ("nixl-dram-vram", "VRAM", "DRAM"),
    ("nixl-vram", "VRAM", "VRAM"),
)


def main(wish: dict[str, Any]) -> None:
    """Listen or connect as `wish` says; the answer, or the error, is the last line on stdout."""
    signal.alarm(int(wish["deadline_s"]))
    token = bytes.fromhex(wish["token"])
    log = _catch_stdout()
    try:
        if wish["role"] == "listen":
            door = wire.open_door(wish["address"], wish["first_port"], wish["last_port"])
            wire.tell({"port": door.getsockname()[1]})
            [control] = wire.admit(door, token, 1, _ADMIT_TIMEOUT_S)
            with control, contextlib.closing(Side(control, wish, log)) as side:
                side.follow()
            wire.tell({"done": True})
        else:
            with (
                wire.knock(wish["address"], wish["port"], token, 0) as control,
                contextlib.closing(Side(control, wish, log)) as side,
            ):
                answer = side.lead()
            wire.tell(answer)
    except LinkError as error:
        wire.tell({"error": str(error)})


def _catch_stdout() -> int:
    """Let C libraries write to memory instead of stdout, which is kept for our answer; UCX logs there."""
    sys.stdout.flush()
    answers = os.dup(1)
    log = os.memfd_create("log")
    os.dup2(log, 1)
    sys.stdout = os.fdopen(answers, "w")
    return log


class Side:
    """One of the two ends: an agent, its memory, and what the other one has."""

    def __init__(self, control: socket.socket, wish: dict[str, Any], log: int) -> None:
        self._control, self._wish, self._log = control, wish, log
        limit = struct.pack("ll", _PREPARE_TIMEOUT_S, 0)
        control.setsockopt(socket.SOL_SOCKET, socket.SO_RCVTIMEO, limit)
        size = max(size * streams for size, streams in wish["points"])
        self._regions = {"DRAM": nixl_memory.dram(size)}
        self._vram_error = ""
        if wish.get("has_gpu"):
            # Before the agent is made: UCX looks for a CUDA context then.
            try:
                self._regions["VRAM"] = nixl_memory.vram(size)
            except LinkError as error:
                self._vram_error = str(error)
        self._agent = _foreign("nixl cannot start", lambda: _make_agent(wish["role"]))
        self._registered = [
            _foreign("nixl cannot register memory", lambda r=region: self._register(r))  # type: ignore[misc]
            for region in self._regions.values()
        ]
        self._peer, self._theirs = self._meet()

    def close(self) -> None:
        """Leave the other end; the process ends now, so what cannot be released any more does not matter."""
        with contextlib.suppress(Exception):
            self._agent.remove_remote_agent(self._peer)
            for registered in self._registered:
                self._agent.deregister_memory(registered)

    def lead(self) -> dict[str, Any]:
        """Pull, then let the other end pull; return what both measured and know."""
        wire.send_message(self._control, {"do": "watch"})
        mine = self._pull_all()
        wire.send_message(self._control, {"do": "rest"})
        mine["starved"] = max(mine["starved"], wire.receive_message(self._control)["starved"])
        starving = Starving()
        wire.send_message(self._control, {"do": "pull"})
        theirs = wire.receive_message(self._control)
        theirs["starved"] = max(theirs["starved"], starving.ratio())
        wire.send_message(self._control, {"do": "bye"})
        return {"in": mine, "out": theirs}

    def follow(self) -> None:
        """Do what the other end asks until it says goodbye."""
        while True:
            what = wire.receive_message(self._control).get("do")
            if what == "watch":
                # Its threads answer meanwhile; what they lacked is told when the other end is done.
                starving = Starving()
                wire.receive_message(self._control)
                wire.send_message(self._control, {"starved": starving.ratio()})
            elif what == "pull":
                wire.send_message(self._control, self._pull_all())
            else:
                return

    def _register(self, region: Region) -> object:
        described = [(region.address, region.size_bytes, region.device, "")]
        return self._agent.register_memory(described, region.kind, backends=["UCX"])

    def _meet(self) -> tuple[str, dict[str, Region]]:
        """Exchange agents' metadata and addresses of memory; return the other agent's name and its memory."""
        metadata = _foreign("nixl has no metadata", self._agent.get_agent_metadata)
        places = {k: [r.address, r.size_bytes, r.device] for k, r in self._regions.items()}
        mine = {"metadata": base64.b64encode(metadata).decode(), "regions": places}
        wire.send_message(self._control, mine)
        theirs = wire.receive_message(self._control)
        blob = base64.b64decode(theirs["metadata"])
        name = _foreign(
            "the other end's nixl does not fit", lambda: self._agent.add_remote_agent(blob)
        )
        regions = {
            kind: Region(kind, address, size_bytes, device, None)
            for kind, (address, size_bytes, device) in theirs["regions"].items()
        }
        return name.decode() if isinstance(name, bytes) else str(name), regions

    def _pull_all(self) -> dict[str, Any]:
        """Measure every kind both ends have memory for; one that fails does not stop the others."""
        found: dict[str, Any] = {}
        starving = Starving()
        for kind, into, source in KINDS:
            if into in self._regions and source in self._theirs:
                try:
                    found[kind] = self._pull_kind(self._regions[into], self._theirs[source])
                except LinkError as error:
                    found[kind] = {"error": str(error)}
            elif into == "VRAM" and self._vram_error:
                found[kind] = {"error": self._vram_error}
        ucx = ucx_log.version(self._read_log())
        return {"kinds": found, "ucx": ucx, "starved": starving.ratio()}

    def _pull_kind(self, into: Region, source: Region) -> dict[str, Any]:
        wish = self._wish
        small = wish["round_trip_bytes"], 1
        # The first transfers connect, and register memory with the device.
        self._point(into, source, small, _WARM_UP_S)
        trip = self._point(into, source, small, wish["round_trip_s"])
        trip["jitter_s"] = wire.jitter(trip.pop("times_s"))
        points: list[dict[str, Any]] = []
        end_s = time.monotonic() + wish["throughput_s"] / 2
        for number, (size, streams) in enumerate(wish["points"]):
            share_s = max(_MIN_POINT_S, (end_s - time.monotonic()) / (len(wish["points"]) - number))
            if points and size * streams / max(points[-1]["bytes_s"], 1.0) > 3 * share_s:
                continue
            point = self._point(into, source, (size, streams), share_s)
            del point["times_s"]
            points.append(point)
        largest = max(point["message_bytes"] for point in points)
        way = ucx_log.way_of_reads(
            self._read_log(),
            largest,
            into_gpu=into.kind == "VRAM",
            from_gpu=source.kind == "VRAM",
        )
        return {"round_trip": trip, "points": points, "transport": way.text(), "end": _end(way)}

    def _point(
        self, into: Region, source: Region, shape: tuple[int, int], for_s: float
    ) -> dict[str, Any]:
        """Keep so many transfers of one size in flight for a time; at least one each."""
        size, streams = shape
        agent = self._agent

        def make(number: int) -> Any:  # noqa: ANN401 - nixl has no types
            mine = agent.get_xfer_descs(into.piece(number * size, size), into.kind)
            theirs = agent.get_xfer_descs(source.piece(number * size, size), source.kind)
            return agent.initialize_xfer("READ", mine, theirs, self._peer, backends=["UCX"])

        handles = _foreign("nixl cannot plan a transfer", lambda: [make(n) for n in range(streams)])
        times, took_s = _foreign("nixl cannot transfer", lambda: _spin(agent, handles, for_s))
        for handle in handles:
            agent.release_xfer_handle(handle)
        return {
            "message_bytes": size,
            "num_streams": streams,
            "bytes_s": len(times) * size / took_s,
            "times_s": times,
            **wire.percentiles(times),
        }

    def _read_log(self) -> str:
        ctypes.CDLL(None).fflush(None)
        size = min(os.fstat(self._log).st_size, 4 << 20)
        return os.pread(self._log, size, 0).decode(errors="replace")


class Starving:
    """How long this process's threads waited for a processor. NIXL's spin, so being at work tells nothing."""

    def __init__(self) -> None:
        self._before = self._waited()
        self._started_s = time.monotonic()

    def ratio(self) -> float:
        """The share of the time since then in which the thread that waited most was waiting."""
        took_s = max(1e-3, time.monotonic() - self._started_s)
        gone = [now - self._before.get(name, 0.0) for name, now in self._waited().items()]
        return min(1.0, max(gone, default=0.0) / took_s)

    @staticmethod
    def _waited() -> dict[str, float]:
        found = {}
        for path in Path("/proc/self/task").glob("*/schedstat"):
            with contextlib.suppress(OSError, ValueError, IndexError):
                found[path.parent.name] = int(path.read_text().split()[1]) / 1e9
        return found


def _make_agent(name: str) -> Any:  # noqa: ANN401 - nixl has no types
    api = importlib.import_module("nixl._api")
    agent = api.nixl_agent(f"{name}-{os.getpid()}", api.nixl_agent_config(backends=["UCX"]))
    if "UCX" not in agent.get_plugin_list():
        raise LinkError("this nixl has no UCX plugin")
    return agent


def _spin(agent: Any, handles: list[Any], for_s: float) -> tuple[list[float], float]:  # noqa: ANN401 - as above
    """Post every transfer again as soon as it is done, until time is up; return their times and the whole time."""
    times: list[float] = []
    begun_s = time.perf_counter()
    end_s = begun_s + for_s
    waiting: dict[int, float] = {}
    for number, handle in enumerate(handles):
        waiting[number] = time.perf_counter()
        state = agent.transfer(handle)
        if state == "ERR":
            raise LinkError("the transfer failed")
    num_polls = 0
    while waiting:
        num_polls += 1
        if num_polls % _POLLS_PER_YIELD == 0:
            # Where processors are few, NIXL's own thread needs the one we spin on.
            os.sched_yield()
        for number in list(waiting):
            state = agent.check_xfer_state(handles[number])
            now_s = time.perf_counter()
            if state == "PROC":
                if now_s - waiting[number] > _STALL_S:
                    raise LinkError(f"the other end vanished: nothing for {_STALL_S:.0f} s")
                continue
            if state != "DONE":
                raise LinkError("the transfer failed; has the other end vanished?")
            times.append(now_s - waiting.pop(number))
            num_polls = 0
            if now_s < end_s and len(times) < _MAX_MESSAGES:
                waiting[number] = time.perf_counter()
                agent.transfer(handles[number])
    return times, time.perf_counter() - begun_s


def _end(way: ucx_log.Way) -> dict[str, object]:
    """The devices of the lanes and the rate they have together."""
    shared = all(transport in _ONE_MACHINE or device == "lo" for transport, device in way.lanes)
    if not way.lanes or shared:
        return {"interface": None, "route_interface": "lo" if way.lanes else None}
    devices = list(dict.fromkeys(device for _, device in way.lanes))
    rates = [_rate(device) for device in devices]
    return {
        "interface": ", ".join(devices),
        "rate_bits_s": None if None in rates else sum(rate or 0 for rate in rates),
    }


def _rate(device: str) -> int | None:
    """An RDMA port as UCX writes it, `mlx5_0:1`, or a network device."""
    name, colon, port = device.partition(":")
    return netdev.rdma_rate(name, port) if colon else netdev.net_rate(name)


def _foreign(what: str, work: Callable[[], Any]) -> Any:  # noqa: ANN401 - nixl has no types
    """Call into nixl, whose errors are of its own many types."""
    try:
        return work()
    except LinkError:
        raise
    except Exception as error:
        raise LinkError(f"{what}: {type(error).__name__}: {error}") from error

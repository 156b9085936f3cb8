"""The TCP program, run the way hosts run it: source and token on stdin, JSON lines out."""

import asyncio
import contextlib
import json
import os
import secrets
import signal
import socket
import subprocess
import sys
import threading
from pathlib import Path

import pytest

from dynctl.core.links import LinkKind
from dynctl.linktest.onhost import program, wire
from dynctl.linktest.onhost.wire import LinkError
from dynctl.linktest.run import measure, tcp

POINTS = [(1 << 16, 1), (1 << 18, 2)]


class Listener:
    """A listening program and what it said."""

    def __init__(self, token, ports, address="127.0.0.2", deadline_s=120):
        wish = {
            "role": "listen", "token": token, "address": address, "max_streams": 2,
            "first_port": ports.first, "last_port": ports.last, "deadline_s": deadline_s,
        }  # fmt: skip
        command = program("tcp", sys.executable, wish, 120)
        self.process = subprocess.Popen(
            command.argv, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE
        )
        self.process.stdin.write(command.stdin)
        self.process.stdin.close()

    def line(self):
        return json.loads(self.process.stdout.readline())

    def close(self):
        self.process.kill()
        self.process.wait(60)
        self.process.stdout.close()
        self.process.stderr.close()


@pytest.fixture
def token():
    return secrets.token_hex(32)


@pytest.fixture
def listen(token, ports):
    with contextlib.ExitStack() as stack:

        def start(**more):
            listener = Listener(more.pop("token", token), more.pop("ports", ports), **more)
            stack.callback(listener.close)
            return listener

        yield start


def connecting(token, port, **more):
    wish = {
        "role": "connect", "token": token, "address": "127.0.0.2", "port": port, "data_address": "127.0.0.1",
        "max_streams": 2, "round_trip_bytes": 64, "round_trip_s": 0.05, "throughput_s": 0.2,
        "points": POINTS, "deadline_s": 120, **more,
    }  # fmt: skip
    command = program("tcp", sys.executable, wish, 120)
    process = subprocess.Popen(command.argv, stdin=subprocess.PIPE, stdout=subprocess.PIPE)
    process.stdin.write(command.stdin)
    process.stdin.close()
    process.stdin = None  # communicate() would flush it
    return process


def answer(process):
    out, _ = process.communicate(timeout=150)
    return json.loads(out)


def test_both_directions_are_measured_at_every_point(two_seats, short, ports):
    links = asyncio.run(measure(["a", "b"], [tcp(two_seats)], short, ports))

    directions = [(m.source_name, m.target_name, m.error) for m in links]
    assert directions == [("a", "b", None), ("b", "a", None)]
    for link in links:
        assert link.kind is LinkKind.TCP
        assert {(p.message_bytes, p.num_streams) for p in link.points} <= set(short.points)
        assert short.points[0] == (link.points[0].message_bytes, link.points[0].num_streams)
        assert all(p.num_messages >= p.num_streams for p in link.points)
        assert link.bytes_s > 1e6
        assert 0 < link.round_trip.p50_s <= link.round_trip.p95_s <= link.round_trip.p99_s
        assert link.source.route_interface == link.target.route_interface == "lo"
        assert link.source.data_interface == "lo"


def test_a_host_that_fails_costs_only_its_own_pairs(two_seats, make_seat, short, ports):
    seats = {
        **two_seats,
        "c": make_seat("c", "192.0.2.7"),
        "d": make_seat("d", "127.0.0.4", python="/nowhere/python"),
    }
    rounds_told = []

    links = asyncio.run(
        measure(list(seats), [tcp(seats)], short, ports, lambda *told: rounds_told.append(told[:2]))
    )

    errors = {(m.source_name, m.target_name): m.error for m in links}
    assert len(errors) == 12
    assert {pair for pair, error in errors.items() if error is None} == {("a", "b"), ("b", "a")}
    assert errors["a", "c"] == errors["c", "a"]
    assert errors["a", "c"].startswith("c: cannot listen on 192.0.2.7:")
    assert errors["c", "a"].endswith("Cannot assign requested address")
    assert "d" in errors["a", "d"]
    assert rounds_told == [(1, 3), (2, 3), (3, 3)]


def test_the_token_is_in_no_command_line(token, listen):
    listener = listen()
    listener.line()

    command_line = Path(f"/proc/{listener.process.pid}/cmdline").read_bytes()
    environment = Path(f"/proc/{listener.process.pid}/environ").read_bytes()

    assert b"json" in command_line
    assert token.encode() not in command_line + environment


def listening_at(port):
    """Local addresses, in the kernel's hexadecimal, of listeners on a port."""
    found = set()
    for table in ("/proc/net/tcp", "/proc/net/tcp6"):
        for line in Path(table).read_text().splitlines()[1:]:
            fields = line.split()
            address, _, hexadecimal = fields[1].rpartition(":")
            if fields[3] == "0A" and int(hexadecimal, 16) == port:
                found.add(address)
    return found


def test_the_door_is_on_the_data_address_alone_and_shut_once_all_are_in(
    token, listen, ports, until
):
    port = listen().line()["port"]
    assert ports.first <= port <= ports.last
    assert listening_at(port) == {"0200007F"}
    with pytest.raises(ConnectionRefusedError):
        socket.create_connection(("127.0.0.1", port), timeout=60)

    process = connecting(token, port, throughput_s=2.0)
    until(lambda: not listening_at(port), "the door is shut")

    assert process.poll() is None
    assert "points" in answer(process)


def test_another_token_is_refused_and_the_right_one_still_gets_in(token, listen):
    port = listen().line()["port"]

    refused = answer(connecting(secrets.token_hex(32), port))

    assert set(refused) == {"error"}
    assert "refused us" in refused["error"]
    assert "points" in answer(connecting(token, port))


def test_strangers_learn_nothing_and_do_not_stop_the_test(token, listen):
    port = listen().line()["port"]
    with contextlib.ExitStack() as stack:
        silent = [
            stack.enter_context(socket.create_connection(("127.0.0.2", port), timeout=60))
            for _ in range(80)
        ]
        loud = stack.enter_context(socket.create_connection(("127.0.0.2", port), timeout=60))
        loud.sendall(b"GET / HTTP/1.1\r\nHost: x\r\n\r\n" + b"x" * 200)

        assert "points" in answer(connecting(token, port))

        said = b""
        with contextlib.suppress(ConnectionError):
            while piece := loud.recv(4096):
                said += piece
        assert len(said) in {0, wire.NONCE_BYTES}
        assert len(silent[0].recv(4096)) == wire.NONCE_BYTES


def test_a_door_of_somebody_else_is_not_trusted(token):
    """Who has not the token cannot pose as the listener: the answer to our proof has to be right."""
    with socket.create_server(("127.0.0.1", 0)) as server:

        def pose():
            connection, _ = server.accept()
            with connection:
                connection.sendall(b"n" * wire.NONCE_BYTES)
                connection.recv(1000)
                connection.sendall(b"p" * wire.PROOF_BYTES)
                connection.recv(1)

        thread = threading.Thread(target=pose)
        thread.start()
        with pytest.raises(LinkError, match="not the listener we started"):
            wire.knock("127.0.0.1", server.getsockname()[1], bytes.fromhex(token), 0)
        thread.join(60)


def test_a_port_that_is_taken_is_passed_over_and_a_full_range_is_an_error(free_ports):
    low = free_ports(2)
    high = low + 1
    with (
        wire.open_door("127.0.0.1", low, high) as one,
        wire.open_door("127.0.0.1", low, high) as two,
    ):
        assert [one.getsockname()[1], two.getsockname()[1]] == [high, low]
        with pytest.raises(LinkError, match=f"no port from {low} to {high} is free"):
            wire.open_door("127.0.0.1", low, high)


def test_a_listener_nobody_comes_to_ends_at_its_deadline(listen):
    listener = listen(deadline_s=3)
    port = listener.line()["port"]

    assert listener.process.wait(60) == -signal.SIGALRM
    assert listening_at(port) == set()


@pytest.mark.parametrize("victim", ["listener", "connector"])
def test_a_peer_that_dies_in_the_middle_is_named_and_nothing_hangs(token, listen, victim, until):
    listener = listen()
    port = listener.line()["port"]
    process = connecting(token, port, round_trip_s=60, throughput_s=60)
    until(lambda: not listening_at(port), "both are in")

    (listener.process if victim == "listener" else process).kill()

    if victim == "listener":
        error = answer(process)["error"]
    else:
        process.communicate(timeout=60)
        error = listener.line()["error"]
    assert "the other end closed" in error or "connection broke" in error


@pytest.mark.parametrize("victim", ["listener", "connector"])
def test_a_peer_that_falls_silent_is_noticed(token, listen, victim, until):
    listener = listen()
    port = listener.line()["port"]
    process = connecting(token, port, round_trip_s=60, throughput_s=1)
    until(lambda: not listening_at(port), "both are in")
    stopped = listener.process if victim == "listener" else process

    os.kill(stopped.pid, signal.SIGSTOP)
    try:
        said = answer(process) if victim == "listener" else listener.line()
    finally:
        os.kill(stopped.pid, signal.SIGCONT)
        process.kill()
        process.communicate(timeout=60)

    assert said["error"] == f"the other end vanished: nothing for {wire.STALL_TIMEOUT_S} s"


@pytest.mark.parametrize(
    "sent", [b"\xff\xff\xff\xff", b"\0\0\0\2[]", b"\0\0\0\4nope"], ids=["huge", "list", "no json"]
)
def test_nonsense_on_the_control_lane_is_a_named_error(sent):
    ours, theirs = socket.socketpair()
    with ours, theirs:
        theirs.sendall(sent)
        with pytest.raises(LinkError, match="nonsense"):
            wire.receive_message(ours)

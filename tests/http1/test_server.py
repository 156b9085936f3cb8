import asyncio
import contextlib
import gc
import resource
import socket
import stat
import struct
import tempfile
import weakref
from contextlib import suppress
from pathlib import Path

import pytest

from dynctl.http1.server import Exchange, Rejection, ServerLimits, raise_file_limit, serve
from dynctl.http1.server_connection import ServerConnection

CLOSE = b"GET /last HTTP/1.1\r\nHost: a\r\nConnection: close\r\n\r\n"


def request(path: bytes = b"/", body: bytes = b"", extra: bytes = b"") -> bytes:
    length = b"Content-Length: %d\r\n" % len(body) if body else b""
    return b"POST %b HTTP/1.1\r\nHost: a\r\n%b%b\r\n%b" % (path, length, extra, body)


def bodies(answer: bytes) -> list[bytes]:
    """Split answers that carry a content-length."""
    found = []
    while answer:
        head, _, rest = answer.partition(b"\r\n\r\n")
        length = int(head.lower().split(b"content-length: ")[1].split(b"\r\n")[0])
        found.append(rest[:length])
        answer = rest[length:]
    return found


def test_a_request_with_a_body_is_answered(run, server_at, talk):
    async def main():
        async with server_at() as server:
            answer = await talk(server.port, request(b"/x", b"hello") + CLOSE)
            assert answer.startswith(b"HTTP/1.1 200 OK\r\n")
            assert bodies(answer) == [b"POST /x hello", b"GET /last "]

    run(main)


def test_a_hundred_pipelined_requests_are_answered_in_order(run, server_at, talk):
    async def main():
        async with server_at() as server:
            wire = b"".join(request(b"/%d" % i, b"b%d" % i) for i in range(99)) + CLOSE
            answer = await talk(server.port, wire)
            assert bodies(answer)[:99] == [b"POST /%d b%d" % (i, i) for i in range(99)]

    run(main)


def test_pipelined_requests_to_a_slow_handler_are_answered_in_order(run, server_at, talk):
    async def main():
        loop = asyncio.get_running_loop()

        def slow_then_fast(exchange: Exchange) -> None:
            body = exchange.request.target
            delay_s = 0.05 if exchange.request.path == "/slow" else 0
            loop.call_later(delay_s, lambda: exchange.respond(200, body))

        async with server_at(slow_then_fast) as server:
            answer = await talk(server.port, request(b"/slow") + request(b"/fast") + CLOSE)
            assert bodies(answer) == [b"/slow", b"/fast", b"/last"]

    run(main)


def test_the_next_pipelined_request_is_not_taken_inside_the_answer_before_it(run, server_at, talk):
    async def main():
        loop, answering, depths = asyncio.get_running_loop(), [], []

        def answer(exchange: Exchange) -> None:
            answering.append(exchange)
            exchange.respond(200, exchange.request.target)
            answering.pop()

        def later(exchange: Exchange) -> None:
            depths.append(len(answering))
            loop.call_soon(answer, exchange)

        async with server_at(later) as server:
            wire = b"".join(request(b"/%d" % i) for i in range(20)) + CLOSE
            answers = await talk(server.port, wire)
            assert bodies(answers)[:20] == [b"/%d" % i for i in range(20)]
            assert depths == [0] * 21

    run(main)


def test_a_refused_request_ends_the_connection_and_later_ones_are_not_served(run, server_at, talk):
    async def main():
        async with server_at() as server:
            bad = b"GET / HTTP/1.1\r\nHost: a\r\nContent-Length: 1\r\nContent-Length: 1\r\n\r\n"
            answer = await talk(server.port, request(b"/ok"), bad + CLOSE)
            assert answer.count(b"HTTP/1.1 ") == 2
            assert b"HTTP/1.1 400 Bad Request\r\n" in answer
            assert b"connection: close\r\n" in answer
            assert b"/last" not in answer
            assert server.num_requests == 1
            assert server.num_rejected == {"framing": 1}

    run(main)


def test_a_chunked_body_is_joined_and_what_follows_is_the_next_request(run, server_at, talk):
    async def main():
        async with server_at() as server:
            wire = request(b"/c", extra=b"Transfer-Encoding: chunked\r\n")
            wire += b"3\r\nabc\r\n2;x=y\r\nde\r\n0\r\nT: v\r\n\r\n" + CLOSE
            assert bodies(await talk(server.port, wire)) == [b"POST /c abcde", b"GET /last "]

    run(main)


def test_a_stream_is_chunked_and_the_connection_lives_on(run, server_at, talk):
    async def main():
        def stream(exchange: Exchange) -> None:
            exchange.start(200, [(b"content-type", b"text/event-stream")])
            exchange.write(b"one")
            exchange.write(b"")
            exchange.write(b"two")
            exchange.finish()

        async with server_at(stream) as server:
            answer = await talk(server.port, request() + CLOSE)
            assert answer.count(b"3\r\none\r\n3\r\ntwo\r\n0\r\n\r\n") == 2

    run(main)


def test_an_http10_client_gets_a_stream_without_chunks(run, server_at, talk):
    async def main():
        def stream(exchange: Exchange) -> None:
            exchange.start(200, [])
            exchange.write(b"one")
            exchange.finish()

        async with server_at(stream) as server:
            answer = await talk(server.port, b"GET / HTTP/1.0\r\n\r\n")
            assert answer.endswith(b"\r\n\r\none")
            assert b"chunked" not in answer

    run(main)


def test_a_head_request_gets_no_body(run, server_at, talk):
    async def main():
        async with server_at() as server:
            head = b"HEAD / HTTP/1.1\r\nHost: a\r\nConnection: close\r\n\r\n"
            answer = await talk(server.port, head)
            assert answer.endswith(b"\r\n\r\n")
            assert b"content-length: 7\r\n" in answer

    run(main)


def test_continue_is_sent_only_after_admission(run, server_at):
    async def main():
        def admit(request):
            if request.header(b"authorization") != b"Bearer k":
                return Rejection(401, b"no", b"text/plain")
            return None

        async def first_line(port: int, extra: bytes) -> bytes:
            reader, writer = await asyncio.open_connection("127.0.0.1", port)
            head = b"POST / HTTP/1.1\r\nHost: a\r\nContent-Length: 2\r\nExpect: 100-continue\r\n"
            writer.write(head + extra + b"\r\n")
            line = await reader.readline()
            if b"100" in line:
                writer.write(b"hi")
                await reader.readline()
                line += await reader.readline()
            writer.close()
            await writer.wait_closed()
            return line

        async with server_at(admit=admit) as server:
            assert await first_line(server.port, b"") == b"HTTP/1.1 401 Unauthorized\r\n"
            admitted = await first_line(server.port, b"Authorization: Bearer k\r\n")
            assert admitted == b"HTTP/1.1 100 Continue\r\nHTTP/1.1 200 OK\r\n"
            assert server.num_requests == 1

    run(main)


def test_a_rejected_upload_still_reads_its_answer(run, server_at):
    async def main():
        async with server_at(admit=lambda _: Rejection(403, b"no")) as server:
            reader, writer = await asyncio.open_connection("127.0.0.1", server.port)
            writer.write(request(b"/", b"x" * 8_000_000))
            assert await reader.readline() == b"HTTP/1.1 403 Forbidden\r\n"
            writer.close()
            await asyncio.wait([asyncio.ensure_future(writer.wait_closed())])

    run(main)


@pytest.mark.parametrize("phase", ["waiting", "streaming"])
def test_a_client_that_leaves_is_reported_once(run, server_at, phase):
    async def main():
        gone: asyncio.Future[Exchange] = asyncio.get_running_loop().create_future()

        def wait_for_end(exchange: Exchange) -> None:
            if phase == "streaming":
                exchange.start(200, [])
                exchange.write(b"first")
            exchange.on_gone = lambda: gone.set_result(exchange)

        async with server_at(wait_for_end) as server:
            _, writer = await asyncio.open_connection("127.0.0.1", server.port)
            writer.write(request())
            await asyncio.sleep(0.02)
            writer.close()
            await writer.wait_closed()
            exchange = await asyncio.wait_for(gone, 60)
            assert exchange.is_gone
            # All of these go nowhere, silently.
            exchange.write(b"more") if phase == "streaming" else exchange.respond(200, b"")
            exchange.abort()
            assert not exchange.is_finished

    run(main)


def test_a_half_closed_client_is_served_when_the_limits_allow(run, server_at, talk):
    async def main():
        loop = asyncio.get_running_loop()

        def later(exchange: Exchange) -> None:
            loop.call_later(0.05, lambda: exchange.respond(200, b"late"))

        limits = ServerLimits(is_half_close_gone=False)
        async with server_at(later, limits=limits) as server:
            answer = await talk(server.port, request(), shut=True)
            assert answer.endswith(b"late")

    run(main)


@pytest.mark.parametrize(
    ("pieces", "status"),
    [
        ([], b"408"),
        ([b"GET / HT"], b"408"),
        ([b"POST / HTTP/1.1\r\nHost: a\r\nContent-Length: 5\r\n\r\nab"], b"408"),
    ],
    ids=["nothing", "head", "body"],
)
def test_a_request_that_stalls_is_answered_408(run, server_at, talk, pieces, status):
    async def main():
        limits = ServerLimits(head_timeout_s=0.2, body_gap_timeout_s=0.2, linger_s=0.2)
        async with server_at(limits=limits) as server:
            answer = await talk(server.port, *pieces)
            assert answer.split(b" ")[1] == status
            assert server.num_requests == 0

    run(main)


def test_a_head_that_trickles_is_cut_at_the_absolute_timeout(run, server_at):
    async def main():
        async with server_at(limits=ServerLimits(head_timeout_s=0.4, linger_s=0.2)) as server:
            reader, writer = await asyncio.open_connection("127.0.0.1", server.port)
            answer = b""
            for byte in request(extra=b"X: " + b"y" * 200 + b"\r\n"):
                writer.write(bytes((byte,)))
                try:
                    answer = await asyncio.wait_for(reader.readline(), 0.02)
                    break
                except TimeoutError:
                    continue
            assert answer.startswith(b"HTTP/1.1 408")
            writer.close()
            await asyncio.wait([asyncio.ensure_future(writer.wait_closed())])

    run(main)


def test_an_idle_connection_is_closed_silently(run, server_at, talk):
    async def main():
        async with server_at(limits=ServerLimits(idle_timeout_s=0.2)) as server:
            answer = await talk(server.port, request(b"/x"))
            assert bodies(answer) == [b"POST /x "]

    run(main)


def test_a_slow_reader_pauses_the_producer_and_is_cut(run, server_at):
    async def main():
        events: list[str] = []
        gone = asyncio.Event()

        def flood(exchange: Exchange) -> None:
            exchange.on_pause = lambda: events.append("pause")
            exchange.on_resume = lambda: events.append("resume")
            exchange.on_gone = lambda: (events.append("gone"), gone.set())
            exchange.start(200, [])
            for _ in range(2_000):
                exchange.write(b"z" * 8192)

        limits = ServerLimits(write_timeout_s=0.3)
        async with server_at(flood, limits=limits) as server:
            sock = socket.socket()
            sock.setblocking(False)
            await asyncio.get_running_loop().sock_connect(sock, ("127.0.0.1", server.port))
            await asyncio.get_running_loop().sock_sendall(sock, request())
            await asyncio.wait_for(gone.wait(), 60)
            sock.close()
            assert events == ["pause", "gone"]
            assert server.num_rejected == {"slow_reader": 1}

    run(main)


def test_a_reader_that_catches_up_resumes_the_producer(run, server_at):
    async def main():
        def flood(exchange: Exchange) -> None:
            exchange.start(200, [])
            exchange.on_resume = exchange.finish
            for _ in range(1_000):
                exchange.write(b"z" * 8192)

        async with server_at(flood) as server:
            reader, writer = await asyncio.open_connection("127.0.0.1", server.port)
            writer.write(request())
            received, tail = 0, b""
            while tail != b"\r\n0\r\n\r\n":
                data = await reader.read(65536)
                received, tail = received + len(data), (tail + data)[-7:]
            assert received > 8_192_000
            writer.close()
            await writer.wait_closed()

    run(main)


def test_a_pipelining_client_that_reads_nothing_is_not_served_without_bound(run, server_at):
    async def main():
        def big(exchange: Exchange) -> None:
            exchange.respond(200, b"x" * 300_000)

        async with server_at(big) as server:
            sock = socket.socket()
            sock.setblocking(False)
            loop = asyncio.get_running_loop()
            await loop.sock_connect(sock, ("127.0.0.1", server.port))
            await loop.sock_sendall(sock, request() * 1_000)
            await asyncio.sleep(0.3)
            assert server.num_requests < 100
            sock.close()

    run(main)


def test_whoever_fails_when_told_of_a_slow_reader_keeps_no_other_connected(server_at):
    async def main():
        faults = []
        asyncio.get_running_loop().set_exception_handler(lambda _, fault: faults.append(fault))

        def fail() -> None:
            raise ValueError("broken")

        def flood(exchange: Exchange) -> None:
            exchange.start(200, [])
            exchange.on_gone = fail
            exchange.write(b"z" * 16_000_000)

        async with server_at(flood, limits=ServerLimits(write_timeout_s=0.3)) as server:
            loop = asyncio.get_running_loop()
            with contextlib.ExitStack() as socks:
                for _ in range(3):
                    sock = socks.enter_context(socket.socket())
                    sock.setblocking(False)
                    await loop.sock_connect(sock, ("127.0.0.1", server.port))
                    await loop.sock_sendall(sock, request())
                async with asyncio.timeout(60):
                    while server.num_connections:
                        await asyncio.sleep(0.005)
            assert server.num_rejected == {"slow_reader": 3}
            assert [str(fault["exception"]) for fault in faults] == ["broken"] * 3

    asyncio.run(main())


def test_a_client_that_leaves_the_rest_of_an_answer_is_cut_once_it_was_idle(run, server_at):
    """Less is left than a producer would be paused for, and closing waits until it is taken."""

    async def main():
        def some(exchange: Exchange) -> None:
            transport = exchange._connection._transport
            own = transport.get_extra_info("socket")
            own.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 4096)
            exchange.respond(200, b"x" * 200_000)

        limits = ServerLimits(idle_timeout_s=0.1, write_timeout_s=0.2)
        async with server_at(some, limits=limits) as server:
            loop = asyncio.get_running_loop()
            with socket.socket() as sock:
                sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
                sock.setblocking(False)
                await loop.sock_connect(sock, ("127.0.0.1", server.port))
                await loop.sock_sendall(sock, request())
                async with asyncio.timeout(60):
                    while not server.num_requests or server.num_connections:
                        await asyncio.sleep(0.005)
            assert server.num_rejected == {"linger": 1}

    run(main)


def test_a_client_that_leaves_is_forgotten_whoever_fails_when_told(server_at):
    async def main():
        faults = []
        asyncio.get_running_loop().set_exception_handler(lambda _, fault: faults.append(fault))

        def fail() -> None:
            raise ValueError("broken")

        def wait(exchange: Exchange) -> None:
            exchange.on_gone = fail

        async with server_at(wait) as server:
            with socket.create_connection(("127.0.0.1", server.port)) as sock:
                sock.sendall(request())
                async with asyncio.timeout(60):
                    while not server.num_requests:
                        await asyncio.sleep(0.005)
                sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
            # It is reset: nobody tells of an end before it is lost.
            async with asyncio.timeout(60):
                while server.num_connections:
                    await asyncio.sleep(0.005)
            assert [str(fault["exception"]) for fault in faults] == ["broken"]

    asyncio.run(main())


def test_a_client_that_asks_again_before_it_reads_waits_and_is_cut_in_time(run, server_at):
    async def main():
        def big(exchange: Exchange) -> None:
            exchange.respond(200, b"x" * 8_000_000)

        limits = ServerLimits(write_timeout_s=0.3)
        async with server_at(big, limits=limits) as server:
            loop = asyncio.get_running_loop()
            with socket.socket() as sock:
                sock.setblocking(False)
                await loop.sock_connect(sock, ("127.0.0.1", server.port))
                for number in range(3):
                    await loop.sock_sendall(sock, request())
                    if not number:
                        while not server.num_requests:
                            await asyncio.sleep(0.005)
                async with asyncio.timeout(60):
                    while server.num_connections:
                        await asyncio.sleep(0.005)
            assert server.num_requests == 1
            assert server.num_rejected == {"slow_reader": 1}

    run(main)


def test_a_client_that_asks_again_before_it_reads_gets_both_answers(run, server_at):
    async def main():
        def big(exchange: Exchange) -> None:
            exchange.respond(200, exchange.request.body * 16_000_000)

        async with server_at(big) as server:
            reader, writer = await asyncio.open_connection("127.0.0.1", server.port)
            whole = request(body=b"b")
            writer.write(request(body=b"a"))
            while not server.num_requests:
                await asyncio.sleep(0.005)
            # While nothing is read, so that it comes in pieces.
            for piece in (whole[:20], whole[20:]):
                writer.write(piece)
                await asyncio.sleep(0.02)
            assert server.num_requests == 1
            for letter in (b"a", b"b"):
                await reader.readuntil(b"\r\n\r\n")
                assert await reader.readexactly(16_000_000) == letter * 16_000_000
            writer.close()
            await writer.wait_closed()

    run(main)


def test_the_last_piece_of_an_answer_pauses_nobody(run, server_at):
    async def main():
        events: list[str] = []

        def at_once(exchange: Exchange) -> None:
            exchange.on_pause = lambda: events.append("pause")
            exchange.start(200, [])
            exchange.write(b"z")
            exchange.finish(b"z" * 8_000_000)

        async with server_at(at_once) as server:
            reader, writer = await asyncio.open_connection("127.0.0.1", server.port)
            writer.write(request())
            received = b""
            while not received.endswith(b"\r\n0\r\n\r\n"):
                received += await reader.read(1_000_000)
            assert not events
            writer.close()
            await writer.wait_closed()

    run(main)


def test_a_connection_beyond_the_limit_is_answered_503(run, server_at, talk):
    async def main():
        async with server_at(limits=ServerLimits(max_connections=1, linger_s=0.2)) as server:
            _, writer = await asyncio.open_connection("127.0.0.1", server.port)
            await asyncio.sleep(0.02)
            answer = await talk(server.port)
            assert answer.startswith(b"HTTP/1.1 503 ")
            writer.close()
            await writer.wait_closed()

    run(main)


def test_a_failing_handler_is_a_500_and_is_reported(server_at, talk):
    async def main():
        faults: list[dict] = []
        asyncio.get_running_loop().set_exception_handler(lambda _, fault: faults.append(fault))

        def broken(exchange: Exchange) -> None:
            if exchange.request.path == "/late":
                exchange.start(200, [])
            raise RuntimeError("boom")

        async with server_at(broken) as server:
            answer = await talk(server.port, request(b"/early") + request(b"/late"))
            assert answer.startswith(b"HTTP/1.1 500 ")
            assert not answer.endswith(b"0\r\n\r\n")
            assert [str(fault["exception"]) for fault in faults] == ["boom", "boom"]

    asyncio.run(main())


def test_closing_lets_answers_end_and_refuses_new_connections(run, server_at):
    async def main():
        loop = asyncio.get_running_loop()
        limits = ServerLimits()
        asked = asyncio.Event()

        def later(exchange: Exchange) -> None:
            asked.set()
            loop.call_later(0.1, lambda: exchange.respond(200, b"done"))

        server = await serve(later, host="127.0.0.1", port=0, limits=limits)
        idle_reader, idle_writer = await asyncio.open_connection("127.0.0.1", server.port)
        reader, writer = await asyncio.open_connection("127.0.0.1", server.port)
        writer.write(request())
        await asked.wait()
        await server.close(60)
        answer = await reader.read()
        assert b"connection: close\r\n" in answer
        assert answer.endswith(b"done")
        assert await idle_reader.read() == b""
        with pytest.raises(ConnectionRefusedError):
            await asyncio.open_connection("127.0.0.1", server.port)
        for one in (writer, idle_writer):
            one.close()
            await one.wait_closed()

    run(main)


def test_closing_cuts_what_outlasts_its_grace(run):
    async def main():
        gone: list[Exchange] = []
        asked = asyncio.Event()

        def never(exchange: Exchange) -> None:
            asked.set()
            exchange.on_gone = lambda: gone.append(exchange)

        server = await serve(never, host="127.0.0.1", port=0)
        _, writer = await asyncio.open_connection("127.0.0.1", server.port)
        writer.write(request())
        await asked.wait()
        await server.close(0.1)
        assert len(gone) == 1
        assert server.num_connections == 0
        writer.close()
        await asyncio.wait([asyncio.ensure_future(writer.wait_closed())])

    run(main)


def test_a_unix_socket_is_private_replaces_a_dead_one_and_goes_with_the_server(run, server_at):
    async def main():
        with tempfile.TemporaryDirectory(dir="/tmp") as folder:
            path = Path(folder, "s")
            dead = socket.socket(socket.AF_UNIX)
            dead.bind(str(path))
            dead.close()
            server = await serve(lambda exchange: exchange.respond(200, b"u"), path=path)
            assert stat.S_IMODE(path.stat().st_mode) == 0o600
            with pytest.raises(OSError, match="in use"):
                await serve(lambda _: None, path=path)
            reader, writer = await asyncio.open_unix_connection(str(path))
            writer.write(CLOSE)
            assert (await reader.read()).endswith(b"u")
            writer.close()
            await writer.wait_closed()
            await server.close(0)
            assert not path.exists()

    run(main)


def test_answer_headers_cannot_smuggle_a_line_end(run, server_at, talk):
    async def main():
        caught: list[str] = []

        def smuggle(exchange: Exchange) -> None:
            try:
                exchange.respond(200, b"", headers=[(b"x", b"a\r\nset-cookie: b")])
            except ValueError as error:
                caught.append(str(error))
            exchange.abort()

        async with server_at(smuggle) as server:
            await asyncio.wait([asyncio.ensure_future(talk(server.port, request()))])
            assert len(caught) == 1

    run(main)


def test_an_answer_of_known_length_is_sent_without_chunks(run, server_at, talk):
    async def main():
        def in_pieces(exchange: Exchange) -> None:
            exchange.start(200, [], length_bytes=6)
            exchange.write(b"abc")
            exchange.write(b"def")
            exchange.finish()

        async with server_at(in_pieces) as server:
            answer = await talk(server.port, request() + CLOSE)
            assert bodies(answer) == [b"abcdef", b"abcdef"]
            assert b"chunked" not in answer

    run(main)


@pytest.mark.parametrize("sent", [b"ab", b"abcd"])
def test_an_answer_that_breaks_its_length_is_cut(run, server_at, talk, sent):
    async def main():
        def wrong(exchange: Exchange) -> None:
            exchange.start(200, [], length_bytes=3)
            exchange.write(sent)
            if not exchange.is_finished:
                exchange.finish()

        async with server_at(wrong) as server:
            try:
                answer = await talk(server.port, request() + CLOSE)
            except ConnectionError:
                answer = b""
            assert answer.count(b"HTTP/1.1 ") <= 1
            assert not answer.endswith(b"abcd")
            assert server.num_requests == 1

    run(main)


def test_an_exchange_leaves_no_cycle_behind(run, server_at, talk):
    async def main():
        alive: list[weakref.ref] = []

        class Work:
            def __init__(self, exchange: Exchange) -> None:
                self.exchange = exchange
                exchange.on_gone = self.stop
                exchange.on_pause = exchange.on_resume = self.stop
                alive.append(weakref.ref(self))
                exchange.respond(200, b"")

            def stop(self) -> None:
                raise AssertionError

        gc.disable()
        try:
            async with server_at(Work) as server:
                await talk(server.port, request() * 3 + CLOSE)
                assert [one() for one in alive] == [None] * 4
        finally:
            gc.enable()

    run(main)


def test_connections_never_use_more_than_half_of_the_open_files(run, server_at):
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    # What other tests hold open counts too.
    few = 256 + len(list(Path("/proc/self/fd").iterdir()))

    async def main():
        async with server_at() as server:
            assert server.max_connections <= few // 2
        assert raise_file_limit() == hard
        assert resource.getrlimit(resource.RLIMIT_NOFILE) == (hard, hard)

    try:
        resource.setrlimit(resource.RLIMIT_NOFILE, (few, hard))
        run(main)
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))


@pytest.mark.parametrize("num_turns", range(6))
def test_whoever_is_accepted_while_the_server_closes_is_let_go(run, server_at, num_turns):
    """In every turn of the loop between the kernel's accept and a connection that is made."""

    async def main():
        async with server_at() as server:
            clients = [socket.create_connection(("127.0.0.1", server.port)) for _ in range(3)]
            for _ in range(num_turns):
                await asyncio.sleep(0)
            await server.close(0)
            assert server.num_connections == 0
            for client in clients:
                client.settimeout(60)
                with suppress(ConnectionResetError):  # never accepted
                    assert client.recv(1) == b""
                client.close()
            gc.collect()  # a connection nobody closed warns

    run(main)


def test_a_connection_made_after_the_end_is_closed(run, server_at):
    async def main():
        async with server_at() as server:
            await server.close(0)
            ours, theirs = socket.socketpair()
            loop = asyncio.get_running_loop()
            await loop.connect_accepted_socket(lambda: ServerConnection(server), theirs)
            reader, writer = await asyncio.open_connection(sock=ours)
            assert await reader.read() == b""
            assert server.num_connections == 0
            writer.close()
            await writer.wait_closed()

    run(main)

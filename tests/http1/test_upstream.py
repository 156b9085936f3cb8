import asyncio
import socket
import tempfile
from contextlib import asynccontextmanager
from pathlib import Path

import pytest

from dynctl.http1.server import Exchange, serve
from dynctl.http1.upstream import Address, ReceiverError, Upstream, UpstreamError, UpstreamLimits


class Recorder:
    """A sink that keeps everything."""

    def __init__(self) -> None:
        self.status = 0
        self.headers: list[tuple[bytes, bytes]] = []
        self.data: list[bytes] = []
        self.error: UpstreamError | None = None
        self.num_ends = 0
        self.over = asyncio.Event()

    @property
    def body(self) -> bytes:
        return b"".join(self.data)

    def on_head(self, status, headers):
        assert not self.over.is_set()
        self.status, self.headers = status, headers

    def on_data(self, data):
        assert not self.over.is_set()
        self.data.append(data)

    def on_end(self):
        self.num_ends += 1
        self.over.set()

    def on_error(self, error):
        self.num_ends += 1
        self.error = error
        self.over.set()


@asynccontextmanager
async def pool_at(port: int, **limits):
    pool = Upstream(Address("127.0.0.1", port), UpstreamLimits(**limits))
    try:
        yield pool
    finally:
        await pool.close()
        assert (pool.num_active, pool.num_connections) == (0, 0)


@asynccontextmanager
async def scripted(*answers: bytes | None, close: bool = True):
    """A server that gives the n-th answer to the n-th request; None closes without one."""
    seen: list[bytes] = []
    left = list(answers)

    async def converse(reader, writer):
        try:
            while left:
                head = await reader.readuntil(b"\r\n\r\n")
                seen.append(head)
                answer = left.pop(0)
                if answer is None:
                    break
                writer.write(answer)
                await writer.drain()
            if not close:
                await reader.read()
        except (asyncio.IncompleteReadError, ConnectionError):
            pass
        finally:
            writer.close()

    server = await asyncio.start_server(converse, "127.0.0.1", 0)
    try:
        yield server.sockets[0].getsockname()[1], seen
    finally:
        server.close()
        await server.wait_closed()


async def get(pool: Upstream, target: str = "/") -> Recorder:
    sink = Recorder()
    pool.send("GET", target, (), b"", sink)
    await asyncio.wait_for(sink.over.wait(), 60)
    return sink


def test_calls_reuse_one_connection(run, server_at):
    async def main():
        async with server_at() as server, pool_at(server.port) as pool:
            for number in range(5):
                answer = await pool.fetch("POST", "/x", [(b"a", b"b")], b"body%d" % number)
                assert answer.status == 200
                assert answer.body == b"POST /x body%d" % number
            assert server.num_connections == 1
            assert pool.num_connections == 1

    run(main)


def test_a_unix_socket_is_reached(run):
    async def main():
        with tempfile.TemporaryDirectory(dir="/tmp") as folder:
            path = str(Path(folder, "s"))
            server = await serve(lambda exchange: exchange.respond(201, b"u"), path=path)
            pool = Upstream(Address(path=path))
            answer = await pool.fetch("GET", "/")
            assert (answer.status, answer.body) == (201, b"u")
            await pool.close()
            await server.close(1)

    run(main)


def test_a_stream_arrives_in_pieces_and_ends_once(run, server_at):
    async def main():
        def stream(exchange: Exchange) -> None:
            exchange.start(200, [(b"content-type", b"text/event-stream")])
            for number in range(64):
                exchange.write(b"data: %d\n\n" % number)
            exchange.finish()

        async with server_at(stream) as server, pool_at(server.port) as pool:
            for _ in range(3):
                sink = await get(pool)
                assert sink.body == b"".join(b"data: %d\n\n" % n for n in range(64))
                assert sink.error is None
                assert sink.num_ends == 1
            assert server.num_connections == 1

    run(main)


def test_large_bodies_pass_both_ways(run, server_at):
    async def main():
        body = b"x" * 5_000_000
        async with server_at() as server, pool_at(server.port) as pool:
            answer = await pool.fetch("POST", "/", (), body)
            assert answer.body == b"POST / " + body

    run(main)


def test_a_refused_connection_is_a_connect_error(run):
    async def main():
        with socket.socket() as unused:
            unused.bind(("127.0.0.1", 0))
            async with pool_at(unused.getsockname()[1]) as pool:
                sink = await get(pool)
                assert sink.error.kind == "connect"

    run(main)


def test_a_connection_that_is_never_made_times_out(run):
    async def main():
        # A full backlog: the kernel drops further SYNs.
        with socket.socket() as deaf, socket.socket() as first, socket.socket() as second:
            deaf.bind(("127.0.0.1", 0))
            deaf.listen(0)
            for filler in (first, second):
                filler.setblocking(False)
                filler.connect_ex(deaf.getsockname())
            async with pool_at(deaf.getsockname()[1], connect_timeout_s=0.2) as pool:
                sink = await get(pool)
                assert sink.error.kind == "connect"
                assert "0.2 s" in str(sink.error)

    run(main)


@pytest.mark.parametrize(
    ("answer", "kind", "has_received"),
    [
        (None, "closed", False),
        (b"HTTP/1.1 200 OK\r\nContent-Length: 10\r\n\r\nabc", "closed", True),
        (b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n3\r\nabc\r\n", "closed", True),
        (
            b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n3\r\nabcd\r\n0\r\n\r\n",
            "protocol",
            True,
        ),
        (
            b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\nContent-Length: 3\r\n\r\nabc",
            "protocol",
            True,
        ),
        (
            b"HTTP/1.1 200 OK\r\nContent-Length: 3\r\nContent-Length: 4\r\n\r\nabc",
            "protocol",
            True,
        ),
        (b"HTTP/1.1 200 OK\r\nTransfer-Encoding: gzip\r\n\r\nabc", "closed", True),
        (b"HTTP/1.1 20", "closed", True),
        (b"SSH-2.0-OpenSSH\r\n", "protocol", True),
        (
            b"HTTP/1.1 302 Found\r\nLocation: http://169.254.169.254/\r\nContent-Length: 0\r\n\r\n",
            "protocol",
            True,
        ),
        (
            b"HTTP/1.1 101 Switching Protocols\r\nConnection: upgrade\r\nUpgrade: x\r\n\r\n",
            "protocol",
            True,
        ),
        (b"HTTP/1.1 103 Early Hints\r\n\r\n" * 11, "protocol", True),
        (
            b"HTTP/1.1 200 OK\r\nX: " + b"y" * 70_000 + b"\r\nContent-Length: 0\r\n\r\n",
            "protocol",
            True,
        ),
        (b"HTTP/1.1 200 OK\r\nX: " + b"y" * 70_000, "protocol", True),
    ],
)
def test_a_broken_answer_is_one_error(run, answer, kind, has_received):
    async def main():
        async with scripted(answer) as (port, seen), pool_at(port) as pool:
            sink = Recorder()
            call = pool.send("GET", "/", (), b"", sink)
            await asyncio.wait_for(sink.over.wait(), 60)
            assert sink.error is not None
            assert (sink.error.kind, call.has_received) == (kind, has_received)
            assert sink.num_ends == 1
            assert len(seen) == 1

    run(main)


@pytest.mark.parametrize(
    ("answer", "status", "body"),
    [
        (
            b"HTTP/1.1 103 Early Hints\r\n\r\n" * 10
            + b"HTTP/1.1 200 OK\r\nContent-Length: 1\r\n\r\na",
            200,
            b"a",
        ),
        (b"HTTP/1.1 200 OK\r\nConnection: close\r\n\r\nto the end", 200, b"to the end"),
        (b"HTTP/1.0 200 OK\r\n\r\nold", 200, b"old"),
        (b"HTTP/1.1 204 No Content\r\n\r\n", 204, b""),
        (b"HTTP/1.1 503 Busy\r\nRetry-After: 1\r\nContent-Length: 2\r\n\r\nno", 503, b"no"),
        (
            b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n1\r\na\r\n0\r\nTrailer: x\r\n\r\n",
            200,
            b"a",
        ),
        (
            b"HTTP/1.1 200 OK\r\nContent-Length: 200000\r\n\r\n" + b"x" * 200_000,
            200,
            b"x" * 200_000,
        ),
    ],
)
def test_a_proper_answer_is_delivered(run, answer, status, body):
    async def main():
        async with scripted(answer) as (port, _), pool_at(port) as pool:
            sink = await get(pool)
            assert (sink.error, sink.status, sink.body) == (None, status, body)
            assert b"trailer" not in dict(sink.headers)

    run(main)


def test_a_second_unasked_answer_is_never_taken_for_the_next_request(run):
    async def main():
        good = b"HTTP/1.1 200 OK\r\nContent-Length: 1\r\n\r\n"
        async with (
            scripted(good + b"a" + good + b"EVIL", good + b"c") as (port, seen),
            pool_at(port) as pool,
        ):
            assert (await get(pool, "/1")).body == b"a"
            second = await get(pool, "/2")
            assert second.body == b"c"
            assert len(seen) == 2

    run(main)


def test_a_stale_connection_is_replaced_for_safe_methods_only(run):
    async def main():
        ok = b"HTTP/1.1 200 OK\r\nContent-Length: 0\r\n\r\n"
        async with scripted(ok, None, ok, None) as (port, seen), pool_at(port) as pool:
            assert (await get(pool)).status == 200
            assert (await get(pool)).status == 200
            assert len(seen) == 3
            sink = Recorder()
            call = pool.send("POST", "/", (), b"x", sink)
            await asyncio.wait_for(sink.over.wait(), 60)
            assert sink.error.kind == "closed"
            assert (call.was_reused, call.has_received) == (True, False)
            assert len(seen) == 4

    run(main)


def test_cancel_closes_the_connection_and_silences_the_sink(run, server_at):
    async def main():
        gone = asyncio.Event()

        def stream(exchange: Exchange) -> None:
            exchange.on_gone = gone.set
            exchange.start(200, [])
            exchange.write(b"first")

        async with server_at(stream) as server, pool_at(server.port) as pool:
            sink = Recorder()
            call = pool.send("GET", "/", (), b"", sink)
            while not sink.data:
                await asyncio.sleep(0.005)
            call.cancel()
            call.cancel()
            await asyncio.wait_for(gone.wait(), 60)
            assert sink.num_ends == 0
            assert (pool.num_active, pool.num_connections) == (0, 0)

    run(main)


def test_what_one_read_brings_of_a_body_comes_in_one_piece(run):
    async def main():
        chunks = b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n" + b"1\r\na\r\n" * 50
        async with scripted(chunks + b"0\r\n\r\n") as (port, _), pool_at(port) as pool:
            sink = Recorder()
            pool.send("GET", "/", (), b"", sink)
            await asyncio.wait_for(sink.over.wait(), 60)
            assert sink.data == [b"a" * 50]
            assert (sink.num_ends, sink.error) == (1, None)

    run(main)


def test_what_lies_behind_the_end_of_an_answer_is_not_part_of_it(run, eventually):
    async def main():
        answer = b"HTTP/1.1 200 OK\r\ncontent-length: 3\r\n\r\nabc"
        async with scripted(answer * 2, close=False) as (port, _), pool_at(port) as pool:
            sink = Recorder()
            pool.send("GET", "/", (), b"", sink)
            await asyncio.wait_for(sink.over.wait(), 60)
            assert sink.body == b"abc"
            assert sink.num_ends == 1
            await eventually(lambda: pool.num_connections == 0)

    run(main)


def test_a_receiver_that_fails_ends_its_own_call_only(run):
    async def main():
        answer = b"HTTP/1.1 200 OK\r\ncontent-length: 3\r\n\r\nabc"
        faults = []
        asyncio.get_running_loop().set_exception_handler(lambda _, fault: faults.append(fault))
        async with scripted(answer, close=False) as (port, _), pool_at(port) as pool:

            class Broken(Recorder):
                def on_data(self, data):
                    raise ValueError("broken")

            sink = Broken()
            pool.send("GET", "/", (), b"", sink)
            await asyncio.wait_for(sink.over.wait(), 60)
            assert sink.error.kind == "protocol"
            assert [str(fault["exception"]) for fault in faults] == ["broken"]
            assert pool.num_active == 0

    run(main)


def fails(*_):
    raise ValueError("broken")


def test_a_receiver_that_fails_at_the_end_harms_nobody_who_gets_its_connection(run, server_at):
    async def main():
        faults = []
        asyncio.get_running_loop().set_exception_handler(lambda _, fault: faults.append(fault))
        async with server_at() as server, pool_at(server.port, max_connections=1) as pool:
            broken, sink = Recorder(), Recorder()
            broken.on_end = fails
            for one in (broken, sink):
                pool.send("POST", "/", (), b"x", one)
            await asyncio.wait_for(sink.over.wait(), 60)
            assert sink.error is None
            assert sink.body == b"POST / x"
            assert [str(fault["exception"]) for fault in faults] == ["broken"]

    run(main)


@pytest.mark.parametrize("cancels", [False, True])
@pytest.mark.parametrize(
    ("method", "body", "is_known"),
    [
        *[(method, b"abc", True) for method in ("on_head", "on_data", "on_end")],
        *[(method, b"abc", False) for method in ("on_head", "on_data", "on_end")],
        *[("on_head", b"", False), ("on_end", b"", False), ("on_error", None, False)],
    ],
)
def test_a_receiver_that_fails_hears_of_it_once_and_last(run, method, body, is_known, cancels):
    """`is_known`: the head of its answer is the one of the answer before."""

    async def main():
        faults = []
        asyncio.get_running_loop().set_exception_handler(lambda _, fault: faults.append(fault))
        answer = None
        if body is not None:
            answer = b"HTTP/1.1 200 OK\r\ncontent-length: %d\r\n\r\n%b" % (len(body), body)
        before = [answer] if is_known else []
        async with scripted(*before, answer) as (port, _), pool_at(port) as pool:
            for _ in before:
                assert (await get(pool)).body == body

            class Broken(Recorder):
                def fail(self, *_):
                    setattr(self, method, getattr(super(), method))
                    if cancels:
                        call.cancel()
                    raise ValueError("broken")

            sink = Broken()
            setattr(sink, method, sink.fail)
            call = pool.send("POST", "/", (), b"x", sink)
            await asyncio.wait_for(sink.over.wait(), 60)
            assert isinstance(sink.error, ReceiverError)
            assert sink.num_ends == 1
            assert [str(fault["exception"]) for fault in faults] == ["broken"]
            assert pool.num_active == 0

    run(main)


def test_receivers_that_fail_when_told_of_silence_keep_it_from_nobody(run, server_at):
    async def main():
        faults = []
        asyncio.get_running_loop().set_exception_handler(lambda _, fault: faults.append(fault))
        async with (
            server_at(lambda _: None) as server,
            pool_at(server.port, silence_timeout_s=0.3) as pool,
        ):
            sinks = [Recorder() for _ in range(4)]
            for number, sink in enumerate(sinks):
                if number % 2:
                    sink.on_error = fails
                pool.send("GET", "/", (), b"", sink)
            for sink in sinks[::2]:
                await asyncio.wait_for(sink.over.wait(), 60)
                assert sink.error.kind == "timeout"
            assert pool.num_active == 0
            # Told of silence, then that it has failed.
            assert [str(fault["exception"]) for fault in faults] == ["broken"] * 4

    run(main)


def test_whoever_sends_again_when_told_of_silence_makes_the_clock_no_faster(run, server_at):
    async def main():
        async with (
            server_at(lambda _: None) as server,
            pool_at(server.port, silence_timeout_s=0.0) as pool,
        ):

            class Insistent(Recorder):
                def on_error(self, error):
                    super().on_error(error)
                    if error.kind == "timeout":
                        pool.send("GET", "/", (), b"", Insistent())

            began_s = asyncio.get_running_loop().time()
            pool.send("GET", "/", (), b"", Insistent())
            while pool.tick < 6:
                await asyncio.sleep(0.005)
            # A busy machine makes it slower at most.
            assert asyncio.get_running_loop().time() - began_s > 2.9

    run(main)


def test_cancel_inside_a_callback_stops_further_data(run):
    async def main():
        chunks = b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n" + b"1\r\na\r\n" * 500_000
        async with scripted(chunks, close=False) as (port, _), pool_at(port) as pool:

            class Impatient(Recorder):
                def on_data(self, data):
                    super().on_data(data)
                    call.cancel()

            sink = Impatient()
            call = pool.send("GET", "/", (), b"", sink)
            while not sink.data:
                await asyncio.sleep(0.005)
            await asyncio.sleep(0.02)
            assert len(sink.data) == 1
            assert len(sink.body) < 500_000
            assert sink.num_ends == 0

    run(main)


@pytest.mark.parametrize("end", ["cancel", "let_go"])
@pytest.mark.parametrize("is_known", [True, False])
def test_who_ends_its_call_at_the_head_hears_nothing_of_the_body(run, end, is_known):
    async def main():
        answer = b"HTTP/1.1 200 OK\r\ncontent-length: 3\r\n\r\nabc"
        before = [answer] if is_known else []
        async with scripted(*before, answer) as (port, _), pool_at(port) as pool:
            for _ in before:
                assert (await get(pool)).body == b"abc"
            told = asyncio.Event()

            class Content(Recorder):
                def on_head(self, status, headers):
                    super().on_head(status, headers)
                    getattr(call, end)()
                    told.set()

            sink = Content()
            call = pool.send("GET", "/", (), b"", sink)
            await asyncio.wait_for(told.wait(), 60)
            assert (sink.data, sink.num_ends, pool.num_active) == ([], 0, 0)

    run(main)


def test_cancel_while_connecting_frees_the_slot(run, server_at):
    async def main():
        async with server_at() as server, pool_at(server.port, max_connections=1) as pool:
            sink = Recorder()
            pool.send("GET", "/", (), b"", sink).cancel()
            assert (await get(pool)).status == 200
            assert sink.num_ends == 0

    run(main)


def test_calls_beyond_the_limit_wait_their_turn(run, server_at):
    async def main():
        async with server_at() as server, pool_at(server.port, max_connections=2) as pool:
            async with asyncio.TaskGroup() as group:
                tasks = [group.create_task(get(pool, f"/{n}")) for n in range(20)]
            assert [task.result().body for task in tasks] == [b"GET /%d " % n for n in range(20)]
            assert server.num_connections <= 2

    run(main)


def test_a_call_that_waits_too_long_for_a_slot_fails(run, server_at):
    async def main():
        async with (
            server_at(lambda _: None) as server,
            pool_at(server.port, max_connections=1, connect_timeout_s=0.3) as pool,
        ):
            pool.send("GET", "/", (), b"", Recorder())
            sink = await get(pool)
            assert sink.error.kind == "connect"
            assert "in use" in str(sink.error)

    run(main)


def test_a_silent_origin_times_out(run, server_at):
    async def main():
        async with (
            server_at(lambda _: None) as server,
            pool_at(server.port, silence_timeout_s=0.3) as pool,
        ):
            sink = await get(pool)
            assert sink.error.kind == "timeout"
            with pytest.raises(UpstreamError, match="no complete answer within"):
                await pool.fetch("GET", "/", timeout_s=0.05)

    run(main)


@pytest.mark.parametrize("rest", [b"", b"1\r\n.\r\n"], ids=["nothing", "more"])
def test_who_is_let_go_and_does_not_end_is_closed(run, eventually, rest):
    async def main():
        gone = asyncio.Event()

        async def converse(reader, writer):
            await reader.readuntil(b"\r\n\r\n")
            writer.write(b"HTTP/1.1 200 OK\r\ntransfer-encoding: chunked\r\n\r\n3\r\nabc\r\n")
            while not writer.is_closing():
                writer.write(rest)
                await asyncio.sleep(0.01)
                if reader.at_eof():
                    break
            gone.set()
            writer.close()

        server = await asyncio.start_server(converse, "127.0.0.1", 0)
        port = server.sockets[0].getsockname()[1]
        async with pool_at(port, end_timeout_s=0.1, max_connections=1) as pool:

            class Content(Recorder):
                def on_data(self, data):
                    super().on_data(data)
                    call.let_go()

            sink = Content()
            call = pool.send("GET", "/", (), b"", sink)
            await asyncio.wait_for(gone.wait(), 60)
            await eventually(lambda: pool.num_active == 0)
            assert (len(sink.data), sink.num_ends) == (1, 0), "it hears no more"
            assert pool.num_connections == 0
        server.close()
        await server.wait_closed()

    run(main)


def test_who_is_let_go_and_ends_in_time_serves_the_next(run, eventually):
    async def main():
        answers = b"HTTP/1.1 200 OK\r\ntransfer-encoding: chunked\r\n\r\n3\r\nabc\r\n"
        began, end, gone = [], asyncio.Event(), asyncio.Event()

        async def converse(reader, writer):
            began.append(writer)
            for _ in range(2):
                await reader.readuntil(b"\r\n\r\n")
                writer.write(answers)
                await end.wait()
                writer.write(b"0\r\n\r\n")
            await reader.read()
            writer.close()
            gone.set()

        server = await asyncio.start_server(converse, "127.0.0.1", 0)
        port = server.sockets[0].getsockname()[1]
        async with pool_at(port) as pool:
            for _ in range(2):
                end.clear()
                sink = Recorder()
                call = pool.send("GET", "/", (), b"", sink)
                await eventually(lambda sink=sink: sink.data)
                call.let_go()
                assert pool.num_active == 1
                end.set()
                await eventually(lambda: pool.num_active == 0)
                assert sink.num_ends == 0
            assert pool.num_connections == 1
            assert len(began) == 1
        await asyncio.wait_for(gone.wait(), 60)
        server.close()
        await server.wait_closed()

    run(main)


@pytest.mark.parametrize("host", ["a" * 64 + ".example", "a..b"])
def test_a_name_that_can_be_none_is_a_connect_error(run, host):
    async def main():
        pool = Upstream(Address(host, 80))
        sink = await get(pool)
        assert sink.error.kind == "connect"
        assert (pool.num_active, pool.num_connections) == (0, 0)
        await pool.close()

    run(main)


def test_a_peer_that_accepts_and_says_nothing_to_a_tls_client_is_a_connect_error(run, authority):
    async def main():
        silent = socket.create_server(("127.0.0.1", 0))
        context = authority.client_context("router:r0")
        address = Address("127.0.0.1", silent.getsockname()[1], ssl=context, server_hostname="h")
        pool = Upstream(address, UpstreamLimits(connect_timeout_s=0.1))
        sink = await get(pool)
        assert sink.error.kind == "connect"
        assert (pool.num_active, pool.num_connections) == (0, 0)
        await pool.close()
        silent.close()

    run(main)


def test_pause_stops_the_flow_and_resume_continues_it(run):
    async def main():
        body = b"x" * 20_000_000
        answer = b"HTTP/1.1 200 OK\r\nContent-Length: %d\r\n\r\n" % len(body) + body
        async with scripted(answer) as (port, _), pool_at(port) as pool:

            class Pausing(Recorder):
                def on_data(self, data):
                    super().on_data(data)
                    if len(self.data) == 1:
                        call.pause()

            sink = Pausing()
            call = pool.send("GET", "/", (), b"", sink)
            while not sink.data:
                await asyncio.sleep(0.005)
            await asyncio.sleep(0.1)
            assert len(sink.body) < 2_000_000
            call.resume()
            await asyncio.wait_for(sink.over.wait(), 60)
            assert sink.body == body

    run(main)


def test_fetch_refuses_an_answer_that_is_too_large(run, server_at):
    async def main():
        def big(exchange: Exchange) -> None:
            exchange.respond(200, b"x" * 10_000)

        async with server_at(big) as server, pool_at(server.port) as pool:
            with pytest.raises(UpstreamError, match="larger than 100 bytes"):
                await pool.fetch("GET", "/", max_body_bytes=100)

    run(main)


def test_idle_connections_are_closed_in_time(run, server_at, eventually):
    async def main():
        async with server_at() as server, pool_at(server.port, idle_timeout_s=0.2) as pool:
            await pool.fetch("GET", "/")
            await eventually(lambda: (pool.num_connections, server.num_connections) == (0, 0))

    run(main)


def test_no_slot_leaks_under_random_cancellation(run, server_at):
    async def main():
        loop = asyncio.get_running_loop()

        def sometimes_slow(exchange: Exchange) -> None:
            if server.num_requests % 3:
                exchange.start(200, [])
                exchange.write(b"a")
                loop.call_later(0.002, exchange.write, b"b")
                loop.call_later(0.004, lambda: exchange.is_gone or exchange.finish())
            else:
                exchange.respond(200, b"ab")

        async with (
            server_at(sometimes_slow) as server,
            pool_at(server.port, max_connections=20, connect_timeout_s=120) as pool,
        ):
            kept = []
            for number in range(3_000):
                sink = Recorder()
                call = pool.send("GET", "/", (), b"", sink)
                if number % 5 < 3:
                    loop.call_later((number % 7) / 1000, call.cancel)
                else:
                    kept.append(sink)
                if number % 25 == 0:
                    await asyncio.sleep(0.002)
            for sink in kept:
                await asyncio.wait_for(sink.over.wait(), 60)
            assert all(sink.body == b"ab" and sink.num_ends == 1 for sink in kept)
            assert pool.num_active == 0
            assert pool.num_connections <= 20
            assert (await pool.fetch("GET", "/")).body == b"ab"

    run(main)


@pytest.mark.parametrize(
    ("method", "target", "headers", "why"),
    [
        ("GET", "/a b", [], "request target"),
        ("GET", "/a\r\nx: y", [], "request target"),
        ("GET", "/", [(b"x", b"y\r\nz: a")], "line end"),
        ("HEAD", "/", [], "HEAD"),
    ],
)
def test_a_request_that_would_break_framing_is_refused(run, method, target, headers, why):
    async def main():
        async with pool_at(1) as pool:
            with pytest.raises(ValueError, match=why):
                pool.send(method, target, headers, b"", Recorder())

    run(main)


def test_closing_the_pool_ends_every_call_once(run, server_at):
    async def main():
        async with server_at(lambda _: None) as server:
            pool = Upstream(Address("127.0.0.1", server.port), UpstreamLimits(max_connections=2))
            sinks = [Recorder() for _ in range(5)]
            for sink in sinks:
                pool.send("GET", "/", (), b"", sink)
            await asyncio.sleep(0.05)
            await pool.close()
            assert [(sink.num_ends, sink.error.kind) for sink in sinks] == [(1, "closed")] * 5
            late = await get(pool)
            assert late.error.kind == "closed"

    run(main)

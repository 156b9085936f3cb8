import asyncio
import socket

import pytest

from dynctl.http1.server import Exchange
from dynctl.http1.upstream import Address, Upstream, UpstreamError


def tell_peer(exchange: Exchange) -> None:
    exchange.start(200, [])
    exchange.write(exchange.request.peer_name.encode())
    exchange.write(b"!" * 100_000)
    exchange.finish()


def test_both_sides_prove_who_they_are(run, server_at, authority):
    async def main():
        async with server_at(tell_peer, ssl=authority.server_context("host-a")) as server:
            context = authority.client_context("router:r0")
            pool = Upstream(
                Address("127.0.0.1", server.port, ssl=context, server_hostname="host-a")
            )
            for _ in range(3):
                answer = await pool.fetch("GET", "/")
                assert answer.body == b"router:r0" + b"!" * 100_000
            assert server.num_connections == 1
            await pool.close()

    run(main)


def test_streams_at_once_over_tls_arrive_whole_and_unmixed(run, server_at, authority):
    """Reads of all connections go through one buffer, smaller than what is on the way."""

    def twice(exchange: Exchange) -> None:
        body = exchange.request.body
        exchange.start(200, [])
        exchange.write(body)
        exchange.write(body)
        exchange.finish()

    async def main():
        async with server_at(twice, ssl=authority.server_context("host-a")) as server:
            context = authority.client_context("router:r0")
            address = Address("127.0.0.1", server.port, ssl=context, server_hostname="host-a")
            pool = Upstream(address)
            bodies = [bytes((65 + number,)) * (number * 250_001) for number in range(6)]
            answers = await asyncio.gather(*(pool.fetch("POST", "/", (), one) for one in bodies))
            for answer, body in zip(answers, bodies, strict=True):
                assert answer.body == body + body
            await pool.close()

    run(main)


def test_an_answer_is_whole_though_its_server_closes_right_behind_it(run, authority):
    """A server that shares nothing with ours: it waits for nobody."""
    body = b"x" * 1_000_000
    answer = b"HTTP/1.1 200 OK\r\ncontent-length: %d\r\nconnection: close\r\n\r\n%b"
    context = authority.server_context("host-a")
    times = 20

    def answer_and_close(listener: socket.socket) -> None:
        for _ in range(times):
            plain, _ = listener.accept()
            with context.wrap_socket(plain, server_side=True) as taken:
                taken.recv(65_536)
                taken.sendall(answer % (len(body), body))
                taken.shutdown(socket.SHUT_WR)

    async def main():
        with socket.create_server(("127.0.0.1", 0)) as listener:
            listener.settimeout(60)
            served = asyncio.ensure_future(asyncio.to_thread(answer_and_close, listener))
            address = Address(
                *listener.getsockname(),
                ssl=authority.client_context("router:r0"),
                server_hostname="host-a",
            )
            for _ in range(times):
                pool = Upstream(address)
                assert (await pool.fetch("GET", "/", timeout_s=60)).body == body
                await pool.close()
            await served

    run(main)


def test_a_server_of_another_name_is_not_talked_to(run, server_at, authority):
    async def main():
        async with server_at(tell_peer, ssl=authority.server_context("host-b")) as server:
            context = authority.client_context("router:r0")
            pool = Upstream(
                Address("127.0.0.1", server.port, ssl=context, server_hostname="host-a")
            )
            with pytest.raises(UpstreamError) as caught:
                await pool.fetch("GET", "/")
            assert caught.value.kind == "connect"
            assert "host-a" in str(caught.value)
            assert server.num_requests == 0
            await pool.close()

    run(main)


def test_a_client_without_a_certificate_is_not_served(run, server_at, authority):
    async def main():
        async with server_at(tell_peer, ssl=authority.server_context("host-a")) as server:
            context = authority.client_context(None)
            pool = Upstream(
                Address("127.0.0.1", server.port, ssl=context, server_hostname="host-a")
            )
            with pytest.raises(UpstreamError):
                await pool.fetch("GET", "/")
            assert server.num_requests == 0
            await pool.close()

    run(main)


def test_cancel_over_tls_reaches_the_other_side(run, server_at, authority):
    async def main():
        gone = asyncio.Event()
        started = asyncio.Event()

        def hold(exchange: Exchange) -> None:
            exchange.on_gone = gone.set
            started.set()

        class Nobody:
            def on_head(self, status, headers):
                raise AssertionError

            on_data = on_end = on_error = on_head

        async with server_at(hold, ssl=authority.server_context("host-a")) as server:
            context = authority.client_context("router:r0")
            pool = Upstream(
                Address("127.0.0.1", server.port, ssl=context, server_hostname="host-a")
            )
            call = pool.send("GET", "/", (), b"", Nobody())
            await asyncio.wait_for(started.wait(), 60)
            call.cancel()
            await asyncio.wait_for(gone.wait(), 60)
            await pool.close()

    run(main)


def test_a_refused_request_over_tls_still_gets_its_answer(run, server_at, authority):
    async def main():
        async with server_at(tell_peer, ssl=authority.server_context("host-a")) as server:
            reader, writer = await asyncio.open_connection(
                "127.0.0.1",
                server.port,
                ssl=authority.client_context("router:r0"),
                server_hostname="host-a",
            )
            writer.write(b"GET /../ HTTP/1.1\r\nHost: a\r\n\r\n")
            assert (await reader.readline()).startswith(b"HTTP/1.1 400 ")
            writer.close()
            await asyncio.wait([asyncio.ensure_future(writer.wait_closed())])

    run(main)

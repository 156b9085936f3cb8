"""A port goes over to a successor: nobody who connects is refused, nobody who is connected is cut."""

import asyncio
import stat
from contextlib import asynccontextmanager

import pytest

from dynctl.http1.handover import Offer, take_over
from dynctl.http1.server import Exchange, serve

GET = b"GET / HTTP/1.1\r\nHost: a\r\n\r\n"


def saying(name: bytes):
    def handler(exchange: Exchange) -> None:
        exchange.respond(200, name)

    return handler


@asynccontextmanager
async def offered(server, path):
    offer = Offer(str(path), lambda: server.descriptors)
    try:
        yield offer
    finally:
        offer.close()


async def ask(reader, writer) -> bytes:
    writer.write(GET)
    return await asyncio.wait_for(reader.readuntil(b"\r\n\r\n"), 60) + await reader.readexactly(3)


@pytest.fixture
def path(tmp_path_factory):
    return tmp_path_factory.mktemp("h") / "hand"


def test_every_connection_made_during_a_hand_over_is_answered(run, path):
    async def main():
        old = await serve(saying(b"old"), host="127.0.0.1", port=0)
        port = old.port
        said = []

        async def client():
            while said[-20:].count(b"new") < 20:
                reader, writer = await asyncio.open_connection("127.0.0.1", port)
                said.append((await ask(reader, writer))[-3:])
                writer.close()
                await writer.wait_closed()

        async with asyncio.TaskGroup() as group, offered(old, path) as offer:
            group.create_task(client())
            group.create_task(client())
            while len(said) < 20:
                await asyncio.sleep(0)
            (taken,) = await take_over(str(path))
            new = await serve(saying(b"new"), sock=taken)
            assert offer.is_taken
            await old.retire(5, 10)
            await old.close(0)
        assert new.port == port
        assert said[:20] == [b"old"] * 20
        await new.close(0)

    run(main)


def test_connection_waiting_in_the_kernels_queue_outlives_the_predecessor(run, path):
    async def main():
        old = await serve(saying(b"old"), host="127.0.0.1", port=0)
        async with offered(old, path):
            (taken,) = await take_over(str(path))
        await old.close(0)
        reader, writer = await asyncio.open_connection("127.0.0.1", old.port)
        new = await serve(saying(b"new"), sock=taken)

        assert (await ask(reader, writer)).endswith(b"new")
        writer.close()
        await writer.wait_closed()
        await new.close(0)

    run(main)


def test_who_is_connected_is_served_once_more_and_told_to_connect_anew(run, path):
    async def main():
        started: list[Exchange] = []

        def handler(exchange: Exchange) -> None:
            if started:
                exchange.respond(200, b"two")
            else:
                started.append(exchange)
                exchange.start(200, [])

        server = await serve(handler, host="127.0.0.1", port=0)
        reader, writer = await asyncio.open_connection("127.0.0.1", server.port)
        writer.write(GET)
        head = await reader.readuntil(b"\r\n\r\n")
        retiring = asyncio.create_task(server.retire(5, 10))
        await asyncio.sleep(0)
        started[0].write(b"one")
        started[0].finish()
        assert b"connection: close" not in head
        assert await reader.readuntil(b"0\r\n\r\n") == b"3\r\none\r\n0\r\n\r\n"

        # The stream began before anyone knew: its connection may carry one more request.
        answer = await ask(reader, writer)
        assert b"connection: close" in answer
        assert answer.endswith(b"two")
        assert await reader.read() == b""
        writer.close()
        await asyncio.wait_for(retiring, 60)
        await server.close(0)

    run(main)


def test_idle_connections_are_let_go_so_that_retiring_ends(run, path):
    async def main():
        server = await serve(saying(b"yes"), host="127.0.0.1", port=0)
        reader, writer = await asyncio.open_connection("127.0.0.1", server.port)
        await ask(reader, writer)

        await asyncio.wait_for(server.retire(0.1, 60), 60)

        assert await reader.read() == b""
        writer.close()
        await writer.wait_closed()
        await server.close(0)

    run(main)


def test_offer_is_private_and_leaves_no_file(run, path):
    async def main():
        server = await serve(saying(b"yes"), host="127.0.0.1", port=0)
        async with offered(server, path) as offer:
            assert stat.S_IMODE(path.stat().st_mode) == 0o600
            assert not offer.is_taken
        assert not path.exists()
        with pytest.raises(OSError, match="No such file"):
            await take_over(str(path))
        await server.close(0)

    run(main)

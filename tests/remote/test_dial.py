import asyncio
import socket

import pytest

from dynctl.remote import dial as module
from dynctl.remote.dial import dial


def resolving_to(monkeypatch, *addresses):
    async def getaddrinfo(self, host, port, **kwargs):
        return [(socket.AF_INET, socket.SOCK_STREAM, 6, "", address) for address in addresses]

    monkeypatch.setattr(asyncio.SelectorEventLoop, "getaddrinfo", getaddrinfo)


async def listening():
    server = await asyncio.start_server(lambda r, w: w.close(), "127.0.0.1", 0)
    return server, server.sockets[0].getsockname()[1]


def test_a_name_with_a_dead_address_reaches_the_living_one(monkeypatch):
    """V5: the first address never answers."""

    async def one(family, address):
        if address[0] == "192.0.2.1":
            await asyncio.sleep(3600)
        return await original(family, address)

    original = module._one
    monkeypatch.setattr(module, "_one", one)

    async def main():
        server, port = await listening()
        resolving_to(monkeypatch, ("192.0.2.1", port), ("127.0.0.1", port))
        async with server, asyncio.timeout(60):
            with await dial("two-faces", port) as sock:
                return sock.getpeername()[0]

    assert asyncio.run(main()) == "127.0.0.1"


def test_a_refusal_moves_on_at_once_and_all_refusals_are_an_error(monkeypatch, free_ports):
    port = free_ports()

    async def main():
        living, other = await listening()
        resolving_to(monkeypatch, ("127.0.0.1", port), ("127.0.0.1", other))
        async with living:
            (await dial("x", 0)).close()
        resolving_to(monkeypatch, ("127.0.0.1", port))
        with pytest.raises(ConnectionRefusedError):
            await dial("x", 0)

    asyncio.run(main())


def test_cancelling_leaves_no_socket_open(monkeypatch):
    async def one(family, address):
        await asyncio.sleep(3600)

    monkeypatch.setattr(module, "_one", one)

    async def main():
        resolving_to(monkeypatch, ("127.0.0.1", 1), ("127.0.0.1", 2))
        with pytest.raises(TimeoutError):
            async with asyncio.timeout(0.05):
                await dial("x", 0)
        return [task for task in asyncio.all_tasks() if task is not asyncio.current_task()]

    assert asyncio.run(main()) == []

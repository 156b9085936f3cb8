"""A bare pass-through: uvloop and httptools with nothing else, engines in turn. What any router in Python costs at least.

Run: python benchmarks/bare.py PORT ENGINE_PORT…
"""

import asyncio
import sys
from functools import partial

import httptools
import uvloop


class Front(asyncio.Protocol):
    """A client's connection: whole requests go to the next of `pools`: how to connect, connections that are free."""

    def __init__(self, pools):
        self.pools, self.parts = pools, []
        self.parser = httptools.HttpRequestParser(self)

    def connection_made(self, transport):
        self.transport = transport

    def data_received(self, data):
        self.parts.append(data)
        self.parser.feed_data(data)

    def on_message_complete(self):
        wire, self.parts = b"".join(self.parts), []
        connect, free = self.pools[0]
        self.pools.append(self.pools.pop(0))
        if free:
            free.pop().carry(self, wire)
        else:
            self.task = asyncio.ensure_future(self.open(connect, free, wire))

    async def open(self, connect, free, wire):
        _, back = await connect(lambda: Back(free))
        back.carry(self, wire)


class Back(asyncio.Protocol):
    """A connection to an engine: bytes go to the client as they come."""

    def __init__(self, free):
        self.free, self.parser = free, httptools.HttpResponseParser(self)

    def connection_made(self, transport):
        self.transport = transport

    def carry(self, front, wire):
        self.front = front
        self.transport.write(wire)

    def data_received(self, data):
        if not self.front.transport.is_closing():
            self.front.transport.write(data)
        self.parser.feed_data(data)

    def on_message_complete(self):
        self.free.append(self)


async def main(port, engine_ports):
    loop = asyncio.get_running_loop()
    pools = [
        (partial(loop.create_connection, host="127.0.0.1", port=engine), [])
        for engine in engine_ports
    ]
    # Several processes may share the port.
    server = await loop.create_server(lambda: Front(pools), "127.0.0.1", port, reuse_port=True)
    await server.serve_forever()


if __name__ == "__main__":
    uvloop.run(main(int(sys.argv[1]), list(map(int, sys.argv[2:]))))

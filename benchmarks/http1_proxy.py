"""CPU of a pass-through made of http1's server and upstream, beside a bare one, in the same run.

Bare: uvloop and httptools with nothing else, bytes copied from socket to socket. Three processes on one machine (client,
proxy, engine); only the proxy's CPU counts. Run: python benchmarks/http1_proxy.py [seconds per measurement]
"""

import asyncio
import os
import signal
import sys
import tempfile
import time
from functools import partial
from pathlib import Path

import uvloop
from bare import Front

from dynctl.http1.message import forwardable
from dynctl.http1.server import serve
from dynctl.http1.upstream import Address, Upstream

CHUNK = b'data: {"id":"c","object":"text_completion","choices":[{"index":0,"text":" word"}]}\n\n'
NUM_CHUNKS = 64
SHORT = b'{"id":"c","object":"text_completion","choices":[{"index":0,"text":" word"}]}'
BODY = b'{"model":"m","prompt":"' + b"word " * 40 + b'","max_tokens":64}'
FIELDS = b"Host: a\r\nAccept: application/json\r\nContent-Type: application/json\r\nUser-Agent: bench\r\n"
FIELDS += b"Authorization: Bearer k\r\nContent-Length: %d\r\n\r\n" % len(BODY)
REQUESTS = {
    name: b"POST /%b HTTP/1.1\r\n" % name.encode() + FIELDS + BODY for name in ("short", "stream")
}
CONCURRENCY = 32


class Engine(asyncio.Protocol):
    """Answers canned bytes; the chunks of a stream leave one by one."""

    def connection_made(self, transport):
        self.transport = transport

    def data_received(self, data):
        if data.startswith(b"POST /short"):
            self.transport.write(
                b"HTTP/1.1 200 OK\r\ncontent-type: application/json\r\ncontent-length: %d\r\n\r\n%b"
                % (len(SHORT), SHORT)
            )
        else:
            self.transport.write(
                b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream\r\ntransfer-encoding: chunked\r\n\r\n"
            )
            self.go_on(NUM_CHUNKS)

    def go_on(self, left):
        if self.transport.is_closing():
            return
        if not left:
            self.transport.write(b"0\r\n\r\n")
            return
        self.transport.write(b"%x\r\n%b\r\n" % (len(CHUNK), CHUNK))
        asyncio.get_running_loop().call_later(0.002, self.go_on, left - 1)


async def bare(path, engine):
    loop = asyncio.get_running_loop()
    pools = [(partial(loop.create_unix_connection, path=engine), [])]
    return await loop.create_unix_server(lambda: Front(pools), path)


class Passage:
    def __init__(self, exchange):
        self.exchange = exchange
        self.on_data, self.on_end = exchange.write, exchange.finish

    def on_head(self, status, headers):
        length = dict(headers).get(b"content-length")
        self.exchange.start(status, forwardable(headers), length and int(length))

    def on_error(self, _):
        self.exchange.abort()


async def http1(path, engine):
    pool = Upstream(Address(path=engine))

    def handler(exchange):
        request = exchange.request
        call = pool.send(
            request.method,
            request.path,
            forwardable(request.headers),
            request.body,
            Passage(exchange),
        )
        exchange.on_gone, exchange.on_pause, exchange.on_resume = (
            call.cancel,
            call.pause,
            call.resume,
        )

    return await serve(handler, path=path)


async def engine(path, _):
    return await asyncio.get_running_loop().create_unix_server(Engine, path)


class Client(asyncio.Protocol):
    """Sends one request after the other until told to stop."""

    def __init__(self, request, end):
        self.request, self.end, self.count, self.tail, self.is_last = request, end, 0, b"", False

    def connection_made(self, transport):
        self.transport = transport
        transport.write(self.request)

    def data_received(self, data):
        self.tail = (self.tail + data)[-len(self.end) :]
        if self.tail == self.end:
            self.count, self.tail = self.count + 1, b""
            if not self.is_last:
                self.transport.write(self.request)


def spawn(main, path, engine_path=""):
    pid = os.fork()
    if not pid:

        async def forever():
            server = await main(path, engine_path)
            await asyncio.Event().wait()
            del server

        uvloop.run(forever())
    while not Path(path).exists():
        time.sleep(0.01)
    return pid


def cpu_s(pid):
    fields = Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


async def load(path, pid, kind, seconds):
    """Return the proxy's CPU per request in µs."""
    end = SHORT[-24:] if kind == "short" else b"\r\n0\r\n\r\n"
    loop = asyncio.get_running_loop()
    clients = [
        (await loop.create_unix_connection(lambda: Client(REQUESTS[kind], end), path))[1]
        for _ in range(CONCURRENCY)
    ]
    await asyncio.sleep(0.5)
    before_s, before = cpu_s(pid), sum(client.count for client in clients)
    await asyncio.sleep(seconds)
    after_s, after = cpu_s(pid), sum(client.count for client in clients)
    for client in clients:
        client.is_last = True
    await asyncio.sleep(0.5)
    for client in clients:
        client.transport.close()
    return (after_s - before_s) / (after - before) * 1e6


def main():
    seconds = float(sys.argv[1]) if len(sys.argv) > 1 else 4.0
    with tempfile.TemporaryDirectory(dir="/tmp") as folder:
        engine_path = f"{folder}/engine"
        pids = {"engine": spawn(engine, engine_path)}
        for name, proxy in (("bare", bare), ("http1", http1)):
            pids[name] = spawn(proxy, f"{folder}/{name}", engine_path)
        try:
            print(f"{'':8}{'bare µs':>10}{'http1 µs':>10}{'ratio':>8}")
            for kind in ("short", "stream"):
                # Interleaved rounds, the least of each: other work on the machine only adds.
                rounds = [
                    [
                        uvloop.run(load(f"{folder}/{name}", pids[name], kind, seconds))
                        for name in ("bare", "http1")
                    ]
                    for _ in range(3)
                ]
                least = [min(column) for column in zip(*rounds, strict=True)]
                print(f"{kind:8}{least[0]:10.1f}{least[1]:10.1f}{least[1] / least[0]:8.2f}")
        finally:
            for pid in pids.values():
                os.kill(pid, signal.SIGKILL)
                os.waitpid(pid, 0)


if __name__ == "__main__":
    main()

"""Pieces of a stream that follow each other at once may come together; nothing of them is lost, late or twice."""

import asyncio
import socket
import time
from contextlib import asynccontextmanager

import pytest

from dynctl.http1.gathering import Gatherer
from dynctl.http1.upstream import Address, Upstream, UpstreamLimits

NUM_PIECES = 200
GATHER_S = 0.05


class Sink:
    """Asks to gather from its first piece on, as the router does from the first token on."""

    def __init__(self):
        self.call, self.data, self.error, self.over = None, [], None, asyncio.Event()

    def on_head(self, status, headers):
        pass

    def on_data(self, data):
        self.data.append(data)
        self.call.gathers = True

    def on_end(self):
        self.over.set()

    def on_error(self, error):
        self.error = error
        self.over.set()


def piece(number):
    return b"data: %d\n\n" % number


ALL = b"".join(map(piece, range(NUM_PIECES)))


async def trickle(exchange):
    """One piece a turn, each a write of its own."""
    exchange.start(200, [(b"content-type", b"text/event-stream")])
    for number in range(NUM_PIECES):
        exchange.write(piece(number))
        await asyncio.sleep(0.001)
    exchange.finish()


@pytest.fixture(params=["plain", "tls"])
def origin(request, server_at, authority):
    """A server of trickling streams, and a pool before it that gathers."""
    is_tls = request.param == "tls"
    own_tls = authority.server_context("host-a") if is_tls else None
    client_tls = authority.client_context("router:r0") if is_tls else None

    @asynccontextmanager
    async def started(stream=trickle, gather_s=GATHER_S):
        async with asyncio.TaskGroup() as tasks:

            def on_exchange(exchange):
                tasks.create_task(stream(exchange))

            async with server_at(on_exchange, ssl=own_tls) as server:
                name = "host-a" if is_tls else None
                address = Address("127.0.0.1", server.port, ssl=client_tls, server_hostname=name)
                pool = Upstream(address, UpstreamLimits(gather_s=gather_s))
                try:
                    yield pool
                finally:
                    await pool.close()

    return started


def begin(pool, **how):
    sink = Sink()
    sink.call = pool.send("GET", "/", (), b"", sink, **how)
    return sink


@pytest.mark.parametrize("gather_s", [0.0, 0.001, GATHER_S])
def test_a_gathered_stream_is_whole_and_its_connection_serves_again(run, origin, gather_s):
    async def main():
        async with origin(gather_s=gather_s) as pool:
            for _ in range(3):
                started_s = time.monotonic()
                sink = begin(pool)
                await asyncio.wait_for(sink.over.wait(), 60)
                took_s = time.monotonic() - started_s
                assert (b"".join(sink.data), sink.error) == (ALL, None)
                if gather_s:
                    # The first two as they come; then one a pause. A timer is never early by more than a tick.
                    assert len(sink.data) <= 3 + took_s / (gather_s - 0.0005)
            assert pool.num_connections == 1

    run(main)


@pytest.mark.parametrize("is_tls", [False, True])
@pytest.mark.parametrize("gather_s", [0.001, GATHER_S])
def test_a_gathered_stream_is_whole_though_its_origin_closes_right_behind_it(
    run, authority, is_tls, gather_s
):
    """A server that shares nothing with ours: it waits for nobody."""
    server_tls = authority.server_context("host-a") if is_tls else None
    client_tls = authority.client_context("router:r0") if is_tls else None
    times = 20

    def stream_and_close(listener):
        for _ in range(times):
            taken, _ = listener.accept()
            with server_tls.wrap_socket(taken, server_side=True) if is_tls else taken as peer:
                peer.recv(65_536)
                peer.sendall(b"HTTP/1.1 200 OK\r\ntransfer-encoding: chunked\r\n\r\n")
                for number in range(NUM_PIECES):
                    peer.sendall(b"%x\r\n%b\r\n" % (len(piece(number)), piece(number)))
                peer.sendall(b"0\r\n\r\n")
                peer.shutdown(socket.SHUT_WR)

    async def main():
        with socket.create_server(("127.0.0.1", 0)) as listener:
            listener.settimeout(60)
            served = asyncio.ensure_future(asyncio.to_thread(stream_and_close, listener))
            name = "host-a" if is_tls else None
            address = Address(*listener.getsockname(), ssl=client_tls, server_hostname=name)
            pool = Upstream(address, UpstreamLimits(gather_s=gather_s))
            for _ in range(times):
                sink = begin(pool, on_new_connection=True)
                await asyncio.wait_for(sink.over.wait(), 60)
                assert (b"".join(sink.data), sink.error) == (ALL, None)
            await served
            await pool.close()

    run(main)


def test_a_receiver_that_is_behind_is_not_read_for_by_the_end_of_a_pause(run, origin):
    async def main():
        async with origin() as pool:
            sink = begin(pool)
            while len(sink.data) < 2:
                await asyncio.sleep(0.002)
            sink.call.pause()
            seen = len(sink.data)
            await asyncio.sleep(3 * GATHER_S)
            assert len(sink.data) == seen
            sink.call.resume()
            await asyncio.wait_for(sink.over.wait(), 60)
            assert b"".join(sink.data) == ALL

    run(main)


@pytest.mark.parametrize("is_pool_closed", [False, True])
def test_a_call_may_be_given_up_during_a_pause(run, origin, is_pool_closed):
    async def main():
        gone = asyncio.Event()

        async def endless(exchange):
            exchange.on_gone = gone.set
            exchange.start(200, ())
            while not gone.is_set():
                exchange.write(b"x")
                await asyncio.sleep(0.001)

        # Longer than any machine has been up: a connection's first read follows none, whatever the clock says.
        async with origin(endless, gather_s=1e9) as pool:
            sink = begin(pool)
            while len(sink.data) < 2:
                await asyncio.sleep(0.002)
            if is_pool_closed:
                await pool.close()
                assert sink.error is not None
            else:
                sink.call.cancel()
                assert not sink.over.is_set()
            await asyncio.wait_for(gone.wait(), 60)

    run(main)


def test_an_origin_that_dies_during_a_pause_is_noticed_after_it(run, origin):
    async def main():
        async def dying(exchange):
            exchange.start(200, ())
            for number in range(9):
                exchange.write(piece(number))
                await asyncio.sleep(0.001)
            exchange.abort()

        async with origin(dying) as pool:
            sink = begin(pool)
            await asyncio.wait_for(sink.over.wait(), 60)
            assert sink.error is not None
            assert ALL.startswith(b"".join(sink.data))

    run(main)


class Loop:
    """A clock moved by hand, and its timers."""

    def __init__(self):
        self.now_s, self.timers = 100.0, []

    def time(self):
        return self.now_s

    def call_later(self, delay_s, callback):
        self.timers.append((self.now_s + delay_s, callback))

    def run_until(self, now_s):
        self.now_s = now_s
        due, self.timers = self.timers, []
        for _, callback in due:
            callback()


class Paused:
    def __init__(self):
        self.heard_s, self.is_paused = 0.0, False

    def pause(self):
        self.is_paused = True

    def read_on(self):
        self.is_paused = False


@pytest.mark.source
def test_only_what_follows_a_read_at_once_is_put_off():
    loop, fast, slow = Loop(), Paused(), Paused()
    gatherer = Gatherer(loop, 0.25)
    for number in range(5):
        loop.now_s = 100.0 + number / 2
        gatherer.heard(slow)
        assert not slow.is_paused, "the read before was long ago"
    gatherer.heard(fast)
    assert not fast.is_paused, "its first"
    loop.now_s += 0.125
    gatherer.heard(fast)
    assert fast.is_paused
    loop.run_until(loop.now_s + 0.25)
    assert not fast.is_paused
    gatherer.heard(fast)
    assert fast.is_paused, "what had gathered was read at once, and the next is put off again"
    loop.run_until(loop.now_s + 0.25)
    loop.now_s += 0.25
    gatherer.heard(fast)
    assert not fast.is_paused, "nothing had gathered: it is slow now"
    assert not loop.timers

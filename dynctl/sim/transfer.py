"""The prefill/decode hand-off: leases on kept blocks, the side channel they are pulled through, and the pull itself.

A prefill engine keeps a finished prompt's blocks under a lease that is good for one pull within 30 s. The decode
engine connects to the side channel, names engine and request, and gets the chain's states (they stand for the KV);
it then waits as long as the bytes would take, and says done, which frees the blocks. Anything else is refused by name.

    frame   := length u32 big-endian · msgpack
    pull    := [engine_id, request_id, block_size, num_local_blocks]   →   [error, states, tail_state, num_bytes]
    done    := nil                                                     →   connection closed

The channel is unauthenticated, as NIXL's is: bind it to the data interface. Not here: scheduling.
IO: TCP sockets, event loop.
"""

import asyncio
import time
from collections import OrderedDict
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from typing import Any, cast

import msgspec

from dynctl.core.text import clean
from dynctl.errors import EngineError
from dynctl.sim.sequence import SimSequence

LEASE_S = 30.0
"""Source: vLLM 0.32 NixlConnector, kv_lease_duration default."""
CONNECT_TIMEOUT_S = 5.0
"""Source: measured with vLLM 0.32 against an unreachable prefill engine."""
REPLY_TIMEOUT_S = 5.0
MAX_FRAME_BYTES = 4 * 1024**2
_LENGTH_BYTES = 4
_IDLE_S = 60.0
_MAX_FORGOTTEN = 1024


class PullError(EngineError):
    """Raised when KV cannot be pulled: unreachable, refused, or cut off."""


class _PullWish(msgspec.Struct, array_like=True):
    engine_id: str
    request_id: str
    block_size: int
    num_local_blocks: int


class Pulled(msgspec.Struct, array_like=True):
    """A prompt's KV after the local hit; `error` is empty when it came."""

    error: str
    states: list[int]
    tail_state: int
    num_bytes: int


@dataclass(slots=True)
class _Lease:
    sequence: SimSequence
    until_s: float
    is_pulled: bool = False


class Leases:
    """Blocks kept for decode engines. Single use. Pure, given the clock."""

    def __init__(self, engine_id: str, block_size: int, bytes_per_token: int) -> None:
        self.engine_id = engine_id
        self._block_size = block_size
        self._bytes_per_token = bytes_per_token
        self._leases: OrderedDict[str, _Lease] = OrderedDict()
        self._forgotten: OrderedDict[str, str] = OrderedDict()
        """Why recent leases ended, for the error text."""

    def __len__(self) -> int:
        return len(self._leases)

    def grant(self, sequence: SimSequence, now_s: float) -> None:
        """Keep a finished prompt's blocks for one pull."""
        self._leases[sequence.wish.id] = _Lease(sequence, now_s + LEASE_S)

    def pull(self, wish: _PullWish, now_s: float) -> Pulled:
        """Answer a pull: the states after the local hit, or why not."""
        lease = self._leases.get(wish.request_id)
        if wish.engine_id != self.engine_id:
            return _refused(f"this is engine {self.engine_id}")
        if wish.block_size != self._block_size:
            return _refused(f"blocks of {self._block_size} tokens here")
        if lease is None or lease.is_pulled or lease.until_s <= now_s:
            why = "in use" if lease is not None and lease.is_pulled else "expired"
            why = why if lease is not None else self._forgotten.get(wish.request_id, "unknown")
            return _refused(f"the lease is {why}")
        lease.is_pulled = True
        lease.until_s = now_s + LEASE_S
        sequence, num_local = lease.sequence, max(0, wish.num_local_blocks)
        num_blocks = max(0, -(-sequence.num_prompt // self._block_size) - num_local)
        num_bytes = num_blocks * self._block_size * self._bytes_per_token
        return Pulled("", sequence.block_states[num_local:], sequence.tail_state, num_bytes)

    def end(self, request_id: str, why: str) -> SimSequence | None:
        """End a lease; returns the request whose blocks are to be freed."""
        lease = self._leases.pop(request_id, None)
        if lease is None:
            return None
        self._forgotten[request_id] = why
        if len(self._forgotten) > _MAX_FORGOTTEN:
            self._forgotten.popitem(last=False)
        return lease.sequence

    def expire(self, now_s: float) -> list[SimSequence]:
        """End the leases whose time is over."""
        over = [name for name, lease in self._leases.items() if lease.until_s <= now_s]
        return [sequence for name in over if (sequence := self.end(name, "expired")) is not None]

    def params_of(self, sequence: SimSequence, host: str, port: int) -> dict[str, Any]:
        """Write the kv_transfer_params of a kept prompt, field for field as vLLM 0.32 does."""
        num_blocks = -(-sequence.num_prompt // self._block_size)
        return {
            "do_remote_prefill": True,
            "do_remote_decode": False,
            "remote_block_ids": [sequence.block_ids[:num_blocks]],
            "remote_engine_id": self.engine_id,
            "remote_request_id": sequence.wish.id,
            "remote_host": host,
            "remote_port": port,
            "tp_size": 1,
            "dcp_size": 1,
            "pp_size": 1,
            "remote_num_tokens": sequence.num_prompt,
            "remote_blocks_expiry_time": None,
            "transfer_mode": "pull",
            "remote_prefill_cached_tokens": sequence.num_cached_tokens,
        }


class SideChannel:
    """Serves pulls on a TCP port. `on_end` takes each request whose blocks are to be freed."""

    def __init__(self, leases: Leases, on_end: Callable[[SimSequence], None]) -> None:
        self._leases = leases
        self._on_end = on_end
        self._server: asyncio.Server | None = None
        self._connections: set[_Connection] = set()
        self.port = 0

    async def start(self, host: str, port: int) -> None:
        """Listen.

        Raises:
            EngineError: when the address cannot be bound.
        """
        loop = asyncio.get_running_loop()
        try:
            self._server = await loop.create_server(lambda: _Connection(self), host, port)
        except OSError as error:
            raise EngineError(f"cannot listen for KV pulls on {host}:{port}: {error}") from error
        self.port = self._server.sockets[0].getsockname()[1]

    async def close(self) -> None:
        """Stop listening and cut pulls under way."""
        for connection in tuple(self._connections):
            connection.cut()
        if self._server is not None:
            self._server.close()
            await asyncio.wait_for(self._server.wait_closed(), REPLY_TIMEOUT_S)

    def opened(self, connection: "_Connection") -> None:
        """Keep book of a connection."""
        self._connections.add(connection)

    def closed(self, connection: "_Connection", request_id: str | None) -> None:
        """Free what a connection had pulled, however it ended."""
        self._connections.discard(connection)
        sequence = self._leases.end(request_id, "used") if request_id is not None else None
        if sequence is not None:
            self._on_end(sequence)

    def answer(self, wish: _PullWish) -> Pulled:
        """Answer one pull."""
        return self._leases.pull(wish, time.monotonic())


_pull_wishes = msgspec.msgpack.Decoder(_PullWish | None)
_pulled = msgspec.msgpack.Decoder(Pulled)
_encode = msgspec.msgpack.Encoder().encode


class _Connection(asyncio.Protocol):
    """One decode engine's pull."""

    def __init__(self, channel: SideChannel) -> None:
        self._channel = channel
        self._rest = bytearray()
        self._transport: asyncio.Transport | None = None
        self._request_id: str | None = None
        self._timer: asyncio.TimerHandle | None = None

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(
            "asyncio.Transport", transport
        )  # uvloop's transports are no subclass of it
        self._channel.opened(self)
        self._timer = asyncio.get_running_loop().call_later(_IDLE_S, self.cut)

    def data_received(self, data: bytes) -> None:
        self._rest += data
        length = int.from_bytes(self._rest[:_LENGTH_BYTES], "big")
        if length > MAX_FRAME_BYTES:
            self.cut()
        elif len(self._rest) >= _LENGTH_BYTES + length:
            frame = bytes(self._rest[_LENGTH_BYTES : _LENGTH_BYTES + length])
            del self._rest[: _LENGTH_BYTES + length]
            self._take(frame)

    def connection_lost(self, exc: Exception | None) -> None:  # noqa: ARG002 - asyncio's signature
        if self._timer is not None:
            self._timer.cancel()
        self._channel.closed(self, self._request_id)

    def cut(self) -> None:
        """Close at once."""
        if self._transport is not None:
            self._transport.abort()

    def _take(self, frame: bytes) -> None:
        try:
            wish = _pull_wishes.decode(frame)
        except msgspec.DecodeError:
            self.cut()
            return
        if wish is None or self._request_id is not None or self._transport is None:
            self.cut()  # done, or out of turn
            return
        pulled = self._channel.answer(wish)
        if not pulled.error:
            self._request_id = wish.request_id
        self._transport.write(_framed(_encode(pulled)))


async def pull(
    params: dict[str, Any], block_size: int, num_local_blocks: int, bytes_per_s: float
) -> tuple[Pulled, float]:
    """Pull a prompt's KV; returns it and the transfer's seconds. Takes as long as the bytes would.

    Raises:
        PullError: when the prefill engine cannot be reached, refuses, or goes away.
    """
    host, port = str(params["remote_host"]), int(params["remote_port"])
    place = f"{clean(host)}:{port}"
    try:
        async with asyncio.timeout(CONNECT_TIMEOUT_S):
            reader, writer = await asyncio.open_connection(host, port, limit=MAX_FRAME_BYTES)
    except (OSError, TimeoutError) as error:
        raise PullError(f"prefill engine at {place} cannot be reached: {error}") from error
    try:
        wish = _PullWish(
            params["remote_engine_id"], params["remote_request_id"], block_size, num_local_blocks
        )
        async with asyncio.timeout(REPLY_TIMEOUT_S):
            writer.write(_framed(_encode(wish)))
            length = int.from_bytes(await reader.readexactly(_LENGTH_BYTES), "big")
            if length > MAX_FRAME_BYTES:
                raise PullError(f"prefill engine at {place} sent {length} bytes")
            pulled = _pulled.decode(await reader.readexactly(length))
        if pulled.error:
            raise PullError(f"prefill engine at {place} refused: {clean(pulled.error)}")
        duration_s = pulled.num_bytes / bytes_per_s
        await _wait_for_bytes(reader, duration_s, place)
        writer.write(_framed(_encode(None)))
    except (OSError, TimeoutError, EOFError, msgspec.DecodeError) as error:
        raise PullError(f"prefill engine at {place} went away: {error}") from error
    finally:
        writer.close()
        with suppress(OSError, TimeoutError):
            await asyncio.wait_for(writer.wait_closed(), REPLY_TIMEOUT_S)
    return pulled, duration_s


async def _wait_for_bytes(reader: asyncio.StreamReader, duration_s: float, place: str) -> None:
    """Wait as long as the transfer takes; a prefill engine that dies meanwhile ends it.

    Raises:
        PullError: when the connection ends first.
    """
    with suppress(TimeoutError):
        async with asyncio.timeout(duration_s):
            await reader.read(1)
            raise PullError(f"prefill engine at {place} went away in mid-transfer")


def _framed(data: bytes) -> bytes:
    return len(data).to_bytes(_LENGTH_BYTES, "big") + data


def _refused(why: str) -> Pulled:
    return Pulled(why, [], 0, 0)

"""The publishing side of KV events in vLLM's wire format: PUB of [topic, seq, payload], ROUTER that replays.

Everything runs on the event loop: publishing never blocks, a replay is answered in slices between other work.
Not here: what the events say (`events`), reading (`reader`). IO: zmq sockets, event loop.
"""

import asyncio
from collections import deque
from pathlib import Path
from typing import TypeGuard

import zmq

from dynctl.errors import EngineError
from dynctl.kv.events import EventBatch, encode

BUFFER_STEPS = 10_000
"""Source: vLLM 0.32 KVEventsConfig.buffer_steps, default."""

END_SEQ = (-1).to_bytes(8, "big", signed=True)
_HWM = 100_000
_SLICE = 200
"""Batches sent before other work on the loop gets its turn."""


class EventPublisher:
    """Publishes batches and answers replays; binds both endpoints (`tcp://…` or `ipc://…`)."""

    def __init__(
        self,
        endpoint: str,
        replay_endpoint: str | None,
        topic: str = "",
        *,
        context: zmq.Context[zmq.Socket[bytes]],
    ) -> None:
        self._topic = topic.encode()
        self._next_seq = 0
        self._buffer: deque[tuple[int, bytes]] = deque(maxlen=BUFFER_STEPS)
        self._pub = context.socket(zmq.PUB)
        self._router = context.socket(zmq.ROUTER) if replay_endpoint else None
        self._loop: asyncio.AbstractEventLoop | None = None
        self._replays: deque[tuple[list[bytes], int]] = deque()
        self._retry: asyncio.TimerHandle | None = None
        self.topic = topic
        self._files = [_path(place) for place in (endpoint, replay_endpoint) if _is_ipc(place)]
        try:
            self.endpoint = _bind(self._pub, endpoint)
            self.replay_endpoint = (
                _bind(self._router, replay_endpoint) if self._router and replay_endpoint else None
            )
        except BaseException:
            self.close()
            raise

    def start(self) -> None:
        """Answer replays on the running loop from now on."""
        self._loop = asyncio.get_running_loop()
        if self._router is not None:
            self._loop.add_reader(self._router.fileno(), self._on_readable)
            self._on_readable()

    def publish(self, batch: EventBatch, *, is_live: bool = True) -> int:
        """Send a batch to all subscribers and keep it for replay; returns its sequence number.

        `is_live` False only keeps it: a batch lost on the way, as tests want it.
        """
        seq, payload = self._next_seq, encode(batch)
        self._next_seq += 1
        self._buffer.append((seq, payload))
        if is_live:
            # A subscriber that is too slow loses batches here, as it does with vLLM, and asks for a replay.
            frames = [self._topic, seq.to_bytes(8, "big"), payload]
            self._pub.send_multipart(frames, zmq.NOBLOCK)
        return seq

    def close(self) -> None:
        """Close both sockets at once; what is not yet sent is dropped."""
        if self._retry is not None:
            self._retry.cancel()
        if self._router is not None:
            if self._loop is not None and not self._router.closed:
                self._loop.remove_reader(self._router.fileno())
            self._router.close(linger=0)
        self._pub.close(linger=0)
        for path in self._files:
            path.unlink(missing_ok=True)

    def _on_readable(self) -> None:
        if self._router is None or self._router.closed:
            return
        while True:
            try:
                frames = self._router.recv_multipart(zmq.NOBLOCK)
            except zmq.Again:
                break
            # [identity, "", start]; anything else is no request and is left unanswered, as vLLM does.
            if len(frames) == 3 and len(frames[2]) == 8:
                start = int.from_bytes(frames[2], "big")
                self._replays.append((frames[:2], start))
        self._answer()

    def _answer(self) -> None:
        """Send the next slice of the first replay asked for."""
        self._retry = None
        if not self._replays or self._router is None or self._loop is None or self._router.closed:
            return
        envelope, start = self._replays[0]
        first = self._buffer[0][0] if self._buffer else self._next_seq
        offset = max(0, start - first)
        end = min(len(self._buffer), offset + _SLICE)
        for i in range(offset, end):
            seq, payload = self._buffer[i]
            self._send([*envelope, self._topic, seq.to_bytes(8, "big"), payload])
        if end < len(self._buffer):
            self._replays[0] = (envelope, first + end)
        else:
            self._send([*envelope, b"", END_SEQ, b""])
            self._replays.popleft()
        # Sending may swallow the descriptor's edge, so look at the socket again in any case.
        self._retry = self._loop.call_later(0, self._on_readable)

    def _send(self, frames: list[bytes]) -> None:
        assert self._router is not None
        try:
            self._router.send_multipart(frames, zmq.NOBLOCK)
        except (zmq.Again, zmq.ZMQError):
            return  # the reader is gone or full: it will ask again


def _is_ipc(endpoint: str | None) -> TypeGuard[str]:
    return endpoint is not None and endpoint.startswith("ipc://")


def _path(endpoint: str) -> Path:
    return Path(endpoint.removeprefix("ipc://"))


def _bind(socket: "zmq.Socket[bytes]", endpoint: str) -> str:
    """Bind and return the resolved endpoint.

    Raises:
        EngineError: when the address is in use or makes no sense.
    """
    socket.setsockopt(zmq.SNDHWM, _HWM)
    socket.setsockopt(zmq.LINGER, 0)
    if _is_ipc(endpoint):
        _path(endpoint).unlink(missing_ok=True)  # left by an earlier run
    try:
        socket.bind(endpoint)
    except zmq.ZMQError as error:
        raise EngineError(
            f"cannot publish KV events on {endpoint}: {error}", "choose another endpoint"
        ) from error
    return socket.getsockopt_string(zmq.LAST_ENDPOINT)

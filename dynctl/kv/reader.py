"""Reads one engine's KV events: subscribes, orders, repairs gaps by replay, decodes, and calls a sink.

Sockets are read on the event loop without tasks; `sequence` decides, this module moves bytes.
Not here: hashing (`tracker`), the relay's frames (`wire`). IO: zmq sockets, event loop.
"""

import asyncio
from collections import deque
from collections.abc import Callable
from contextlib import suppress
from typing import Protocol

import zmq

from dynctl.core.text import clean
from dynctl.errors import EngineError
from dynctl.kv.events import MAX_PAYLOAD_BYTES, EventBatch, EventError, decode
from dynctl.kv.publisher import END_SEQ
from dynctl.kv.sequence import EventSequence, SequenceCounts, Verdict

TICK_S = 0.25
AUDIT_S = 10.0
MAX_ERRORS_PER_MINUTE = 10
_HWM = 20_000
_SLICE = 100
"""Messages taken before other work on the loop gets its turn."""


class EventSink(Protocol):
    """Who takes the events; called on the loop, in order."""

    def on_batch(self, seq: int, batch: EventBatch) -> None:
        """Take one engine step's events."""

    def on_reset(self) -> None:
        """Forget everything known of this engine: it restarted, or events are lost for good."""

    def on_failed(self, reason: str) -> None:
        """Take the news that the source is given up; nothing more will come."""


class KvEventReader:
    """One subscription. `start` on a running loop, `close` when done; close is safe to call twice."""

    def __init__(
        self,
        endpoint: str,
        replay_endpoint: str | None,
        topic: str,
        sink: EventSink,
        *,
        context: "zmq.Context[zmq.Socket[bytes]]",
    ) -> None:
        self._context = context
        self._endpoint = endpoint
        self._replay_endpoint = replay_endpoint
        self._topic = topic.encode()
        self._sink = sink
        self._sequence = EventSequence(can_replay=replay_endpoint is not None)
        self._sub: zmq.Socket[bytes] | None = None
        self._replay: zmq.Socket[bytes] | None = None
        self._monitor: zmq.Socket[bytes] | None = None
        self._loop: asyncio.AbstractEventLoop | None = None
        self._timers: dict[str, asyncio.Handle] = {}
        self._errors_at: deque[float] = deque(maxlen=MAX_ERRORS_PER_MINUTE + 1)
        self._last_live_s = 0.0
        self.num_errors = 0
        self.num_unknown_events = 0

    @property
    def counts(self) -> SequenceCounts:
        """Duplicates, gaps, replays, losses and restarts so far."""
        return self._sequence.counts

    @property
    def is_stale(self) -> bool:
        """Tell whether events are missing just now, or reading has ended."""
        return self._sub is None or self._sequence.is_repairing

    @property
    def last_seq(self) -> int:
        """The last sequence number handed to the sink, -1 before the first."""
        return self._sequence.last

    def start(self) -> None:
        """Subscribe and ask for everything the engine still has.

        Raises:
            EngineError: when an endpoint makes no sense.
        """
        self._loop = asyncio.get_running_loop()
        self._last_live_s = self._loop.time()
        try:
            self._subscribe(self._loop)
            self._obey(self._sequence.start(self._loop.time()))
        except EngineError:
            self.close()
            raise
        self._later("tick", TICK_S, self._on_tick)
        self._on_live()

    def close(self) -> None:
        """Close the sockets and stop all timers."""
        for timer in self._timers.values():
            timer.cancel()
        self._timers.clear()
        self._drop_replay()
        if self._sub is not None and self._loop is not None:
            self._loop.remove_reader(self._sub.fileno())
            if self._monitor is not None:
                self._loop.remove_reader(self._monitor.fileno())
                self._sub.disable_monitor()
                self._monitor.close(linger=0)
                self._monitor = None
            self._sub.close(linger=0)
            self._sub = None

    def _subscribe(self, loop: asyncio.AbstractEventLoop) -> None:
        self._sub = self._socket(zmq.SUB)
        self._sub.setsockopt(zmq.SUBSCRIBE, self._topic)
        self._monitor = self._sub.get_monitor_socket(zmq.EVENT_CONNECTED)
        loop.add_reader(self._sub.fileno(), self._on_live)
        loop.add_reader(self._monitor.fileno(), self._on_connected)
        self._connect(self._sub, self._endpoint)

    def _socket(self, kind: int) -> "zmq.Socket[bytes]":
        socket = self._context.socket(kind)
        socket.setsockopt(zmq.LINGER, 0)
        socket.setsockopt(zmq.RCVHWM, _HWM)
        socket.setsockopt(zmq.MAXMSGSIZE, MAX_PAYLOAD_BYTES)
        socket.setsockopt(zmq.RECONNECT_IVL_MAX, 1000)
        return socket

    def _connect(self, socket: "zmq.Socket[bytes]", endpoint: str) -> None:
        try:
            socket.connect(endpoint)
        except zmq.ZMQError as error:
            raise EngineError(f"cannot read KV events from {clean(endpoint)}: {error}") from error

    def _on_connected(self) -> None:
        """Look whether it is still the same engine that answers, each time the subscription connects."""
        for _ in self._take("connected", self._monitor, self._on_connected):
            self._obey(self._sequence.reconnected(self._now()))

    def _on_live(self) -> None:
        for frames in self._take("live", self._sub, self._on_live):
            if self._sub is None:
                return  # given up meanwhile
            # 3 frames: topic, sequence, payload.
            if len(frames) == 3 and len(frames[1]) == 8:
                seq = int.from_bytes(frames[1], "big")
                self._last_live_s = self._now()
                self._obey(self._sequence.live(seq, frames[2], self._now()))
            else:
                self._count_error(f"an event message of {len(frames)} frames")

    def _on_replay(self) -> None:
        for frames in self._take("replay", self._replay, self._on_replay):
            if self._replay is None:
                return  # given up, or asked anew on another socket
            # ["", topic, sequence, payload]; older releases leave out the topic.
            if len(frames) not in {3, 4} or len(frames[-2]) != 8:
                self._count_error(f"a replay message of {len(frames)} frames")
                continue
            if frames[-2] == END_SEQ:
                self._drop_replay()
                self._obey(self._sequence.replay_ended(self._now()))
                return
            seq = int.from_bytes(frames[-2], "big")
            self._obey(self._sequence.replayed(seq, frames[-1], self._now()))

    def _take(
        self, name: str, socket: "zmq.Socket[bytes] | None", again: Callable[[], None]
    ) -> list[list[bytes]]:
        """Read what has arrived, at most a slice; comes back soon for the rest."""
        taken: list[list[bytes]] = []
        if socket is None or self._loop is None:
            return taken
        with suppress(zmq.Again):
            while len(taken) < _SLICE:
                taken.append(socket.recv_multipart(zmq.NOBLOCK))
        if len(taken) == _SLICE:
            # The descriptor is edge-triggered: without this call the rest would wait for the next message.
            self._later(name, 0.0, again)
        return taken

    def _on_tick(self) -> None:
        now_s = self._now()
        self._later("tick", TICK_S, self._on_tick)
        self._obey(self._sequence.tick(now_s))
        if now_s - self._last_live_s >= AUDIT_S:
            self._last_live_s = now_s
            self._obey(self._sequence.audit(now_s))

    def _obey(self, verdict: Verdict) -> None:
        if verdict.reset:
            self._sink.on_reset()
        for seq, payload in verdict.apply:
            self._hand_on(seq, payload)
        if verdict.replay_from is not None and self._sub is not None:
            self._ask(verdict.replay_from)

    def _hand_on(self, seq: int, payload: bytes) -> None:
        try:
            batch = decode(payload)
        except EventError as error:
            self._count_error(error.message)
            return
        self.num_unknown_events += batch.num_unknown
        self._sink.on_batch(seq, batch)

    def _ask(self, start: int) -> None:
        """Ask for a replay on a new socket, so that an answer to an earlier question cannot be mistaken for it."""
        self._drop_replay()
        assert self._replay_endpoint is not None
        assert self._loop is not None
        self._replay = self._socket(zmq.DEALER)
        self._loop.add_reader(self._replay.fileno(), self._on_replay)
        self._connect(self._replay, self._replay_endpoint)
        self._replay.send_multipart([b"", start.to_bytes(8, "big")], zmq.NOBLOCK)
        self._later("replay", 0.0, self._on_replay)  # sending may swallow the descriptor's edge

    def _drop_replay(self) -> None:
        timer = self._timers.pop("replay", None)
        if timer is not None:
            timer.cancel()
        if self._replay is not None and self._loop is not None:
            self._loop.remove_reader(self._replay.fileno())
            self._replay.close(linger=0)
            self._replay = None

    def _count_error(self, reason: str) -> None:
        """Count a message nobody understands; a source that sends many in a minute is given up (K15)."""
        self.num_errors += 1
        now_s = self._now()
        self._errors_at.append(now_s)
        is_full = len(self._errors_at) > MAX_ERRORS_PER_MINUTE
        if is_full and now_s - self._errors_at[0] < 60 and self._sub is not None:
            self.close()
            self._sink.on_failed(clean(reason))

    def _later(self, name: str, delay_s: float, call: Callable[[], None]) -> None:
        assert self._loop is not None
        before = self._timers.get(name)
        if before is not None:
            before.cancel()
        self._timers[name] = self._loop.call_later(delay_s, call)

    def _now(self) -> float:
        assert self._loop is not None
        return self._loop.time()

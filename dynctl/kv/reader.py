"""Reads one engine's KV events: subscribes, orders, repairs gaps by replay, decodes, and calls a sink.

Sockets are read on the event loop without tasks; `sequence` decides, this module moves bytes.
Not here: hashing (`tracker`), the relay's frames (`wire`). IO: zmq sockets, event loop.
"""

import asyncio
import sys
from collections import deque
from collections.abc import Callable
from contextlib import suppress
from typing import Protocol

import zmq

from dynctl.core.text import clean
from dynctl.errors import EngineError
from dynctl.kv.events import MAX_PAYLOAD_BYTES, EventBatch, EventError, decode
from dynctl.kv.intake import Intake
from dynctl.kv.publisher import END_SEQ
from dynctl.kv.sequence import EventSequence, SequenceCounts, Verdict
from dynctl.kv.wire import SourceHealth

TICK_S = 0.25
AUDIT_S = 10.0
MAX_ERRORS_PER_MINUTE = 10
_RESUBSCRIBE_S = 0.25
_HWM = 20_000
_SLICE = 100
"""Messages taken before other engines have their turn, …"""
_SLICE_BYTES = 16 * 1024
"""… or so many bytes, if that is less: some 240 blocks. A quarter of it cost a tenth more time for each."""
_MAX_SEQ = 2**56
"""No engine counts so far: eight letters where a number should be, from messages put together."""
BEHIND_S = 2.0
"""After so long with more messages waiting than can be taken, what is known says nothing any more (K19)."""
_MISSING_TRUST = 0.5
"""While batches are missing, what was cached most probably still is. A guess."""


def trust_text(trust: float) -> str:
    """Say to an operator how far the cache of an engine is known now, and what that changes."""
    if trust >= 1:
        return "all here again"
    if trust > 0:
        return (
            "some did not come, or the engine behind them may be another; asked for again, "
            "and what is cached counts in part until they are here"
        )
    return "more come than can be taken in; nothing counts as cached until that is made up for"


class EventSink(Protocol):
    """Who takes the events; called on the loop, in order."""

    def on_batch(self, seq: int, batch: EventBatch) -> None:
        """Take one engine step's events."""

    def on_end_of_read(self) -> None:
        """Take the news that no more batches were read together with the last one: what they change is to be told."""

    def on_reset(self) -> None:
        """Forget everything known of this engine: it restarted, or events are lost for good."""

    def on_trust(self, trust: float) -> None:
        """Take the news how far what was told is to be believed from now on, 0 to 1."""

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
        intake: Intake | None = None,
    ) -> None:
        """`intake` is shared by all who take events in, in one process."""
        self._context = context
        self._intake = intake or Intake()
        self._slots = self._intake.slots
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
        self._full_since_s: float | None = None
        """Since when more live messages wait than are taken at once."""
        self._trust = 1.0
        self._was_connected = False
        self._other_topic = b""
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
    def health(self) -> SourceHealth:
        """How well the engine's cache is known, and what was odd so far."""
        return SourceHealth(
            self._trust,
            self._was_connected,
            self.num_errors + self.num_unknown_events,
            other_topic=clean(self._other_topic.decode("utf-8", "replace"))[:64],
            num_lost=self._sequence.counts.num_lost,
        )

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
        # The descriptors are edge-triggered: what came before they were watched is told by nobody.
        self._intake.ask(self._on_live)
        self._intake.ask(self._on_connected)

    def close(self) -> None:
        """Close the sockets and stop all timers."""
        for timer in self._timers.values():
            timer.cancel()
        self._timers.clear()
        for part in (self._on_live, self._on_connected):
            self._intake.leave(part)
        self._drop_replay()
        self._slots.leave(self)
        self._unsubscribe()

    def _unsubscribe(self) -> None:
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
        self._monitor = self._sub.get_monitor_socket(zmq.EVENT_CONNECTED | zmq.EVENT_DISCONNECTED)
        loop.add_reader(self._sub.fileno(), self._intake.ask, self._on_live)
        loop.add_reader(self._monitor.fileno(), self._intake.ask, self._on_connected)
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
        for frames in self._take(self._monitor, self._on_connected)[0]:
            if int.from_bytes(frames[0][:2], sys.byteorder) == zmq.EVENT_CONNECTED:
                is_first, self._was_connected = not self._was_connected, True
                look = self._sequence.connected if is_first else self._sequence.reconnected
                self._obey(look(self._now()))
            else:
                # After a frame beyond all bounds zmq cuts the connection and does not try again by itself.
                self._later("subscribe", _RESUBSCRIBE_S, self._resubscribe)

    def _resubscribe(self) -> None:
        assert self._loop is not None
        self._unsubscribe()
        self._subscribe(self._loop)
        self._intake.ask(self._on_live)

    def _on_live(self) -> None:
        messages, is_cut = self._take(self._sub, self._on_live, has_three=True)
        if not is_cut:
            self._full_since_s = None
        elif self._full_since_s is None:
            self._full_since_s = self._now()
        for frames in messages:
            if self._sub is None:
                return  # given up meanwhile
            seq = self._number(frames)
            if len(frames) != 3 or seq < 0:
                self._count_error(f"an event message of {len(frames)} frames")
                if seq < 0 or self._sub is None:
                    continue
            if self._sequence.takes(seq, frames[-1]):
                self._hand_on(seq, frames[-1])
            else:
                self._obey(self._sequence.live(seq, frames[-1], self._now()))
        if messages:
            self._last_live_s = self._now()
            self._judge_trust()
            self._sink.on_end_of_read()

    def _number(self, frames: list[bytes]) -> int:
        """Read the sequence number of the message that the last three frames are: topic, sequence, payload. -1: they are none."""
        if len(frames) < 3 or len(frames[-2]) != 8 or not frames[-3].startswith(self._topic):
            return -1
        seq = int.from_bytes(frames[-2], "big")
        return seq if seq < _MAX_SEQ else -1

    def _on_replay(self) -> None:
        asked = self._replay
        for frames in self._take(asked, self._on_replay)[0]:
            if self._replay is not asked:
                return  # given up, or asked anew: the rest answers the old question
            # ["", topic, sequence, payload]; older releases leave out the topic.
            if len(frames) not in {3, 4} or len(frames[-2]) != 8:
                self._count_error(f"a replay message of {len(frames)} frames")
                continue
            if frames[-2] == END_SEQ:
                self._drop_replay()
                self._obey(self._sequence.replay_ended(self._now()))
                break
            if len(frames) == 4 and not frames[1].startswith(self._topic):
                self._other_topic = frames[1]
            seq = int.from_bytes(frames[-2], "big")
            self._obey(self._sequence.replayed(seq, frames[-1], self._now()))
        self._sink.on_end_of_read()

    def _take(
        self,
        socket: "zmq.Socket[bytes] | None",
        again: Callable[[], None],
        *,
        has_three: bool = False,
    ) -> tuple[list[list[bytes]], bool]:
        """Read what has arrived, at most a slice; if it says that there may be more, `again` is called when others had their turn.

        `has_three`: every message should have three frames. So whether another follows is asked once, since asking takes as
        long as reading one. All frames of a message arrive together; one that has fewer is put together with the next, and
        has too many then: the last three are the next.
        """
        taken: list[list[bytes]] = []
        if socket is None or self._loop is None:
            return taken, False
        receive = socket.recv
        is_cut, left_bytes = False, _SLICE_BYTES
        with suppress(zmq.Again):
            while len(taken) < _SLICE and left_bytes > 0:
                if not has_three:
                    frames = socket.recv_multipart(zmq.NOBLOCK)
                    taken.append(frames)
                else:
                    frames = [receive(zmq.NOBLOCK)]
                    taken.append(frames)
                    frames.append(receive(zmq.NOBLOCK))
                    frames.append(receive(zmq.NOBLOCK))
                    while socket.getsockopt(zmq.RCVMORE):
                        frames.append(receive(zmq.NOBLOCK))
                left_bytes -= len(frames[-1])
            is_cut = True
        if is_cut:
            # The descriptor is edge-triggered: without this call the rest would wait for the next message.
            self._intake.ask(again)
        return taken, is_cut

    def _on_tick(self) -> None:
        now_s = self._now()
        self._later("tick", TICK_S, self._on_tick)
        self._on_connected()
        if self._slots.is_waiting(self):
            self._sequence.not_asked_yet(now_s)
        self._obey(self._sequence.tick(now_s))
        self._sink.on_end_of_read()
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
        if not self._sequence.is_repairing:
            self._slots.leave(self)
        self._judge_trust()

    def _judge_trust(self) -> None:
        is_behind = self._full_since_s is not None and self._now() - self._full_since_s > BEHIND_S
        trust = 0.0 if is_behind else _MISSING_TRUST if self._sequence.is_missing else 1.0
        if trust != self._trust:
            self._trust = trust
            self._sink.on_trust(trust)

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
        self._slots.enter(self, lambda: self._open_replay(start))

    def _open_replay(self, start: int) -> None:
        assert self._replay_endpoint is not None
        assert self._loop is not None
        self._sequence.not_asked_yet(self._now())
        self._replay = self._socket(zmq.DEALER)
        self._loop.add_reader(self._replay.fileno(), self._intake.ask, self._on_replay)
        self._connect(self._replay, self._replay_endpoint)
        self._replay.send_multipart([b"", start.to_bytes(8, "big")], zmq.NOBLOCK)
        self._intake.ask(self._on_replay)  # sending may swallow the descriptor's edge

    def _drop_replay(self) -> None:
        self._intake.leave(self._on_replay)
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

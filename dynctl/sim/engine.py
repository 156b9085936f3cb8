"""The simulated engine in real time: steps on a timer, tokens to listeners, cache events to subscribers, KV pulls.

This is one data-parallel rank; ranks know nothing of each other, as those of a dense model.
One timer drives all requests; there is no task per request or token. Only pulls are tasks, owned here.
Not here: HTTP (`api`), decisions about batches (`scheduler`). IO: event loop, ZMQ, TCP (through `kv` and `transfer`).
"""

import asyncio
import os
import signal
import time
import uuid
from collections import deque
from typing import Any, Protocol

import zmq

from dynctl.errors import DynctlError
from dynctl.kv.events import EventBatch
from dynctl.kv.publisher import EventPublisher
from dynctl.kv.ranks import endpoint_of
from dynctl.sim.cache import PagedCache
from dynctl.sim.chain import Chain
from dynctl.sim.faults import Fault, FaultKind, Faults
from dynctl.sim.host_cache import HostCache
from dynctl.sim.metrics import EngineMetrics
from dynctl.sim.options import SimOptions
from dynctl.sim.scheduler import Output, Scheduler, Step, StepCosts
from dynctl.sim.sequence import Phase, SimSequence, Wish
from dynctl.sim.text import TextModel
from dynctl.sim.transfer import Leases, PullError, SideChannel, pull

_MAX_CATCH_UP_S = 0.05
"""A loop that is late by less plans on from when the step should have ended, so that speeds come out right."""
_LEASE_SWEEP_S = 0.5
_MAX_ABORTS = 10_000


class Listener(Protocol):
    """Who takes one request's tokens; called on the loop."""

    def on_output(self, output: Output) -> None:
        """Take a token."""

    def on_error(self, message: str) -> None:
        """Take the news that the engine could not serve the request."""

    def on_cut(self) -> None:
        """Close the client's connection in mid-answer: a fault says so."""

    def on_shutdown(self) -> None:
        """End the answer at once: the engine stops."""


class SimEngine:
    """One rank, of most engines the only one. `start` it on a running loop, `close` it."""

    def __init__(
        self, options: SimOptions, text: TextModel, rank: int = 0, faults: Faults | None = None
    ) -> None:
        """`faults` are the whole engine's."""
        has_connector = options.side_channel is not None
        self.options = options
        self.rank = rank
        self.text = text
        self.engine_id = str(uuid.uuid4())
        self.faults = Faults(options.fault) if faults is None else faults
        self.chain = Chain(text.words, options.seed, text.eos_id, options.eos_every)
        self.metrics = EngineMetrics(options.model, time.time(), rank, has_connector=has_connector)
        self.publisher: EventPublisher | None = None
        self.aborts: deque[dict[str, Any]] = deque(maxlen=_MAX_ABORTS)
        """Requests whose client left: id, phase, tokens said, time."""
        self.scheduler = Scheduler(
            PagedCache(
                options.num_cache_blocks,
                options.block_size,
                is_caching=options.prefix_caching > 0,
            ),
            self.chain,
            StepCosts(
                options.prefill_us_per_token,
                options.prefill_base_ms,
                options.decode_ms,
                options.decode_us_per_seq,
                options.kv_bytes_per_token / options.host_mbytes_s,
            ),
            options.max_num_seqs,
            options.max_num_batched_tokens,
            has_connector=has_connector,
            host=HostCache.of(options),
        )
        self.leases = Leases(self.engine_id, options.block_size, options.kv_bytes_per_token)
        self._side_channel = SideChannel(self.leases, self._lease_ended)
        self._listeners: dict[SimSequence, Listener] = {}
        self._request_faults: dict[SimSequence, tuple[Fault, ...]] = {}
        self._pulls: dict[SimSequence, asyncio.Task[None]] = {}
        self._step_timer: asyncio.TimerHandle | None = None
        self._lease_timer: asyncio.TimerHandle | None = None
        self._is_hung = False
        self.is_parted = False
        """A node it needs is lost."""
        self.is_asleep = False
        """It has dropped its cache and makes no step."""
        self._is_delivering = False
        self._idle = asyncio.Event()
        self._idle.set()
        self._zmq: zmq.Context[zmq.Socket[bytes]] | None = None

    @property
    def num_open(self) -> int:
        """Count the requests not answered yet."""
        return len(self._listeners)

    @property
    def side_channel_address(self) -> tuple[str, int]:
        """Where decode engines pull from."""
        host, _ = self.options.side_channel_of(self.rank) or ("127.0.0.1", 0)
        return host, self._side_channel.port

    async def start(self) -> None:
        """Bind event sockets and side channel.

        Raises:
            EngineError: when an address cannot be bound.
        """
        options = self.options
        if options.kv_events is not None:
            self._zmq = zmq.Context()
            self.publisher = EventPublisher(
                endpoint_of(options.kv_events, self.rank),
                options.kv_replay and endpoint_of(options.kv_replay, self.rank),
                options.topic,
                context=self._zmq,
            )
            self.publisher.start()
        side_channel = options.side_channel_of(self.rank)
        if side_channel is not None:
            await self._side_channel.start(*side_channel)
        self.apply_faults()

    async def close(self) -> None:
        """End pulls, timers and sockets; open requests are told."""
        for listener in tuple(self._listeners.values()):
            listener.on_shutdown()
        self._listeners.clear()
        for timer in (self._step_timer, self._lease_timer):
            if timer is not None:
                timer.cancel()
        pulls = tuple(self._pulls.values())
        for task in pulls:
            task.cancel()
        if pulls:
            await asyncio.wait(pulls, timeout=5)
        await self._side_channel.close()
        if self.publisher is not None:
            self.publisher.close()
        if self._zmq is not None:
            self._zmq.destroy(linger=0)

    async def wait_until_idle(self) -> None:
        """Wait until no request is open."""
        await self._idle.wait()

    def submit(self, wish: Wish, listener: Listener, faults: tuple[Fault, ...] = ()) -> SimSequence:
        """Queue a request; its listener hears of every token."""
        sequence = self.scheduler.add(wish, time.monotonic())
        self._listeners[sequence] = listener
        self._idle.clear()
        if faults:
            self._request_faults[sequence] = faults
            self._strike_request(sequence, num_output=0, in_prefill=False)
        self.wake()
        return sequence

    def stop(self, sequence: SimSequence, reason: str) -> None:
        """End a request from outside: `abort` when its client left, `stop` when a stop text was said."""
        if sequence.phase is Phase.DONE:
            return
        if reason == "abort":
            self.aborts.append(
                {
                    "id": sequence.wish.id,
                    "phase": sequence.phase.value,
                    "num_output": sequence.num_output,
                    "at_unix_s": time.time(),
                }
            )
        self.scheduler.stop(sequence)
        self._forget(sequence, reason)
        pulling = self._pulls.get(sequence)
        if pulling is not None:
            pulling.cancel()
        self.wake()

    def transfer_params(self, sequence: SimSequence) -> dict[str, Any] | None:
        """Return what a decode engine needs to pull a finished prompt, None when it was not kept."""
        if not sequence.block_ids or sequence.phase is not Phase.DONE:
            return None
        host, port = self.side_channel_address
        return self.leases.params_of(sequence, host, port)

    def reset_prefix_cache(self) -> bool:
        """Forget cached blocks if none is in use; the event goes out with the next step, as with vLLM."""
        return self._forget_cache(is_told=True)

    def sleep(self) -> bool:
        """Drop the cache without a word and make no step until woken; False while requests run."""
        if self._forget_cache(is_told=False):
            self.is_asleep = True
        return self.is_asleep

    def wake_up(self) -> None:
        """Go on."""
        self.is_asleep = False
        self.wake()

    def _forget_cache(self, *, is_told: bool) -> bool:
        has_cleared = self.scheduler.cache.clear(is_told=is_told)
        if has_cleared and self.scheduler.host is not None:
            self.scheduler.host.clear()
        return has_cleared

    def apply_faults(self) -> None:
        """Take a change of the faults: those about no request strike now, a hang that was lifted ends."""
        self._is_hung = self.is_parted
        for fault in self.faults.marked(b""):
            is_immediate = (
                not fault.marker and fault.after_tokens is None and not fault.is_in_prefill
            )
            if is_immediate and fault.kind in {FaultKind.DIE, FaultKind.HANG} and fault.strike():
                self._do(fault)
        self.wake()

    def part(self) -> None:
        """Make no step any more, for want of a node, and say nothing of that."""
        self.is_parted = self._is_hung = True

    def wake(self) -> None:
        """Make the next step if none is under way."""
        is_free = self._step_timer is None and not self._is_delivering
        if is_free and not self._is_hung and not self.is_asleep:
            self._plan(time.monotonic())

    def gauges(self) -> dict[str, float]:
        """Return the present state for metrics."""
        scheduler = self.scheduler
        deferred = len(scheduler.fetching) + len(scheduler.ready)
        return {
            "running": len(scheduler.running),
            "waiting": scheduler.num_waiting,
            "deferred": deferred,
            "in_progress": len(scheduler.fetching),
            "usage": scheduler.cache.usage_ratio,
            "asleep": float(self.is_asleep),
        }

    def _plan(self, start_s: float) -> None:
        step = self.scheduler.plan(start_s)
        for sequence in self.scheduler.take_fetches():
            self._start_pull(sequence)
        if step is None:
            return
        if step.has_prefill:
            for sequence, _ in step.items:
                if sequence.phase is Phase.PREFILL and sequence in self._request_faults:
                    self._strike_request(sequence, num_output=0, in_prefill=True)
        if self._is_hung:
            return
        end_s = start_s + step.duration_s * self.faults.factor
        loop = asyncio.get_running_loop()
        delay_s = max(0.0, end_s - time.monotonic())
        self._step_timer = loop.call_later(delay_s, self._complete, step, end_s)

    def _complete(self, step: Step, end_s: float) -> None:
        self._step_timer = None
        now_s = time.monotonic()
        said_before = {sequence: sequence.times.last_token_s for sequence, _ in step.items}
        outputs = self.scheduler.complete(step, now_s)
        self.metrics.observe("iteration_tokens_total", step.num_tokens)
        self._publish()
        self._is_delivering = (
            True  # listeners may stop requests; the next step is planned once, below
        )
        try:
            for output in outputs:
                self._deliver(output, said_before[output.sequence], now_s)
        finally:
            self._is_delivering = False
            if not self._is_hung:
                self._plan(max(end_s, now_s - _MAX_CATCH_UP_S))

    def _deliver(self, output: Output, previous_s: float | None, now_s: float) -> None:
        sequence = output.sequence
        listener = self._listeners.get(sequence)
        if listener is None:
            return  # stopped by another listener in this very step
        self.metrics.token(output, previous_s, now_s)
        if output.finish_reason is not None:
            self._keep(sequence, now_s)
            self._forget(sequence, output.finish_reason)
        elif sequence in self._request_faults:
            self._strike_request(sequence, num_output=sequence.num_output, in_prefill=False)
            if sequence not in self._listeners:
                return  # cut
        listener.on_output(output)

    def _forget(self, sequence: SimSequence, reason: str) -> None:
        if self._listeners.pop(sequence, None) is not None:
            self.metrics.finish(sequence, reason, time.monotonic())
        self._request_faults.pop(sequence, None)
        if not self._listeners:
            self._idle.set()

    def _publish(self) -> None:
        events = self.scheduler.take_events()
        if not events or self.publisher is None:
            return
        is_lost = self.faults.struck(FaultKind.LOSE_EVENTS) is not None
        self.publisher.publish(EventBatch(time.time(), events, self.rank), is_live=not is_lost)

    # Pulls and leases

    def _start_pull(self, sequence: SimSequence) -> None:
        name = f"pull:{sequence.wish.id}"
        self._pulls[sequence] = asyncio.get_running_loop().create_task(
            self._pull(sequence), name=name
        )

    async def _pull(self, sequence: SimSequence) -> None:
        params = sequence.wish.remote_prefill
        assert params is not None
        num_local = len(sequence.block_states)
        try:
            if self.faults.struck(FaultKind.FAIL_PULL):
                raise PullError("a fault says that this pull fails")
            bytes_s = self.options.kv_transfer_mbytes_s * 1e6
            pulled, duration_s = await pull(params, self.options.block_size, num_local, bytes_s)
        except DynctlError as error:
            self._pulls.pop(sequence, None)
            self._fail(sequence, error.message)
            return
        finally:
            self._pulls.pop(sequence, None)
        self.metrics.observe("nixl_xfer_time_seconds", duration_s)
        self.metrics.observe("nixl_post_time_seconds", 0.0)
        self.metrics.observe("nixl_bytes_transferred", pulled.num_bytes)
        self.metrics.observe("nixl_num_descriptors", len(pulled.states) + 1)
        self.scheduler.fetched(sequence, pulled.states, pulled.tail_state)
        self.wake()

    def _fail(self, sequence: SimSequence, message: str) -> None:
        """End a request whose KV did not come: policy `fail`, the router decides what is next."""
        self.metrics.nixl["nixl_num_failed_transfers"] += 1
        listener = self._listeners.get(sequence)
        self.scheduler.stop(sequence)
        self._forget(sequence, "error")
        if listener is not None:
            listener.on_error(message)
        self.wake()

    def _keep(self, sequence: SimSequence, now_s: float) -> None:
        """Lease a finished prompt's blocks to a decode engine."""
        if not sequence.block_ids:
            return
        self.leases.grant(sequence, now_s)
        if self._lease_timer is None:
            self._lease_timer = asyncio.get_running_loop().call_later(
                _LEASE_SWEEP_S, self._sweep_leases
            )
        if self.faults.struck(FaultKind.LOSE_LEASE) is not None:
            self.leases.end(sequence.wish.id, "expired")
            asyncio.get_running_loop().call_soon(self._lease_ended, sequence)

    def _sweep_leases(self) -> None:
        self._lease_timer = None
        for sequence in self.leases.expire(time.monotonic()):
            self.metrics.nixl["nixl_num_kv_expired_reqs"] += 1
            self._lease_ended(sequence)
        if len(self.leases):
            self._lease_timer = asyncio.get_running_loop().call_later(
                _LEASE_SWEEP_S, self._sweep_leases
            )

    def _lease_ended(self, sequence: SimSequence) -> None:
        self.scheduler.release(sequence)
        self.wake()  # a request may have waited for the room

    # Faults

    def _strike_request(self, sequence: SimSequence, *, num_output: int, in_prefill: bool) -> None:
        """Let the faults about this request strike whose moment has come."""
        for fault in self._request_faults.get(sequence, ()):
            if fault.kind not in {FaultKind.DIE, FaultKind.HANG, FaultKind.CUT}:
                continue
            if fault.is_in_prefill:
                is_now = in_prefill
            elif fault.after_tokens is not None:
                is_now = not in_prefill and num_output == fault.after_tokens
            elif fault.kind is FaultKind.CUT:
                is_now = not in_prefill and num_output == 1
            else:
                is_now = not in_prefill and num_output == 0 and bool(fault.marker)
            if is_now and fault.strike():
                self._do(fault, sequence)

    def _do(self, fault: Fault, sequence: SimSequence | None = None) -> None:
        match fault.kind:
            case FaultKind.DIE:
                os.kill(os.getpid(), signal.SIGKILL)
            case FaultKind.HANG:
                self._is_hung = True
            case FaultKind.CUT if sequence is not None:
                listener = self._listeners.get(sequence)
                if listener is not None:
                    listener.on_cut()

"""What all requests of one router share: books, index, policy, queue, budget, counters; and the timer over all of them.

Not here: one request's way (`flight`), HTTP routes (`server`), where engines come from (`sources`).
IO: event loop timers.
"""

import asyncio
import logging
import random
import time
from collections.abc import Callable
from typing import TYPE_CHECKING, Final

from dynctl import registry
from dynctl.core.kv_links import LinkClasses
from dynctl.core.text import clean
from dynctl.http1.request import Request
from dynctl.router.admission import RetryBudget, WaitingLine
from dynctl.router.afterwards import Afterwards
from dynctl.router.alarms import Alarms, apart, unreached
from dynctl.router.api.answers import Failure
from dynctl.router.api.keys import Keys
from dynctl.router.choosing import Policy
from dynctl.router.config import RouterConfig
from dynctl.router.decision_log import open_log
from dynctl.router.decisions import DecisionRing
from dynctl.router.findings import Finding
from dynctl.router.first_events import FirstEvents
from dynctl.router.gauges import gauges
from dynctl.router.hits import HitBook
from dynctl.router.metrics import Metrics
from dynctl.router.orders import deadline_s, level_of
from dynctl.router.placement import Placement
from dynctl.router.prefix_index import PrefixIndex
from dynctl.router.probes import Probes
from dynctl.router.prompt import Hashers
from dynctl.router.reply import Reply
from dynctl.router.route_keys import RouteKeys
from dynctl.router.sessions import Sessions
from dynctl.router.shadow import Shadow
from dynctl.router.shared_books import SharedBooks
from dynctl.router.sources.fleet import Fleet
from dynctl.router.text_blocks import TextHolders
from dynctl.router.tokens import ModelTokenizer, PromptTokens
from dynctl.router.verdicts import own_fault
from dynctl.router.worker_table import WorkerTable

if TYPE_CHECKING:
    from dynctl.router.flight import Flight
    from dynctl.router.short_flight import ShortFlight

log = logging.getLogger("dynctl.router")

_TICK_S: Final = 0.1
_CHECK_EVERY: Final = 5
"""Deadlines of running requests are looked at every half second."""

_PROBE_EVERY: Final = 10

_IS_COMPILED: Final = not __file__.endswith(".py")
_GENERATING: Final = frozenset(("decode", "aggregated"))


class Desk:
    """The shared state of one router; `close` it."""

    def __init__(
        self,
        config: RouterConfig,
        tokenizer: ModelTokenizer | None,
        rng: random.Random | None = None,
    ) -> None:
        settings = config.settings
        self.config = config
        self.settings = settings
        self.short_request_chars = settings.short_request_chars
        self._served_names = frozenset(config.served_names)
        self.loop = asyncio.get_running_loop()
        self.now_s = self.loop.time
        self.rng = rng or random.Random()  # noqa: S311 - spreads load, guards nothing
        self.draw = self.rng.random
        self.metrics = Metrics()
        self.hashers = Hashers(config.block_hash_seed)
        self.tokens = PromptTokens(tokenizer, settings)
        self.workers = WorkerTable(settings)
        self.index = PrefixIndex(settings.index_max_bytes)
        self.alarms = Alarms(self.metrics.decision, is_compiled=_IS_COMPILED)
        self.hits = HitBook()
        self.probes = Probes(self.workers, self.index, self.hashers)
        self.texts = TextHolders(self.index)
        self.fleet = Fleet(
            self.workers, self.index, self.metrics, self.pump_soon, self.probes.notes
        )
        self.routes = self.fleet.routes
        parts = self.workers, self.index, self.probes.notes, self.fleet.silent
        self.first_events = FirstEvents(*parts, config.relays, asks=settings.probe_s > 0)
        self.policy_name = config.policy
        self.placement = Placement(
            *(self.workers, self.index, load_policy(config.policy), settings, self.rng),
            Sessions(settings.session_ttl_s, are_processes_many=config.workers > 1),
            LinkClasses(config.places, config.link_rates),
        )
        self.decision_log = open_log(config)
        self.ring = DecisionRing(
            settings.decisions, self.decision_log.add if self.decision_log is not None else None
        )
        self.keys = Keys(config.api_keys)
        self.route_keys = RouteKeys(config.route_key_field, self.keys)
        self.line: WaitingLine[Flight] = WaitingLine(
            settings.queue_limit, settings.queue_timeout_s, settings.priority_ageing_s
        )
        self.budget = RetryBudget(settings.retry_budget_ratio, settings.retry_budget_floor)
        self.flights: set[Flight | ShortFlight] = set()
        self.max_flights = settings.max_concurrent_requests
        """In all processes of the port; 0: no limit."""
        self.afterwards = Afterwards(self.loop, self.metrics.book_faults)
        self.is_draining = False
        self.books: SharedBooks | None = None
        """Set where other processes serve the same port."""
        self.started_unix_s = time.time()
        self.is_compiled = _IS_COMPILED
        self._ticks = 0
        self._pump: asyncio.Handle | None = None
        self._is_pumping = False
        self._timer: asyncio.TimerHandle = self.loop.call_later(_TICK_S, self._tick)
        self._emptied: asyncio.Event = asyncio.Event()

    async def close(self, grace_s: float) -> None:
        """Let running requests end within `grace_s`, then stop timers and threads."""
        self.is_draining = True
        if self.flights:
            self._emptied.clear()
            try:
                async with asyncio.timeout(grace_s):
                    await self._emptied.wait()
            except TimeoutError:
                log.warning("%d requests are cut at the end of the drain", len(self.flights))
        self.afterwards.close()
        for flight in tuple(self.flights):
            self.act(flight, flight.cut)
        self._timer.cancel()
        if self.books is not None:
            self.books.close()
            self.books = None
        if self._pump is not None:
            self._pump.cancel()
        self.tokens.close()
        if self.decision_log is not None:
            await self.decision_log.close()

    # Models and health

    def model_of(self, name: str) -> str | None:
        """What engines must serve for a model name clients ask for; None: any of this deployment.

        Raises:
            KeyError: when nobody serves it.
        """
        if self._served_names:
            if name not in self._served_names:
                raise KeyError(name)
            return None
        if not self.workers.knows(name):
            raise KeyError(name)
        return name

    def models(self) -> dict[str, int]:
        """Names clients may ask for, to the longest context all their engines take (0: not known)."""
        found: dict[str, int] = {}
        for worker in self.workers.all():
            info = worker.info
            for name in self.config.served_names or ((info.model,) if info.model else ()):
                known, own = found.get(name, 0), info.max_model_len_tokens
                found[name] = min(known, own) if known and own else known or own
        return found or dict.fromkeys(self.config.served_names, 0)

    def can_serve(self) -> bool:
        """Whether a request could be served now."""
        return not self.is_draining and bool(self.workers.serving(_GENERATING))

    def awaits(self) -> str:
        """What a router that begins should wait for, in words; empty: nothing any more."""
        return self.first_events.lack(self.loop.time(), is_matching=self.matches_tokens())

    def matches_tokens(self) -> bool:
        """Whether requests are placed by what engines have cached of their tokens."""
        return self.tokens.tokenizer is not None and self.placement.policy.uses_index

    def findings(self) -> list[Finding]:
        """What is wrong with the router itself, and with engines: by what requests showed, and before there were any."""
        found = [*self.alarms.findings(), *unreached(self.config.relays, self.fleet.silent)]
        found += apart(self.workers.all())
        if self.decision_log is not None:
            found += self.decision_log.findings()
        found += self.probes.findings()
        named = {finding.engine for finding in found}
        if self.tokens.tokenizer is not None:
            found += [one for one in self.probes.degraded() if one.engine not in named]
        return found

    # Flights

    def act(self, flight: "Flight | ShortFlight", act: Callable[..., None], *args: object) -> bool:
        """Do something for one request; where our own code fails that one ends. Whether it went well."""
        try:
            act(*args)
        except Exception:  # noqa: BLE001 - whatever it is, neither the others nor a drain are to suffer from it
            self.lost(flight)
            return False
        return True

    def lost(self, flight: "Flight | ShortFlight") -> None:
        """End a request that our own code has failed; called while that is handled."""
        text = "request %s is ended by a fault of the router's own"
        log.exception(text, flight.request_id)  # noqa: LOG004 - handled by the caller
        self.afterwards.guard(flight.abandon)
        self.let_go(flight)

    def tell_fault(self, reply: Reply) -> None:
        """Tell a client that the router failed it; one that has its answer is not concerned, only books are."""
        failure = own_fault()
        if not reply.give_up(failure):
            self.metrics.book_faults.add()
            return
        self.metrics.errors.add(failure.reason)
        if reply.code == 200:
            self.metrics.stream_broken.add(failure.reason)

    def enter(self, flight: "Flight | ShortFlight") -> None:
        """Take a request in."""
        self.flights.add(flight)
        if self.max_flights:
            self._tell_flights()

    def is_at_capacity(self) -> bool:
        """Whether no further request may be under way; asked only where there is a limit.

        Processes that ask at the same instant may each let one in.
        """
        number = len(self.flights)
        if self.books is not None:
            number += self.books.others_under_way()
        return number >= self.max_flights

    def _tell_flights(self) -> None:
        if self.books is not None:
            self.books.under_way(len(self.flights))

    def leave(self, flight: "Flight") -> None:
        """Let a request go that may be waiting."""
        self.line.leave(flight)
        self.let_go(flight)

    def let_go(self, flight: "Flight | ShortFlight") -> None:
        """Let a request go; whoever waits may have room now."""
        self.flights.discard(flight)
        if self.max_flights:
            self._tell_flights()
        if self.books is not None:
            self.books.exchange_soon(self.loop)
        if len(self.line):
            self.pump_soon()
        if not self.flights:
            self._emptied.set()

    def answered(self, short: "ShortFlight") -> None:
        """Keep the books of a request whose client has its answer: soon, unless somebody waits for what they say.

        Other processes see load as it was an exchange ago, so they may see an end as late; but not a free place under a
        limit: whoever was answered may ask another process next.
        """
        self.afterwards.add(short)
        if len(self.line) or (self.max_flights and self.books is not None):
            self.afterwards.keep()

    # The queue

    def must_wait(self, flight: "Flight") -> bool:
        """Whether others wait for the same model already: who comes now does not overtake them unasked."""
        return not self._is_pumping and self.line.has_waiting(flight.model)

    def wait(self, flight: "Flight", head: Request, arrived_s: float) -> Failure | None:
        """Let a request wait for an engine; the failure for the client when it may not. `head` says how urgent it is."""
        line, model = self.line, flight.model
        level = level_of(head, self.keys.top(head.header(b"authorization")))
        failure = line.join(flight, model, level, arrived_s, deadline_s(head))
        if failure is not None:
            last = line.last_below(model, level, self.loop.time())
            if last is not None:
                self.act(last, last.expire, failure)
                failure = line.join(flight, model, level, arrived_s, deadline_s(head))
        if not self._is_pumping:
            self.pump_soon()
        return failure

    def pump_soon(self) -> None:
        """Look at the queue once this turn of the loop is over."""
        if self._pump is None and len(self.line):
            self._pump = self.loop.call_soon(self._pump_now)

    def _pump_now(self) -> None:
        self._pump = None
        self._is_pumping = True
        try:
            # One model's queue does not hold up another's.
            for model in self.line.models():
                self._pump_model(model)
        finally:
            self._is_pumping = False

    def _pump_model(self, model: str | None) -> None:
        now_s = self.loop.time()
        for flight in self.line.in_order(model, now_s):
            if flight.is_over:
                continue
            failure = self.line.lateness(flight, now_s)
            if failure is not None:
                self.act(flight, flight.expire, failure)
            elif not self.act(flight, self._resume, flight):
                self.line.leave(flight)
            elif flight in self.line:
                return

    def _resume(self, flight: "Flight") -> None:
        if flight.resume():
            self.line.leave(flight)

    def _tick(self) -> None:
        self._timer = self.loop.call_later(_TICK_S, self._tick)
        self.afterwards.keep()
        now_s = self.loop.time()
        self._ticks += 1
        if self._ticks % _CHECK_EVERY == 0:
            for running in tuple(self.flights):
                self.act(running, running.check, now_s)
        if len(self.line):
            for flight, failure in self.line.expired(now_s):
                self.act(flight, flight.expire, failure)
            self.pump_soon()
        # What may fail and ends no request comes behind what ends them in time.
        if self.books is not None:
            self.books.exchange(now_s)
        self.index.sweep(now_s)
        if self._ticks % _PROBE_EVERY == 0:
            self.workers.relax(now_s, self.index)
            self.first_events.look(now_s)
            self.placement.sessions.sweep(now_s)
            for finding in (*self.alarms.tick(now_s), *self.probes.tick(now_s)):
                subject = f"engine {clean(finding.engine)}" if finding.engine else "this router"
                log.warning("%s: %s (%s)", subject, finding.text, finding.hint)

    def set_policy(self, name: str) -> None:
        """Change the policy for all decisions from now on.

        Raises:
            DynctlError: when there is no policy of that name.
        """
        self.placement.policy = load_policy(name)
        if name != self.policy_name and self.placement.shadow is not None:
            # What it was compared with is over.
            self.set_shadow(self.placement.shadow.name, beside=name)
        self.policy_name = name

    def set_stickiness(self, stickiness: float) -> None:
        """Change how long caches are held on to, for all decisions from now on."""
        self.placement.stickiness = stickiness

    def set_shadow(self, name: str, beside: str = "") -> None:
        """Let another policy follow the decisions of the present one, or of `beside`, without acting; an empty name stops that.

        Raises:
            DynctlError: when there is no policy of that name.
        """
        self.placement.shadow = (
            Shadow(name, load_policy(name), beside or self.policy_name, self.rng) if name else None
        )

    # What is shown

    def exposition(self) -> bytes:
        """All metrics as Prometheus text."""
        self.afterwards.keep()
        return self.metrics.exposition(gauges(self))


def load_policy(name: str) -> Policy:
    """Find a policy by its name.

    Raises:
        DynctlError: when there is none; lists the ones there are.
    """
    policy: Policy = registry.load("dynctl.router.policies", name, "POLICY")
    return policy

"""Books per engine: what was sent there and has not ended, and what its work has cost so far.

Load is booked when a decision is made and released exactly once, whatever happens to the request. A new incarnation
is a new worker; bookings of the old one run out on the old object.

Not here: choosing, HTTP, clocks (times are passed in, monotonic seconds). Pure.
"""

import math
from typing import Final

from dynctl.core.deployment import EngineInfo, EngineState
from dynctl.router.bookings import Booking
from dynctl.router.choosing import ROOM_PRICE, WATERMARK, Load
from dynctl.router.config import Settings
from dynctl.router.loading import counted_ms
from dynctl.router.prompt import Prompt
from dynctl.router.rates import OUTLIER, Mean
from dynctl.router.rooms import TIGHT, Room
from dynctl.router.slow_start import Joined
from dynctl.router.tally import Tally, per_token

_BREAKER_FAILURES: Final = 5
_BREAKER_OPEN_S: Final = 5.0
_BREAKER_MAX_S: Final = 60.0
# Source: defaults of common breakers (5 consecutive failures, 5 s doubling to 60 s).

_MIN_GAP_S = 1e-4

_MAX_CAPACITY_TOKENS: Final = 2**40
"""No engine has KV memory for more; who says so knows nothing of it."""


class Worker:
    """One incarnation of an engine, as the router sees it."""

    __slots__ = (
        "_block_size",
        "_is_full",
        "_lookahead",
        "_num_stored",
        "_parity",
        "_tally",
        "active_requests",
        "active_tokens",
        "cached_load",
        "capacity_tokens",
        "failures_in_row",
        "free_at_s",
        "held_tokens",
        "id",
        "info",
        "is_reachable",
        "is_tight",
        "is_told",
        "joined",
        "last_token_s",
        "loads",
        "num_sent",
        "open_until_s",
        "pace",
        "pending_prefill_tokens",
        "pending_prefills",
        "prefill",
        "prefill_ended_s",
        "recent",
        "room",
        "saturated_until_s",
        "share_stored",
        "slots",
        "stored_lately",
        "tight_tokens",
        "transfer_identity",
        "turnover",
        "was_serving",
    )

    def __init__(self, info: EngineInfo, settings: Settings, tally: Tally | None = None) -> None:
        self.id = info.id
        self.is_reachable = True
        self.is_told = True
        """Whether anybody tells what it caches; else it is believed to hold what it was sent."""
        self.active_requests = 0
        self.active_tokens = 0
        self.pending_prefill_tokens = 0
        self.pending_prefills = 0
        self.free_at_s = 0.0
        """When its queued prefills are expected to be over."""
        self.prefill_ended_s = 0.0
        """When it last brought a first token."""
        self.recent = 0.0
        """Requests sent here lately, in units that grow with time (`worker_table`)."""
        self.num_sent = 0
        self.held_tokens = 0
        """Of its KV memory, in use or cached: as its events say, and what was sent there since it was looked up."""
        self.stored_lately = 0.0
        """Blocks, each weighing less the older it is."""
        self._num_stored = 0
        self.turnover = 0.0
        """How much of what it stores pushes something else out of its cache."""
        self.share_stored = 1.0
        """How much it stores, in shares of the mean."""
        self.was_serving = False
        """Whether requests could be sent here before."""
        self.joined: Joined | None = None
        """Set while it starts slowly."""
        self.failures_in_row = 0
        self.open_until_s = 0.0
        self.saturated_until_s = 0.0
        self.last_token_s = 0.0
        """When any of its streams last brought a token."""
        self._tally = tally or Tally(settings)
        self._tally.unseen.add(self)
        self._parity = "unverified"
        self._block_size = 0
        self.transfer_identity = ""
        """The engine id in its first transfer parameters; fixed for the incarnation."""
        self.prefill = self._tally.prefill
        self.loads = dict(self._tally.loads)
        """Milliseconds it takes to load tokens from a slower medium, by medium."""
        self.pace = Mean(1.0)
        """Its gaps between tokens against what is usual on all engines."""
        self.cached_load: Load | None = None
        self._is_full = False
        self.room = Room()
        self.update(info, settings)

    def update(self, info: EngineInfo, settings: Settings) -> None:
        """Take newer facts about the same incarnation."""
        self.info = info
        capacity = info.kv_capacity_tokens
        self.capacity_tokens = capacity if 0 < capacity <= _MAX_CAPACITY_TOKENS else 0
        """0: not known."""
        self._lookahead = settings.kv_lookahead_tokens
        self.block_size = info.block_size_tokens or self.block_size
        slots, limit = info.max_num_seqs or settings.default_slots, settings.max_requests_per_engine
        self.slots = min(slots, limit) if limit else slots
        self._resize()
        self.changed()

    def _resize(self) -> None:
        self.room.resize(self.capacity_tokens, self._block_size, self._lookahead)
        self.tight_tokens = TIGHT * (self.room.limit_tokens or math.inf)
        """Beyond so many in use its KV memory may be without room; infinite where that is not known."""
        self._tally.small_tokens = min(self._tally.small_tokens, self.tight_tokens)

    def load(self) -> Load:
        """Its facts for a policy; kept in `cached_load` until one changes."""
        prefill, capacity = self.prefill, self.capacity_tokens
        facts = (
            self.id,
            per_token(prefill),
            prefill.base,
            self.free_at_s,
            self._tally.pressure.slope * self.pace.value * self.active_requests,
            self.recent,
            WATERMARK * capacity - self.reserved_tokens if capacity else math.inf,
            capacity,
            self.active_requests,
            self.pending_prefill_tokens,
            per_token(prefill) * (1.0 + ROOM_PRICE * self.crowding()),
            *(0.0, 0.0),
        )
        # As `Load(*facts)`, in half the time: a named tuple's own constructor is Python.
        self.cached_load = load = tuple.__new__(Load, facts)
        return load

    @property
    def reserved_tokens(self) -> int:
        """Of its KV memory; what requests share counts once, as far as it was looked at."""
        return self.active_tokens - self.room.shared_tokens

    def fits(self, prompt: Prompt | None, tokens: int, now_s: float) -> bool:
        """Whether its KV memory has room for so many tokens, a prompt among them. An engine that does nothing takes anything."""
        room = self.room
        if not (self.active_requests and room.limit_tokens):
            return True
        if prompt is not None and self.is_beyond(prompt):
            # It need not wait to be refused, nor let others wait behind it.
            return True
        shared_tokens = room.shared_tokens
        gap_s = self._tally.pressure.gap_ms * self.pace.value / 1e3
        elsewhere = self.active_tokens - room.booked_tokens
        is_fit = room.fits(prompt, tokens, elsewhere, now_s, max(gap_s, _MIN_GAP_S))
        if shared_tokens != room.shared_tokens:
            self.cached_load = None
        return is_fit

    def is_beyond(self, prompt: Prompt) -> bool:
        """Whether its engine can never take a prompt, however little else runs there, and says so at once."""
        limit_tokens = self.room.limit_tokens
        return 0 < limit_tokens < prompt.num_tokens

    def crowding(self) -> float:
        """How soon what is stored here pushes out what may be wanted again: the fuller its cache and the more it stores."""
        capacity = self.capacity_tokens
        filled = min(self.held_tokens / capacity, 1.0) if capacity else 0.0
        return self.share_stored * max(self.turnover, filled * filled)

    def changed(self) -> None:
        """Note that its books or facts have changed."""
        self.cached_load = None
        self.is_tight = self.active_tokens > self.tight_tokens
        is_full = self.is_tight or self.active_requests >= self.slots
        if is_full != self._is_full:
            self._is_full = is_full
            self._tally.num_full += 1 if is_full else -1
            if not is_full:
                self.room.relax()

    def stored(self, num_ever: int, keep: float) -> None:
        """Take how many blocks it ever stored; what it stored before counts `keep` of what it did."""
        # An index that began anew counts from 0.
        fresh = num_ever - self._num_stored if num_ever >= self._num_stored else num_ever
        self._num_stored = num_ever
        self.stored_lately = self.stored_lately * keep + fresh

    def crowded(self, share_stored: float, turnover: float, num_held: int) -> None:
        """Take how much it stores, how much of that pushes something out, and how many blocks it holds."""
        held_tokens = num_held * self.block_size + self.pending_prefill_tokens
        found = share_stored, turnover, held_tokens
        if found != (self.share_stored, self.turnover, self.held_tokens):
            self.share_stored, self.turnover, self.held_tokens = found
            self.cached_load = None

    def prefill_took(self, tokens: int, ms: float) -> None:
        """Learn what a prefill of so many tokens costs here."""
        tally = self._tally
        if self in tally.unseen:
            tally.unseen.discard(self)
            self.prefill = tally.prefill.anchored()
        self.prefill.learn(tokens, ms)
        self.cached_load = None
        tally.prefill.learn(tokens, ms)
        tally.bound(self.prefill)
        tally.bound(tally.prefill)
        for other in tally.unseen:
            other.cached_load = None

    def load_took(self, medium: int, tokens: int, ms: float) -> None:
        """Learn what it takes to load so many tokens here."""
        usual = self._tally.loads[medium]
        if self.loads[medium] is usual:
            self.loads[medium] = usual.anchored()
        own = self.loads[medium]
        own.learn(tokens, counted_ms(own, usual, tokens, ms))
        usual.learn(tokens, counted_ms(usual, usual, tokens, ms))

    @property
    def step_ms(self) -> float:
        """How long one of its steps takes, as the gaps between tokens tell; 0 before there were any."""
        pressure = self._tally.pressure
        return pressure.gap_ms * self.pace.value if pressure.is_known else 0.0

    def gaps_took(self, ms: float) -> None:
        """Learn from the gap between two tokens beside the sequences that run now."""
        pressure = self._tally.pressure
        pressure.learn(self.active_requests, ms)
        if pressure.is_known and pressure.gap_ms > 0.0:  # tokens that came in one read have no gap
            self.pace.learn(min(ms / pressure.gap_ms, OUTLIER * self.pace.value))
        self.cached_load = None

    @property
    def parity(self) -> str:
        """Outcome of the tokenizer check: `verified`, `unverified`, `mismatch`."""
        return self._parity

    @parity.setter
    def parity(self, parity: str) -> None:
        self._parity = parity
        self._tally.version += 1

    @property
    def block_size(self) -> int:
        """Tokens; 0 until the engine or its events say it."""
        return self._block_size

    @block_size.setter
    def block_size(self, tokens: int) -> None:
        if tokens != self._block_size:
            self._block_size = tokens
            self._tally.version += 1
            self._resize()

    @property
    def has_blocks(self) -> bool:
        """Whether its cache can be considered: it counts tokens as we do, in blocks of a known size."""
        return self._block_size > 0 and self._parity != "mismatch"

    @property
    def is_stranger(self) -> bool:
        """Whether it counts tokens otherwise: blocks of text stand for its blocks of tokens."""
        return self._block_size > 0 and self._parity == "mismatch"

    @property
    def incarnation(self) -> str:
        """Which start of the engine this is."""
        return self.info.incarnation

    @property
    def key(self) -> tuple[str, str]:
        """Engine and incarnation: what exclusions name, so that a restarted engine is a fresh chance."""
        return (self.info.id, self.info.incarnation)

    def is_serving(self) -> bool:
        """Whether it takes new requests at all."""
        return self.is_reachable and self.info.state is EngineState.READY

    def has_room(self, now_s: float) -> bool:
        """Whether one more request may go there now, whatever it needs."""
        return (
            self.active_requests < self.slots
            and now_s >= self.open_until_s
            and now_s >= self.saturated_until_s
        )

    def lack(self, now_s: float) -> str:
        """Why none may; empty: one may."""
        if self.active_requests >= self.slots:
            return "full"
        if now_s < self.open_until_s:
            return "failing"
        return "busy" if now_s < self.saturated_until_s else ""

    def book(
        self,
        prompt_tokens: int,
        uncached_tokens: int,
        output_tokens: int,
        now_s: float = 0.0,
        unit: float = 1.0,
        prompt: Prompt | None = None,
    ) -> Booking:
        """Enter a request into the books; release the booking exactly once. With its `prompt` what it shares is known.

        `unit` is what a request weighs now (`worker_table`); 0 for the router's own, which are nobody's share.
        """
        booking = Booking(self, prompt_tokens, output_tokens, now_s)
        self.active_requests += 1
        self.active_tokens += prompt_tokens + output_tokens
        if unit:
            self.num_sent += 1
            self.recent += unit
        if self.room.limit_tokens:
            self.room.enter(booking, prompt)
        self.held_tokens += uncached_tokens
        if uncached_tokens:
            booking.prefill_here(uncached_tokens, now_s)
        self.changed()
        return booking

    def released(self, tokens: int) -> None:
        """Take one request out of the books; for its booking only."""
        self.active_requests -= 1
        self.active_tokens -= tokens
        self.changed()

    def failed(self, now_s: float) -> None:
        """Count a failure; several in a row keep the engine out for a while that doubles."""
        self.failures_in_row += 1
        if self.failures_in_row >= _BREAKER_FAILURES:
            # Far beyond what it may be, and still a number after thousands of failures.
            num_doubled = min(self.failures_in_row - _BREAKER_FAILURES, 30)
            doubled = _BREAKER_OPEN_S * 2.0**num_doubled
            self.open_until_s = now_s + min(doubled, _BREAKER_MAX_S)
            self._limit(self.open_until_s)

    def succeeded(self, now_s: float) -> None:
        """Note that a request brought what it should."""
        self.failures_in_row = 0
        self.open_until_s = 0.0
        self.last_token_s = now_s

    def saturated(self, now_s: float, retry_after_s: float) -> None:
        """Keep new requests away for as long as the engine asked, at least a second, at most a minute."""
        self.saturated_until_s = now_s + min(max(retry_after_s, 1.0), 60.0)
        self._limit(self.saturated_until_s)

    def _limit(self, until_s: float) -> None:
        self._tally.limited_until_s = max(self._tally.limited_until_s, until_s)

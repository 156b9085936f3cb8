"""Which engine had a session's last request, and when the next one follows it.

A client names a session in `X-Dynctl-Session`. What the index knows of a prompt says more than that: where engines hold
different amounts of it, the policy weighs them. Where they hold the same, mostly nothing since the prompt has images or
is short, the session goes on where it was, unless that engine is clearly busier than the rest. Not here: choosing
otherwise, booking. Pure: times are passed in.
"""

from collections import OrderedDict
from collections.abc import Iterable, Sequence
from hashlib import blake2b
from itertools import islice

from dynctl.router.choosing import Load, Need, Policy
from dynctl.router.metrics import counter, gauge
from dynctl.router.workers import Worker

_MAX_SESSIONS = 65_536
"""Least recently used ones are forgotten first: 20 MB."""

_NUM_AT_ONCE = 1000
"""Forgotten in one go, so that requests are not held up."""

_BUSY_RATIO = 1.5
_BUSY_REQUESTS = 2
_BUSY_TOKENS = 8192
"""An engine is clearly busier with more than this multiple of the mean and so many requests, or tokens to prefill, above
it: with few requests the ratio is noise. A session yields then, as a cached prefix does under the policy `prefix`."""


_RESULTS = [("followed",), ("new",), ("cache",), ("busy",), ("away",)]


class Following:
    """A policy for one request of a session: what it stands on is frozen, so the same choice can be made again."""

    __slots__ = ("_policy", "begins", "engine")

    def __init__(self, policy: Policy, engine: str, *, begins: bool = False) -> None:
        self._policy = policy
        self.engine = engine
        """That had the session's last request, as long as its cache may still have it; empty: none."""
        self.begins = begins
        """The session is not known here: the engine is the one all processes let it begin at, or none."""

    @property
    def policy(self) -> Policy:
        """Chooses where the session does not."""
        return self._policy

    @property
    def uses_index(self) -> bool:
        """As of the policy."""
        return self._policy.uses_index

    @property
    def term_names(self) -> tuple[str, ...]:
        """As of the policy."""
        return self._policy.term_names

    def choose(
        self, need: Need, loads: Sequence[Load], overlaps: Sequence[int], draw: float
    ) -> int:
        """Choose the session's engine, or leave it to the policy."""
        position, _ = self.look(loads, overlaps)
        return self._policy.choose(need, loads, overlaps, draw) if position < 0 else position

    def terms(
        self, need: Need, loads: Sequence[Load], overlaps: Sequence[int]
    ) -> list[tuple[float, ...]]:
        """As of the policy."""
        return self._policy.terms(need, loads, overlaps)

    def look(self, loads: Sequence[Load], overlaps: Sequence[int]) -> tuple[int, str]:
        """Say where the session's engine stands among candidates, -1 where the policy chooses; and the reason in a word."""
        names = [load.engine for load in loads]
        if self.engine not in names:
            return -1, "new" if self.begins else "away"
        if min(overlaps) != max(overlaps):
            return -1, "cache"
        position = names.index(self.engine)
        own = loads[position]
        if _is_above(own.active_requests, [load.active_requests for load in loads], _BUSY_REQUESTS):
            return -1, "busy"
        waiting = [load.pending_prefill_tokens for load in loads]
        if _is_above(own.pending_prefill_tokens, waiting, _BUSY_TOKENS):
            return -1, "busy"
        return position, "new" if self.begins else "followed"


def _is_above(own: int, all_of_them: Sequence[int], margin: int) -> bool:
    mean = sum(all_of_them) / len(all_of_them)
    return own > max(mean * _BUSY_RATIO, mean + margin)


class Sessions:
    """The last engine of each session, for as long as `ttl_s`; 0: of none."""

    def __init__(self, ttl_s: float, *, are_processes_many: bool = False) -> None:
        """`are_processes_many`: others serve the same port and remember sessions of their own."""
        self.ttl_s = ttl_s
        self._are_processes_many = are_processes_many
        self._last: OrderedDict[tuple[bytes, bool], tuple[tuple[str, str], float]] = OrderedDict()
        """By session and whether it is the prefill's: engine with incarnation, and until when."""
        self.results: dict[tuple[str, ...], float] = dict.fromkeys(_RESULTS, 0.0)
        """How often each was the outcome."""

    def __len__(self) -> int:
        return len(self._last)

    def following(
        self, policy: Policy, session: bytes, leg: str, workers: Sequence[Worker], now_s: float
    ) -> Following:
        """Let a request of a session follow the one before it; by `policy` where it cannot."""
        engine, until_s = self._last.get((session, leg == "prefill"), (("", ""), 0.0))
        if now_s < until_s:
            # Started anew it holds nothing of the session any more.
            is_there = any(worker.key == engine for worker in workers)
            return Following(policy, engine[0] if is_there else "")
        begin = _falls_to(session, workers) if self._are_processes_many else ""
        return Following(policy, begin, begins=True)

    def sent(
        self, session: bytes, leg: str, worker: Worker, now_s: float, result: str = "followed"
    ) -> None:
        """Note which engine a request of a session went to, and what became of the session."""
        if result:
            self.results[(result,)] = self.results.get((result,), 0.0) + 1
        key = (session, leg == "prefill")
        self._last[key] = (worker.key, now_s + self.ttl_s)
        self._last.move_to_end(key)
        if len(self._last) > _MAX_SESSIONS:
            self._last.popitem(last=False)

    def exposition(self) -> Iterable[str]:
        """The metrics' lines."""
        yield from gauge("sessions", "Sessions remembered.", {(): len(self._last)})
        results = self.results
        yield from counter("session_decisions_total", "What became of them.", results, ("result",))

    def sweep(self, now_s: float) -> None:
        """Forget what is over; those used last the longest ago come first."""
        for key in tuple(islice(self._last, _NUM_AT_ONCE)):
            if now_s < self._last[key][1]:
                return
            del self._last[key]


def _falls_to(session: bytes, workers: Sequence[Worker]) -> str:
    """Name the engine that every process takes for a session it does not know, without asking the others."""
    ranks = [
        (blake2b(session + worker.id.encode(), digest_size=8).digest(), worker.id)
        for worker in workers
    ]
    return max(ranks)[1]

"""What a router finds wrong with itself: decisions that take too long, hosts it does not reach, pools that do not fit. Pure: times are passed in."""

from bisect import bisect_left
from collections import deque
from collections.abc import Iterable, Mapping, Sequence

from dynctl.router.config import RelayTarget
from dynctl.router.findings import Finding
from dynctl.router.metrics import Histogram
from dynctl.router.paths import partners
from dynctl.router.seen import NOT_YET
from dynctl.router.workers import Worker

_LIMIT_S = 2e-3
"""Of the 99th percentile. Wanted: 200 requests a second on 2 cores, 64 engines and a million blocks."""

_OFF_PER_1000 = 5
"""It is over when fewer are slow, or when for a whole window no more than the limit were: near the limit it would come and go."""

_WINDOW_S = 60.0
_MIN_DECISIONS = 100
_MIN_SLOW = 5
"""Fewer say nothing of a 99th percentile: all of them may be one stall."""


class Alarms:
    """Watches the time of decisions over the last minute."""

    def __init__(self, decisions: Histogram, *, is_compiled: bool) -> None:
        self._decisions = decisions
        self._is_compiled = is_compiled
        self._seen: deque[tuple[float, tuple[int, ...]]] = deque()
        self._found: list[Finding] = []
        self._slow_s = 0.0
        """When too many were slow last."""

    def tick(self, now_s: float) -> list[Finding]:
        """Look at what was decided; return findings that are new. Call it about every second."""
        self._seen.append((now_s, self._decisions.counts))
        while now_s - self._seen[0][0] > _WINDOW_S:
            self._seen.popleft()
        counts = [b - a for a, b in zip(self._seen[0][1], self._seen[-1][1], strict=True)]
        num_slow = sum(counts[bisect_left(self._decisions.bounds, _LIMIT_S) + 1 :])
        before, found = self._found, self._slow(counts, num_slow)
        if found:
            self._slow_s = now_s
        elif now_s - self._slow_s < _WINDOW_S and not _is_over(counts, num_slow):
            found = before
        self._found = found
        return [] if before else found

    def findings(self) -> list[Finding]:
        """What is wrong now."""
        return self._found

    def _slow(self, counts: Sequence[int], num_slow: int) -> list[Finding]:
        bounds, total = self._decisions.bounds, sum(counts)
        if total < _MIN_DECISIONS or num_slow < _MIN_SLOW or num_slow * 100 <= total:
            return []
        beyond, position = 0, len(counts)
        while (beyond := beyond + counts[position - 1]) * 100 <= total:
            position -= 1
        under = (
            f"up to {bounds[position - 1] * 1e3:g}"
            if position <= len(bounds)
            else f"over {bounds[-1] * 1e3:g}"
        )
        hint = "give the router a core of its own (/proc/pressure/cpu says whether it waits for one), or spread requests: --workers"
        if not self._is_compiled:
            hint += "; compiled (make wheel) it needs half the time"
        return [
            Finding(
                "",
                "slow_decisions",
                f"{num_slow} of {total} decisions in the last minute took more than 2 ms, 99 of 100 {under} ms",
                hint,
            )
        ]


def _is_over(counts: Sequence[int], num_slow: int) -> bool:
    return num_slow * 1000 <= sum(counts) * _OFF_PER_1000


def apart(workers: Iterable[Worker]) -> list[Finding]:
    """Name the decode engines to which no prefill engine can hand KV over, though there are some."""
    serving = [worker for worker in workers if worker.is_serving()]
    prefills = [worker for worker in serving if worker.info.role == "prefill"]
    decodes = [worker for worker in serving if worker.info.role == "decode"]
    fitting = partners(decodes, prefills)
    alone = [worker.id for worker in decodes if worker not in fitting]
    if not prefills or not alone:
        return []
    return [
        Finding(
            "",
            "other_kv",
            f"{len(alone)} of {len(decodes)} decode engines have KV of another kind than every prefill engine, and compute "
            f"their prompts themselves: {', '.join(alone)}",
            "model, revision, engine version and flags of both must agree; dynctl status shows an up that is half done, dynctl up "
            "finishes it",
        )
    ]


def unreached(relays: Iterable[RelayTarget], silent: Mapping[str, str]) -> list[Finding]:
    """Name the hosts whose relays do not answer, with why as `silent` says."""
    names = [relay.host_name for relay in relays]
    told = {name: silent[name] for name in names if silent.get(name, NOT_YET) != NOT_YET}
    if not told:
        return []
    return [
        Finding(
            "",
            "relay_silent",
            f"{len(told)} of {len(names)} relays do not answer, their engines get no requests: "
            + ", ".join(f"{name} ({why})" for name, why in told.items()),
            "dynctl status and dynctl logs relay show how they fare, dynctl doctor the ways there",
        )
    ]

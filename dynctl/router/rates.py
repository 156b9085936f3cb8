"""What an engine's work costs in milliseconds, learned from what it does: straight lines with forgetting.

Not here: clocks, which engine is chosen. Pure.
"""

import math
from collections.abc import Iterable

_KEEP = 0.98
"""Weight of the past at each observation: about the last 50 count. A guess, to be tuned on traces."""

OUTLIER = 2.0
"""An observation counts as at most this many times what was expected: one stall must not turn the line."""

_ORIGIN_WEIGHT = 1.0
"""Observations that the declared base is worth for ever: where all work is of one size, slope and base cannot be told
apart, and a slope from noise would price a long prompt absurdly."""

_ANCHOR_WEIGHT = 6.0
"""Observations that the anchor is worth at either end: what few facts say of one engine counts little against what
all say, and an engine that is avoided for a bad time it had comes back to the others."""


_LINE_FIELDS = (
    "_anchor",
    "_declared_base",
    "_declared_slope",
    "_is_base_sure",
    "_n",
    "_outlier",
    "_pin_weight",
    "_scale",
    "_sx",
    "_sxx",
    "_sxy",
    "_sy",
    "base",
    "num_seen",
    "slope",
)


class Line:
    """y ≈ base + slope · x by least squares with forgetting; starts from a declared line that fades as facts come.

    Facts tell first how far the declared line is off as a whole, then its shape: where all work is small, what large
    work costs is the declared shape at the observed level.
    """

    __slots__ = _LINE_FIELDS

    def __init__(
        self,
        base: float,
        slope: float,
        scale: float,
        weight: float = 2.0,
        outlier: float = OUTLIER,
        *,
        is_base_sure: bool = False,
    ) -> None:
        """`scale` is the x at which the declared line is pinned a second time, besides 0.

        `weight` is how many observations each pin is worth. Where the base is sure, only the slope may be off as a whole:
        a link that is a hundred times as slow as declared does not take a hundred times as long to set up.
        """
        self._anchor: Line | None = None
        self._declared_base = self.base = base
        self._declared_slope = self.slope = slope
        self._is_base_sure = is_base_sure
        self._outlier = outlier
        self._pin_weight = weight
        self._scale = scale
        self.num_seen = 0
        self._n = self._sx = self._sy = self._sxx = self._sxy = 0.0

    def copy(self) -> "Line":
        """Return a line that has seen the same and goes its own way from here."""
        twin = Line(self.base, self.slope, self._scale)
        for name in _LINE_FIELDS:
            setattr(twin, name, getattr(self, name))
        return twin

    def anchored(self) -> "Line":
        """Return a line without facts of its own, held to this one."""
        line = Line(self.base, self.slope, self._scale, _ANCHOR_WEIGHT, self._outlier)
        line._anchor = self
        return line

    def at(self, x: float) -> float:
        """Predict y."""
        return self.base + self.slope * x

    def learn(self, x: float, y: float) -> None:
        """Take an observation in."""
        self.add(x, min(y, self._outlier * max(self.at(x), 1e-6)))
        self.settle()

    def add(self, x: float, y: float) -> None:
        """The same for one that is no outlier; `settle` then."""
        self.num_seen += 1
        self._n = self._n * _KEEP + 1.0
        self._sx = self._sx * _KEEP + x
        self._sy = self._sy * _KEEP + y
        self._sxx = self._sxx * _KEEP + x * x
        self._sxy = self._sxy * _KEEP + x * y
        if self._anchor is None:
            self._pin_weight *= _KEEP

    def fade(self) -> None:
        """Let the past count a little less without a new fact; an anchored line so comes back to its anchor."""
        for name in ("_n", "_sx", "_sy", "_sxx", "_sxy"):
            setattr(self, name, getattr(self, name) * _KEEP)
        self.settle()

    def settle(self) -> None:
        """Compute the line from what was seen and what it is held to."""
        n, sx, sy, sxx, sxy = self._n, self._sx, self._sy, self._sxx, self._sxy
        anchor, far, weight = self._anchor, self._scale, self._pin_weight
        if anchor is None:
            base, slope = self._declared_base, self._declared_slope
            sure_y = base * n if self._is_base_sure else 0.0
            expected = base * n + slope * sx - sure_y
            level = max(sy - sure_y, 0.0) / expected if expected > 0.0 else 1.0
            near_y = base if self._is_base_sure else level * base
            far_y = near_y + level * slope * far
            n, sy = n + _ORIGIN_WEIGHT, sy + _ORIGIN_WEIGHT * near_y
        else:
            near_y, far_y = anchor.base, anchor.at(far)
        n, sx, sy = n + 2 * weight, sx + weight * far, sy + weight * (near_y + far_y)
        sxx, sxy = sxx + weight * far * far, sxy + weight * far * far_y
        spread = n * sxx - sx * sx
        if spread > 1e-9 * n * max(sxx, 1.0):
            # More work never takes less time: a negative slope is noise.
            self.slope = max((n * sxy - sx * sy) / spread, 0.0)
        self.base = max((sy - self.slope * sx) / n, 0.0)


class SteadyLine:
    """A line that one odd observation does not turn, and that is believed the less the longer ago the last one was.

    What is not believed is made up by its peers' line, at the top by what was declared, whose base is sure. The last observations count at
    most some times as much as the middle one of them; if that is far from all there was before, that is over.
    """

    _YOUNG = 5
    _FAR = 3.0
    _LEVEL_TOKENS = 512.0
    """Of longer work no observation tells more of the level."""
    _FRESH_S = 1.0
    """For so long what was worked out is not worked out again."""
    _GRACE_S = 5.0
    _HALF_S = 8.0
    """After the grace half of what was seen in one second is forgotten in so long, of each further one in as many times that."""
    _MOST_SECONDS = 8

    __slots__ = (
        "_declared",
        "_is_own_old",
        "_max_half_s",
        "_num_seconds",
        "_own",
        "_past",
        "_peers",
        "_seen_s",
        "_worked_out_s",
        "_young",
        "base",
        "num_seen",
        "seen_share",
        "slope",
    )

    def __init__(
        self, declared: Line, peers: "SteadyLine | None" = None, max_half_s: float = math.inf
    ) -> None:
        """Half of it is forgotten in `max_half_s` at most: what nobody tries again may long have changed."""
        self._declared = self._past = self._own = declared
        self._peers = peers
        self._max_half_s = max_half_s
        self._young: list[tuple[float, float]] = []
        self._is_own_old = False
        self._num_seconds = 0
        self._seen_s = self._worked_out_s = -math.inf
        self.num_seen = 0.0
        """Observations, its own and its peers', as far as they are believed."""
        self.seen_share = 0.0
        """How much of the line these make up; the rest is what was declared."""
        self.base, self.slope = declared.base, declared.slope

    def learn(self, x: float, y: float, now_s: float) -> None:
        """Take an observation in."""
        if self._peers is not None:
            self._peers.learn(x, y, now_s)
        if self._young and self._trust(now_s) < 0.5:
            self._renew()
            self._let_go(x, y)
        if now_s >= self._seen_s + 1.0:
            self._num_seconds = min(self._num_seconds + 1, self._MOST_SECONDS)
        self._seen_s = max(self._seen_s, now_s)
        self._young.append((x, y))
        if len(self._young) > self._YOUNG:
            self._grow_old()
        self._is_own_old = True
        self._worked_out_s = -math.inf

    def at(self, x: float, now_s: float) -> float:
        """Predict y."""
        self.look(now_s)
        return self.base + self.slope * x

    def look(self, now_s: float) -> None:
        """Bring base and slope up to date."""
        if 0.0 <= now_s - self._worked_out_s < self._FRESH_S:
            return
        self._worked_out_s = now_s
        if self._is_own_old:
            self._renew()
        peers, own, trust = self._peers, self._own, self._trust(now_s)
        base, slope, num_seen, seen_share = self._declared.base, self._declared.slope, 0.0, 0.0
        if peers is not None:
            peers.look(now_s)
            base, slope, num_seen = peers.base, peers.slope, peers.num_seen
            seen_share = peers.seen_share
        self.seen_share = seen_share + trust * (1.0 - seen_share)
        self.num_seen = num_seen + trust * (own.num_seen - num_seen)
        self.base = base + trust * (own.base - base)
        self.slope = slope + trust * (own.slope - slope)

    def _trust(self, now_s: float) -> float:
        if not self._num_seconds:
            return 0.0
        half_s = min(self._HALF_S**self._num_seconds, self._max_half_s)
        return math.exp2(-max(now_s - self._seen_s - self._GRACE_S, 0.0) / half_s)

    def _renew(self) -> None:
        middle = self._middle()
        self._own = own = self._past.copy()
        for x, y in self._young:
            own.add(x, self._bounded(x, y, middle))
        own.settle()
        self._is_own_old = False

    def _middle(self) -> float:
        """The slope that the middle one of the last observations tells of; of two the lower: work is held up, not hurried."""
        base, most = self._declared.base, self._LEVEL_TOKENS
        told = sorted([(max(y - base, 0.0) / x, min(x, most)) for x, y in self._young])
        weight = sum([one[1] for one in told]) / 2.0
        for slope, own_weight in told:
            weight -= own_weight
            if weight <= 0.0:
                return slope
        return told[-1][0]

    def _bounded(self, x: float, y: float, slope: float) -> float:
        return min(y, self._FAR * (self._declared.base + slope * x))

    def _let_go(self, x: float, y: float) -> None:
        """Drop what is hardly believed any more; how long it was seen counts on where what comes now is like it."""
        if not 1.0 / self._FAR <= y / max(self._own.at(x), 1e-9) <= self._FAR:
            self._num_seconds = 0
        self._young, self._past = [], self._declared

    def _grow_old(self) -> None:
        middle = self._middle()
        x, y = self._young.pop(0)
        if self._past is self._declared:
            self._past = self._past.copy()
        self._past.learn(x, self._bounded(x, y, middle))
        expected = self._past.at(self._LEVEL_TOKENS)
        ratio = (self._declared.base + middle * self._LEVEL_TOKENS) / max(expected, 1e-9)
        if not 1.0 / self._FAR <= ratio <= self._FAR:
            self._past, self._num_seconds = self._declared, 1


class Mean:
    """A mean with forgetting."""

    __slots__ = ("_keep", "value")

    def __init__(self, value: float, keep: float = _KEEP) -> None:
        self.value = value
        self._keep = keep

    def learn(self, value: float) -> None:
        """Take an observation in."""
        self.value = self.value * self._keep + value * (1.0 - self._keep)


class Pressure:
    """How much longer the gap between two tokens gets with each further sequence on the same engine, in milliseconds.

    Learned from differences between answers that ended at about the same time: what slows all engines alike is no reason
    to prefer one.
    """

    _KEEP_PRESENT = 0.9
    """The last ten answers, of any engine, are "about the same time"."""

    _MOST = 0.3
    """Of the usual gap: what an answer counts as longer at most. In a stall requests pile up and gaps grow at once."""

    _PIN = 64.0
    """Weight of the declared shape: four answers with four sequences more or less than usual."""

    __slots__ = ("_shape", "_sxx", "_sxy", "_x", "gap_ms", "slope")

    def __init__(self, gap_ms: float, slope_ms: float) -> None:
        self._shape = slope_ms / gap_ms
        self._x: float | None = None
        self.gap_ms = gap_ms
        """The usual gap just now."""
        self._sxx = self._sxy = 0.0
        self.slope = slope_ms

    @property
    def is_known(self) -> bool:
        """Whether any answer told; else the gap is what was declared."""
        return self._x is not None

    def learn(self, running: int, gap_ms: float) -> None:
        """Take one answer's mean gap in, and how many sequences ran beside it."""
        if self._x is None:
            if gap_ms <= 0.0:
                return  # it came in one read: what grows by shares of itself would stay there
            self._x, self.gap_ms = running, gap_ms
        more, longer_ms = running - self._x, gap_ms - self.gap_ms
        longer_ms = min(longer_ms, self._MOST * self.gap_ms)
        self._sxx = self._sxx * _KEEP + more * more
        self._sxy = self._sxy * _KEEP + more * longer_ms
        self._x += (1.0 - self._KEEP_PRESENT) * more
        self.gap_ms += (1.0 - self._KEEP_PRESENT) * longer_ms
        declared = self._shape * self.gap_ms
        slope = (self._sxy + self._PIN * declared) / (self._sxx + self._PIN)
        self.slope = max(slope, 0.0)


class OutputLengths:
    """Expected output tokens by what kind of request it is (route key); an unknown kind is taken as the mean of all."""

    _MAX_KEYS = 4096

    def __init__(self, start_tokens: float = 128.0) -> None:
        """`start_tokens` is a guess until the first answers end."""
        self._all = Mean(start_tokens)
        self._by_key: dict[str, Mean] = {}

    def expected(self, key: str, limit: int | None) -> int:
        """Tokens an answer is expected to have, never above the request's own limit."""
        mean = self._by_key.get(key, self._all)
        tokens = max(1, int(mean.value + 0.5))
        return tokens if limit is None else min(limit, tokens)

    def learned(self, keys: Iterable[str]) -> dict[str, float]:
        """What answers of these kinds were like, as far as there were any."""
        return {key: self._by_key[key].value for key in keys if key in self._by_key}

    def learn(self, key: str, num_tokens: int) -> None:
        """Take an answer's length in."""
        self._all.learn(num_tokens)
        mean = self._by_key.get(key)
        if mean is None:
            if len(self._by_key) >= self._MAX_KEYS:
                return
            mean = self._by_key[key] = Mean(float(num_tokens), keep=0.95)
        mean.learn(num_tokens)

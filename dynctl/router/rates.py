"""What an engine's work costs in milliseconds, learned from what it does: straight lines with forgetting.

Not here: clocks, which engine is chosen. Pure.
"""

from collections.abc import Iterable

_KEEP = 0.98
"""Weight of the past at each observation: about the last 50 count. A guess, to be tuned on traces."""

_OUTLIER = 2.0
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
        outlier: float = _OUTLIER,
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
        y = min(y, self._outlier * max(self.at(x), 1e-6))
        self.num_seen += 1
        self._n = self._n * _KEEP + 1.0
        self._sx = self._sx * _KEEP + x
        self._sy = self._sy * _KEEP + y
        self._sxx = self._sxx * _KEEP + x * x
        self._sxy = self._sxy * _KEEP + x * y
        if self._anchor is None:
            self._pin_weight *= _KEEP
        self.settle()

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

    def learn(self, running: int, gap_ms: float) -> None:
        """Take one answer's mean gap in, and how many sequences ran beside it."""
        if self._x is None:
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

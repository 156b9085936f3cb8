"""Routing that fails must not fail requests: past 5 % the plain rule takes over for a while, then routing is tried again.

IO: a log line when it does.
"""

import logging
from collections import deque

log = logging.getLogger("dynctl.router")

_WINDOW = 200
_MIN_SAMPLES = 20
_MAX_SHARE = 0.05
"""Of the last choices that may raise; up to here only those that do fall back."""

_REST_S = 10.0


class RoutingBreaker:
    """Counts choices that raised, over the last ones made."""

    def __init__(self) -> None:
        self._outcomes: deque[bool] = deque(maxlen=_WINDOW)
        self._num_failed = 0
        self._rest_until_s = 0.0

    def is_open(self, now_s: float) -> bool:
        """Whether the plain rule is to be used without trying."""
        return now_s < self._rest_until_s

    def record(self, now_s: float, *, is_failure: bool) -> None:
        """Take an attempt's outcome in."""
        outcomes = self._outcomes
        if len(outcomes) == _WINDOW and outcomes[0]:
            self._num_failed -= 1
        outcomes.append(is_failure)
        self._num_failed += is_failure
        if len(outcomes) >= _MIN_SAMPLES and self._num_failed > _MAX_SHARE * len(outcomes):
            log.error(
                "routing failed in %d of the last %d choices: for %.0f s the least loaded engine is taken",
                *(self._num_failed, len(outcomes), _REST_S),
            )
            self._rest_until_s = now_s + _REST_S
            outcomes.clear()
            self._num_failed = 0

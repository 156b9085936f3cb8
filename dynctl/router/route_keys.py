"""Which line of business a request belongs to, its route key; and what was counted by that.

Named by, in this order: the client's header, the body field that the configuration names, its API key; else by what it
asks for. A key tells requests apart in books and in what is learned; it never draws them to an engine. Pure.
"""

from bisect import bisect_left
from collections.abc import Iterable, Sequence
from typing import Any, Final

from dynctl.core.route_keys import is_route_key
from dynctl.http1.request import Request
from dynctl.router.api.keys import Keys
from dynctl.router.api.requests import KINDS, ApiRequest
from dynctl.router.metrics import Spreads, Values, counter, histogram

HEADER: Final = b"x-dynctl-route-key"

OTHER: Final = "other"
"""Stands for all keys after the first ones: a client may name any number of them."""

_MAX_KEYS: Final = 64
"""Told apart in metrics, beside those that the configuration names and those that nobody does."""

_TTFT_BOUNDS: Final = (0.05, 0.1, 0.2, 0.5, 1.0, 2.0, 5.0, 10.0)
"""Fewer than for all requests together: there is one such histogram for each key."""


class RouteKeys:
    """Names a request's key. What cannot be one is as if it were not there: a request is never refused for it."""

    def __init__(self, field: str, keys: Keys) -> None:
        """`field`: of the body, its parts joined by dots; empty: none."""
        self._path = field.split(".") if field else []
        self._keys = keys
        self.sums = ByKey([*keys.route_keys(), *KINDS])
        """What was counted by key."""

    def of(self, head: Request, request: ApiRequest) -> str:
        """The key of a request."""
        given = head.header(HEADER)
        if given is not None and is_route_key(name := given.decode("utf-8", "replace")):
            return name
        if self._path and (found := self._in_body(request.body)):
            return found
        if not self._keys.is_open:
            name = self._keys.route_key(head.header(b"authorization"))
            if name:
                return name
        return request.kind

    def _in_body(self, body: dict[str, Any]) -> str:
        value: Any = body
        for part in self._path:
            value = value.get(part) if isinstance(value, dict) else None
        return value if isinstance(value, str) and is_route_key(value) else ""


class KeySums:
    """What one key's requests came to."""

    __slots__ = ("_counts", "_ttft_s", "codes", "output_tokens", "prompt_tokens")

    def __init__(self) -> None:
        self.codes: dict[int, int] = {}
        """Requests by the status the client got."""
        self.prompt_tokens = 0
        self.output_tokens = 0
        self._counts = [0] * (len(_TTFT_BOUNDS) + 1)
        self._ttft_s = 0.0

    def ended(self, code: int) -> None:
        """Count a request."""
        self.codes[code] = self.codes.get(code, 0) + 1

    def took(self, prompt_tokens: int, output_tokens: int) -> None:
        """Count a whole answer's tokens."""
        self.prompt_tokens += prompt_tokens
        self.output_tokens += output_tokens

    def first_token(self, after_s: float) -> None:
        """Take in how long a stream's first token took."""
        self._counts[bisect_left(_TTFT_BOUNDS, after_s)] += 1
        self._ttft_s += after_s

    @property
    def ttft(self) -> tuple[Sequence[int], float]:
        """Streams by the bounds their first tokens stayed under, and the sum of seconds."""
        return self._counts, self._ttft_s


class ByKey:
    """Sums by route key: of those known from the start, of the first others, and of the rest together."""

    def __init__(self, named: Iterable[str]) -> None:
        self._named = frozenset(named)
        self._sums: dict[str, KeySums] = {}
        self._num_others = 0

    def of(self, key: str) -> KeySums:
        """The sums a request of this key counts in."""
        sums = self._sums.get(key)
        if sums is None:
            if key not in self._named:
                if self._num_others >= _MAX_KEYS:
                    return self._sums.setdefault(OTHER, KeySums())
                self._num_others += 1
            sums = self._sums[key] = KeySums()
        return sums

    def names(self) -> list[str]:
        """The keys told apart so far."""
        return [key for key in self._sums if key != OTHER]

    def lines(self) -> Iterable[str]:
        """The exposition lines, of keys of which something has come or ended."""
        label = ("route_key",)
        sums = {key: one for key, one in self._sums.items() if one.codes or any(one.ttft[0])}
        codes: Values = {
            (key, str(code)): float(number)
            for key, one in sums.items()
            for code, number in one.codes.items()
        }
        yield from counter(
            "route_key_requests_total", "Requests that ended.", codes, (*label, "code")
        )
        prompts: Values = {(key,): float(one.prompt_tokens) for key, one in sums.items()}
        yield from counter("route_key_prompt_tokens_total", "Of prompts.", prompts, label)
        outputs: Values = {(key,): float(one.output_tokens) for key, one in sums.items()}
        yield from counter("route_key_output_tokens_total", "Of answers.", outputs, label)
        ttfts: Spreads = {(key,): one.ttft for key, one in sums.items()}
        yield from histogram("route_key_ttft_seconds", "Of streams.", ttfts, label, _TTFT_BOUNDS)

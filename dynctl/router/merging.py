"""Several processes' answers to those who run the router, put together as one. Pure."""

import urllib.parse
from collections import Counter
from collections.abc import Callable, Iterable, Sequence

import msgspec

from dynctl.router.api.answers import Failure
from dynctl.router.hits import with_ratios
from dynctl.router.seen import Seen, join
from dynctl.router.shadow import ShadowSums
from dynctl.router.skew import SkewSums

Shown = tuple[int, bytes] | tuple[int, bytes, bytes] | Failure
"""Status, body and perhaps its type; or why there is none."""

_SUMMED_GAUGES = frozenset(
    "dynctl_router_" + name for name in ("inflight", "queued", "hit_tokens", "probe_tokens")
)


def add_expositions(texts: Iterable[bytes]) -> bytes:
    """Add several processes' metrics: counters, histograms and what is in flight; of other gauges the first one's count."""
    lines: list[str] = []
    positions: dict[str, int] = {}
    sums: dict[str, float] = {}
    is_summed = True
    for text in texts:
        for line in text.decode().splitlines():
            if line.startswith("#"):
                if line.startswith("# TYPE "):
                    _, _, name, kind = line.split(" ")
                    is_summed = kind != "gauge" or name in _SUMMED_GAUGES
                if line not in positions:
                    positions[line] = len(lines)
                    lines.append(line)
                continue
            key, _, value = line.rpartition(" ")
            if key not in positions:
                positions[key] = len(lines)
                lines.append(key)
                sums[key] = float(value)
            elif is_summed:
                sums[key] += float(value)
    return ("\n".join(f"{k} {_number(sums[k])}" if k in sums else k for k in lines) + "\n").encode()


def _number(value: float) -> str:
    return str(int(value)) if value == int(value) and abs(value) < 1e15 else repr(value)


def add_decisions(texts: Iterable[bytes], limit: int) -> bytes:
    """Put several processes' decisions together, the newest first."""
    found = [one for text in texts for one in msgspec.json.decode(text)]
    found.sort(key=lambda one: one.get("unix_s", 0.0), reverse=True)
    return msgspec.json.encode(found[:limit])


def add_hits(texts: Iterable[bytes]) -> bytes:
    """Add several processes' sums of tokens, and say anew what they mean."""
    total: Counter[str] = Counter()
    for text in texts:
        sums = msgspec.json.decode(text)
        total.update({name: number for name, number in sums.items() if isinstance(number, int)})
    return msgspec.json.encode(with_ratios(total))


def add_findings(texts: Iterable[bytes]) -> bytes:
    """Each finding once: processes see the same engines, but not the same requests."""
    found = {
        (one["engine"], one["cause"]): one for text in texts for one in msgspec.json.decode(text)
    }
    return msgspec.json.encode(list(found.values()))


_skew_answers = msgspec.json.Decoder(SkewSums)


def add_skews(texts: Iterable[bytes]) -> bytes:
    """Add several processes' sums of what went to which engine."""
    total = SkewSums()
    for text in texts:
        total.join(_skew_answers.decode(text))
    return msgspec.json.encode(total)


_seen_answers = msgspec.json.Decoder(Seen)


def add_seen(texts: Iterable[bytes]) -> bytes:
    """Put together what several processes see of the engines."""
    return msgspec.json.encode(join([_seen_answers.decode(text) for text in texts]))


class _ShadowAnswer(msgspec.Struct):
    sums: ShadowSums


_shadow_answers = msgspec.json.Decoder(_ShadowAnswer | None)


def add_shadows(texts: Iterable[bytes]) -> bytes:
    """Join what several processes' shadows counted; one that is not told to follow, or follows another policy, is left out.

    The first that follows says which. Each has simulated the caches of what it sent itself.
    """
    joined: ShadowSums | None = None
    for text in texts:
        answer = _shadow_answers.decode(text)
        if answer is None:
            continue
        sums = answer.sums
        if joined is None:
            joined = sums
        elif (sums.real_policy, sums.shadow_policy) == (joined.real_policy, joined.shadow_policy):
            joined.join(sums)
    return msgspec.json.encode(None if joined is None else joined.to_json())


_SUMS: dict[str, Callable[[Iterable[bytes]], bytes]] = {
    "/engines": add_seen,
    "/findings": add_findings,
    "/hits": add_hits,
    "/shadow": add_shadows,
    "/skew": add_skews,
}


def add_answers(path: str, query: bytes, own: Shown, others: Sequence[bytes]) -> Shown:
    """Add the other processes' answers to one's own; where they all say the same, one's own stands."""
    if isinstance(own, Failure) or own[0] != 200:
        return own
    if path == "/metrics":
        return (200, add_expositions((own[1], *others)), *own[2:])
    if path == "/decisions":
        limit = urllib.parse.parse_qs(query.decode("ascii", "replace")).get("limit", ["100"])[0]
        return 200, add_decisions((own[1], *others), int(limit))
    add = _SUMS.get(path)
    return own if add is None else (200, add((own[1], *others)))

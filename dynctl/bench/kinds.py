"""A mixed run by kind of request: short and long prompts, short and long answers, each on its own. Pure."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from dynctl.bench.record import Record
from dynctl.bench.statistics import percentile
from dynctl.bench.workload import Workload

ALL = "all"


@dataclass(frozen=True, slots=True)
class Kind:
    """What became of requests of one kind."""

    name: str
    """`128 in, 32 out`: tokens, as asked for; `all`: the whole run."""
    requests_s: float
    """Answers that ended within the measured time, per second."""
    ttft_ms: float | None
    """Mean."""
    output_tok_s: float
    """Generated tokens that arrived within the measured time, per second."""
    tok_s_user: float | None
    """Mean over answers of the speed at which each was generated."""
    ttft_p99_ms: float | None
    num_ok: int
    num_failed: int


def kinds_of(
    workload: Workload, records: Sequence[Record], since_s: float, until_s: float
) -> tuple[Kind, ...]:
    """The whole run, then each kind that was asked for; nothing where all requests are of one.

    Kinds are told apart by lengths of which there are two (`either`); what a chat's later turns ask for depends on answers.
    """
    varies = workload.isl.kind == "either", workload.osl.kind == "either"
    if not any(varies) or workload.chats:
        return ()
    by_kind: dict[tuple[int, int], list[Record]] = {}
    for record in records:
        isl = (record.isl_asked_tokens or 0) if varies[0] else 0
        osl = record.osl_asked_tokens if varies[1] else 0
        by_kind.setdefault((isl, osl), []).append(record)
    every = [_kind(ALL, records, since_s, until_s)]
    for key in sorted(by_kind):
        parts = [
            f"{tokens} {'in' if at == 0 else 'out'}" for at, tokens in enumerate(key) if varies[at]
        ]
        every.append(_kind(", ".join(parts), by_kind[key], since_s, until_s))
    return tuple(every)


def _kind(name: str, records: Sequence[Record], since_s: float, until_s: float) -> Kind:
    measured_s = max(until_s - since_s, 1e-9)
    measured = [r for r in records if not r.is_warmup]
    ok = [r for r in measured if r.is_ok]
    ended = sum(r.is_ok and since_s <= (r.end_s or 0.0) < until_s for r in records)
    ttfts = sorted(_known(r.ttft_ms for r in ok))
    return Kind(
        name=name,
        requests_s=ended / measured_s,
        ttft_ms=_mean(ttfts),
        output_tok_s=sum(r.tokens_between(since_s, until_s) for r in records) / measured_s,
        tok_s_user=_mean([1e3 / tpot for tpot in _known(r.tpot_ms for r in ok) if tpot]),
        ttft_p99_ms=percentile(ttfts, 0.99) if len(ttfts) > 1 else None,
        num_ok=len(ok),
        num_failed=len(measured) - len(ok),
    )


def _known(values: Iterable[float | None]) -> list[float]:
    return [value for value in values if value is not None]


def _mean(values: Sequence[float]) -> float | None:
    return sum(values) / len(values) if values else None

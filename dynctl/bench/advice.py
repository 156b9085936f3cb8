"""What the figures of a run say to do next, in one line. Pure."""

from collections.abc import Iterator

from dynctl.bench.report import MAX_FAILED_RATIO, Report

ROOM_RATIO = 0.5
"""A goal used up to less than this leaves room for a higher load."""
HIT_SHORTFALL = 0.1
"""A hit rate so far below the possible one has a cause worth looking for."""


def advice(report: Report) -> str:
    """Say the most urgent thing: what spoils the figures, then what misses a goal, then what could be better."""
    return next(_advice(report))


def _advice(report: Report) -> Iterator[str]:
    requests = report.requests
    if report.is_partial and requests.sent == 0:
        yield "interrupted during the warm-up: nothing was measured"
    if requests.ok == 0:
        kinds = ", ".join(requests.failed_by_kind) or "nothing was sent"
        yield f"no request succeeded ({kinds}): look at `dynctl status` and `dynctl logs`"
    if report.client_limited:
        yield "run the load generator on another machine, or lower the load: these figures are not the server's"
    if requests.failed > MAX_FAILED_RATIO * requests.sent:
        yield f"{requests.failed} of {requests.sent} requests failed: see requests.jsonl and `dynctl logs` first"
    if requests.ok < 2:
        yield "one answer says nothing about percentiles: run longer"
    yield from on_missed_goals(report)
    yield from _on_hits(report)
    yield from _on_room(report)


def on_missed_goals(report: Report) -> Iterator[str]:
    """What latency goals that are missed say to do."""
    missed = [c.name for c in report.checks if not c.is_met]
    is_ttft = any(name.startswith("ttft") for name in missed)
    is_itl = any(name.startswith(("itl", "chunk_gap")) for name in missed)
    lagging = report.requests.completed_rps < 0.9 * report.requests.offered_rps
    behind = " (fewer requests complete than are offered, so queues grow)" if lagging else ""
    if is_ttft and is_itl:
        yield f"TTFT and ITL miss their goals{behind}: lower the load or add engines"
    if is_ttft:
        yield f"TTFT misses its goal while ITL holds{behind}: add prefill engines, or send shorter prompts"
    if is_itl:
        yield f"ITL misses its goal{behind}: add decode engines, or lower the number of sequences each may run"


def _on_hits(report: Report) -> Iterator[str]:
    got, ideal = report.kv.cached_ratio, report.kv.ideal_ratio
    if got is not None and ideal is not None and ideal - got > HIT_SHORTFALL:
        yield (
            f"KV hit rate is {got:.0%}, and one cache of everything would give {ideal:.0%}: check that the router's "
            "policy is kv, and whether KV use in `dynctl top` is near 100% (then blocks are evicted); prefill engines "
            "never hold what decode engines wrote, so with such pools a part of it is out of reach"
        )


def _on_room(report: Report) -> Iterator[str]:
    used = [
        c.value / c.limit for c in report.checks if c.value is not None and c.name.endswith("p99")
    ]
    if used and max(used) < ROOM_RATIO:
        yield f"all goals hold with room (the tightest at {max(used):.0%} of its limit): raise --load to find the limit"
    if used:
        yield f"all goals hold, the tightest at {max(used):.0%} of its limit: little room for more load"
    ttft = report.metrics.get("ttft_ms")
    if ttft is not None and ttft.is_p99_weak:
        yield f"{ttft.num} answers are few for a p99: use a longer --duration before comparing runs"
    yield "no goal was given: add --slo ttft=500,itl=40 for a verdict and goodput"

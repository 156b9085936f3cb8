"""One row per pool: how many engines are up, load, KV use and hits, latency, tokens. Pure."""

from dynctl.core.units import format_bytes
from dynctl.telemetry.figures import PoolFigures
from dynctl.tui.columns import Column, choose, header, row
from dynctl.tui.draw import (
    MISSING,
    Line,
    Span,
    count,
    judged,
    line,
    milliseconds,
    percent,
    seconds,
    spark,
    whole,
)
from dynctl.tui.view import View

Pool = PoolFigures


def rows(view: View, width: int, height: int) -> list[Line]:
    """Draw the titles and as many pools as there is room for."""
    pools = view.overview.pools if view.overview else ()
    columns = choose(_columns(view), width)
    drawn = [header(columns), *(row(columns, pool) for pool in pools)]
    if len(drawn) > height > 1:
        drawn[height - 1 :] = [line(Span(f" … {len(pools) - height + 2} more pools", "dim"))]
    if not pools:
        drawn.append(line(Span(" no pool is known yet", "dim")))
    return drawn[:height]


def _columns(view: View) -> list[Column[Pool]]:
    has_several = view.overview is not None and len(view.overview.deployments) > 1

    def name(pool: Pool) -> str:
        return f"{pool.deployment} {pool.role}" if has_several else pool.role

    def up(pool: Pool, _: int) -> Span:
        is_whole = pool.num_ready == pool.num_engines
        return Span(f"{pool.num_ready}/{pool.num_engines}", "good" if is_whole else "bad")

    def trend(pool: Pool, width: int) -> Span:
        what = "itl_p99" if pool.role == "decode" else "ttft_p99"
        return Span(spark(view.trends.of(f"pool:{pool.deployment}:{pool.role}:{what}"), width))

    def ttft(q: str) -> Column[Pool]:
        def show(pool: Pool, _: int) -> Span:
            # A decode engine's own TTFT begins after prefill: no figure of a request.
            value = getattr(pool.ttft, q) if pool.ttft and pool.role != "decode" else None
            goal_ms = view.slo_of(pool.deployment).ttft_ms if q == "p99_s" else None
            return judged(milliseconds(value), value, seconds(goal_ms))

        title = "TTFT50" if q == "p50_s" else "TTFT99"
        return Column(title, 7, show, drop=5 if q == "p50_s" else 0)

    def itl(q: str) -> Column[Pool]:
        def show(pool: Pool, _: int) -> Span:
            value = getattr(pool.itl, q) if pool.itl else None
            goal_ms = view.slo_of(pool.deployment).itl_ms if q == "p99_s" else None
            return judged(milliseconds(value), value, seconds(goal_ms))

        return Column("ITL50" if q == "p50_s" else "ITL99", 6, show, drop=4 if q == "p50_s" else 0)

    name_width = max([10, *(len(name(p)) for p in (view.overview.pools if view.overview else ()))])
    return [
        Column("POOL", min(name_width, 16), lambda p, _: Span(name(p)), is_right=False, is_flexible=True,
               max_width=min(name_width, 40)),
        Column("UP", 5, up),
        Column("RUN", 5, lambda p, _: Span(whole(p.running))),
        Column("WAIT", 5, lambda p, _: Span(whole(p.waiting))),
        Column("KV%", 4, lambda p, _: Span(percent(p.kv_usage_ratio, ""))),
        Column("HIT%", 4, lambda p, _: Span(percent(p.hit_ratio, "")), drop=2),
        ttft("p50_s"),
        ttft("p99_s"),
        itl("p50_s"),
        itl("p99_s"),
        Column("TOK/S", 6, lambda p, _: Span(count(_tokens_s(p)))),
        Column("KV IN/s", 10, lambda p, _: Span(_bytes(p.transfer_bytes_s)), drop=7),
        Column("XFER99", 6, lambda p, _: Span(milliseconds(p.transfer.p99_s if p.transfer else None)), drop=6),
        Column("TREND", 6, trend, drop=3, is_right=False, is_flexible=True, max_width=40),
    ]  # fmt: skip


def _bytes(number: float | None) -> str:
    return MISSING if number is None else format_bytes(number)


def _tokens_s(pool: Pool) -> float | None:
    return pool.prompt_tokens_s if pool.role == "prefill" else pool.output_tokens_s

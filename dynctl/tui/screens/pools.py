"""Pools: throughput, the ratio of prefill to decode, and which of them is full, with the figures that say so. Pure."""

from dataclasses import replace

from dynctl.core.text import clean
from dynctl.telemetry.balance import Evidence, balance
from dynctl.telemetry.figures import PoolFigures
from dynctl.tui.draw import (
    MISSING,
    Line,
    Span,
    cell,
    count,
    line,
    milliseconds,
    percent,
    rule,
    whole,
)
from dynctl.tui.listing import footer
from dynctl.tui.panels import pools
from dynctl.tui.screen import Screen
from dynctl.tui.view import Choices, Place, View

_WHAT = {
    "waiting": "requests wait per engine",
    "kv": "of KV memory in use",
    "ttft": "ms TTFT p99",
    "itl": "ms ITL p99",
}


def rows(view: View, width: int, height: int) -> list[Line]:
    """Draw the table, throughput and ratio of the shown deployment, the verdict and its evidence."""
    shown = view.overview.pools if view.overview else ()
    table = pools.rows(view, width, 1 + max(1, min(len(shown), height // 2)))
    cursor = min(view.choices.place.cursor, max(0, len(shown) - 1))
    if shown and cursor + 1 < len(table):
        table[cursor + 1] = (Span("▸", "title"), *_unmarked(table[cursor + 1]))
    drawn = [rule(width), *table, rule(width), *_throughput(view), line(), *_verdict(view)]
    room = max(0, height - 1)
    drawn = [*drawn[:room], *[()] * (room - len(drawn))]
    return [*drawn, footer(view, len(shown), len(shown), width, "pools", "enter: its engines")][
        :height
    ]


def _unmarked(row: Line) -> Line:
    return (Span(row[0].text[1:], row[0].style), *row[1:])


def _mine(view: View) -> list[PoolFigures]:
    name = view.deployment.name if view.deployment else ""
    return [p for p in (view.overview.pools if view.overview else ()) if p.deployment == name]


def _throughput(view: View) -> list[Line]:
    deployment = view.deployment
    prefill, decode = (
        next((pool for pool in _mine(view) if pool.role == role), None)
        for role in ("prefill", "decode")
    )
    name = clean(deployment.name, 60) if deployment else MISSING
    requests_s = deployment.requests_s if deployment else None
    taken = deployment.prompt_tokens_s if deployment else None
    made = deployment.output_tokens_s if deployment else None
    drawn = [
        line(Span(f" {name}", "title")),
        line(
            f" requests {count(requests_s)}/s   prompts {count(taken)} tok/s   answers {count(made)} tok/s"
            f"   queue {whole(deployment.queued if deployment else None)}"
        ),
    ]
    if prefill is not None and decode is not None:
        tokens = f"{count(taken / made)} : 1" if taken is not None and made else MISSING
        drawn.append(
            line(
                f" P:D {prefill.num_ready}:{decode.num_ready} engines ready"
                f"   {tokens} tokens of prompts to answers"
            )
        )
    return drawn


def _verdict(view: View) -> list[Line]:
    found = balance(_mine(view), view.slo)
    style = "good" if found.verdict in {"balanced", "has room"} else "bad"
    told = Span(found.verdict, style) if found.verdict else Span("not known yet", "dim")
    return [line(Span(" verdict  ", "title"), told), *(_evidence(one) for one in found.evidence)]


def _evidence(one: Evidence) -> Line:
    if one.what == "waiting":
        value = MISSING if one.value is None else f"{one.value:.1f}"
        limit = f"{one.limit:g}"
    elif one.what == "kv":
        value, limit = percent(one.value), percent(one.limit)
    else:
        value, limit = milliseconds(one.value), milliseconds(one.limit)
    mark = Span("!", "bad") if one.is_over else Span(" ")
    return line(" ", mark, f" {cell(one.role, 10)} {value:>7} {_WHAT[one.what]}, full from {limit}")


def _open(view: View) -> Choices:
    """Go to the engines of the pool under the cursor."""
    shown = view.overview.pools if view.overview else ()
    if not shown:
        return view.choices
    pool = shown[min(view.choices.place.cursor, len(shown) - 1)]
    wanted = f"role={pool.role} deployment={pool.deployment}"
    return replace(view.choices.at("overview"), place=Place(filter=wanted))


SCREEN = Screen(
    "pools",
    rows,
    num_rows=lambda view: len(view.overview.pools) if view.overview else 0,
    enter=_open,
)

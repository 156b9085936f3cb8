"""How much of the prompts was cached: what the router expected, what engines found, what was possible, the course. Pure."""

from dynctl.tui.draw import Line, Span, cell, line, percent, spark
from dynctl.tui.view import View


def rows(view: View, width: int, height: int) -> list[Line]:
    """Draw the figures, their difference and the course."""
    deployment = view.deployment
    predicted = deployment.predicted_hit_ratio if deployment else None
    reported = deployment.reported_hit_ratio if deployment else None
    drawn = [
        line(Span("KV hit rate", "title"), " of prompt tokens"),
        line(
            f" router expected {percent(predicted)}   engines found {percent(reported)}{_error(predicted, reported)}"
            f"{_possible(deployment.possible_hit_ratio if deployment else None)}"
        ),
        line(
            " ",
            spark(
                view.trends.of(f"deployment:{deployment.name if deployment else ''}:hit"),
                max(1, width - 2),
                1.0,
            ),
        ),
    ]
    pools = view.overview.pools if view.overview else ()
    name = deployment.name if deployment else ""
    for pool in (p for p in pools if p.deployment == name):
        bar_width = max(1, width - 24)
        filled = round(max(0.0, min(1.0, pool.hit_ratio or 0.0)) * bar_width)
        drawn.append(
            line(f" {cell(pool.role, 11)}{percent(pool.hit_ratio):>5} ", Span("█" * filled, "good"))
        )
    return drawn[:height]


def _error(predicted: float | None, reported: float | None) -> str:
    if predicted is None or reported is None:
        return ""
    return f"   off by {(reported - predicted) * 100:+.1f} points"


def _possible(ratio: float | None) -> str:
    return "" if ratio is None else f"   of {percent(ratio)} possible"

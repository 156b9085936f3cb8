"""A comparison as people read it: rows, what differs beside the workload, and one sentence to act on. Pure."""

import math
from collections.abc import Sequence

from dynctl.bench.changes import SHARES, Change, Verdict
from dynctl.bench.compare import Comparison
from dynctl.bench.summary import METRIC_TITLES, MISSING, milliseconds, percent
from dynctl.core.units import format_count

MOST_REPEATS = 100
"""More is no advice."""
COLUMNS = ("figure", "A", "B", "change", "95% interval", "verdict")
_TITLES = {
    "hit_rate": "KV hit rate",
    "failed": "failed requests",
    "goodput": "goodput (of requests)",
    "output_tok_s": "output tok/s",
}


def title_of(figure: str) -> str:
    """The figure as tables name it."""
    metric, _, statistic = figure.rpartition("_")
    return _TITLES.get(figure) or f"{METRIC_TITLES.get(f'{metric}_ms', metric)} {statistic}"


def rows(changes: Sequence[Change]) -> list[tuple[str, ...]]:
    """Make the rows of the table, under COLUMNS."""
    return [
        (
            title_of(each.figure),
            value_text(each.figure, each.before),
            value_text(each.figure, each.after),
            change_text(each),
            interval_text(each),
            _verdict(each),
        )
        for each in changes
    ]


def value_text(figure: str, value: float | None) -> str:
    """A figure in its unit."""
    if figure in SHARES or value is None:
        return percent(value)
    return format_count(value) if figure == "output_tok_s" else milliseconds(value)


def change_text(change: Change) -> str:
    """`−18.6%`, or of shares `+12.3 points`."""
    if change.change is None:
        return MISSING
    return f"{_signed(change.change)}{_unit(change)}"


def interval_text(change: Change) -> str:
    """`−22.1 to −15.0%`."""
    if change.interval is None:
        return MISSING
    low, high = change.interval
    return f"{_signed(low)} to {_signed(high)}{_unit(change)}"


def _unit(change: Change) -> str:
    return " points" if change.figure in SHARES else "%"


def _signed(ratio: float) -> str:
    return f"{ratio * 100:+.1f}".replace("-", "−")


def _verdict(change: Change) -> str:
    few = min(change.num_samples)
    is_short = change.verdict is Verdict.UNKNOWN and few < change.needed
    return f"{change.verdict}: {few} of {change.needed}" if is_short else str(change.verdict)


def difference_lines(found: Comparison) -> list[str]:
    """Say what differs beside the figures."""
    return [f"differs: {key} {one} → {other}" for key, (one, other) in found.differs.items()]


def footnotes(found: Comparison) -> list[str]:
    """Say what must be known to read the verdicts rightly."""
    notes = [
        f"INVALID: the load generator of {name} was the limit: {why}"
        for name, why in found.client_limited.items()
    ]
    if found.have_same_prompts:
        notes.append(
            "both sent the same prompts to the same server, so the later one may have found them cached: "
            "leave --seed out"
        )
    for change in found.changes:
        if change.is_regression:
            notes.append(
                f"REGRESSION {title_of(change.figure)} {change_text(change)}, at most {_limit(change)}"
            )
        elif change.is_gate and change.verdict is Verdict.UNKNOWN:
            notes.append(
                f"UNDECIDED  {title_of(change.figure)}: a change beyond {_limit(change)} cannot be ruled out"
            )
    return notes


def _limit(change: Change) -> str:
    return f"{change.tolerance * 100:g}{_unit(change)}"


def advice(found: Comparison) -> str:
    """One sentence to act on."""
    if found.client_limited:
        return "run the load generator on another machine: these figures are not the servers'"
    named = {
        verdict: ", ".join(c.figure for c in found.changes if c.verdict is verdict)
        for verdict in Verdict
    }
    worse, better = named[Verdict.WORSE], named[Verdict.BETTER]
    unsure = [c.figure for c in found.changes if c.is_gate and c.verdict is Verdict.UNKNOWN]
    if found.regressions:
        differs = ", ".join(key for key in found.differs if key not in {"seed", "url"})
        cause = (
            f"see first what else differs: {differs}"
            if differs
            else "nothing known differs, so run B once more"
        )
        return f"B regressed in {', '.join(found.regressions)}; {cause}"
    if unsure:
        return f"{', '.join(unsure)} cannot be judged yet: run both {_longer(found)}"
    if worse and better:
        return f"B is better in {better}, worse in {worse}: weigh them by your goals"
    if worse:
        return f"B is worse in {worse}"
    if better:
        return f"B is better in {better}, and nothing is worse"
    if named[Verdict.SAME]:
        return "nothing changed that can be told"
    return f"these runs are too short to tell anything: run both {_longer(found)}"


def _longer(found: Comparison) -> str:
    """What brings more to go by: longer runs, or more of them."""
    if found.num_runs == (1, 1):
        return "with a longer --duration"
    fewest = min(found.num_runs)
    unsure = [c for c in found.changes if c.verdict is Verdict.UNKNOWN]
    wide = [
        (c.interval[1] - c.interval[0]) / 2 / c.tolerance
        for c in [c for c in unsure if c.is_gate] or unsure
        if c.interval is not None and c.tolerance
    ]
    if not wide:
        return f"with --repeat {fewest + 1}"
    # How far runs differ stays; half the interval shrinks with the root of their number.
    needed = math.ceil(max(fewest + 1, fewest * max(wide) ** 2))
    if needed > MOST_REPEATS:
        return (
            "with a longer --duration and more --repeat, as runs differ far more than the threshold"
        )
    return f"with about --repeat {needed}"

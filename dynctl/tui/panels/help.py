"""What the keys do, from their table, and how to read what is shown. Pure."""

from dynctl.tui.draw import Line, Span, beside, line
from dynctl.tui.keys import ACTIONS, BINDINGS, PLAYS
from dynctl.tui.view import View

QUIT = ("q ctrl+c", "quit")
MARKS = (
    ("–", "not known; never zero"),
    ("!462/500", "SLO 500, ! from 80% of it; 98% in: share of requests within it"),
    ("9s old", "the host has not reported for so long; its figures are not shown"),
    ("p50 p99", "over the last 60 s, from histogram buckets; rates are over 10 s"),
    ("HIT%", "prompt tokens found in the engine's prefix cache, last 60 s"),
    ("KV hit", "expected of those answered / found in those begun, of possible"),
    ("lost", "of prompts: never seen, evicted, or held by an engine not chosen"),
    ("filter", "words that all occur; !word must not; host= role= state= one field"),
    ("caches", "engines whose cache the router knows, of all; shown until all are"),
    ("nvlink host", "KV from prefill to decode, by link; also rdma, tcp, unknown"),
)


def rows(view: View, width: int, height: int) -> list[Line]:
    """Draw keys in two columns, and marks."""
    chosen = [(one.shown, one.text) for one in BINDINGS]
    if view.playing is not None:
        replaced = {shown for shown, _ in PLAYS}
        chosen = [*(one for one in chosen if one[0] not in replaced), *PLAYS]
    told = [*chosen, *ACTIONS, QUIT]
    keys = [line(f"  {shown:<9}", text) for shown, text in told]
    half = (len(keys) + 1) // 2
    above = beside(keys[:half], keys[half:], width)
    below = [line(Span(" reading it", "title"))]
    below += [line(f"  {mark:<12}", text) for mark, text in MARKS]
    if len(above) + len(below) + 2 > height:
        return [*above, *below][:height]
    return [line(Span(" keys", "title")), *above, line(), *below]

"""What the keys do. Pure."""

from dynctl.tui.draw import Line, Span, line
from dynctl.tui.view import View

KEYS = (
    ("j k, arrows", "move the cursor; g G to the first, last"),
    ("/", "filter: words !word host= role= state=; enter keeps, esc clears"),
    ("< >", "sort by the column before, after; r reverses"),
    ("space", "hold the picture; collecting goes on"),
    ("d", "show the next deployment in the top lines"),
    ("? esc", "open, close this help"),
    ("q ctrl+c", "quit"),
)
MARKS = (
    ("–", "not known; never zero"),
    ("!", "at 80% of the SLO or above"),
    ("9s old", "the host has not reported for so long; its figures are not shown"),
    ("p50 p99", "over the last 60 s, from histogram buckets; rates are over 10 s"),
    ("HIT%", "prompt tokens found in the engine's prefix cache, last 60 s"),
    ("KV hit", "expected of those answered / found in those begun, of possible"),
    ("lost", "of prompts: never seen, evicted, or held by an engine not chosen"),
    ("caches", "engines whose cache the router knows, of all; shown until all are"),
    ("nvlink host", "KV from prefill to decode, by link; also rdma, tcp, unknown"),
)


def rows(view: View, width: int, height: int) -> list[Line]:  # noqa: ARG001 - a panel's signature
    """Draw keys and marks."""
    drawn = [line(Span(" keys", "title"))]
    drawn += [line(f"  {keys:<13}", text) for keys, text in KEYS]
    drawn += [line(), line(Span(" reading it", "title"))]
    drawn += [line(f"  {mark:<13}", text) for mark, text in MARKS]
    return drawn[:height]

"""How much to ask at each look: a router answers between its requests, and must not be kept from them. Pure."""

from dynctl.tui.view import View

MOST_DECISIONS = 60
LEAST_DECISIONS = 10
CANDIDATES = 600
"""Over all decisions of one look: a router writes out every candidate of each."""


def decisions_to_ask(view: View) -> int:
    """How many decisions to ask of each router."""
    num_engines = len(view.overview.engines) if view.overview else 1
    return max(LEAST_DECISIONS, min(MOST_DECISIONS, CANDIDATES // max(1, num_engines)))

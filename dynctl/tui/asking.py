"""How much the screens ask at each look. Pure."""

from dynctl.telemetry.answers import num_decisions
from dynctl.tui.view import View


def decisions_to_ask(view: View) -> int:
    """How many decisions to ask of each router."""
    return num_decisions(len(view.overview.engines) if view.overview else 1)

"""All screens in the order of their digits. Pure."""

from dynctl.tui.screen import Screen
from dynctl.tui.screens import engine, events, gpus, kv, logs, overview, pools, requests
from dynctl.tui.view import Choices

SCREENS: tuple[Screen, ...] = (
    overview.SCREEN,
    pools.SCREEN,
    gpus.SCREEN,
    kv.SCREEN,
    requests.SCREEN,
    logs.SCREEN,
    events.SCREEN,
)
ENGINE = engine.SCREEN
"""Opened from a row of others."""


def screen_of(choices: Choices) -> Screen:
    """The screen that is shown."""
    if choices.opened:
        return ENGINE
    return next((one for one in SCREENS if one.name == choices.screen), SCREENS[0])

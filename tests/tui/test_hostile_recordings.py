"""Whatever a recording holds that is not refused can be shown, on every screen, as text."""

import random
from dataclasses import fields, is_dataclass, replace

import pytest

from dynctl.core.snapshot import Histogram
from dynctl.telemetry.answers import Answers
from dynctl.telemetry.ledger import Ledger
from dynctl.telemetry.recording import Asked, DamagedError, Entry, decode_entry, encode
from dynctl.telemetry.traces import Told
from dynctl.tui.catalog import SCREENS
from dynctl.tui.draw import plain, width_of
from dynctl.tui.frame import compose
from dynctl.tui.view import Choices, Place, View

NUMBERS = (0, -1, 1, 2**31, 10**17, -(10**17))
FLOATS = (0.0, -0.0, -1.0, 1e-300, 5e-324, 1e17, -1e17, 0.5)
TEXTS = ("", "\x1b]52;c;ZXZpbA==\x07", "\u202e\x00\n", "漢" * 300, "a" * 100_000, "[red]", "chat")


def changed(value, dice):
    """A value of the same kind, here and there an extreme one."""
    if dice.random() < 0.7 and not is_dataclass(value) and not isinstance(value, tuple):
        return value
    if isinstance(value, Histogram):
        return value
    if is_dataclass(value):
        return replace(
            value, **{f.name: changed(getattr(value, f.name), dice) for f in fields(value)}
        )
    if isinstance(value, tuple):
        return tuple(changed(one, dice) for one in value)
    if type(value) is str:
        return dice.choice(TEXTS)
    if type(value) is float:
        return dice.choice(FLOATS)
    if type(value) is int:
        return dice.choice(NUMBERS)
    return value


def decisions(dice):
    told = Told("r", "whole", "chat-decode-0", 1.7e9, route_key="k", prompt_tokens=5, waited_ms=1.0, ttft_ms=2.0)  # fmt: skip
    return tuple(changed(replace(told, request_id=f"r{n}"), dice) for n in range(5))


@pytest.mark.parametrize("seed", range(60))
def test_extremes_end_no_screen_and_reach_no_terminal_raw(snapshots, seed):
    dice = random.Random(seed)
    ledger, overview, asked = Ledger(), None, Asked()
    for tick in range(1, 15):
        taken = changed(snapshots(tick), dice)
        lines = (
            encode(Entry(float(tick), snapshot=taken)),
            encode(Entry(float(tick), asked=Asked(decisions(dice), {"chat-router": {"requests": 1e17}}))),
        )  # fmt: skip
        for line in lines:
            try:
                entry = decode_entry(line)
            except DamagedError:
                continue
            if entry.asked is not None:
                asked = entry.asked
                ledger.requests.add(asked.decisions)
            if entry.snapshot is not None:
                overview = ledger.take(entry.snapshot, entry.at_s)
    assert overview is not None
    answers = Answers(hits=asked.hits, failures=asked.failures)
    for screen in SCREENS:
        for opened in ("", overview.engines[0].id if overview.engines else ""):
            for size in ((80, 24), (200, 60)):
                choices = Choices(
                    screen=screen.name, opened=opened, place=Place(cursor=1, sort=1), metric=1
                )
                view = View(
                    overview, ledger.trends, ledger.events.newest(50), choices, answers,
                    ledger.requests.newest(), width=size[0], room=size[1] - 3,
                )  # fmt: skip
                drawn = compose(view, *size)
                assert {width_of(line) for line in drawn} == {size[0]}
                raw = [plain(line) for line in drawn if not plain(line).isprintable()]
                assert raw == [], screen.name

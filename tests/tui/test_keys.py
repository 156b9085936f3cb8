"""What each key does."""

from dataclasses import replace
from pathlib import Path

import pytest

import dynctl
from dynctl.telemetry.trends import WINDOWS, Trends
from dynctl.tui.catalog import SCREENS
from dynctl.tui.keys import BINDINGS, MAX_FILTER_CHARS, press
from dynctl.tui.panels.help import QUIT
from dynctl.tui.view import SORTS, Choices, Place, View


@pytest.fixture
def pressed(make_view):
    """The choices after some keys, with 20 engines on the screen."""
    view = make_view(ticks=2, num_decode=19)

    def type_(*keys, choices=None, view=view):
        choices = choices or Choices()
        for key in keys:
            character = key if len(key) == 1 else {"space": " "}.get(key)
            choices = press(replace(view, choices=choices), key, character)
        return choices

    return type_


def test_the_cursor_moves_and_stops_at_the_ends(pressed):
    assert pressed("j", "j", "down").place.cursor == 3
    assert pressed("j", "k", "k", "up").place.cursor == 0
    assert pressed("G").place.cursor == 19
    assert pressed("G", "j").place.cursor == 19
    assert pressed("G", "g").place.cursor == 0
    assert pressed("pagedown").place.cursor == 10
    assert pressed("j", view=View(None, Trends())).place.cursor == 0


def test_sorting_goes_round(pressed):
    assert pressed(">").place.sort == 1
    assert pressed("<").place.sort == len(SORTS) - 1
    assert pressed(*[">"] * len(SORTS)).place.sort == 0
    assert pressed("r").place.is_reversed


def test_the_filter_is_typed_and_kept_or_cleared(pressed):
    typing = pressed("/", "d", "q", "space", "r", "j")

    assert typing.is_typing
    assert typing.place == Place(filter="dq rj")
    assert pressed("enter", choices=typing) == Choices(place=Place(filter="dq rj"))
    assert pressed("backspace", choices=typing).place.filter == "dq r"
    assert pressed("escape", choices=typing) == Choices()


def test_a_filter_is_bounded_and_takes_no_control_characters(pressed, make_view):
    assert len(pressed("/", *["x"] * 200).place.filter) == MAX_FILTER_CHARS
    typing = replace(make_view(ticks=1), choices=Choices(is_typing=True))
    assert press(typing, "ctrl+x", "\x18").place.filter == ""


def test_toggles(pressed):
    assert pressed("space").is_paused
    assert not pressed("space", "space").is_paused
    assert pressed("?").is_helping
    assert not pressed("?", "escape").is_helping
    assert pressed("d").deployment == 1


def test_digits_choose_screens_in_their_order(pressed):
    for digit, screen in enumerate(SCREENS, 1):
        assert pressed(str(digit)).screen == screen.name
    assert pressed("9") == Choices()


def test_every_screen_keeps_where_one_was_on_it(pressed):
    choices = pressed("j", "j", ">", "7", "j")

    assert choices.place == Place()
    assert pressed("1", choices=choices).place == Place(cursor=2, sort=1)


def test_enter_opens_the_engine_under_the_cursor_and_esc_goes_back_to_the_row(pressed):
    opened = pressed("j", "enter")

    assert opened.opened == "chat-decode-0"
    back = pressed("escape", choices=opened)
    assert (back.opened, back.place.cursor, back.screen) == ("", 1, "overview")


def test_enter_opens_nothing_where_there_is_no_engine(pressed):
    assert pressed("/", *"nothing", "enter", "enter").opened == ""


def test_esc_leads_out_step_by_step(pressed):
    choices = pressed("7", "/", *"gpu", "enter", "?")
    steps = []
    for _ in range(3):
        choices = pressed("escape", choices=choices)
        steps.append((choices.screen, choices.place.filter, choices.is_helping))

    assert steps == [("events", "gpu", False), ("events", "", False), ("overview", "", False)]


def test_enter_on_a_pool_lists_its_engines(pressed, make_view):
    choices = pressed("2", "j", "enter")
    view = replace(make_view(ticks=2), choices=choices)

    assert choices.screen == "overview"
    assert {engine.role for engine in view.engines()} == {"decode"}


def test_l_goes_to_the_log_of_the_row_and_of_an_opened_engine(pressed, make_view):
    for keys in (("j", "l"), ("j", "enter", "l")):
        choices = pressed(*keys)
        view = make_view(ticks=2, num_decode=19, choices=choices)
        assert choices.screen == "logs"
        assert not choices.opened
        (name,) = SCREENS[5].asks(view).logs
        assert name == ("gpu-02", "chat-decode-0")


def test_the_window_stops_at_its_ends(pressed):
    assert WINDOWS[pressed("]").window].name == "15m"
    assert pressed(*["]"] * 9).window == len(WINDOWS) - 1
    assert pressed(*["["] * 9).window == 0


def test_m_goes_through_the_figures_of_a_screen(pressed):
    assert pressed("m") == Choices()
    assert pressed("3", "m").metric == 1
    assert pressed("3", "m", "m", "m").metric == 0
    assert pressed("3", "m", "1").metric == 0


def test_no_key_is_bound_twice_and_all_are_told(pressed):
    keys = [key for binding in BINDINGS for key in binding.keys]

    assert len(keys) == len(set(keys))
    assert all(binding.shown and binding.text for binding in BINDINGS)


def test_unknown_keys_change_nothing(pressed):
    assert pressed("x", "f5", "ctrl+k", "0") == Choices()


def test_the_manual_has_every_key_and_every_screen():
    manual = (Path(dynctl.__file__).parent.parent / "docs" / "top.md").read_text()

    for shown, text in (*((one.shown, one.text) for one in BINDINGS), QUIT):
        assert f"| `{shown}` | {text} |" in manual
    for digit, screen in enumerate(SCREENS, 1):
        assert f"| {digit} {screen.name} |" in manual

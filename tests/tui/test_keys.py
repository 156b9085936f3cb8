"""What each key does."""

from dynctl.tui.keys import MAX_FILTER_CHARS, press
from dynctl.tui.view import SORTS, Choices


def pressed(*keys, choices=None, engines=20):
    choices = choices or Choices()
    for key in keys:
        character = key if len(key) == 1 else {"space": " "}.get(key)
        choices = press(choices, key, character, engines)
    return choices


def test_the_cursor_moves_and_stops_at_the_ends():
    assert pressed("j", "j", "down").cursor == 3
    assert pressed("j", "k", "k", "up").cursor == 0
    assert pressed("G").cursor == 19
    assert pressed("G", "j").cursor == 19
    assert pressed("G", "g").cursor == 0
    assert pressed("pagedown").cursor == 10
    assert pressed("j", engines=0).cursor == 0


def test_sorting_goes_round():
    assert pressed(">").sort == 1
    assert pressed("<").sort == len(SORTS) - 1
    assert pressed(*[">"] * len(SORTS)).sort == 0
    assert pressed("r").is_reversed


def test_the_filter_is_typed_and_kept_or_cleared():
    typing = pressed("/", "d", "q", "space", "r", "j")

    assert typing.is_typing
    assert typing.filter == "dq rj"
    assert typing.cursor == 0
    assert pressed("enter", choices=typing) == Choices(filter="dq rj")
    assert pressed("backspace", choices=typing).filter == "dq r"
    assert pressed("escape", choices=typing) == Choices()


def test_a_filter_is_bounded_and_takes_no_control_characters():
    choices = pressed("/", *["x"] * 200)

    assert len(choices.filter) == MAX_FILTER_CHARS
    assert press(Choices(is_typing=True), "ctrl+x", "\x18", 1).filter == ""


def test_toggles():
    assert pressed("space").is_paused
    assert not pressed("space", "space").is_paused
    assert pressed("?").is_helping
    assert not pressed("?", "escape").is_helping
    assert pressed("d").deployment == 1


def test_unknown_keys_change_nothing():
    assert pressed("x", "f5", "ctrl+k", "1") == Choices()

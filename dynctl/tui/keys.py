"""What each key does to the choices. Pure."""

from dataclasses import replace

from dynctl.tui.view import SORTS, Choices

MAX_FILTER_CHARS = 60


def press(choices: Choices, key: str, character: str | None, num_engines: int) -> Choices:
    """Take one key; unknown keys change nothing."""
    if choices.is_typing:
        return _type(choices, key, character)
    last = max(0, num_engines - 1)
    moves = {
        "j": 1, "down": 1, "k": -1, "up": -1, "ctrl+d": 10, "pagedown": 10, "ctrl+u": -10, "pageup": -10,
        "g": -last, "home": -last, "G": last, "end": last,
    }  # fmt: skip
    name = character if character is not None and character in "gG<>?/" else key
    if name in moves:
        return replace(choices, cursor=max(0, min(last, min(choices.cursor, last) + moves[name])))
    return _toggle(choices, name)


def _toggle(choices: Choices, name: str) -> Choices:
    match name:
        case "<" | ">":
            step = 1 if name == ">" else -1
            return replace(choices, sort=(choices.sort + step) % len(SORTS))
        case "r":
            return replace(choices, is_reversed=not choices.is_reversed)
        case "space":
            return replace(choices, is_paused=not choices.is_paused)
        case "?":
            return replace(choices, is_helping=not choices.is_helping)
        case "/":
            return replace(choices, is_typing=True, is_helping=False)
        case "d":
            return replace(choices, deployment=choices.deployment + 1)
        case "escape":
            return replace(choices, is_helping=False, filter="")
    return choices


def _type(choices: Choices, key: str, character: str | None) -> Choices:
    if key == "enter":
        return replace(choices, is_typing=False)
    if key == "escape":
        return replace(choices, is_typing=False, filter="")
    if key == "backspace":
        return replace(choices, filter=choices.filter[:-1])
    if character is not None and character.isprintable() and len(choices.filter) < MAX_FILTER_CHARS:
        return replace(choices, filter=choices.filter + character, cursor=0)
    return choices

"""What a failed validation means in the words of the file. IO: none of its own; it reads trees that `values` made."""

from typing import Any

from pydantic import ValidationError

from dynctl.inventory.problems import Problem, Spot, shown, suggest
from dynctl.inventory.schema import TAGS, keys_at
from dynctl.inventory.values import Loc, Values

_AT_LEAST = {
    "greater_than_equal": "must be at least {ge}",
    "greater_than": "must be more than {gt}",
    "less_than_equal": "must be at most {le}",
    "less_than": "must be less than {lt}",
    "string_too_short": "must not be empty",
    "string_too_long": "must be at most {max_length} characters",
    "too_short": "needs at least {min_length} item",
    "finite_number": "must be a finite number",
}
_KINDS = {
    "string_type": "text",
    "int_type": "a whole number",
    "int_from_float": "a whole number",
    "float_type": "a number",
    "bool_type": "true or false",
    "list_type": "a list (lines that begin with -)",
    "dict_type": "a mapping (lines of key: value)",
    "model_type": "a mapping (lines of key: value)",
}


def problems_of(error: ValidationError, values: Values) -> list[Problem]:
    """Turn every error of a validation into a problem at its place."""
    return [_problem(item, values) for item in error.errors(include_url=False)]


def where(loc: Loc) -> str:
    """Write a path as people do: `deployments[0].engine`."""
    text = ""
    for part in loc:
        text += f"[{part}]" if isinstance(part, int) else f".{part}" if text else part
    return text


def _problem(item: Any, values: Values) -> Problem:  # noqa: ANN401 - pydantic's ErrorDetails
    loc: Loc = tuple(part for part in item["loc"] if part not in TAGS)
    if loc[-1:] == ("[key]",):
        loc = loc[:-1]
    kind, context, given = item["type"], item.get("ctx") or {}, item["input"]
    name = where(loc)
    if kind == "extra_forbidden":
        known = keys_at(item["loc"][:-1])
        inside = f" in {where(loc[:-1])}" if loc[:-1] else ""
        text = f"unknown key {shown(loc[-1])}{inside}"
        return Problem(values.key_spot(loc), text, suggest(str(loc[-1]), known))
    if kind == "missing":
        inside = f"{where(loc[:-1])} needs" if loc[:-1] else "the file needs"
        return Problem(_first_line(values.spot(loc[:-1])), f"{inside} the key {loc[-1]!r}")
    spot = values.spot(loc)
    if given is None and kind in _KINDS:
        return Problem(values.key_spot(loc), f"{name} has no value", f"it must be {_KINDS[kind]}")
    if kind == "string_type" and isinstance(given, bool | int | float):
        written = values.texts.get(loc, str(given))
        text = f"{name} must be text, but {written} is {_read_as(given, written)}"
        return Problem(spot, text, f'write "{written}" in quotes')
    if kind in _KINDS:
        what = (
            "a mapping"
            if isinstance(given, dict)
            else "a list"
            if isinstance(given, list)
            else shown(given)
        )
        return Problem(spot, f"{name} must be {_KINDS[kind]}, not {what}")
    if kind in _AT_LEAST:
        return Problem(spot, f"{name} {_AT_LEAST[kind].format(**context)}")
    if kind == "literal_error":
        known = tuple(
            part.strip("'") for part in context["expected"].replace(" or ", ", ").split(", ")
        )
        hint = suggest(str(given), known)
        return Problem(spot, f"{name} must be one of {', '.join(known)}, not {shown(given)}", hint)
    return Problem(spot, f"{name}: {item['msg'].removeprefix('Value error, ')}")


def _read_as(value: object, written: str) -> str:
    if isinstance(value, bool):
        return "a truth value"
    return "a number" if str(value) == written else f"read as the number {value}"


def _first_line(spot: Spot) -> Spot:
    """A mapping spans many lines; its beginning is enough."""
    return Spot(spot.line, spot.column)

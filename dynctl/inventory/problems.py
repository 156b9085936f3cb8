"""What is wrong in a file people write, and how it is shown: position, source line, caret, next step. Pure."""

import difflib
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from dynctl.core.text import clean
from dynctl.errors import InventoryError

_MAX_SHOWN = 50
NAME_HINT = "names are letters, digits, '.', '_' and '-', and begin with a letter or digit"


@dataclass(frozen=True, slots=True, order=True)
class Spot:
    """A place in the text; line and column count from 1."""

    line: int
    column: int
    width: int = 1
    """Characters the caret marks."""


@dataclass(frozen=True, slots=True, order=True)
class Problem:
    """One thing that is wrong."""

    spot: Spot
    text: str
    hint: str = ""
    hides_line: bool = False
    """The line holds a secret: no message shows it."""


class ProblemsError(InventoryError):
    """Raised when a file has problems; carries all of them, in the order they stand in the file."""

    def __init__(
        self, path: str, source: str, problems: Iterable[Problem], hint: str | None = None
    ) -> None:
        self.path = path
        self.problems = tuple(dict.fromkeys(sorted(problems)))
        super().__init__(listed(path, source, self.problems), hint)


def listed(path: str, source: str, problems: Sequence[Problem]) -> str:
    """Write all problems of a file with the lines they stand on, after their number."""
    secret = {problem.spot.line for problem in problems if problem.hides_line}
    lines = source.splitlines()
    text = "\n".join("…" if n in secret else line for n, line in enumerate(lines, 1))
    shown = [render(path, text, problem) for problem in problems[:_MAX_SHOWN]]
    if len(problems) > _MAX_SHOWN:
        shown.append(f"… and {len(problems) - _MAX_SHOWN} more")
    count = "1 problem" if len(problems) == 1 else f"{len(problems)} problems"
    return f"{count} in {path}\n\n" + "\n\n".join(shown)


def render(path: str, source: str, problem: Problem) -> str:
    """Write one problem with the line it stands on."""
    spot = problem.spot
    lines = source.splitlines()
    head = f"{path}:{spot.line}:{spot.column}: {problem.text}"
    if 0 < spot.line <= len(lines) and lines[spot.line - 1] != "…":
        head += _excerpt(lines[spot.line - 1], spot)
    return head + (f"\n      = {problem.hint}" if problem.hint else "")


def suggest(word: str, known: Sequence[str]) -> str:
    """Say which known word was probably meant, or list them when none is near and they are few."""
    lower = {name.lower(): name for name in reversed(known)}
    near = difflib.get_close_matches(word.lower(), lower, 3, 0.7)
    # Letters that changed places count as less wrong than others in theirs.
    near.sort(key=lambda name: sorted(name) != sorted(word.lower()))
    if near:
        return f"did you mean {lower[near[0]]!r}?"
    return f"there are: {', '.join(known)}" if 0 < len(known) <= 20 else ""


def _excerpt(line: str, spot: Spot) -> str:
    """The source line and a caret below it; tabs and control characters keep their column."""
    start = max(0, spot.column - 80)
    text = "".join(c if c.isprintable() else " " for c in line[start : start + 120])
    width = max(1, min(spot.width, len(text) - (spot.column - 1 - start)))
    gutter = f"{spot.line:>5} | "
    caret = " " * (len(gutter) - 2) + "| " + " " * (spot.column - 1 - start) + "^" * width
    return f"\n{gutter}{text}\n{caret}"


def shown(value: object, max_chars: int = 60) -> str:
    """Quote a value from the file for a message, cleaned and bounded."""
    return clean(repr(value), max_chars)

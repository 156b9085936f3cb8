"""Text from hosts is data: cleaned and bounded before a person sees it. Pure."""

import re

# Whole escape sequences first: were their first character dropped alone, the rest would be left as text.
_CONTROL = re.compile(
    r"\x1b\[[0-9;?]*[ -/]*[@-~]|\x1b\][^\x07\x1b]*(?:\x07|\x1b\\)?"
    r"|[\x00-\x08\x0b-\x1f\x7f-\x9f\u202a-\u202e\u2066-\u2069]"
)
_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,252}")


def clean(text: str, max_chars: int = 200) -> str:
    """Drop escape sequences and control characters, join lines, cut at `max_chars` with an ellipsis."""
    flat = " ".join(_CONTROL.sub("", text[: max_chars * 20]).split())
    return flat if len(flat) <= max_chars else flat[: max_chars - 1] + "…"


def printable(text: str) -> str:
    """Drop escape sequences and control characters; lines and tabs stay."""
    return _CONTROL.sub("", text)


def is_name(text: str) -> bool:
    """Tell whether a text may name a host, deployment or replica: `[A-Za-z0-9][A-Za-z0-9._-]*`, ≤ 253."""
    return _NAME.fullmatch(text) is not None

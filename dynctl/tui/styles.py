"""What the names of styles look like. Pure."""

from rich.style import Style

STYLES = {
    "": Style(),
    "dim": Style(dim=True),
    "title": Style(bold=True),
    "good": Style(color="green"),
    "warn": Style(color="yellow"),
    "bad": Style(color="red", bold=True),
    "cursor": Style(reverse=True),
}

"""What an operator writes for a place in a recording → seconds since its start. Pure."""

import re
from datetime import datetime, timedelta

from dynctl.errors import UsageError

SLACK_S = 60.0
"""Who writes the minute in which it began means its beginning."""
_SINCE = re.compile(r"\+(\d{1,9})s?")
_TIME = re.compile(r"(\d{1,2}):(\d{2})(?::(\d{2}))?")


def place_s(text: str, started_unix_s: float, begin_s: float, end_s: float) -> float:
    """Find a place between the first and the last snapshot.

    Times are local. A time of day is its first one from the beginning on.

    Raises:
        UsageError: when it is no place, or not one of this recording.
    """
    begin = datetime.fromtimestamp(started_unix_s + begin_s)  # noqa: DTZ006 - as screens show it
    if since := _SINCE.fullmatch(text):
        at_s = begin_s + int(since[1])
    else:
        at_s = _unix_s(text, begin) - started_unix_s
    if begin_s - SLACK_S <= at_s < begin_s:
        at_s = begin_s
    if not begin_s <= at_s <= end_s:
        end = datetime.fromtimestamp(started_unix_s + end_s)  # noqa: DTZ006
        raise UsageError(
            f"{text} is not in this recording", f"it goes from {begin:%Y-%m-%dT%H:%M:%S} to {end:%Y-%m-%dT%H:%M:%S}"
        )  # fmt: skip
    return at_s


def _unix_s(text: str, begin: datetime) -> float:
    try:
        if found := _TIME.fullmatch(text):
            hour, minute, second = (int(part or 0) for part in found.groups())
            at = begin.replace(hour=hour, minute=minute, second=second, microsecond=0)
            is_over = (begin - at).total_seconds() > SLACK_S
            return (at + timedelta(days=1) if is_over else at).timestamp()
        return datetime.fromisoformat(text).timestamp()
    except (ValueError, OverflowError) as error:
        raise UsageError(
            f"--at {text!r} is no time", "write 03:07, 03:07:30, 2026-11-30T03:07, or +90 for seconds"
        ) from error  # fmt: skip

"""Sizes, and how quantities are written for people. Pure."""

import re

KIB = 1024
MIB = 1024**2
GIB = 1024**3
GB = 10**9

_SIZES = {"": 1, "B": 1, "KB": 10**3, "MB": 10**6, "GB": 10**9, "TB": 10**12}
_SIZES |= {"KIB": KIB, "MIB": MIB, "GIB": GIB, "TIB": 1024**4}
_SIZE = re.compile(r"^\s*([0-9]{1,18}(?:\.[0-9]{1,18})?)\s*([A-Za-z]*)\s*$")
_WHOLE = re.compile(r"[0-9]{1,18}")
_COUNT = re.compile(r"([0-9]{1,15}(\.[0-9]{1,9})?)([kmgtKMGT]?)")
_TIMES = {
    "": 1,
    "k": 10**3,
    "m": 10**6,
    "g": 10**9,
    "t": 10**12,
    "K": KIB,
    "M": MIB,
    "G": GIB,
    "T": 1024**4,
}


def parse_bytes(text: str) -> int:
    """Read a size such as `80GiB` or `512 MB` into bytes.

    Raises:
        ValueError: when the text is no number with a known unit.
    """
    match = _SIZE.match(text)
    if match is None or match[2].upper() not in _SIZES:
        raise ValueError(f"{text!r} is no size; write it as 80GiB or 512MB")
    return int(float(match[1]) * _SIZES[match[2].upper()])


def whole(text: str) -> int | None:
    """Read a whole number of at most 18 plain digits; None: the text is something else.

    `str.isdigit` and `str.isdecimal` let pass what `int` refuses, `²` and thousands of digits, and what nobody meant: `٣`.
    """
    return int(text) if _WHOLE.fullmatch(text) else None


def engine_count(text: str) -> int | None:
    """Read tokens as engines' flags take them: `8192`, `8k` for thousands, `8K` for times 1,024; None: it is no number."""
    match = _COUNT.fullmatch(text)
    if match is None or (match[2] and not match[3].islower()):
        return None
    return int(float(match[1]) * _TIMES[match[3]]) if match[2] else int(match[1]) * _TIMES[match[3]]


def format_number(number: float) -> str:
    """Write three significant digits, never as a power of ten: `0.546`, `312`, `1,910`."""
    text = f"{number:.3g}"
    if "e" not in text:
        return text
    return f"{float(text):,.0f}" if abs(number) >= 1 else f"{float(text):.15f}".rstrip("0")


def format_bytes(num_bytes: float) -> str:
    """Write bytes with a binary unit, three significant digits."""
    for unit, size in (("TiB", 1024**4), ("GiB", GIB), ("MiB", MIB), ("KiB", KIB)):
        if abs(num_bytes) >= size:
            return f"{format_number(num_bytes / size)} {unit}"
    return f"{num_bytes:.0f} B"


def format_seconds(seconds: float) -> str:
    """Write a duration the way an operator reads it: `0.8 ms`, `231 ms`, `4.2 s`, `3m12s`, `2h05m`."""
    if seconds < 0.0995:
        return f"{seconds * 1e3:.1f} ms"
    if seconds < 0.9995:
        return f"{seconds * 1e3:.0f} ms"
    if seconds < 60:
        return f"{seconds:.1f} s"
    minutes, rest = divmod(round(seconds), 60)
    if minutes < 60:
        return f"{minutes}m{rest:02d}s"
    hours, minutes = divmod(minutes, 60)
    return f"{hours}h{minutes:02d}m"


def format_count(number: float) -> str:
    """Write a count or rate with k and M: `312`, `2.41k`, `38.1k`, `1.2M`."""
    for unit, size in (("M", 1e6), ("k", 1e3)):
        if abs(number) >= size:
            return f"{format_number(number / size)}{unit}"
    return format_number(number)

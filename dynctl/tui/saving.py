"""Puts a screen into a new file. IO: files."""

import os
from pathlib import Path

MOST_TRIES = 100
"""Of one name within one second."""


def save(directory: Path, stem: str, suffix: str, content: str) -> Path:
    """Write a file that is not there yet: `STEM.txt`, else `STEM-2.txt` and so on; only its owner can read it.

    Raises:
        OSError: when it cannot be written.
    """
    for number in range(1, MOST_TRIES + 1):
        path = directory / f"{stem}{f'-{number}' if number > 1 else ''}{suffix}"
        try:
            fd = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW, 0o600)
        except FileExistsError:
            continue
        try:
            with os.fdopen(fd, "w", encoding="utf-8") as file:
                file.write(content)
        except OSError:
            path.unlink()
            raise
        return path
    raise FileExistsError(0, f"{stem} has been written {MOST_TRIES} times", str(directory))

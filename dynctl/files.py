"""Files that survive power loss: whole-file replacement; directories to write to; and what the system says of calls that failed.

IO: files.
"""

import os
import socket
import ssl
import stat
from contextlib import suppress
from pathlib import Path


def reason(error: OSError) -> str:
    """The system's own words, without number, path or address: asyncio's texts repeat them."""
    if error.errno and not isinstance(error, ssl.SSLError | socket.gaierror):
        return os.strerror(error.errno)
    return error.strerror or str(error)


def write_atomic(path: Path, content: bytes, mode: int = 0o600) -> None:
    """Replace a file so that a reader sees the old or the new content, never a mixture, also after power loss.

    Raises:
        OSError: naming this file, whatever step failed.
    """
    try:
        _replace(path, content, mode, None)
    except OSError as error:
        raise OSError(error.errno, error.strerror, str(path)) from error


def rewrite(path: Path, content: bytes, mode: int = 0o644) -> None:
    """As `write_atomic`, a file of the operator's: a link is followed, and whose it was and who may read it stays.

    Raises:
        OSError: naming this file, whatever step failed.
    """
    try:
        target = Path(os.path.realpath(path))
        before = target.stat() if target.exists() else None
        _replace(target, content, mode, before)
    except OSError as error:
        raise OSError(error.errno, error.strerror, str(path)) from error


def make_writable(directory: Path, mode: int = 0o777) -> None:
    """Make a directory for what comes later, and write there once: permissions do not tell of a full disk.

    Raises:
        OSError: when that fails.
    """
    directory.mkdir(mode=mode, parents=True, exist_ok=True)
    attempt = directory / f".{os.getpid()}.tmp"
    fd = os.open(attempt, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_NOFOLLOW, 0o600)
    try:
        os.write(fd, b"\n")
    finally:
        os.close(fd)
        attempt.unlink(missing_ok=True)


def _replace(path: Path, content: bytes, mode: int, like: os.stat_result | None) -> None:
    if not path.parent.exists():  # what is in the way, `open` says better
        path.parent.mkdir(parents=True, exist_ok=True)
    temporary = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    fd = os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_NOFOLLOW, mode)
    try:
        with os.fdopen(fd, "wb") as file:
            if like is not None:
                with suppress(PermissionError):  # only root may give files away
                    os.fchown(fd, like.st_uid, like.st_gid)
                os.fchmod(fd, stat.S_IMODE(like.st_mode))
            file.write(content)
            file.flush()
            os.fsync(file.fileno())
        temporary.replace(path)
    except BaseException:
        temporary.unlink(missing_ok=True)
        raise

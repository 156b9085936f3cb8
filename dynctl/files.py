"""Files that survive power loss: whole-file replacement; and what the system says of calls that failed. IO: files."""

import os
import socket
import ssl
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
        _replace(path, content, mode)
    except OSError as error:
        raise OSError(error.errno, error.strerror, str(path)) from error


def _replace(path: Path, content: bytes, mode: int) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    fd = os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, mode)
    try:
        with os.fdopen(fd, "wb") as file:
            file.write(content)
            file.flush()
            os.fsync(file.fileno())
        temporary.replace(path)
    except BaseException:
        temporary.unlink(missing_ok=True)
        raise

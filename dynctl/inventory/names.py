"""Host names as people write them: ranges, `user@name:port`, globs and groups, aliases of `~/.ssh/config`.

IO: files (the SSH configuration).
"""

import fnmatch
import glob
import re
import shlex
from collections.abc import Iterator
from pathlib import Path

from dynctl.core.text import is_name

MAX_HOSTS = 4096

_RANGE = re.compile(r"\[([^\[\]]*)\]")
_PART = re.compile(r"^([0-9]+)(?:-([0-9]+))?$")
_HOST = re.compile(r"^(?:(?P<user>[^@:/\s]+)@)?(?P<name>[^@:/\s]+)(?::(?P<port>[0-9]+))?$")
_USER = re.compile(r"^[A-Za-z0-9_][A-Za-z0-9._@+-]{0,63}\$?$")
_ADDRESS = re.compile(r"^[0-9A-Fa-f:.]{2,45}(%[A-Za-z0-9._-]{1,32})?$")


def expand_range(text: str) -> list[str]:
    """Expand `gpu-[01-08,12]` into its names, several ranges into their product; leading zeros keep the width.

    Raises:
        ValueError: when a range is empty, runs backwards, or makes more than MAX_HOSTS names.
    """
    match = _RANGE.search(text)
    if match is None:
        return [text]
    numbers: list[str] = []
    for part in match[1].split(","):
        found = _PART.match(part.strip())
        if found is None:
            raise ValueError(f"[{match[1]}] is no range; write [01-08] or [1,2,5-7]")
        first, last = found[1], found[2] or found[1]
        if int(last) < int(first):
            raise ValueError(f"the range [{part.strip()}] runs backwards")
        if int(last) - int(first) >= MAX_HOSTS:
            raise ValueError(f"the range [{part.strip()}] makes more than {MAX_HOSTS} hosts")
        width = len(first) if first.startswith("0") or len(first) == len(last) else 0
        numbers += [str(number).zfill(width) for number in range(int(first), int(last) + 1)]
    rest = expand_range(text[match.end() :])
    if len(numbers) * len(rest) > MAX_HOSTS:
        raise ValueError(f"{text} makes more than {MAX_HOSTS} hosts")
    return [text[: match.start()] + number + tail for number in numbers for tail in rest]


def parse_host(text: str) -> tuple[str, str | None, int | None]:
    """Split `[user@]name[:port]` into name, user and port.

    Raises:
        ValueError: when it is no such text.
    """
    match = _HOST.match(text)
    if match is None:
        hint = (
            "; an IPv6 address needs the long form: {name: …, address: …}" if "::" in text else ""
        )
        raise ValueError(f"a host is written [user@]name[:port]{hint}")
    port = int(match["port"]) if match["port"] else None
    if port is not None and not 0 < port < 65536:
        raise ValueError(f"{port} is no port")
    return match["name"], match["user"], port


def is_user(text: str) -> bool:
    """Tell whether a text may be a login name: no option, no shell character."""
    return _USER.match(text) is not None


def is_address(text: str) -> bool:
    """Tell whether a text may be an address: a host name, IPv4 or IPv6."""
    return is_name(text) or _ADDRESS.match(text) is not None


def is_pattern(text: str) -> bool:
    """Tell whether a text holds glob characters."""
    return any(character in text for character in "*?[")


def matching(pattern: str, names: list[str]) -> list[str]:
    """The names a glob fits, in their order."""
    return [name for name in names if fnmatch.fnmatchcase(name, pattern)]


def ssh_aliases(config: Path) -> list[str]:
    """List the host aliases an SSH configuration defines, in order, with its includes; patterns are no aliases."""
    return list(dict.fromkeys(_aliases(config, 0)))


def _aliases(config: Path, depth: int) -> Iterator[str]:
    try:
        lines = config.read_text("utf-8", "replace").splitlines()
    except OSError:
        return
    for line in lines:
        try:
            words = shlex.split(line.replace("=", " ", 1), comments=True)
        except ValueError:
            continue
        if not words or words[0].lower() not in ("host", "include"):
            continue
        if words[0].lower() == "host":
            yield from (word for word in words[1:] if is_name(word))
        elif depth < 16:
            for pattern in words[1:]:
                # Relative includes start from ~/.ssh. Source: ssh_config(5), Include.
                where = Path("~/.ssh").expanduser() / Path(pattern).expanduser()
                for path in sorted(glob.glob(str(where))):  # noqa: PTH207 - the pattern is absolute
                    yield from _aliases(Path(path), depth + 1)

"""A command as the one line sshd hands to a login shell, and its output found between marks.

The login shell may be anything (sh, csh, fish) and may talk before and after: so the line is fixed, quoted only with
single quotes, and carries the command as an octal-escaped text of harmless characters that `sh` decodes. Marks with a
random part surround the output; the last one carries the exit status.
Pure.
"""

import re
from dataclasses import dataclass

from dynctl.core.command import Command
from dynctl.errors import CommandError
from dynctl.remote.port import MAX_LINE_BYTES, check_command

MAX_LINE_CHARS = 120_000
"""Linux passes at most 128 KiB in one argument, and the login shell gets the whole line as one."""

_UNSAFE = re.compile(rb"[^A-Za-z0-9_./:=,@+ -]")


def quote(word: str) -> str:
    """Quote a word for `sh` so that it is one word and nothing else: no keyword, assignment, alias or option."""
    return "'" + word.replace("'", "'\\''") + "'"


def wrap(command: Command, nonce: str) -> str:
    """Write the line that runs a command under any login shell, its output between marks made of `nonce`.

    Raises:
        CommandError: when the command is none, or longer than a line may be.
    """
    check_command(command)
    exports = "".join(f"export {name}={quote(value)}; " for name, value in command.env)
    words = " ".join(quote(word) for word in command.argv)
    begin, end = _marks(nonce)
    script = (
        f"echo {begin} $$; echo {begin} $$ >&2; LC_ALL=C; export LC_ALL; "
        f"({exports}exec {words}); set -- $?; "
        f'echo; echo {end} "$1"; {{ echo; echo {end} "$1"; }} >&2; exit "$1"'
    )
    text = _UNSAFE.sub(lambda m: b"\\0%03o" % m[0][0], script.encode("utf-8", "surrogateescape"))
    line = f"""sh -c 'eval "$(printf %b "$1")"' sh '{text.decode()}'"""
    if len(line) > MAX_LINE_CHARS:
        raise CommandError(
            f"{command.argv[0]}: the command is longer than a host accepts ({len(line)} characters)",
            "send long data by stdin or as a file",
        )
    return line


@dataclass(frozen=True, slots=True)
class Marked:
    """What stood between the marks of one output stream."""

    content: bytes
    has_begun: bool
    """Whether the first mark was there: the command was started."""
    exit_status: int | None
    """From the last mark; None when the output ended before it."""
    noise: bytes
    """What came before the first mark, or everything when there was none."""
    pid: int | None = None
    """The shell around the command, from the first mark."""


def between(output: bytes, nonce: str) -> Marked:
    """Find the command's own output in everything that came."""
    begin, end = (mark.encode() for mark in _marks(nonce))
    noise, mark, rest = output.partition(begin + b" ")
    pid, newline, rest = rest.partition(b"\n")
    if not mark or not newline or not pid.isdigit():
        return Marked(b"", has_begun=False, exit_status=None, noise=output)
    content, mark, trailer = rest.rpartition(b"\n" + end + b" ")
    if not mark:
        return Marked(rest, True, None, noise, int(pid))
    status = trailer.split(b"\n", 1)[0]
    return Marked(content, True, int(status) if status.isdigit() else None, noise, int(pid))


class MarkedLines:
    """The same for a stream that is read while it runs: bytes in, complete lines out."""

    def __init__(self, nonce: str) -> None:
        begin, end = _marks(nonce)
        self._begin, self._end = begin.encode() + b" ", end.encode() + b" "
        self._rest = b""
        self._num_blank = 0
        self.has_begun = False
        self.exit_status: int | None = None
        self.pid: int | None = None

    def feed(self, data: bytes) -> list[bytes]:
        """Take what came and return the lines that are complete; blank ones wait until something follows them."""
        *complete, self._rest = (self._rest + data).split(b"\n")
        lines: list[bytes] = []
        for line in complete:
            lines += self._line(line)
        while len(self._rest) > MAX_LINE_BYTES and self.has_begun and self.exit_status is None:
            lines += self._line(self._rest[:MAX_LINE_BYTES])
            self._rest = self._rest[MAX_LINE_BYTES:]
        if not self.has_begun or self.exit_status is not None:
            self._rest = self._rest[-MAX_LINE_BYTES:]
        return lines

    def _line(self, line: bytes) -> list[bytes]:
        if self.exit_status is not None:
            return []
        if not self.has_begun:
            # Noise without a line end may stand on the same line.
            _, mark, pid = line.partition(self._begin)
            if mark and pid.isdigit():
                self.has_begun, self.pid = True, int(pid)
            return []
        if not line:
            self._num_blank += 1
            return []
        blanks, self._num_blank = self._num_blank, 0
        if line.startswith(self._end) and line[len(self._end) :].isdigit():
            self.exit_status = int(line[len(self._end) :])
            # One of the blank lines, or the line end before it, is the mark's own.
            return [b""] * (blanks - 1)
        return [*([b""] * blanks), line]


def end_group(pid: int, nonce: str) -> Command:
    """The command that ends another one: every process of its group, if that shell still runs it.

    Needed where sshd refuses signals, which it does for root.
    """
    script = (
        'grep -q "$2" "/proc/$1/cmdline" && read -r stat < "/proc/$1/stat" && '
        'set -- ${stat##*")"} && kill -TERM "-$3"'
    )
    return Command(("sh", "-c", script, "sh", str(pid), _marks(nonce)[0]), timeout_s=5.0)


def as_signal(status: int) -> int:
    """Turn the status by which a shell reports a signal (128 + n) into -n, as for local processes."""
    return 128 - status if 128 < status <= 192 else status


def _marks(nonce: str) -> tuple[str, str]:
    return f"dynctl-{nonce}-begin", f"dynctl-{nonce}-end"

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

_KILL_AFTER_S = 2
"""What was asked to end is killed then."""
HAS_TIMEOUT = ("timeout", "-k", "1", "9", "true")
"""Whether a host has a `timeout` that `wrap` can use: busybox had none that kills for long."""
_MAX_DIGITS = 10
"""Of a session or an exit status, that a host may write as it likes."""

_UNSAFE = re.compile(rb"[^A-Za-z0-9_./:=,@+ -]")


def quote(word: str) -> str:
    """Quote a word for `sh` so that it is one word and nothing else: no keyword, assignment, alias or option."""
    return "'" + word.replace("'", "'\\''") + "'"


def wrap(command: Command, nonce: str, limit_s: int | None = None) -> str:
    """Write the line that runs a command under any login shell, its output between marks made of `nonce`.

    `limit_s`: the host's own `timeout` ends the command and its process group then, whoever is still connected.

    Raises:
        CommandError: when the command is none, or longer than a line may be.
    """
    check_command(command)
    exports = "".join(f"export {name}={quote(value)}; " for name, value in command.env)
    limit = () if limit_s is None else ("timeout", "-k", str(_KILL_AFTER_S), str(limit_s))
    words = " ".join(quote(word) for word in (*limit, *command.argv))
    check = _found_or_said(command.argv[0]) if limit else ""
    begin, end = _marks(nonce)
    script = (
        f'{{ read -r s < /proc/$$/stat && set -- ${{s##*")"}}; }} 2>/dev/null; '
        f'echo {begin} "${{4:-0}}"; echo {begin} "${{4:-0}}" >&2; LC_ALL=C; export LC_ALL; '
        f"({exports}{check}exec {words}); set -- $?; "
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


def _found_or_said(program: str) -> str:
    """Say that a program is missing in our own words: `timeout` would say that it failed to run a command."""
    word = quote(program)
    return (
        f"command -v {word} >/dev/null 2>&1 || [ -e {word} ] || "
        f"{{ printf '%s: not found\\n' {word} >&2; exit 127; }}; "
    )


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
    session: int = 0
    """The session it runs in, from the first mark; 0 when the host did not say."""


def between(output: bytes, nonce: str) -> Marked:
    """Find the command's own output in everything that came."""
    begin, end = (mark.encode() for mark in _marks(nonce))
    noise, mark, rest = output.partition(begin + b" ")
    session, newline, rest = rest.partition(b"\n")
    number = _number(session)
    if not mark or not newline or number is None:
        return Marked(b"", has_begun=False, exit_status=None, noise=output)
    content, mark, trailer = rest.rpartition(b"\n" + end + b" ")
    if not mark:
        return Marked(rest, True, None, noise, number)
    status = trailer.split(b"\n", 1)[0]
    return Marked(content, True, _number(status), noise, number)


def _number(text: bytes) -> int | None:
    """Read what stands behind a mark."""
    return int(text) if text.isdigit() and len(text) <= _MAX_DIGITS else None


class MarkedLines:
    """The same for a stream that is read while it runs: bytes in, complete lines out."""

    def __init__(self, nonce: str) -> None:
        begin, end = _marks(nonce)
        self._begin, self._end = begin.encode() + b" ", end.encode() + b" "
        self._rest = b""
        self._num_blank = 0
        self.has_begun = False
        self.exit_status: int | None = None
        self.session = 0

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
            _, mark, session = line.partition(self._begin)
            number = _number(session)
            if mark and number is not None:
                self.has_begun, self.session = True, number
            return []
        if not line:
            self._num_blank += 1
            return []
        blanks, self._num_blank = self._num_blank, 0
        if line.startswith(self._end) and (status := _number(line[len(self._end) :])) is not None:
            self.exit_status = status
            # One of the blank lines, or the line end before it, is the mark's own.
            return [b""] * (blanks - 1)
        return [*([b""] * blanks), line]


# $1 session, $2 mark. The leader of a session that sshd made for this command has the mark in its command line or,
# behind a forced command, in its environment. A number is used again only when its session is empty: so a session whose leader
# has ended is the one meant. Any other is somebody's: that of a server whose commands share one is left alone.
_END_SESSION = """
session=$1 mark=$2
members() {
  for stat in /proc/[0-9]*/stat; do
    read -r line < "$stat" || continue
    set -- "${line%% *}" ${line##*")"}
    case $2 in [ZX]) continue;; esac
    [ "$5" != "$session" ] || echo "$1"
  done 2>/dev/null
}
is_meant() {
  grep -q -- "$mark" "/proc/$session/cmdline" "/proc/$session/environ" && return 0
  read -r line < "/proc/$session/stat" || return 0
  set -- ${line##*")"}
  case $1 in [ZX]) return 0;; esac
  return 1
} 2>/dev/null
is_meant || exit 0
kill -TERM $(members) 2>/dev/null
for pause in 0.05 0.1 0.2 0.4 0.4; do
  left=$(members)
  [ -n "$left" ] || exit 0
  sleep $pause 2>/dev/null || sleep 1
done
kill -KILL $left 2>/dev/null
"""


def end_session(session: int, nonce: str) -> Command:
    """The command that ends another one, and what it left behind in its session: asked first, then killed.

    Needed where sshd refuses signals, which it does for root, and where the command itself has exited.
    """
    argv = ("sh", "-c", _END_SESSION, "sh", str(session), _marks(nonce)[0])
    return Command(argv, timeout_s=5.0)


def as_signal(status: int) -> int:
    """Turn the status by which a shell reports a signal (128 + n) into -n, as for local processes."""
    return 128 - status if 128 < status <= 192 else status


def _marks(nonce: str) -> tuple[str, str]:
    return f"dynctl-{nonce}-begin", f"dynctl-{nonce}-end"

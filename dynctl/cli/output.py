"""The only writer to stdout and stderr: data, tables, talk and errors.

Data goes to stdout, talk to stderr. Not here: what is said. IO: terminal.
"""

import asyncio
import contextlib
import io
import os
import shlex
import signal
import sys
import threading
import time
from collections.abc import Coroutine, Sequence
from typing import IO, Any, AnyStr, Literal, TypeVar

from dynctl.core.text import clean, printable
from dynctl.errors import DynctlError, ExitCode

T = TypeVar("T")
_ENDING = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
INSIST_S = 10.0
"""Once a command was told to end, another signal within this time changes nothing; a later one ends it at once."""
_WHOLE_WORD_CELLS = 40
"""Longer words are cut rather than widen a table."""


class ReaderGoneError(Exception):
    """Raised when whoever reads the data, as `| head`, has what it wanted; no failure."""


def mend_streams() -> None:
    """Make the three streams usable: one that is closed leads nowhere, and no character is too much for one."""
    for name, mode in (("stdin", "r"), ("stdout", "w"), ("stderr", "w")):
        stream = getattr(sys, name)
        if stream is None:
            # Else the next file that is opened, or socket, would get its number.
            number = os.open(os.devnull, os.O_RDWR)
            setattr(sys, name, os.fdopen(number, mode, encoding="utf-8"))
        elif isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="replace")


def say(text: str = "") -> None:
    """Tell the operator something that is not data; where nobody listens any more, work goes on.

    Names in it may come from hosts: what would command a terminal is dropped.
    """
    with contextlib.suppress(OSError):
        sys.stderr.write(printable(text) + "\n")
        sys.stderr.flush()


def progress(where: str, step: str, text: str) -> None:
    """One line per change of state: time, host, step and what happened."""
    say(f"{time.strftime('%H:%M:%S')} {clean(where, 24):<12} {step:<16} {clean(text, 400)}")


def emit_json(value: object) -> None:
    """Write one JSON document to stdout."""
    from dynctl.store import to_json

    sys.stdout.flush()
    _write(sys.stdout.buffer, to_json(value))


def emit(text: str) -> None:
    """Write text to stdout, with one final newline.

    Raises:
        ReaderGoneError: when nobody reads it any more.
    """
    _write(sys.stdout, text if text.endswith("\n") else text + "\n")


def _write(stream: IO[AnyStr], data: AnyStr) -> None:
    try:
        stream.write(data)
        stream.flush()
    except BrokenPipeError as error:
        # What is left in the buffer would be a second error at the interpreter's exit.
        os.dup2(os.open(os.devnull, os.O_WRONLY), stream.fileno())
        raise ReaderGoneError from error


def table(
    columns: Sequence[str], rows: Sequence[Sequence[str]], *, right: Sequence[str] = ()
) -> None:
    """Write an aligned table to stdout; cells are data, never markup. `right` names right-aligned columns.

    Long cells are wrapped between words. In a terminal too narrow for the words the lines go on at its left edge, so
    that no name or address comes out in pieces.
    """
    from rich.console import Console
    from rich.table import Table
    from rich.text import Text

    cells = [[clean(cell, 400) for cell in row] for row in rows]
    drawn = Table(box=None, pad_edge=False, padding=(0, 2, 0, 0), header_style="bold")
    least = [_least_width(c, [row[i] for row in cells], c in right) for i, c in enumerate(columns)]
    for column, width in zip(columns, least, strict=True):
        side: Literal["left", "right"] = "right" if column in right else "left"
        drawn.add_column(column, justify=side, overflow="fold", min_width=width)
    for row in cells:
        drawn.add_row(*map(Text, row))
    console = Console(file=sys.stdout, width=None if sys.stdout.isatty() else 120, highlight=False)
    console.width = max(console.width, sum(least) + 2 * len(least))
    with console.capture() as captured:
        console.print(drawn)
    # Padding at line ends is noise in files and diffs.
    emit("\n".join(line.rstrip() for line in captured.get().splitlines()))


def _least_width(title: str, cells: Sequence[str], is_number: bool) -> int:
    """The longest word of a column, as far as words are kept whole; numbers keep their unit beside them."""
    from rich.cells import cell_len

    words = [title, *(word for cell in cells for word in ([cell] if is_number else cell.split()))]
    return min(_WHOLE_WORD_CELLS, max(map(cell_len, words)))


def is_interactive() -> bool:
    """Whether a question can be asked: both ends are a terminal."""
    return sys.stdin.isatty() and sys.stderr.isatty()


async def ask(question: str) -> bool:
    """Ask at the terminal; anything but yes is no. Connections are kept alive meanwhile, and Ctrl-C ends the wait."""
    say(f"{question} [y/N] ")
    loop, has_typed = asyncio.get_running_loop(), asyncio.Event()
    loop.add_reader(sys.stdin.fileno(), has_typed.set)
    try:
        await has_typed.wait()
    finally:
        loop.remove_reader(sys.stdin.fileno())
    return sys.stdin.readline().strip().lower() in {"y", "yes"}


def unasked() -> str:
    """The command that is being run, as it needs no question."""
    words = sys.argv[1:]
    return shlex.join(["dynctl", *words, *([] if {"-y", "--yes"} & set(words) else ["--yes"])])


async def confirm(question: str, *, yes: bool) -> None:
    """Ask before changing things.

    Raises:
        DynctlError: exit 2 when nobody can answer, exit 4 when the answer is no.
    """
    if yes:
        return
    if not is_interactive():
        raise DynctlError(
            f"nobody can be asked here, where there is no terminal: {question}",
            f"rerun: {unasked()}",
            code=ExitCode.USAGE,
        )
    if not await ask(question):
        raise DynctlError("not confirmed; nothing was changed", code=ExitCode.REFUSED)


def report(error: DynctlError) -> None:
    """Write an error: what happened, then the next step. DYNCTL_TRACEBACK=1 adds the traceback."""
    if os.environ.get("DYNCTL_TRACEBACK"):
        import traceback

        traceback.print_exception(error)
    say(f"error: {error.message}")
    if error.hint:
        say(f"hint: {error.hint}")


class Stage:
    """How far a command is: what Ctrl-C leaves behind, and the next step then."""

    def __init__(self, if_interrupted: str = "interrupted") -> None:
        self.if_interrupted = if_interrupted


def wait_for(work: Coroutine[Any, Any, T], stage: Stage | None = None) -> T:
    """Run a coroutine to its end from a command; errors inside task groups come out as the first DynctlError.

    SIGTERM and a terminal that is closed end it as Ctrl-C does, so that locks are given back and files put away. What
    comes while that is done does not disturb it; only what comes more than `INSIST_S` later ends it at once.
    """
    try:
        try:
            return asyncio.run(_ended_by_signals(work))
        except BaseExceptionGroup as group:
            raise _first(group) from group
        except asyncio.CancelledError:
            raise KeyboardInterrupt from None
    except KeyboardInterrupt:
        say((stage or Stage()).if_interrupted)
        raise


async def _ended_by_signals(work: Coroutine[Any, Any, T]) -> T:
    loop, task = asyncio.get_running_loop(), asyncio.current_task()
    numbers: list[int] = []
    since_s: float | None = None

    def end(number: int) -> None:
        nonlocal since_s
        if since_s is None:
            since_s = loop.time()
            assert task is not None
            task.cancel()
        elif loop.time() - since_s < INSIST_S:
            # Cancelled again, what gives locks back would be cut short, and the cluster stay locked.
            say(f"still ending, so that locks are given back; after {INSIST_S:g} s it ends at once")
        else:
            loop.remove_signal_handler(number)
            signal.raise_signal(number)

    if task is not None and threading.current_thread() is threading.main_thread():
        # One that is ignored stays so: nohup.
        numbers = [n for n in _ENDING if signal.getsignal(n) not in {signal.SIG_IGN, None}]
        for number in numbers:
            loop.add_signal_handler(number, end, number)
    try:
        return await work
    finally:
        for number in numbers:
            loop.remove_signal_handler(number)


def _first(group: BaseExceptionGroup[BaseException]) -> BaseException:
    """Pick what the operator must see: an interrupt, else the first error of ours, else the first of all."""
    leaves: list[BaseException] = []
    queue: list[BaseException] = [group]
    while queue:
        error = queue.pop(0)
        if isinstance(error, BaseExceptionGroup):
            queue.extend(error.exceptions)
        else:
            leaves.append(error)
    for kind in (KeyboardInterrupt, DynctlError):
        for leaf in leaves:
            if isinstance(leaf, kind):
                return leaf
    return leaves[0]

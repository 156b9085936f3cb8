"""A command for a host as a value: argv, environment, stdin, time limit. Pure."""

import shlex
from dataclasses import dataclass


class Secret:
    """A text that never shows in repr, logs or JSON; read it with `reveal()` where it is used."""

    __slots__ = ("_text",)

    def __init__(self, text: str) -> None:
        self._text = text

    def reveal(self) -> str:
        """Return the text itself."""
        return self._text

    def __repr__(self) -> str:
        return "Secret(…)"


@dataclass(frozen=True, slots=True)
class Command:
    """One program run. Never a shell string: quoting happens in one place, `shell_line`."""

    argv: tuple[str, ...]
    env: tuple[tuple[str, str], ...] = ()
    stdin: bytes | None = None
    timeout_s: float = 30.0

    def shell_line(self) -> str:
        """The line a POSIX shell runs to the same effect; sshd hands commands to the login shell."""
        words = [f"{name}={shlex.quote(value)}" for name, value in self.env]
        return (
            shlex.join(self.argv) if not words else " ".join(["env", *words, shlex.join(self.argv)])
        )


@dataclass(frozen=True, slots=True)
class Completed:
    """A finished command. Only a known exit status makes one: a lost link raises UnknownOutcomeError."""

    command: Command
    exit_status: int
    """Negative: ended by that signal."""
    stdout: bytes
    stderr: bytes
    elapsed_s: float = 0.0

    @property
    def is_ok(self) -> bool:
        """Whether it exited with 0."""
        return self.exit_status == 0

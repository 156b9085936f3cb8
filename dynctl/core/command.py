"""A command for a host as a value: argv, environment, stdin, time limit. Pure."""

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
    """One program run. Never a shell string; `env` shows in the host's process list, so it carries no secrets."""

    argv: tuple[str, ...]
    env: tuple[tuple[str, str], ...] = ()
    stdin: bytes | None = None
    timeout_s: float = 30.0


@dataclass(frozen=True, slots=True)
class Completed:
    """A finished command. Only a known exit status makes one: a lost link raises UnknownOutcomeError."""

    command: Command
    exit_status: int
    """Negative: ended by that signal."""
    stdout: bytes
    stderr: bytes
    noise: bytes = b""
    """The beginning of what a login shell printed before the command ran; no part of its output."""

    @property
    def is_ok(self) -> bool:
        """Whether it exited with 0."""
        return self.exit_status == 0

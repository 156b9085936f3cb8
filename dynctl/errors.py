"""The errors an operator may meet: what happened, where, and what to do next.

Not here: exit codes as process behaviour, printing. `cli.main` turns an error into text and a code.
Pure.
"""

from enum import IntEnum


class ExitCode(IntEnum):
    """What the process tells the shell; listed in `dynctl --help` and docs/."""

    OK = 0
    ERROR = 1
    USAGE = 2
    PARTIAL = 3
    REFUSED = 4
    LOCKED = 5
    GATE = 6
    TRUST = 7
    UNKNOWN = 8
    CHANGES = 10
    INTERRUPTED = 130


class DynctlError(Exception):
    """Raised when a command cannot go on; the base of all kinds below.

    `message` says what happened and where, `hint` the next step. `exit_code` is the code of its kind.
    """

    exit_code = ExitCode.ERROR

    def __init__(
        self, message: str, hint: str | None = None, *, code: ExitCode | None = None
    ) -> None:
        super().__init__(message)
        self.message = message
        self.hint = hint
        if code is not None:
            self.exit_code = code


class UsageError(DynctlError):
    """Raised when flags or arguments do not make sense together."""

    exit_code = ExitCode.USAGE


class InventoryError(DynctlError):
    """Raised when a file people write is wrong; carries every problem found, not only the first."""

    exit_code = ExitCode.USAGE


class ConnectError(DynctlError):
    """Raised when a host cannot be reached or logged in to (network, name, authentication)."""

    exit_code = ExitCode.REFUSED


class TrustError(DynctlError):
    """Raised when a host key or certificate is unknown or has changed."""

    exit_code = ExitCode.TRUST


class CommandError(DynctlError):
    """Raised when a command on a host ran and failed."""


class MissingFileError(CommandError):
    """Raised when a file on a host does not exist; one that may not be read is another matter."""


class UnknownOutcomeError(DynctlError):
    """Raised when a connection was lost mid-command, so that nobody knows whether it took effect."""

    exit_code = ExitCode.UNKNOWN


class ProbeError(DynctlError):
    """Raised when the output of a probe cannot be understood; names tool and line."""


class PlanError(DynctlError):
    """Raised when no layout is feasible, or a plan does not fit the cluster it is applied to."""

    exit_code = ExitCode.REFUSED


class DeployError(DynctlError):
    """Raised when bringing up or down stopped; says what was done and what was not."""


class EngineError(DynctlError):
    """Raised when an engine refuses to start or answers wrongly."""


class RouterError(DynctlError):
    """Raised when the router cannot serve (port busy, bad configuration)."""

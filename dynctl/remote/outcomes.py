"""What becomes of a command that worked on several hosts: every host that failed is named. Pure."""

from collections.abc import Mapping, Sequence

from dynctl.errors import DynctlError, ExitCode


def failures_of(results: Mapping[str, object]) -> dict[str, DynctlError]:
    """The hosts that failed, each with why."""
    return {name: error for name, error in results.items() if isinstance(error, DynctlError)}


def raise_any_failure(results: Mapping[str, object]) -> None:
    """End a command that needs every host: nothing when all went well.

    Raises:
        DynctlError: names each failed host with its cause; exits with the worst of their codes.
    """
    failures = failures_of(results)
    if failures:
        causes = list(failures.values())
        raise DynctlError(_lines(causes), _hint(causes), code=_worst(causes))


def raise_host_failures(results: Mapping[str, object], what: str) -> None:
    """End a command that worked on several hosts: nothing when all went well.

    Raises:
        DynctlError: names each failed host with its cause; exit 3 when others went well, else the cause's own code.
    """
    failures = failures_of(results)
    done = [name for name in results if name not in failures]
    if failures and done:
        causes = list(failures.values())
        raise DynctlError(
            f"{len(failures)} of {len(results)} hosts failed; {what}: {', '.join(done)}\n  "
            + _lines(causes),
            _hint(causes),
            code=ExitCode.PARTIAL,
        )
    raise_any_failure(failures)


def _lines(causes: Sequence[DynctlError]) -> str:
    return "\n  ".join(error.message for error in causes)


def _hint(causes: Sequence[DynctlError]) -> str | None:
    return next((error.hint for error in causes if error.hint), None)


def _worst(causes: Sequence[DynctlError]) -> ExitCode:
    """Trust problems come first: they need a person; then what stopped everything."""
    codes = {error.exit_code for error in causes}
    for code in (ExitCode.TRUST, ExitCode.UNKNOWN, ExitCode.LOCKED):
        if code in codes:
            return code
    return causes[0].exit_code

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
    causes = list(failures_of(results).values())
    if len(causes) == 1:
        raise causes[0]
    if causes:
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
    """One line per host; where next steps differ, each stands below the last host it is for."""
    lines = []
    for error, following in zip(causes, [*causes[1:], None], strict=True):
        lines.append(error.message)
        is_last = following is None or following.hint != error.hint
        if error.hint and is_last and _hint(causes) is None:
            lines.append(f"  {error.hint}")
    return "\n  ".join(lines)


def _hint(causes: Sequence[DynctlError]) -> str | None:
    """The next step, when there is one for all."""
    hints = {error.hint for error in causes if error.hint}
    return hints.pop() if len(hints) == 1 else None


def _worst(causes: Sequence[DynctlError]) -> ExitCode:
    """Trust problems come first: they need a person; then what stopped everything."""
    codes = {error.exit_code for error in causes}
    for code in (ExitCode.TRUST, ExitCode.UNKNOWN, ExitCode.LOCKED):
        if code in codes:
            return code
    return causes[0].exit_code

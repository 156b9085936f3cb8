"""What a check says: how bad, where, on what evidence, how to cure it, and how to see it without dynctl. Pure."""

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from enum import StrEnum

from dynctl.checks.evidence import Evidence, Need


class Severity(StrEnum):
    """How bad a finding is; only RED fails `dynctl doctor`."""

    OK = "ok"
    INFO = "info"
    WARNING = "warning"
    RED = "red"

    @property
    def rank(self) -> int:
        """Order for sorting: worse is higher."""
        return list(Severity).index(self)


def red_if(condition: object) -> Severity:
    """RED when it breaks what is planned, else a WARNING."""
    return Severity.RED if condition else Severity.WARNING


@dataclass(frozen=True, slots=True)
class Finding:
    """One thing a check found."""

    code: str
    """The check's code, listed in docs/findings.md."""
    severity: Severity
    host_name: str | None
    """Where it holds; None: on the operator's machine, or of the cluster as a whole."""
    subject: str
    """What it is about: `GPU3`, `mlx5_0`, a replica's id; empty for the host itself."""
    text: str
    """What is wrong, in a sentence without the host's name, so that equal findings can be shown together."""
    evidence: tuple[str, ...] = ()
    """The facts it rests on."""
    fix: str = ""
    """What to do."""
    fix_command: str | None = None
    """Shell line for the host (or here, without a host) that does it; None when it takes more than one line."""
    safe_fix: tuple[str, ...] = ()
    """The same as a program and its arguments, when `doctor --fix` may run it: reversible, and disturbs nothing that runs."""
    verify: str = ""
    """Shell line that needs no dynctl: prints what it saw and exits 0 as long as the finding holds, else not 0."""
    verify_on: str | None = None
    """Host to run it on; None: the operator's machine."""


Judge = Callable[[Evidence], Iterable[Finding]]


@dataclass(frozen=True, slots=True)
class Check:
    """One named check: the object `CHECK` of its module."""

    code: str
    title: str
    """What is wrong when it fires, a few words."""
    judge: Judge
    needs: tuple[Need, ...] = ()
    """Evidence without which it says nothing; it is then reported as skipped, not as ok."""

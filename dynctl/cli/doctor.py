"""`dynctl doctor`: look for what is wrong, and say how to cure and how to prove it. IO: ssh, HTTP, files, terminal."""

from collections.abc import Sequence
from enum import StrEnum
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from dynctl.cli.options import (
    DEFAULT_INVENTORY,
    AdminSocket,
    InventoryPath,
    Limit,
    Local,
    Output,
    OutputOption,
    Yes,
)
from dynctl.cli.output import confirm, emit, emit_json, say, wait_for
from dynctl.cli.session import ask_about_keys, load, load_if_there, select
from dynctl.core.inventory import Inventory

if TYPE_CHECKING:
    from dynctl.checks.evidence import Evidence
    from dynctl.checks.examine import Group, Report
    from dynctl.checks.finding import Check, Finding
    from dynctl.remote.fleet import Fleet

FIX_TIMEOUT_S = 60.0


class Subject(StrEnum):
    """What can be looked at by itself."""

    SKEW = "skew"


def command(
    subject: Annotated[
        Subject | None,
        typer.Argument(
            help="`skew`: why engines are loaded unevenly, by what running routers decided; nothing else is looked at."
        ),
    ] = None,
    *,
    inventory: InventoryPath = DEFAULT_INVENTORY,
    local: Local = False,
    limit: Limit = None,
    check: Annotated[
        list[str] | None,
        typer.Option("--check", "-c", help="Only this check; may be given several times."),
    ] = None,
    captures: Annotated[
        list[str] | None,
        typer.Option(
            "--from",
            metavar="[NAME=]PATH",
            help="Judge what discover --script or single tools printed, instead of asking hosts; may be repeated.",
        ),
    ] = None,
    fix: Annotated[
        bool, typer.Option("--fix", help="Run the safe fixes, after showing and asking.")
    ] = False,
    yes: Yes = False,
    admin_socket: AdminSocket = None,
    output: OutputOption = Output.TABLE,
) -> None:
    """Look for what is wrong on hosts, between them and here, before and after dynctl up.

    Every finding says how bad it is, what was seen, how to cure it, and a command that proves it without dynctl: it
    prints what it saw and exits 0 as long as the finding holds. Without --fix nothing is changed. Exit 6 when a
    finding is red, 3 when some hosts could not be reached, 4 when none could, 7 when a host key is unknown or has changed.

    With --from it judges files of hosts that cannot be reached, as far as they tell.

    With `skew` it judges the last 10,000 decisions of the cluster's routers, or of the one at --admin-socket: how uneven
    the load is beside what chance gives, whether the same requests dealt out in turn would be even, and which cause
    explains it: policy, parallel layout or KV memory. Exit 0 when load is even, else 6.

    Example: dynctl doctor --check memlock-low; dynctl doctor skew
    """
    if subject is Subject.SKEW:
        from dynctl.cli.doctor_skew import show_skew

        if limit or check or captures or fix:
            raise _only_with("skew takes none of --limit, --check, --from and --fix")
        show_skew(inventory, admin_socket, output, local=local)
        return
    if admin_socket is not None:
        raise _only_with("--admin-socket goes with skew")
    from dynctl.checks import examine
    from dynctl.discovery.survey import raise_incomplete

    checks = examine.select(examine.load_checks(), check or ())
    if captures:
        evidence = _read(captures, inventory, fix=fix)
        report = examine.examine(evidence, checks)
    else:
        wanted = load(inventory, local=local)
        evidence, report = wait_for(_look(wanted, select(wanted, limit), checks, fix=fix, yes=yes))
    if output is Output.JSON:
        emit_json(document(evidence, report))
    else:
        _draw(evidence, report)
    raise_incomplete(evidence.topology, "looked at")
    if report.is_red:
        from dynctl.errors import ExitCode

        raise typer.Exit(int(ExitCode.GATE))


def _only_with(text: str) -> Exception:
    from dynctl.errors import UsageError

    return UsageError(text, "dynctl doctor --help")


def _read(captures: Sequence[str], inventory: Path, *, fix: bool) -> "Evidence":
    """Evidence out of files alone; the inventory is read when there is one, for its deployments."""
    from dynctl.cli.doctor_evidence import from_captures
    from dynctl.discovery.capture import read_captures
    from dynctl.discovery.offline import read_files
    from dynctl.errors import UsageError

    if fix:
        raise UsageError("--fix needs the hosts themselves", "leave out --from")
    topology, _ = read_captures(read_files(captures))
    return from_captures(topology, load_if_there(inventory))


async def _look(
    wanted: Inventory,
    names: Sequence[str],
    checks: "dict[str, Check]",
    *,
    fix: bool,
    yes: bool,
) -> "tuple[Evidence, Report]":
    from dynctl.checks.examine import examine
    from dynctl.cli.doctor_evidence import gather
    from dynctl.discovery.survey import raise_unreachable
    from dynctl.remote.fleet import open_fleet

    async with open_fleet(wanted.entries(names), wanted.ssh, ask_about_keys) as fleet:
        evidence = await gather(wanted, names, fleet)
        if not evidence.topology.hosts:
            raise_unreachable(evidence.topology)
        report = examine(evidence, checks)
        if fix and await _fix(report, fleet, yes=yes):
            evidence = await gather(wanted, names, fleet)
            report = examine(evidence, checks)
    return evidence, report


async def _fix(report: "Report", fleet: "Fleet", *, yes: bool) -> bool:
    """Run the safe fixes, one by one, and let each finding's own verify command say whether it helped."""
    from dynctl.checks.shell import join
    from dynctl.core.command import Command
    from dynctl.core.text import clean
    from dynctl.errors import DynctlError
    from dynctl.remote.local import LocalRemote
    from dynctl.remote.port import tail

    todo = {(f.host_name, f.safe_fix): f for f in report.findings if f.safe_fix}
    if not todo:
        say("nothing that could be fixed safely; the other fixes are in the findings")
        return False
    say(f"{len(todo)} safe fixes:")
    for host_name, argv in todo:
        say(f"  {host_name or 'here':<12} {join(argv)}")
    await confirm("run them?", yes=yes)
    here = LocalRemote("here")
    for (host_name, argv), finding in todo.items():
        where = host_name or "here"
        try:
            remote = fleet.remote(host_name) if host_name else here
            done = await remote.run(Command(argv, timeout_s=FIX_TIMEOUT_S))
            prove = Command(("sh", "-c", finding.verify), timeout_s=FIX_TIMEOUT_S)
            holds = (await remote.run(prove)).is_ok
        except DynctlError as error:
            say(f"  {where:<12} {finding.code}: {error.message}")
            continue
        said = clean(tail(done.stderr or done.stdout), 200)
        outcome = "still there" if holds else "cured"
        say(
            f"  {where:<12} {finding.code} {finding.subject}: {outcome}{f' ({said})' if said and not done.is_ok else ''}"
        )
    return True


def document(evidence: "Evidence", report: "Report") -> dict[str, Any]:
    """The whole outcome for programs."""
    from dynctl.cli.doctor_evidence import unanswered

    return {
        "schema": "dynctl.doctor/1",
        "cluster": evidence.inventory.cluster,
        "is_red": report.is_red,
        "findings": [_plain(finding) for finding in report.findings],
        "passed": report.passed,
        "skipped": [{"code": code, "why": why} for code, why in report.skipped],
        "unanswered": [
            {"host": host, "question": question, "cause": cause}
            for host, question, cause in unanswered(evidence)
        ],
        "failures": [
            {"host": f.name, "cause": f.cause, "hint": f.hint} for f in evidence.topology.failures
        ],
    }


def _plain(finding: "Finding") -> dict[str, Any]:
    return {
        "code": finding.code,
        "severity": finding.severity.value,
        "host": finding.host_name,
        "subject": finding.subject,
        "text": finding.text,
        "evidence": finding.evidence,
        "fix": finding.fix,
        "fix_command": finding.fix_command,
        "is_fix_safe": bool(finding.safe_fix),
        "verify": finding.verify,
        "verify_on": finding.verify_on,
    }


def _draw(evidence: "Evidence", report: "Report") -> None:
    from dynctl.checks.examine import grouped
    from dynctl.checks.finding import Severity
    from dynctl.cli.doctor_evidence import unanswered

    counts = []
    for severity in sorted(Severity, key=lambda s: -s.rank):
        groups = grouped([f for f in report.findings if f.severity is severity])
        if groups:
            counts.append(f"{sum(max(1, len(g.host_names)) for g in groups)} {severity.value}")
        for group in groups:
            emit("\n".join(_lines(group, severity.value)) + "\n")
    for host, question, cause in unanswered(evidence):
        say(f"{host}: {question} gave no answer, what hangs on it is unknown: {cause}")
    say(
        f"{', '.join(counts) or 'nothing found'}; {len(report.passed)} checks ok"
        + (f", {len(report.skipped)} had nothing to look at" if report.skipped else "")
    )


def _lines(group: "Group", severity: str) -> list[str]:
    finding = group.finding
    where = ", ".join(group.host_names) or "here"
    title = f"{severity.upper():<8}{finding.code}  {where}"
    lines = [title + (f"  {finding.subject}" if finding.subject else ""), f"  {finding.text}"]
    lines += [f"    seen    {line}" for line in finding.evidence]
    lines.append(
        f"    fix     {finding.fix}" + (" (doctor --fix does it)" if finding.safe_fix else "")
    )
    if finding.fix_command:
        lines.append(f"            $ {finding.fix_command}")
    lines.append(f"    verify  on {finding.verify_on or 'this machine'}:")
    lines.append(f"            $ {finding.verify}")
    return lines

"""Runs the checks over the evidence and sorts what they found. Not here: gathering, showing.

IO: imports the catalog's modules.
"""

from collections.abc import Collection, Mapping
from dataclasses import dataclass, replace

from dynctl import registry
from dynctl.checks.evidence import WHY_NOT, Evidence
from dynctl.checks.finding import Check, Finding, Severity
from dynctl.core.text import clean
from dynctl.errors import UsageError
from dynctl.inventory.problems import suggest

CATALOG = "dynctl.checks.catalog"


@dataclass(frozen=True, slots=True)
class Report:
    """The outcome of all checks that were asked for."""

    findings: tuple[Finding, ...]
    """Worst first."""
    passed: tuple[str, ...]
    """Codes of checks that looked and found nothing."""
    skipped: tuple[tuple[str, str], ...]
    """Codes of checks that had nothing to look at, and why."""

    @property
    def is_red(self) -> bool:
        """Whether any finding is red."""
        return any(finding.severity is Severity.RED for finding in self.findings)


@dataclass(frozen=True, slots=True)
class Group:
    """Equal findings of several hosts."""

    finding: Finding
    """The first of them."""
    host_names: tuple[str, ...]


def load_checks() -> dict[str, Check]:
    """Return all checks by code."""
    checks: Mapping[str, Check] = registry.load_all(CATALOG, "CHECK")
    return {check.code: check for check in checks.values()}


def select(checks: Mapping[str, Check], wanted: Collection[str]) -> dict[str, Check]:
    """Choose checks by code; nothing wanted means all.

    Raises:
        UsageError: when there is no check of that code.
    """
    unknown = [code for code in wanted if code not in checks]
    if unknown:
        near = [code for code in checks if any(part in code for part in unknown[0].split("-"))]
        hint = f"there are: {', '.join(near or sorted(checks))}"
        raise UsageError(
            f"there is no check {unknown[0]!r}", suggest(unknown[0], list(checks)) or hint
        )
    return {code: check for code, check in checks.items() if not wanted or code in wanted}


def examine(evidence: Evidence, checks: Mapping[str, Check]) -> Report:
    """Run the checks. Every text that came from hosts is cleaned here, once for all."""
    findings: list[Finding] = []
    passed, skipped = [], []
    for code, check in checks.items():
        missing = [need for need in check.needs if not evidence.has(need)]
        if missing:
            skipped.append((code, WHY_NOT[missing[0]]))
            continue
        found = [_cleaned(finding) for finding in check.judge(evidence)]
        findings += found
        if not any(f.severity.rank > Severity.OK.rank for f in found):
            passed.append(code)
    order = {host.name: i for i, host in enumerate(evidence.topology.hosts)}
    findings.sort(key=lambda f: (-f.severity.rank, f.code, order.get(f.host_name or "", -1)))
    return Report(tuple(findings), tuple(passed), tuple(skipped))


def _cleaned(finding: Finding) -> Finding:
    return replace(
        finding,
        subject=clean(finding.subject, 80),
        text=clean(finding.text, 400),
        evidence=tuple(clean(line, 300) for line in finding.evidence[:20]),
        fix=clean(finding.fix, 400),
        fix_command=clean(finding.fix_command, 1000) if finding.fix_command else None,
        verify=clean(finding.verify, 1000),
    )


def grouped(findings: Collection[Finding]) -> tuple[Group, ...]:
    """Put equal findings of several hosts together, in order."""
    groups: dict[Finding, list[Finding]] = {}
    for finding in findings:
        groups.setdefault(replace(finding, host_name=None, verify_on=None, evidence=()), []).append(
            finding
        )
    return tuple(
        Group(members[0], tuple(dict.fromkeys(m.host_name for m in members if m.host_name)))
        for members in groups.values()
    )

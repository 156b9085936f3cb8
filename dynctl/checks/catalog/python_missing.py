"""The agent needs Python 3.11 or later and the host has none. Pure."""

from collections.abc import Iterator

from dynctl.checks.evidence import Evidence
from dynctl.checks.finding import Check, Finding, Severity
from dynctl.checks.shell import quote

CODE = "python-missing"


def _judge(evidence: Evidence) -> Iterator[Finding]:
    for host in evidence.topology.hosts:
        said = [w.text for w in host.warnings if w.code == "no-python"]
        if host.python is not None or not said:
            continue
        wanted = evidence.entry(host).python
        program = quote(wanted) if wanted else "python3"
        yield Finding(
            CODE,
            Severity.RED,
            host.name,
            wanted or "",
            "no Python 3.11 or later: the agent cannot run",
            tuple(said),
            "install one (no root needed: unpack a standalone build), and name it with python: in the inventory",
            verify=f"{program} --version 2>&1 | grep -vE '^Python 3\\.(1[1-9]|[2-9][0-9])'",
            verify_on=host.name,
        )


CHECK = Check(CODE, "No usable Python", _judge)

"""The interpreter of the engine's environment is not there or does not start. Pure."""

from collections.abc import Iterator

from dynctl.checks.evidence import Evidence
from dynctl.checks.finding import Check, Finding, Severity
from dynctl.checks.shell import program

CODE = "engine-python-missing"


def _judge(evidence: Evidence) -> Iterator[Finding]:
    for host, wish, software in evidence.engines():
        if software.python_version is not None and not software.error:
            continue
        yield Finding(
            CODE,
            Severity.RED,
            host.name,
            wish.name,
            f"the engine's interpreter {software.python} does not start",
            (software.error or "no version",),
            "install the engine's environment there, or correct engine.python in the inventory",
            verify=f"{program(software.python)} --version 2>&1 | grep -v '^Python '",
            verify_on=host.name,
        )


CHECK = Check(CODE, "Engine's interpreter does not start", _judge)

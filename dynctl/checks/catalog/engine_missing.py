"""The engine's interpreter works but has no vLLM. Pure."""

from collections.abc import Iterator

from dynctl.checks.advisories import VLLM, VLLM_WANTED, version_of
from dynctl.checks.evidence import Evidence
from dynctl.checks.finding import Check, Finding, Severity
from dynctl.checks.shell import program

CODE = "engine-missing"


def _judge(evidence: Evidence) -> Iterator[Finding]:
    for host, wish, software in evidence.engines():
        if software.python_version is None or software.error or version_of(software, VLLM):
            continue
        yield Finding(
            CODE,
            Severity.RED,
            host.name,
            wish.name,
            f"{software.python} has no vLLM",
            (
                f"packages: {', '.join(name for name, _ in software.packages) or 'none of the engine'}",
            ),
            "install it into that environment",
            f"{program(software.python)} -m pip install '{VLLM_WANTED}'",
            verify=f"{program(software.python)} -c 'import importlib.util as u; f = u.find_spec(\"vllm\"); print(f); raise SystemExit(f is not None)'",
            verify_on=host.name,
        )


CHECK = Check(CODE, "No vLLM in the engine's environment", _judge)

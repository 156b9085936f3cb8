"""The engine is older than the first release without known serious advisories. Pure."""

from collections.abc import Iterator

from dynctl.checks.advisories import (
    VLLM,
    VLLM_FLOOR,
    VLLM_WANTED,
    advisories_for,
    release,
    version_of,
)
from dynctl.checks.evidence import Evidence
from dynctl.checks.finding import Check, Finding, Severity
from dynctl.checks.shell import program

CODE = "vllm-below-floor"


def _judge(evidence: Evidence) -> Iterator[Finding]:
    floor = ".".join(map(str, VLLM_FLOOR))
    for host, wish, software in evidence.engines():
        found = version_of(software, VLLM)
        if found is None or release(found[1]) >= VLLM_FLOOR:
            continue
        name, version = found
        is_allowed = wish.engine.allow_old_version
        yield Finding(
            CODE,
            Severity.INFO
            if is_allowed and wish.engine.device == "cpu"
            else Severity.WARNING
            if is_allowed
            else Severity.RED,
            host.name,
            wish.name,
            f"{name} {version} is older than {floor}"
            + (", which the inventory allows" if is_allowed else ""),
            tuple(advisories_for(version)),
            f"upgrade the environment to {VLLM_WANTED}; engine.allow_old_version accepts it on test machines",
            f"{program(software.python)} -m pip install --upgrade '{VLLM_WANTED}'",
            verify=(
                f'{program(software.python)} -c \'import importlib.metadata as m, re; v = m.version("{name}"); print(v); '
                f'raise SystemExit(tuple(map(int, re.findall(r"\\d+", v)[:3])) >= {VLLM_FLOOR})\''
            ),
            verify_on=host.name,
        )


CHECK = Check(CODE, "vLLM older than the floor", _judge)

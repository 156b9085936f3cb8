"""A package on the operator's machine is older than the release that fixes a published advisory. Pure."""

from collections.abc import Iterator

from dynctl.checks.advisories import CLIENT_FLOORS, release
from dynctl.checks.evidence import Evidence
from dynctl.checks.finding import Check, Finding, Severity
from dynctl.checks.shell import quote

CODE = "client-package-old"


def _judge(evidence: Evidence) -> Iterator[Finding]:
    for name, floor, why in CLIENT_FLOORS:
        version = evidence.local_packages.get(name)
        if version is None or release(version) >= floor:
            continue
        least = ".".join(map(str, floor))
        yield Finding(
            CODE,
            Severity.RED,
            None,
            name,
            f"{name} {version} on this machine has known faults, {least} has not",
            (why,),
            "upgrade it",
            f"{quote(evidence.python)} -m pip install --upgrade {quote(f'{name}>={least}')}",
            verify=(
                f'{quote(evidence.python)} -c \'import importlib.metadata as m, re; v = m.version("{name}"); print(v); '
                f'raise SystemExit(tuple(map(int, re.findall(r"\\d+", v)[:3])) >= {floor})\''
            ),
        )


CHECK = Check(CODE, "Package with an advisory here", _judge)

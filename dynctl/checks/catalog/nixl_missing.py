"""A prefill or decode engine has no NIXL, so KV blocks cannot be handed over. Pure."""

from collections.abc import Iterator

from dynctl.checks.advisories import NIXL, version_of
from dynctl.checks.evidence import Evidence
from dynctl.checks.finding import Check, Finding, Severity
from dynctl.checks.shell import program
from dynctl.core.plan import Role

CODE = "nixl-missing"


def _judge(evidence: Evidence) -> Iterator[Finding]:
    for host, wish, software in evidence.engines():
        wants = any(pool.role is not Role.AGGREGATED for pool in wish.pools) or evidence.is_split(
            host.name
        )
        if (
            not wants
            or software.python_version is None
            or software.error
            or version_of(software, NIXL)
        ):
            continue
        yield Finding(
            CODE,
            Severity.RED,
            host.name,
            wish.name,
            f"{software.python} has no NIXL: KV blocks cannot be handed from prefill to decode",
            (f"packages: {', '.join(name for name, _ in software.packages) or 'none'}",),
            "install it into that environment",
            f"{program(software.python)} -m pip install 'nixl>=1.5.1'",
            verify=f"{program(software.python)} -c 'import importlib.util as u; f = u.find_spec(\"nixl\"); print(f); raise SystemExit(f is not None)'",
            verify_on=host.name,
        )


CHECK = Check(CODE, "No NIXL for KV transfer", _judge)

"""A router sends requests by what engines cache, and a precondition does not hold on one: it is never hit. Pure."""

from collections.abc import Iterator

from dynctl.checks.evidence import Evidence, Need
from dynctl.checks.finding import Check, Finding, Severity
from dynctl.checks.shell import quote

CODE = "kv-hits-missing"


def _judge(evidence: Evidence) -> Iterator[Finding]:
    for found in evidence.cache_findings:
        root = evidence.roots.get(found.host_name, "")
        told = f'"engine":"{found.engine}","cause":"{found.cause}"'
        yield Finding(
            CODE,
            Severity.WARNING,
            found.host_name,
            found.engine,
            found.text,
            (f"{found.router} says: {found.cause}",),
            found.hint,
            verify=(
                f'curl -s -m 5 --unix-socket "$(cat {quote(root + "/agent.socket-path")})" '
                f"http://agent/v1/router/{quote(found.router)}/findings | grep -oF {quote(told)}"
            ),
            verify_on=found.host_name,
        )


CHECK = Check(CODE, "Engine whose cache is never hit", _judge, (Need.AGENTS,))

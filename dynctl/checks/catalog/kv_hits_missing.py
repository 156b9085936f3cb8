"""A router sends requests by what engines cache, and a precondition does not hold on one: it is hit less than it should be. Pure."""

from collections.abc import Iterator

from dynctl.checks.evidence import Evidence, Need
from dynctl.checks.finding import Check, Finding
from dynctl.checks.router_findings import told

CODE = "kv-hits-missing"


def _judge(evidence: Evidence) -> Iterator[Finding]:
    for found in evidence.cache_findings:
        if found.engine:
            yield told(evidence, CODE, found)


CHECK = Check(CODE, "Engine whose cache is not hit as it should be", _judge, (Need.AGENTS,))

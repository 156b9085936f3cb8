"""A router reports what is wrong with itself. Pure."""

from collections.abc import Iterator

from dynctl.checks.evidence import Evidence, Need
from dynctl.checks.finding import Check, Finding
from dynctl.checks.router_findings import told

CODE = "router-degraded"


def _judge(evidence: Evidence) -> Iterator[Finding]:
    for found in evidence.cache_findings:
        if not found.engine:
            yield told(evidence, CODE, found)


CHECK = Check(CODE, "Router cannot do all of its work, or not in time", _judge, (Need.AGENTS,))

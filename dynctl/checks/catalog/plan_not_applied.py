"""What runs comes from another plan than the one in the file. Pure."""

from collections.abc import Iterator

from dynctl.checks.evidence import Evidence, Need
from dynctl.checks.finding import Check, Finding, Severity
from dynctl.checks.shell import quote

CODE = "plan-not-applied"


def _judge(evidence: Evidence) -> Iterator[Finding]:
    wanted = evidence.plan.digest if evidence.plan else ""
    for name, status in (evidence.agents or {}).items():
        if not status.plan_digest or not wanted or status.plan_digest == wanted:
            continue
        yield Finding(
            CODE,
            Severity.INFO,
            name,
            "",
            f"runs plan {status.plan_digest}, the file has {wanted}",
            (f"generation {status.generation}",),
            "dynctl up brings the file's plan about",
            "dynctl up",
            verify=f"! grep -F {quote(wanted)} {quote(evidence.roots.get(name, '') + '/slice.json')}",
            verify_on=name,
        )


CHECK = Check(CODE, "Plan and cluster differ", _judge, (Need.PLAN, Need.AGENTS))

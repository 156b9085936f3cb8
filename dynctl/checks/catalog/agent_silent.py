"""A host of the running cluster has no agent that answers. Pure."""

from collections.abc import Iterator

from dynctl.checks.evidence import Evidence, Need
from dynctl.checks.finding import Check, Finding, Severity
from dynctl.checks.shell import quote

CODE = "agent-silent"


def _judge(evidence: Evidence) -> Iterator[Finding]:
    if not evidence.agents:
        return  # the cluster is not up: nothing is missing
    planned = {host.name for host in evidence.plan.hosts} if evidence.plan else set()
    for name, cause in evidence.silent_agents.items():
        if evidence.plan is not None and name not in planned:
            continue
        root = evidence.roots.get(name, "")
        yield Finding(
            CODE,
            Severity.RED,
            name,
            "agent",
            "no agent answers on this host, others do",
            (cause,),
            "dynctl up starts it again; engines go on running meanwhile",
            "dynctl up",
            verify=f"! pgrep -af {quote(f'[d]ynctl[.]agents --root {root}')}",
            verify_on=name,
        )


CHECK = Check(CODE, "Agent does not answer", _judge, (Need.AGENTS,))

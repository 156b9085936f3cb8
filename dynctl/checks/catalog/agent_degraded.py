"""An agent reports what it cannot do at the moment. Pure."""

from collections.abc import Iterator

from dynctl.checks.evidence import Evidence, Need
from dynctl.checks.finding import Check, Finding, Severity
from dynctl.checks.shell import quote

CODE = "agent-degraded"


def _judge(evidence: Evidence) -> Iterator[Finding]:
    for name, status in (evidence.agents or {}).items():
        for text in status.degraded:
            root = evidence.roots.get(name, "")
            yield Finding(
                CODE,
                Severity.WARNING,
                name,
                "agent",
                f"the agent reports: {text}",
                (f"pid {status.pid}",),
                "see its log; a full disk and taken rights are the usual causes",
                f"tail -n 50 {quote(root + '/logs/agent.log')}",
                verify=(
                    f'curl -s -m 5 --unix-socket "$(cat {quote(root + "/agent.socket-path")})" http://agent/v1/status '
                    '| grep -oE \'"degraded":\\["[^]]*\''
                ),
                verify_on=name,
            )


CHECK = Check(CODE, "Agent cannot do all of its work", _judge, (Need.AGENTS,))

"""A host's agent runs other code than this dynctl would install. Pure."""

from collections.abc import Iterator

from dynctl.checks.evidence import Evidence, Need
from dynctl.checks.finding import Check, Finding, Severity
from dynctl.checks.shell import quote

CODE = "agent-outdated"


def _judge(evidence: Evidence) -> Iterator[Finding]:
    for name, status in (evidence.agents or {}).items():
        wanted = evidence.bundles.get(name)
        if not wanted or status.bundle == wanted or not status.bundle:
            continue
        yield Finding(
            CODE,
            Severity.WARNING,
            name,
            "agent",
            f"the agent runs bundle {status.bundle}, this dynctl would install {wanted}",
            (f"agent's version {status.version}",),
            "bring it up to date; engines go on running while the agent is replaced",
            "dynctl up",
            verify=f"tr '\\0' '\\n' < /proc/{status.pid}/environ | grep '^PYTHONPATH=' | grep -v {quote(wanted)}",
            verify_on=name,
        )


CHECK = Check(CODE, "Agent runs another bundle", _judge, (Need.AGENTS,))

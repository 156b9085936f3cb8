"""What routers find, as findings of ours. Pure."""

from dynctl.checks.evidence import CacheFinding, Evidence
from dynctl.checks.finding import Finding, Severity
from dynctl.checks.shell import quote


def told(evidence: Evidence, code: str, found: CacheFinding) -> Finding:
    """Pass on what a router says; the proof asks it again."""
    root = evidence.roots.get(found.host_name, "")
    said = f'"engine":"{found.engine}","cause":"{found.cause}"'
    return Finding(
        code,
        Severity.WARNING,
        found.host_name,
        found.engine or found.router,
        found.text,
        (f"{found.router} says: {found.cause}",),
        found.hint,
        verify=(
            f'curl -s -m 5 --unix-socket "$(cat {quote(root + "/agent.socket-path")})" '
            f"http://agent/v1/router/{quote(found.router)}/findings | grep -oF {quote(said)}"
        ),
        verify_on=found.host_name,
    )

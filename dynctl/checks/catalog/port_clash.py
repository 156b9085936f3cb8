"""Another program listens on a port the plan needs. Pure."""

from collections.abc import Iterator

from dynctl.checks.evidence import Evidence, Need
from dynctl.checks.finding import Check, Finding, Severity
from dynctl.checks.ports import planned_ports
from dynctl.core.addresses import is_any

CODE = "port-clash"


def _judge(evidence: Evidence) -> Iterator[Finding]:
    for planned in planned_ports(evidence.plan):
        audit = evidence.audits.get(planned.host_name)
        own = evidence.roots.get(planned.host_name)
        for listener in audit.listeners if audit else ():
            if listener.port != planned.port or (own and listener.root == own):
                continue
            if listener.address != planned.address and not (
                is_any(listener.address) or is_any(planned.address)
            ):
                continue
            who = (
                f"pid {listener.pid} ({listener.program})"
                if listener.pid
                else "another user's process"
            )
            yield Finding(
                CODE,
                Severity.RED,
                planned.host_name,
                f"port {planned.port}",
                f"{who} listens on the port of the {planned.what}",
                (f"{listener.address}:{listener.port}",),
                "end that program, or choose other ports with ports.base or the router's listen, and plan again",
                verify=f"ss -Hltnp 'sport = :{planned.port}' | grep .",
                verify_on=planned.host_name,
            )
            break


CHECK = Check(CODE, "Planned port taken", _judge, (Need.PLAN, Need.AUDIT))

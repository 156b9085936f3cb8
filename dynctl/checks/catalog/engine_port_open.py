"""An inference engine listens for other machines on a port the plan does not name. Pure."""

from collections.abc import Iterator

from dynctl.checks.evidence import Evidence, Need
from dynctl.checks.finding import Check, Finding, Severity
from dynctl.checks.ports import is_open, is_planned

CODE = "engine-port-open"


def _judge(evidence: Evidence) -> Iterator[Finding]:
    for host, audit in evidence.audited():
        for listener in audit.listeners:
            if not (listener.is_engine or listener.root) or not is_open(listener):
                continue
            if listener.root not in ("", evidence.roots.get(host.name)):
                continue  # another cluster of dynctl has its own plan
            if is_planned(evidence, host.name, listener) or listener.port == 8265:
                continue
            yield Finding(
                CODE,
                Severity.RED,
                host.name,
                f"port {listener.port}",
                f"{listener.program or 'an engine'} listens for other machines, unplanned and without a key",
                (
                    f"{listener.address}:{listener.port}, pid {listener.pid}, user {listener.user or 'unknown'}",
                ),
                "bind it to 127.0.0.1 or a Unix socket and let the router be the only entrance; else close the port to others",
                verify=f"ss -Hltn 'sport = :{listener.port}' | grep -vE '(127\\.[0-9.]+|\\[::1\\]):{listener.port} '",
                verify_on=host.name,
            )


CHECK = Check(CODE, "Engine reachable from outside", _judge, (Need.AUDIT,))

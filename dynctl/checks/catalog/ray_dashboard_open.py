"""A Ray dashboard listens for other machines: anybody who reaches it runs code (CVE-2023-48022). Pure."""

from collections.abc import Iterator

from dynctl.checks.evidence import Evidence, Need
from dynctl.checks.finding import Check, Finding, Severity
from dynctl.checks.ports import is_open

CODE = "ray-dashboard-open"


def _judge(evidence: Evidence) -> Iterator[Finding]:
    for host, audit in evidence.audited():
        for listener in audit.listeners:
            if listener.port == 8265 and is_open(listener):
                yield Finding(
                    CODE,
                    Severity.RED,
                    host.name,
                    "port 8265",
                    "a Ray dashboard is reachable: whoever reaches it runs code here (CVE-2023-48022, CVE-2025-62593, CVE-2026-27482)",
                    (f"{listener.address}:8265, {listener.program or 'unknown program'}",),
                    "stop Ray, which dynctl does not use, or start it with --dashboard-host=127.0.0.1",
                    "ray stop",
                    verify="ss -Hltn 'sport = :8265' | grep -vE '(127\\.[0-9.]+|\\[::1\\]):8265 '",
                    verify_on=host.name,
                )
                break


CHECK = Check(CODE, "Ray dashboard reachable", _judge, (Need.AUDIT,))

"""The router's listen address is open to other machines and asks for no API key. Pure."""

from collections.abc import Iterator

from dynctl.checks.evidence import Evidence
from dynctl.checks.finding import Check, Finding, Severity
from dynctl.checks.ports import is_any, is_loopback_address
from dynctl.router.config import split_listen

CODE = "router-without-key"


def _judge(evidence: Evidence) -> Iterator[Finding]:
    for wish in evidence.inventory.deployments:
        host, port = split_listen(wish.router.listen)
        if is_loopback_address(host) or evidence.inventory.api_keys:
            continue
        address = "127.0.0.1" if is_any(host) else host
        scheme = "https" if wish.router.tls_cert else "http"
        target = f"[{address}]" if ":" in address else address
        planned = (
            next(
                (d.router.host_name for d in evidence.plan.deployments if d.name == wish.name), None
            )
            if evidence.plan
            else None
        )
        yield Finding(
            CODE,
            Severity.RED,
            planned,
            wish.name,
            f"its router listens on {wish.router.listen} and asks for no API key",
            (
                f"allow_insecure_listen: {str(wish.router.allow_insecure_listen).lower()}",
                "api_keys: none",
            ),
            "add api_keys to the inventory, or listen on 127.0.0.1; then dynctl up",
            verify=f"curl -sk -m 5 -o /dev/null -w '%{{http_code}}\\n' {scheme}://{target}:{port}/v1/models | grep -x 200",
            verify_on=planned,
        )


CHECK = Check(CODE, "Router open without a key", _judge)

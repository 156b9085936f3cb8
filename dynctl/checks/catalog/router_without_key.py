"""The router's listen address is open to other machines and asks for no API key. Pure."""

from collections.abc import Iterator

from dynctl.checks.evidence import Evidence
from dynctl.checks.finding import Check, Finding, Severity
from dynctl.checks.ports import entrance
from dynctl.core.addresses import is_loopback
from dynctl.router.config import split_listen

CODE = "router-without-key"


def _judge(evidence: Evidence) -> Iterator[Finding]:
    for wish in evidence.inventory.deployments:
        if is_loopback(split_listen(wish.router.listen)[0]) or evidence.inventory.api_keys:
            continue
        scheme = "https" if wish.router.tls_cert else "http"
        planned, at = entrance(evidence, wish)
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
            verify=f"curl -sk -m 5 -o /dev/null -w '%{{http_code}}\\n' {scheme}://{at}/v1/models | grep -x 200",
            verify_on=planned,
        )


CHECK = Check(CODE, "Router open without a key", _judge)

"""The router's listen address is open to other machines and speaks plain HTTP: keys and prompts can be read on the way. Pure."""

from collections.abc import Iterator

from dynctl.checks.evidence import Evidence
from dynctl.checks.finding import Check, Finding, Severity
from dynctl.checks.ports import entrance
from dynctl.core.addresses import is_loopback
from dynctl.router.config import split_listen

CODE = "router-without-tls"


def _judge(evidence: Evidence) -> Iterator[Finding]:
    for wish in evidence.inventory.deployments:
        if is_loopback(split_listen(wish.router.listen)[0]) or wish.router.tls_cert:
            continue
        planned, at = entrance(evidence, wish)
        yield Finding(
            CODE,
            Severity.WARNING,
            planned,
            wish.name,
            f"its router listens on {wish.router.listen} without TLS: keys and prompts travel in clear text",
            ("router.tls_cert: none",),
            "set router.tls_cert and router.tls_key, or put a TLS proxy in front and listen on 127.0.0.1",
            verify=f"curl -s -m 5 -o /dev/null -w '%{{http_code}}\\n' http://{at}/health | grep -vx 000",
            verify_on=planned,
        )


CHECK = Check(CODE, "Router open without TLS", _judge)

"""A deployment is routed by prefix, and its engines publish no KV events: hits are guessed or zero. Pure."""

from collections.abc import Iterator

from dynctl.checks.evidence import Evidence
from dynctl.checks.finding import Check, Finding, Severity
from dynctl.checks.shell import quote

CODE = "kv-events-missing"


def _judge(evidence: Evidence) -> Iterator[Finding]:
    for wish in evidence.inventory.deployments:
        if wish.router.policy != "kv":
            continue
        args = dict(wish.engine.args)
        if wish.engine.kind == "external" and "kv-events" not in args:
            text, fact = (
                "its adopted servers publish no KV events: they are routed by load only",
                "engine.args has no kv-events",
            )
            verify = f"! grep -n 'kv-events' {quote(evidence.inventory.path)}"
        elif (
            args.get("enable-prefix-caching", "").lower() == "false"
            or "no-enable-prefix-caching" in args
        ):
            text, fact = (
                "prefix caching is switched off: there is nothing to route by",
                "no-enable-prefix-caching",
            )
            verify = f"grep -nE 'enable.prefix.caching' {quote(evidence.inventory.path)}"
        else:
            continue
        yield Finding(
            CODE,
            Severity.WARNING,
            None,
            wish.name,
            text,
            (fact, "router.policy: kv"),
            "name the servers' ZMQ endpoints with engine.args kv-events and kv-replay, or choose another policy",
            verify=verify,
        )


CHECK = Check(CODE, "Routing by prefix without KV events", _judge)

"""The KV load failure policy is set to recompute: decode engines then stall everybody while they prefill. Pure."""

from collections.abc import Iterator

from dynctl.checks.evidence import Evidence
from dynctl.checks.finding import Check, Finding, Severity
from dynctl.checks.shell import quote

CODE = "kv-recompute-set"


def _judge(evidence: Evidence) -> Iterator[Finding]:
    for wish in evidence.inventory.deployments:
        said = [
            f"{name}={value}"
            for name, value in (*wish.engine.args, *wish.engine.env)
            if "recompute" in value.lower()
        ]
        if not said:
            continue
        yield Finding(
            CODE,
            Severity.WARNING,
            None,
            wish.name,
            "failed KV transfers are recomputed by the decode engine, which stalls its other streams",
            tuple(said),
            "leave the policy at `fail`: the router then prefills again where it disturbs nobody",
            verify=f"grep -niE 'recompute' {quote(evidence.inventory.path)}",
        )


CHECK = Check(CODE, "Failed transfers are recomputed in decode", _judge)

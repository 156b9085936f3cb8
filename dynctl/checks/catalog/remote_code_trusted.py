"""Code that comes with a model is run: whoever can change the model owns the hosts. Pure."""

from collections.abc import Iterator

from dynctl.checks.evidence import Evidence
from dynctl.checks.finding import Check, Finding, red_if
from dynctl.checks.shell import quote

CODE = "remote-code-trusted"


def _judge(evidence: Evidence) -> Iterator[Finding]:
    for wish in evidence.inventory.deployments:
        args = dict(wish.engine.args)
        if args.get("trust-remote-code", "false").lower() in ("false", "0"):
            continue
        yield Finding(
            CODE,
            red_if(wish.revision is None),
            None,
            wish.name,
            "code from the model's directory is run"
            + ("" if wish.revision else ", and no revision is pinned"),
            ("engine.args: trust-remote-code", "CVE-2026-22807, CVE-2026-27893, CVE-2025-66448"),
            "leave it out when the engine knows the architecture; else pin revision to a commit you have read",
            verify=f"grep -nE 'trust.remote.code' {quote(evidence.inventory.path)}",
        )


CHECK = Check(CODE, "Model code is trusted", _judge)

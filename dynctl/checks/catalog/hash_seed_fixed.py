"""PYTHONHASHSEED is fixed and the engine's block hash is the builtin one: tenants can make blocks collide. Pure."""

from collections.abc import Iterator

from dynctl.checks.evidence import Evidence
from dynctl.checks.finding import Check, Finding, Severity
from dynctl.checks.shell import quote

CODE = "hash-seed-fixed"


def _judge(evidence: Evidence) -> Iterator[Finding]:
    for wish in evidence.inventory.deployments:
        env, args = dict(wish.engine.env), dict(wish.engine.args)
        algorithm = args.get("prefix-caching-hash-algo", "sha256")
        if env.get("PYTHONHASHSEED", "random") == "random" or algorithm.startswith("sha256"):
            continue
        yield Finding(
            CODE,
            Severity.RED,
            None,
            wish.name,
            f"PYTHONHASHSEED is fixed with the block hash {algorithm}: others can make blocks collide",
            (
                f"PYTHONHASHSEED={env['PYTHONHASHSEED']}",
                f"prefix-caching-hash-algo={algorithm}",
                "CVE-2025-25183",
            ),
            "use sha256, or leave PYTHONHASHSEED out: the router does not need it",
            verify=f"grep -nE 'PYTHONHASHSEED|prefix-caching-hash-algo: *[\"'\"'\"']?builtin' {quote(evidence.inventory.path)}",
        )


CHECK = Check(CODE, "Predictable block hashes", _judge)

"""The router cannot see prompts as the engine does: the model's directory has no tokenizer.json. Pure."""

from collections.abc import Iterator

from dynctl.checks.evidence import Evidence, Need
from dynctl.checks.finding import Check, Finding, Severity
from dynctl.checks.shell import quote

CODE = "tokenizer-missing"


def _judge(evidence: Evidence) -> Iterator[Finding]:
    for planned in evidence.plan.deployments if evidence.plan else ():
        wish = evidence.wish(planned.name)
        if wish is None or planned.engine_kind != "vllm":
            continue
        host_name = (
            planned.router.host_name
            if wish.tokenizer
            else next(
                (r.host_name for pool in planned.pools for r in pool.replicas),
                planned.router.host_name,
            )
        )
        path = wish.tokenizer or planned.model
        audit = evidence.audits.get(host_name)
        files = next((m for m in audit.models if m.path == path), None) if audit else None
        if files is None or not files.exists or "tokenizer.json" in dict(files.sizes_bytes):
            continue
        yield Finding(
            CODE,
            Severity.RED,
            host_name,
            planned.name,
            f"no tokenizer.json in {path}: the router cannot route by prefix",
            (f"files: {', '.join(sorted(dict(files.sizes_bytes))[:10])}",),
            "put it beside the weights, or name a directory that has one with deployments[].tokenizer",
            verify=f'p={quote(path + "/tokenizer.json")}; [ ! -e "$p" ] && echo "$p is missing"',
            verify_on=host_name,
        )


CHECK = Check(CODE, "No tokenizer for the router", _judge, (Need.PLAN, Need.AUDIT))

"""A planned engine's host has no model at the path the inventory names. Pure."""

from collections.abc import Iterator

from dynctl.checks.evidence import Evidence, Need
from dynctl.checks.finding import Check, Finding, Severity
from dynctl.checks.shell import quote

CODE = "model-missing"


def _judge(evidence: Evidence) -> Iterator[Finding]:
    seen = set()
    parts = [
        (planned, replica.member_id(rank), member.host_name)
        for planned, _, replica in evidence.replicas()
        for rank, member in enumerate(replica.members)
    ]
    for planned, needed_by, host_name in parts:
        audit = evidence.audits.get(host_name)
        for files in audit.models if audit else ():
            key = host_name, planned.model
            if planned.engine_kind != "vllm" or files.path != planned.model or key in seen:
                continue
            seen.add(key)
            names = {name for name, _ in files.sizes_bytes}
            if files.exists and "config.json" in names:
                continue
            yield Finding(
                CODE,
                Severity.RED,
                host_name,
                planned.name,
                f"no model in {planned.model}"
                if not files.exists
                else f"no config.json in {planned.model}",
                (f"needed by {needed_by}", f"{len(names)} files there"),
                "copy the model there, or correct the path in the inventory",
                verify=f'p={quote(planned.model + "/config.json")}; [ ! -e "$p" ] && echo "$p is missing"',
                verify_on=host_name,
            )


CHECK = Check(CODE, "Model not on the host", _judge, (Need.PLAN, Need.AUDIT))

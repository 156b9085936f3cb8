"""An engine, router or relay gave up starting. Pure."""

from collections.abc import Iterator

from dynctl.checks.evidence import Evidence, Need
from dynctl.checks.finding import Check, Finding, Severity
from dynctl.checks.shell import quote
from dynctl.core.deployment import EngineState

CODE = "unit-failed"


def _judge(evidence: Evidence) -> Iterator[Finding]:
    for name, status in (evidence.agents or {}).items():
        for unit in status.units:
            if unit.state is not EngineState.FAILED:
                continue
            log = f"{evidence.roots.get(name, '')}/logs/{unit.id}.log"
            tag = (
                f"^DYNCTL_INCARNATION={unit.incarnation}$"
                if unit.incarnation
                else "^DYNCTL_INCARNATION=none$"
            )
            yield Finding(
                CODE,
                Severity.RED,
                name,
                unit.id,
                f"the {unit.kind} gave up after {unit.num_restarts} restarts",
                (unit.last_error or "no cause given",),
                "read its log, cure the cause, then dynctl up",
                f"tail -n 50 {quote(log)}",
                verify=f"tail -n 3 {quote(log)}; ! grep -lzs {quote(tag)} /proc/[0-9]*/environ",
                verify_on=name,
            )


CHECK = Check(CODE, "Unit gave up", _judge, (Need.AGENTS,))

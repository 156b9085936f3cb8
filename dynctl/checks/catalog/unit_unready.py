"""An engine has been starting for long, or a planned one is not there. Pure."""

from collections.abc import Iterator

from dynctl.checks.evidence import Evidence, Need
from dynctl.checks.finding import Check, Finding, Severity
from dynctl.checks.shell import quote, where
from dynctl.core.deployment import EngineState

CODE = "unit-unready"


_LONG_S = 1800


def _judge(evidence: Evidence) -> Iterator[Finding]:
    for name, status in (evidence.agents or {}).items():
        root = evidence.roots.get(name, "")
        units = {unit.id: unit for unit in status.units}
        for replica in evidence.replicas_on(name):
            unit = units.get(replica.id)
            is_old = (
                unit and unit.started_unix_s and evidence.now_unix_s - unit.started_unix_s > _LONG_S
            )
            if unit is not None and not (unit.state is EngineState.STARTING and is_old):
                continue
            yield Finding(
                CODE,
                Severity.WARNING,
                name,
                replica.id,
                "planned, and the agent has no such engine"
                if unit is None
                else "starting for more than half an hour",
                (
                    f"agent's plan {status.plan_digest or 'none'}",
                    *([unit.last_error] if unit and unit.last_error else []),
                ),
                "dynctl up brings the plan about"
                if unit is None
                else "see at which stage it stands in its log",
                "dynctl up"
                if unit is None
                else f"tail -n 50 {quote(f'{root}/logs/{replica.id}.log')}",
                verify=(
                    f"! grep -F '\"{replica.id}\"' {quote(root + '/slice.json')}"
                    if unit is None
                    else f"ps -o etimes= -p {unit.pid or 0} | {where(f'$1 > {_LONG_S}')}"
                ),
                verify_on=name,
            )


CHECK = Check(CODE, "Unit not ready", _judge, (Need.PLAN, Need.AGENTS))

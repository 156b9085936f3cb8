"""An engine, router or relay dies and is started again, repeatedly. Pure."""

from collections.abc import Iterator

from dynctl.checks.evidence import Evidence, Need
from dynctl.checks.finding import Check, Finding, red_if
from dynctl.checks.shell import quote
from dynctl.core.deployment import EngineState
from dynctl.core.units import format_seconds

CODE = "unit-restarting"


def _judge(evidence: Evidence) -> Iterator[Finding]:
    for name, status in (evidence.agents or {}).items():
        for unit in status.units:
            if unit.num_restarts < 3 or unit.state is EngineState.FAILED:
                continue
            log = f"{evidence.roots.get(name, '')}/logs/{unit.id}.log"
            age = evidence.now_unix_s - (unit.started_unix_s or evidence.now_unix_s)
            since = max(60, int(evidence.now_unix_s - status.started_unix_s))
            yield Finding(
                CODE,
                red_if(unit.state is not EngineState.READY),
                name,
                unit.id,
                f"the {unit.kind} was restarted {unit.num_restarts} times",
                (
                    unit.last_error or "no cause given",
                    f"state {unit.state.value}, up {format_seconds(max(age, 0))}",
                ),
                "read its log around the last end",
                f"tail -n 100 {quote(log)}",
                # Gone, or younger than the agent that has been looking after it.
                verify=f't=$(ps -o etimes= -p {unit.pid or 0}); echo "up ${{t:-0}} s"; [ "${{t:-0}}" -lt {since} ]',
                verify_on=name,
            )


CHECK = Check(CODE, "Unit starts again and again", _judge, (Need.AGENTS,))

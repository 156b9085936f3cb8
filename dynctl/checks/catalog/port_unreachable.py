"""A host cannot connect to a port of another host that requests or KV blocks need. Pure."""

from collections.abc import Iterator

from dynctl.checks.evidence import Evidence, Need
from dynctl.checks.finding import Check, Finding, Severity
from dynctl.checks.shell import quote
from dynctl.core.deployment import EngineState

CODE = "port-unreachable"


def _judge(evidence: Evidence) -> Iterator[Finding]:
    for host, audit in evidence.audited():
        for reach in audit.reaches:
            runs = _runs(evidence, reach.host_name, reach.target)
            if reach.outcome in ("open", "untried") or (reach.outcome == "refused" and not runs):
                continue
            is_dropped = reach.outcome in ("timeout", "unreachable")
            line = f"timeout 3 bash -c '</dev/tcp/{quote(reach.address)}/{reach.port}'"
            yield Finding(
                CODE,
                Severity.RED,
                host.name,
                f"{reach.address}:{reach.port}",
                f"cannot connect to the {reach.target} on {reach.host_name}: {reach.outcome}",
                (reach.detail or reach.outcome,),
                f"a firewall drops the packets; on {reach.host_name}, as root: "
                f"iptables -I INPUT -p tcp -s {quote(evidence.data_address(host))} --dport {reach.port} -j ACCEPT (and in its permanent rules)"
                if is_dropped
                else f"nothing listens there although it should: dynctl logs on {reach.host_name}",
                verify=f"if {line}; then false; else echo 'no connection'; fi",
                verify_on=host.name,
            )


def _runs(evidence: Evidence, host_name: str, target: str) -> bool:
    """Whether the agent says that what should listen there is up."""
    status = (evidence.agents or {}).get(host_name)
    units = status.units if status else ()
    return any(
        unit.state is EngineState.READY and (unit.kind in target or target.endswith(f" {unit.id}"))
        for unit in units
    )


CHECK = Check(CODE, "Relay or transfer port not reachable", _judge, (Need.AUDIT,))

"""NIXL is installed in an engine's environment and does not load, or not with its UCX plugin. Pure."""

from collections.abc import Iterator

from dynctl.checks.evidence import Evidence, Need
from dynctl.checks.finding import Check, Finding, red_if
from dynctl.checks.shell import program, quote

CODE = "nixl-broken"


def _judge(evidence: Evidence) -> Iterator[Finding]:
    for host, audit in evidence.audited():
        for load in audit.nixl:
            if load.outcome in ("works", "timeout"):
                continue  # a busy host is slow to load it: that proves nothing
            text = 'from nixl._api import nixl_agent, nixl_agent_config; nixl_agent("check", nixl_agent_config(backends=["UCX"]))'
            yield Finding(
                CODE,
                red_if(evidence.plan is None or evidence.is_split(host.name)),
                host.name,
                load.python,
                "NIXL does not load with its UCX plugin: no KV block can be handed over"
                if load.outcome == "failed"
                else f"loading NIXL with its UCX plugin was {load.outcome}",
                (load.detail or load.outcome,),
                "install the NIXL build for this CUDA and C library into the engine's own environment, and nothing else of UCX",
                f"{program(load.python)} -m pip install --force-reinstall nixl",
                verify=f"! timeout 60 {program(load.python)} -c {quote(text)}",
                verify_on=host.name,
            )


CHECK = Check(CODE, "NIXL does not load", _judge, (Need.AUDIT,))

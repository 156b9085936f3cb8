"""KV blocks will travel over links that were never measured. Pure."""

from collections.abc import Iterator

from dynctl.checks.evidence import Evidence, Need
from dynctl.checks.finding import Check, Finding, Severity
from dynctl.checks.shell import quote

CODE = "link-unmeasured"


def _judge(evidence: Evidence) -> Iterator[Finding]:
    measured = {
        (m.source_name, m.target_name) for m in evidence.topology.links if m.points or m.error
    }
    for source, target in evidence.transfers_between_hosts():
        if (source, target) in measured:
            continue
        yield Finding(
            CODE,
            Severity.INFO,
            source,
            target,
            f"the link to {target} was never measured: predictions for it are nominal",
            ("no linktest result",),
            "measure it: dynctl linktest",
            "dynctl linktest",
            # The measurements are a file of the operator's; the pair is in it or not.
            verify=(
                f'! grep -s -A 1 \'"source_name": "{source}"\' {quote(_state(evidence))} '
                f'| grep \'"target_name": "{target}"\''
            ),
        )


def _state(evidence: Evidence) -> str:
    return f"{evidence.state_dir}/links.json"


CHECK = Check(CODE, "Link between pools never measured", _judge, (Need.PLAN, Need.PEERS))

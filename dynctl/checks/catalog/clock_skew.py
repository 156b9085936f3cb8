"""A host's clock differs from the operator's: certificates and the order of logs suffer. Pure."""

from collections.abc import Iterator

from dynctl.checks.evidence import Evidence
from dynctl.checks.finding import Check, Finding, red_if
from dynctl.checks.shell import on_host, root_line, where
from dynctl.core.tolerances import MAX_SKEW_S, is_off

CODE = "clock-skew"


def _judge(evidence: Evidence) -> Iterator[Finding]:
    for host in evidence.topology.hosts:
        clock = host.clock
        if clock is None or not is_off(clock):
            continue
        yield Finding(
            CODE,
            red_if(abs(clock.skew_s) > 240),
            host.name,
            "",
            f"its clock is {abs(clock.skew_s):.1f} s {'ahead' if clock.skew_s > 0 else 'behind'}",
            (f"skew {clock.skew_s:+.2f} s ± {clock.error_s:.2f} s; certificates allow 300 s",),
            "let it follow a time server",
            root_line(host, "timedatectl", "set-ntp", "true"),
            verify=(
                f"echo $(( $({on_host(evidence.entry(host), 'date +%s')}) - $(date +%s) )) | "
                + where(f"$1 >= {MAX_SKEW_S:g} || $1 <= -{MAX_SKEW_S:g}")
            ),
        )


CHECK = Check(CODE, "Clocks differ", _judge)

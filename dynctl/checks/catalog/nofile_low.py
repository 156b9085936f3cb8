"""Routers and relays run out of file descriptors: every stream takes two. Pure."""

from collections.abc import Iterator

from dynctl.checks.evidence import Evidence
from dynctl.checks.finding import Check, Finding, red_if
from dynctl.checks.limits import limits_of
from dynctl.core.machine import UNLIMITED

CODE = "nofile-low"


def _judge(evidence: Evidence) -> Iterator[Finding]:
    for host in evidence.topology.hosts:
        source = limits_of(evidence, host)
        value = source.limits.nofile
        if value is None or value == UNLIMITED or value >= _LEAST:
            continue
        yield Finding(
            CODE,
            red_if(value < 1024),
            host.name,
            "",
            f"{value} open files allowed: every stream through router and relay takes two",
            (f"nofile of {source.whose}: {value}",),
            f"raise it {source.where_to_set(host)}, log in anew and run dynctl up (running sessions keep their limits)",
            source.cure(host, "nofile 1048576", "LimitNOFILE=1048576"),
            verify=source.proof(
                "Max open files",
                "DefaultLimitNOFILE",
                f'VALUE != "unlimited" && VALUE != "infinity" && VALUE < {_LEAST}',
            ),
            verify_on=host.name,
        )


_LEAST = 4096


CHECK = Check(CODE, "Few open files allowed", _judge)

"""The SSH server allows fewer sessions on one connection than dynctl opens. Pure."""

from collections.abc import Iterator

from dynctl.checks.evidence import Evidence, Need
from dynctl.checks.finding import Check, Finding, red_if
from dynctl.checks.shell import root_line, where

CODE = "sshd-sessions-few"


_LEAST = 8


def _judge(evidence: Evidence) -> Iterator[Finding]:
    for host in evidence.topology.hosts:
        value = host.sshd.max_sessions
        if value is None or value >= _LEAST or host.is_local:
            continue
        yield Finding(
            CODE,
            red_if(value < 3),
            host.name,
            "sshd",
            f"MaxSessions {value}: dynctl runs up to {_LEAST} at once over one connection",
            (f"MaxSessions {value}",),
            "raise MaxSessions in /etc/ssh/sshd_config (10 is its default) and reload sshd",
            verify=f"{root_line(host, 'sshd', '-T')} | "
            + where(f'$1 == "maxsessions" && $2 < {_LEAST}'),
            verify_on=host.name,
        )


CHECK = Check(CODE, "SSH server allows few sessions", _judge, (Need.SSH,))

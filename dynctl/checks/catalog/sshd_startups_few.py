"""The SSH server starts to drop connections when few are being set up at once. Pure."""

from collections.abc import Iterator

from dynctl.checks.evidence import Evidence, Need
from dynctl.checks.finding import Check, Finding, Severity
from dynctl.checks.shell import root_line
from dynctl.core.units import whole

CODE = "sshd-startups-few"


_LEAST = 10


def _judge(evidence: Evidence) -> Iterator[Finding]:
    for host in evidence.topology.hosts:
        text = host.sshd.max_startups
        start = whole(text.partition(":")[0]) if text else None
        if start is None or start >= _LEAST or host.is_local:
            continue
        yield Finding(
            CODE,
            Severity.WARNING,
            host.name,
            "sshd",
            f"MaxStartups {text}: logins are dropped when {start} others are being set up",
            (f"MaxStartups {text}",),
            "set MaxStartups 10:30:100 (its default) or higher in /etc/ssh/sshd_config and reload sshd; a jump host needs more",
            verify=(
                f'{root_line(host, "sshd", "-T")} | awk \'$1 == "maxstartups" '
                f'{{ split($2, a, ":"); if (a[1] < {_LEAST}) {{ print; n++ }} }} END {{ exit !n }}\''
            ),
            verify_on=host.name,
        )


CHECK = Check(CODE, "SSH server drops logins", _judge, (Need.SSH,))

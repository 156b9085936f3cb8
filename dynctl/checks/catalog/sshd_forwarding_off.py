"""The SSH server forbids forwarding to Unix sockets, which is how dynctl reaches its agents. Pure."""

from collections.abc import Iterator

from dynctl.checks.evidence import Evidence, Need
from dynctl.checks.finding import Check, Finding, Severity
from dynctl.checks.shell import root_line

CODE = "sshd-forwarding-off"


def _judge(evidence: Evidence) -> Iterator[Finding]:
    for host in evidence.topology.hosts:
        if host.sshd.allows_forwarding is not False or host.is_local:
            continue
        yield Finding(
            CODE,
            Severity.RED,
            host.name,
            "sshd",
            "forwarding to Unix sockets is forbidden: dynctl cannot reach its agent",
            ("AllowStreamLocalForwarding no, or DisableForwarding yes",),
            "set AllowStreamLocalForwarding yes (or local) in /etc/ssh/sshd_config, for this user at least, and reload sshd",
            verify=f"{root_line(host, 'sshd', '-T')} | grep -iE '^(allowstreamlocalforwarding (no|remote)|disableforwarding yes)'",
            verify_on=host.name,
        )


CHECK = Check(CODE, "SSH server forbids forwarding", _judge, (Need.SSH,))

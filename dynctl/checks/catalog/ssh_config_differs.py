"""OpenSSH's client would reach a host otherwise than dynctl does. Pure."""

from collections.abc import Iterator

from dynctl.checks.evidence import Evidence
from dynctl.checks.finding import Check, Finding, Severity
from dynctl.checks.shell import quote

CODE = "ssh-config-differs"


def _judge(evidence: Evidence) -> Iterator[Finding]:
    config = evidence.inventory.ssh.config
    flag = f" -F {quote(config)}" if config and config != "~/.ssh/config" else ""
    for difference in evidence.ssh_differences:
        entry = evidence.inventory.host(difference.host_name)
        yield Finding(
            CODE,
            Severity.WARNING,
            difference.host_name,
            difference.keyword,
            f"ssh would use {difference.keyword} {difference.theirs or 'none'}, dynctl uses {difference.ours or 'none'}",
            (f"ssh -G {entry.address}",),
            "set it for this host in the inventory if ssh is right; see which Match or Include of the configuration differs",
            verify=f"ssh{flag} -G {quote(entry.address)} | grep -i {quote(f'^{difference.keyword} ')} | grep -vixF {quote(f'{difference.keyword} {difference.ours}')}",
        )


CHECK = Check(CODE, "ssh would connect otherwise", _judge)

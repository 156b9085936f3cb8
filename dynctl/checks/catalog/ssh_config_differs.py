"""OpenSSH's client would reach a host otherwise than dynctl does. Pure."""

from collections.abc import Iterator

from dynctl.checks.evidence import Evidence
from dynctl.checks.finding import Check, Finding, Severity
from dynctl.checks.shell import join, quote

CODE = "ssh-config-differs"


def _judge(evidence: Evidence) -> Iterator[Finding]:
    for difference in evidence.ssh_differences:
        ours, theirs = difference.ours or "none", difference.theirs or "none"
        keyword = quote(f"^{difference.keyword} ")
        same = quote(f"{difference.keyword} {ours}")
        yield Finding(
            CODE,
            Severity.WARNING,
            difference.host_name,
            difference.keyword,
            f"ssh would use {difference.keyword} {theirs}, dynctl uses {ours}",
            (join(difference.argv),),
            "set it for this host in the inventory if ssh is right; else see which part of the configuration ssh reads and dynctl does not",
            verify=f"{join(difference.argv)} | grep -i {keyword} | grep -vixF -e {same}",
        )


CHECK = Check(CODE, "ssh would connect otherwise", _judge)

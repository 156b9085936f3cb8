"""Keys or secrets of the cluster can be read by other users of a host. Pure."""

from collections.abc import Iterator

from dynctl.checks.evidence import Evidence, Need
from dynctl.checks.finding import Check, Finding, Severity
from dynctl.checks.shell import join, quote

CODE = "host-file-open"


def _judge(evidence: Evidence) -> Iterator[Finding]:
    for host, audit in evidence.audited():
        for file in audit.files:
            if not file.mode & 0o077:
                continue
            yield Finding(
                CODE,
                Severity.RED,
                host.name,
                file.path,
                "other users of the host may read or write it",
                (f"mode {file.mode:04o}, uid {file.uid}",),
                "close it; dynctl down and up make new keys if it stood open for long",
                join(("chmod", "go-rwx", file.path)),
                ("chmod", "go-rwx", file.path),
                verify=f"find {quote(file.path)} -maxdepth 0 -perm /077 -printf '%m %p\\n' | grep .",
                verify_on=host.name,
            )


CHECK = Check(CODE, "Private file readable on a host", _judge, (Need.AUDIT,))

"""Others on this machine can read or write an SSH key or the cluster's own key. Pure."""

from collections.abc import Iterator

from dynctl.checks.evidence import Evidence
from dynctl.checks.finding import Check, Finding, Severity
from dynctl.checks.shell import join, quote

CODE = "ssh-key-open"


def _judge(evidence: Evidence) -> Iterator[Finding]:
    for file in evidence.local_files:
        if file.kind in ("ssh key", "state") and file.mode & 0o077:
            yield Finding(
                CODE,
                Severity.RED,
                None,
                file.path,
                f"a private {'key' if file.kind == 'ssh key' else 'file of the cluster'} others may read",
                (f"mode {file.mode:04o}",),
                "close it; if others use this machine, make a new one",
                join(("chmod", "600", file.path)),
                ("chmod", "600", file.path),
                verify=f"find {quote(file.path)} -perm /077 -printf '%m %p\\n' | grep .",
            )


CHECK = Check(CODE, "SSH key readable by others", _judge)

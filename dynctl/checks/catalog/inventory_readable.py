"""The inventory holds a secret in clear text and others on this machine can read it. Pure."""

from collections.abc import Iterator

from dynctl.checks.evidence import Evidence
from dynctl.checks.finding import Check, Finding, Severity
from dynctl.checks.shell import join, quote

CODE = "inventory-readable"


def _judge(evidence: Evidence) -> Iterator[Finding]:
    for file in evidence.local_files:
        if file.kind == "inventory" and file.has_secret and file.mode & 0o077:
            yield Finding(
                CODE,
                Severity.RED,
                None,
                file.path,
                "holds a secret in clear text and others may read it",
                (f"mode {file.mode:04o}",),
                "put the secret elsewhere and write ${env:NAME} or ${file:PATH}; until then, close the file",
                join(("chmod", "600", file.path)),
                ("chmod", "600", file.path),
                verify=f"find {quote(file.path)} -perm /077 -printf '%m %p\\n' | grep .",
            )


CHECK = Check(CODE, "Secrets readable by others", _judge)

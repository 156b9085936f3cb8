"""The inventory, or a file it takes a secret from, holds one in clear text, and others on this machine can read it. Pure."""

from collections.abc import Iterator

from dynctl.checks.evidence import Evidence
from dynctl.checks.finding import Check, Finding, Severity
from dynctl.checks.shell import join, quote

CODE = "inventory-readable"
_FIXES = {
    "inventory": "put the secret elsewhere and write ${env:NAME} or ${file:PATH}; until then, close the file",
    "secret": "close the file; if others use this machine, make a new secret",
}


def _judge(evidence: Evidence) -> Iterator[Finding]:
    for file in evidence.local_files:
        if file.kind in _FIXES and file.has_secret and file.mode & 0o077:
            yield Finding(
                CODE,
                Severity.RED,
                None,
                file.path,
                "holds a secret in clear text and others may read it",
                (f"mode {file.mode:04o}",),
                _FIXES[file.kind],
                join(("chmod", "600", file.path)),
                ("chmod", "600", file.path),
                verify=f"find {quote(file.path)} -perm /077 -printf '%m %p\\n' | grep .",
            )


CHECK = Check(CODE, "Secrets readable by others", _judge)

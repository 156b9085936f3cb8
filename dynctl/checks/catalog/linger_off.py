"""The agent runs as a user's unit and that user does not linger: it ends at logout and does not start at boot. Pure."""

from collections.abc import Iterator

from dynctl.checks.evidence import Evidence
from dynctl.checks.finding import Check, Finding, Severity

CODE = "linger-off"


def _judge(evidence: Evidence) -> Iterator[Finding]:
    for host in evidence.topology.hosts:
        if host.is_local or host.is_root or not host.has_systemd_system or host.has_linger:
            continue
        yield Finding(
            CODE,
            Severity.WARNING,
            host.name,
            "",
            "without linger the agent and its engines end at logout and do not come back after a reboot",
            ("no file in /var/lib/systemd/linger",),
            "let the user linger (or log in as root)",
            "loginctl enable-linger",
            ("loginctl", "enable-linger"),
            verify='u=$(id -un); [ ! -e "/var/lib/systemd/linger/$u" ] && echo "$u does not linger"',
            verify_on=host.name,
        )


CHECK = Check(CODE, "User units end at logout", _judge)

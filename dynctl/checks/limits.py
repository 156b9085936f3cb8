"""Which resource limits engines on a host get, from where, and how to see them. Pure."""

from dataclasses import dataclass

from dynctl.checks.evidence import Evidence
from dynctl.checks.shell import root_line, where
from dynctl.core.hardware import Host
from dynctl.core.machine import Limits, LimitsOf

_MANAGER = "XDG_RUNTIME_DIR=/run/user/$(id -u) systemctl --user show -p"


@dataclass(frozen=True, slots=True)
class Source:
    """Limits and whose they are."""

    limits: Limits
    whose: LimitsOf
    pid: str = "self"
    """Whose /proc file shows them."""

    def where_to_set(self, host: Host) -> str:
        """The place these limits come from, in words."""
        if self._is_of_systemd(host):
            return "for the user's service manager (limits.d has no effect on it)"
        return "for this user in /etc/security/limits.d (a line for `*` would not count for root)"

    def cure(self, host: Host, item: str, setting: str) -> str:
        """A line that lifts a limit: `item` as limits.d writes it, `setting` as systemd does."""
        name = setting.partition("=")[0].lower()
        if self._is_of_systemd(host):
            folder = "/etc/systemd/system/user@.service.d"
            text = f"mkdir -p {folder} && printf '[Service]\\n{setting}\\n' > {folder}/dynctl-{name}.conf && systemctl daemon-reload"
            return root_line(host, "sh", "-c", text)
        file = root_line(host, "tee", f"/etc/security/limits.d/90-dynctl-{name}.conf")
        return f'echo "$(id -un) - {item}" | {file}'

    def _is_of_systemd(self, host: Host) -> bool:
        is_users = host.has_systemd_user and not host.is_root
        return self.whose is LimitsOf.USER_UNITS or (self.whose is LimitsOf.AGENT and is_users)

    def proof(self, name: str, variable: str, condition: str) -> str:
        """A line that shows a limit while it is below something.

        `name` is its name in /proc/PID/limits, `variable` its name in systemd; `condition` is on VALUE.
        """
        if self.whose is LimitsOf.USER_UNITS:
            return f"{_MANAGER} {variable} | {where(condition.replace('VALUE', '$2')).replace('awk', 'awk -F=', 1)}"
        test = condition.replace("VALUE", "$(NF - 2)")
        return where(f"/^{name}/ && {test}", f"/proc/{self.pid}/limits")


def limits_of(evidence: Evidence, host: Host) -> Source:
    """The limits of a running agent, else those an agent would get."""
    whose, limits = host.engine_limits
    status = (evidence.agents or {}).get(host.name)
    is_own = whose is LimitsOf.AGENT and status is not None
    return Source(limits, whose, str(status.pid) if status and is_own else "self")

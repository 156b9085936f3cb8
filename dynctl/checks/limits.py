"""Which resource limits engines on a host get, from where, and how to see them. Pure."""

from dataclasses import dataclass

from dynctl.checks.evidence import Evidence
from dynctl.checks.shell import where
from dynctl.core.hardware import Host
from dynctl.core.machine import UNLIMITED, Limits

_LOGIN, _UNITS = "a login session, which the agent inherits", "the user's systemd units"
_MANAGER = "XDG_RUNTIME_DIR=/run/user/$(id -u) systemctl --user show -p"


@dataclass(frozen=True, slots=True)
class Source:
    """Limits and whose they are."""

    limits: Limits
    whose: str
    pid: str = "self"
    """Whose /proc file shows them."""

    def proof(self, name: str, variable: str, condition: str) -> str:
        """A line that shows a limit while it is below something.

        `name` is its name in /proc/PID/limits, `variable` its name in systemd; `condition` is on VALUE.
        """
        if self.whose == _UNITS:
            return f"{_MANAGER} {variable} | {where(condition.replace('VALUE', '$2')).replace('awk', 'awk -F=', 1)}"
        test = condition.replace("VALUE", "$(NF - 2)")
        return where(f"/^{name}/ && {test}", f"/proc/{self.pid}/limits")


def limits_of(evidence: Evidence, host: Host) -> Source:
    """The limits of a running agent, else those an agent would get."""
    status = (evidence.agents or {}).get(host.name)
    if host.agent_limits != Limits():
        return Source(host.agent_limits, "the running agent", str(status.pid) if status else "self")
    if host.is_root and host.has_systemd_system and not host.is_local:
        # Our own unit file asks for these.
        return Source(Limits(UNLIMITED, 1048576), "the agent's unit")
    if host.has_systemd_user and not host.is_root and host.unit_limits != Limits():
        return Source(host.unit_limits, _UNITS)
    return Source(host.session_limits, _LOGIN)

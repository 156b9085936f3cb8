"""Which resource limits engines on a host get, from where, and how to see them. Pure."""

from dataclasses import dataclass

from dynctl.checks.evidence import Evidence
from dynctl.checks.shell import where
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

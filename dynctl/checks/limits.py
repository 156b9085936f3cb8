"""Which resource limits engines on a host get, and from where. Pure."""

from dynctl.checks.evidence import Evidence
from dynctl.core.hardware import Host
from dynctl.core.machine import UNLIMITED, Limits


def limits_of(evidence: Evidence, host: Host) -> tuple[Limits, str, str]:
    """Limits, whose they are, and the pid (or `self`) whose /proc file shows them."""
    status = (evidence.agents or {}).get(host.name)
    if host.agent_limits != Limits():
        return host.agent_limits, "the running agent", str(status.pid) if status else "self"
    if host.is_root and host.has_systemd_system and not host.is_local:
        # Our own unit file asks for these.
        return Limits(UNLIMITED, 1048576), "the agent's unit", "self"
    if host.has_systemd_user and not host.is_root and host.unit_limits != Limits():
        return host.unit_limits, "the user's systemd units", "self"
    return host.session_limits, "a login session, which the agent inherits", "self"

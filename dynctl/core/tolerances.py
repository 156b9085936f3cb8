"""How far facts of a host may be off before they are faults: judged alike by discovery and by `doctor`.

Not here: what to say of a fault (`discovery.rules`, `checks.catalog`).
Pure.
"""

from dynctl.core.hardware import Host, Nic
from dynctl.core.machine import UNLIMITED, Clock

MAX_SKEW_S = 2.0
"""Between a host's clock and the operator's. Logging in takes up to a second, and shows as skew to who compares by hand."""
MANY_LINK_LOSSES = 10
"""Since boot or the driver's start: more than switches restarted and cables changed. Older firmware counts to 255."""


def is_off(clock: Clock | None) -> bool:
    """Whether a clock surely differs by too much."""
    return clock is not None and abs(clock.skew_s) - clock.error_s >= MAX_SKEW_S


def is_flapping(nic: Nic) -> bool:
    """Whether a port that is up has lost its link again and again."""
    return nic.state == "up" and (nic.num_link_downed or 0) >= MANY_LINK_LOSSES


def low_memlock_bytes(host: Host) -> int | None:
    """How much memory engines may lock, where that is less than there is to register with RDMA devices; None: enough."""
    limit = host.engine_limits[1].memlock_bytes
    has_rdma = any(nic.kind != "ethernet" for nic in host.nics)
    if not has_rdma or limit is None or limit == UNLIMITED:
        return None
    return None if host.memory_bytes and limit >= host.memory_bytes else limit

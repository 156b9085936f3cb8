"""The host itself: Python, limits, disk, addresses, clock. Pure."""

from dynctl.core.addresses import is_public
from dynctl.core.tolerances import is_off, low_memlock_bytes
from dynctl.core.units import GIB, format_bytes
from dynctl.discovery.facts import SystemFacts
from dynctl.discovery.rules.case import Case, Found, Rule

_MIN_DISK_BYTES = 2 * GIB


def programs(case: Case) -> Found:
    """What our own programs need there."""
    host = case.host
    if case.found.fact("system", SystemFacts) is None:
        return
    if host.python is None:
        wanted = (
            f"{case.entry.python} is not one"
            if case.entry.python
            else "none found on the usual paths"
        )
        yield (
            "no-python",
            f"no Python ≥ 3.11 ({wanted}): install one, or name it with python: in the inventory",
        )
    if not host.platform:
        yield "platform-unknown", "libc unknown: wheels for this host cannot be chosen"
    if not host.is_local and not host.is_root and host.has_systemd_system and not host.has_linger:
        yield (
            "no-linger",
            "without linger user units end at logout: run `loginctl enable-linger` on the host",
        )
    for engine in host.software.engines:
        if engine.error:
            yield "engine-python", f"{engine.python} does not run: {engine.error}"


def login(case: Case) -> Found:
    """A login shell that talks to programs."""
    if case.found.login_noise is not None:
        yield (
            "login-noisy",
            f"the login shell prints before commands run ({case.found.login_noise!r}): harmless here, but it breaks scp and kin; let rc files print at terminals only",
        )


def limits(case: Case) -> Found:
    """What the host gives less of than it has."""
    host = case.host
    system = case.found.fact("system", SystemFacts)
    if system is not None:
        if system.num_cpus < system.num_cpus_nominal:
            yield (
                "cpus-limited",
                f"{system.num_cpus} of {system.num_cpus_nominal} CPUs may be used (control group or affinity)",
            )
        if system.memory_bytes < system.memory_nominal_bytes:
            yield (
                "memory-limited",
                f"{format_bytes(system.memory_bytes)} of {format_bytes(system.memory_nominal_bytes)} memory may be used (control group)",
            )
    if host.disk_free_bytes is not None and host.disk_free_bytes < _MIN_DISK_BYTES:
        yield (
            "disk-low",
            f"only {format_bytes(host.disk_free_bytes)} free where dynctl keeps its files",
        )
    memlock = low_memlock_bytes(host)
    if memlock is not None:
        yield (
            "memlock-low",
            f"locked memory is limited to {format_bytes(memlock)}: RDMA cannot register KV memory; raise memlock",
        )


def addresses(case: Case) -> Found:
    """Addresses nobody outside should reach, and clocks that differ."""
    host = case.host
    if is_public(host.data_address):
        yield (
            "public-address",
            f"the data address {host.data_address} is public: set data_address to a private one",
        )
    clock = host.clock
    if clock is not None and is_off(clock):
        yield (
            "clock-skew",
            f"its clock is {abs(clock.skew_s):.1f} s {'ahead of' if clock.skew_s > 0 else 'behind'} this machine's (± {clock.error_s:.1f} s)",
        )


RULES: tuple[Rule, ...] = (login, programs, limits, addresses)

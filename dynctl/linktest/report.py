"""One run of `linktest`, from discovered hosts to a report: who can measure what, the measuring, the warnings. IO: hosts."""

import time
from collections.abc import Callable, Sequence

from dynctl.core.hardware import Host, HostFailure, Topology
from dynctl.core.inventory import Inventory
from dynctl.core.links import LinkHost, LinkKind, LinkMeasurement
from dynctl.errors import DynctlError, ExitCode
from dynctl.linktest import judge
from dynctl.linktest.engines import find_nixl
from dynctl.linktest.pair import Ports, Seat
from dynctl.linktest.run import Pace, measure, nixl, tcp
from dynctl.linktest.view import Report
from dynctl.remote.fleet import Fleet

Progress = Callable[[int, int, int, int], None]
"""Round, number of rounds, directions measured in it, directions that failed."""


async def make_report(
    inventory: Inventory, topology: Topology, fleet: Fleet, pace: Pace, progress: Progress
) -> Report:
    """Measure all links between the hosts of a topology.

    Raises:
        DynctlError: exit 4 (7 on trust) when fewer than two hosts can take part.
    """
    able = [host for host in topology.hosts if host.python is not None]
    failures = [
        *topology.failures,
        *(_no_python(host) for host in topology.hosts if not host.python),
    ]
    if len(able) < 2:
        raise _too_few(len(able), failures)
    ports = Ports(inventory.port_base, inventory.port_base + inventory.port_count - 1)
    started_s = time.time()

    def told(number: int, count: int, made: Sequence[LinkMeasurement]) -> None:
        num_failed = sum(1 for link in made if link.error)
        progress(number, count, len(made) - num_failed, num_failed)

    by_nixl, unmeasured = await find_nixl(inventory, able, fleet)
    programs = [tcp({h.name: Seat(h, fleet.remote(h.name), str(h.python)) for h in able})]
    programs += [nixl(by_nixl)] if len(by_nixl) > 1 else []
    links = await measure([host.name for host in able], programs, pace, ports, told)
    order = list(LinkKind)
    links.sort(key=lambda m: (m.source_name, m.target_name, order.index(m.kind)))
    return Report(
        inventory.cluster,
        started_s,
        tuple(LinkHost(host.name, host.machine_id, host.data_address) for host in able),
        tuple(links),
        tuple(failures),
        tuple(unmeasured),
        tuple(judge.warnings(links, [host.name for host in able if _has_rdma(host)])),
    )


def _no_python(host: Host) -> HostFailure:
    return HostFailure(
        host.name,
        host.python_problem,
        "Debian 12 and Ubuntu 24.04 have one as python3; without root, unpack a standalone build",
        int(ExitCode.REFUSED),
    )


def _too_few(num_able: int, failures: Sequence[HostFailure]) -> DynctlError:
    causes = "".join(f"\n  {f.name}: {f.cause.removeprefix(f.name + ': ')}" for f in failures)
    is_trust = any(f.exit_code == ExitCode.TRUST for f in failures)
    return DynctlError(
        f"a link has two ends; {num_able} host can be reached{':' + causes if causes else ''}",
        next((f.hint for f in failures if f.hint), "name two hosts or more"),
        code=ExitCode.TRUST if is_trust else ExitCode.REFUSED,
    )


def _has_rdma(host: Host) -> bool:
    return any(
        nic.kind in {"infiniband", "roce", "rdma"} and nic.state == "up" for nic in host.nics
    )

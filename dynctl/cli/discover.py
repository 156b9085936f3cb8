"""`dynctl discover`: describe the hosts. IO: ssh, terminal."""

from dynctl.cli.options import DEFAULT_INVENTORY, InventoryPath, Limit, Local, Output, OutputOption
from dynctl.cli.output import emit, emit_json, say, table, wait_for
from dynctl.cli.session import load, select
from dynctl.core.hardware import Topology
from dynctl.core.inventory import Inventory


def command(
    inventory: InventoryPath = DEFAULT_INVENTORY,
    local: Local = False,
    limit: Limit = None,
    output: OutputOption = Output.TABLE,
) -> None:
    """Describe the hosts: GPUs, NVLink, PCIe, NUMA, NICs.

    Reads only; nothing is installed or changed on a host. Exit 3 when some hosts could not be described, 4 when
    none could, 7 when a host key is unknown or has changed.

    Example: dynctl discover --limit gpu-01 -o json
    """
    wanted = load(inventory, local=local)
    topology = wait_for(_look(wanted, select(wanted, limit)))
    if output is Output.JSON:
        from dynctl.discovery.view import document

        emit_json(document(topology))
    else:
        _draw(topology)
    _raise_failures(topology)


async def _look(wanted: Inventory, hosts: list[str]) -> Topology:
    from dynctl.cli.up import ask_about_keys
    from dynctl.discovery.discover import discover
    from dynctl.remote.fleet import open_fleet

    entries = [entry for entry in wanted.hosts if entry.name in hosts]
    async with open_fleet(entries, wanted.ssh, ask_about_keys) as fleet:
        return await discover(entries, fleet)


def _draw(topology: Topology) -> None:
    from dynctl.core.text import clean
    from dynctl.discovery import view

    if not topology.hosts:
        return
    rows = [
        [
            clean(host.name, 24),
            clean(view.gpu_summary(host), 60),
            view.link_summary(host),
            clean(view.nic_summary(host), 40),
            view.memory_summary(host),
        ]
        for host in topology.hosts
    ]
    table(["HOST", "GPUS", "LINKS", "NICS", "HOST MEMORY"], rows)
    for names, drawn in view.drawings(topology):
        emit(f"\n{clean(', '.join(names), 78)}")
        emit("\n".join(drawn))
    for host in topology.hosts:
        for warning in host.warnings:
            say(f"{clean(host.name, 24)}: {warning.text}  [{warning.code}]")
    for warning in topology.warnings:
        say(f"{warning.text}  [{warning.code}]")


def _raise_failures(topology: Topology) -> None:
    from dynctl.discovery.survey import causes, raise_unreachable
    from dynctl.errors import DynctlError, ExitCode

    if not topology.failures:
        return
    if not topology.hosts:
        raise_unreachable(topology)
    total = len(topology.hosts) + len(topology.failures)
    trust = all(failure.exit_code == ExitCode.TRUST for failure in topology.failures)
    raise DynctlError(
        f"{len(topology.failures)} of {total} hosts could not be described:\n{causes(topology)}",
        next((f.hint for f in topology.failures if f.hint), None),
        code=ExitCode.TRUST if trust else ExitCode.PARTIAL,
    )

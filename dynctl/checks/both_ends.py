"""Shell lines that need a program on both ends of a link. Pure."""

from dynctl.checks.evidence import Evidence
from dynctl.checks.shell import on_host
from dynctl.core.inventory import HostEntry
from dynctl.core.links import LinkMeasurement


def between(evidence: Evidence, link: LinkMeasurement, client: str) -> str:
    """A line for the operator's machine: iperf3 serves one client on the target, and the source is that client."""
    source, target = _entry(evidence, link.source_name), _entry(evidence, link.target_name)
    return f"{on_host(target, 'iperf3 -s -1 -D')} && sleep 1 && {on_host(source, client)}"


def _entry(evidence: Evidence, name: str) -> HostEntry:
    """The host's lines of the inventory; one that is gone from it is reached by its name."""
    return next((e for e in evidence.inventory.hosts if e.name == name), HostEntry(name, name))

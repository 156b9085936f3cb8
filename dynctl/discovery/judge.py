"""What a user must be told about a host: each warning with a code of docs/findings.md.

Not here: how facts are found or put together, the rules themselves (`rules/`).
Pure.
"""

from collections.abc import Sequence
from dataclasses import replace

from dynctl.core.hardware import Host, HostWarning
from dynctl.core.inventory import HostEntry
from dynctl.core.text import clean
from dynctl.discovery.facts import HostFacts, TopoFacts
from dynctl.discovery.rules import gpus, links, nics, numa, probes, system
from dynctl.discovery.rules.case import Case

_RULES = (*probes.RULES, *gpus.RULES, *links.RULES, *numa.RULES, *nics.RULES, *system.RULES)
MAX_WARNINGS = 200


def judge_host(host: Host, found: HostFacts, topo: TopoFacts, entry: HostEntry) -> Host:
    """Return the host with its warnings, in a fixed order."""
    case = Case(host, found, topo, entry)
    warnings = [HostWarning(code, clean(text, 400)) for rule in _RULES for code, text in rule(case)]
    return replace(host, warnings=tuple(warnings[:MAX_WARNINGS]))


def judge_topology(hosts: Sequence[Host]) -> tuple[HostWarning, ...]:
    """Warnings that only the whole shows."""
    found = []
    by_address: dict[str, list[str]] = {}
    for host in hosts:
        by_address.setdefault(host.data_address, []).append(host.name)
    for address, names in sorted(by_address.items()):
        if len(names) > 1:
            found.append(
                HostWarning(
                    "shared-address",
                    f"{', '.join(names)} share the address {clean(address)}: they are taken for one machine when ports are given out",
                )
            )
    domains: dict[str, dict[frozenset[str], list[str]]] = {}
    for host in hosts:
        nodes = frozenset(node.address for node in host.fabric.imex_nodes)
        for clique in {gpu.health.fabric_clique for gpu in host.gpus} - {None}:
            if nodes:
                domains.setdefault(str(clique), {}).setdefault(nodes, []).append(host.name)
    for clique, groups in sorted(domains.items()):
        if len(groups) > 1:
            sets = "; ".join(", ".join(names) for names in groups.values())
            found.append(
                HostWarning(
                    "imex-domains-differ",
                    clean(
                        f"hosts of NVLink clique {clique} are in different IMEX domains, which disturb each other: {sets}",
                        400,
                    ),
                )
            )
    drivers = {h.software.driver_version for h in hosts if h.gpus} - {None}
    if len(drivers) > 1:
        found.append(
            HostWarning(
                "drivers-differ",
                f"GPU drivers differ between hosts: {', '.join(sorted(str(d) for d in drivers))}",
            )
        )
    return tuple(found)

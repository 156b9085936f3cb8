"""How near two devices of the PCI bus are, from the bridges above them, in the words of `nvidia-smi topo -m`.

Not here: reading the bus (`probes/pci`).
Pure.
"""

from collections.abc import Mapping, Sequence

from dynctl.discovery.facts import PciFacts


def bus_key(bus_id: str) -> str:
    """`00000000:1B:00.0` and `0000:1b:00.0` are one place."""
    domain, _, rest = bus_id.lower().partition(":")
    return f"{domain[-4:]}:{rest}"


class PciTree:
    """The bridges above each device."""

    def __init__(self, facts: PciFacts) -> None:
        self._paths: Mapping[str, Sequence[str]] = {bus_key(a): p for a, p in facts.paths}
        self._nodes = {bus_key(address): node for address, node in facts.nodes}

    def above(self, bus_id: str) -> Sequence[str]:
        """Bridges from the root down to a device."""
        return self._paths.get(bus_key(bus_id), ())[:-1]

    def node(self, bus_id: str) -> int | None:
        """NUMA node of a device; None when the firmware does not tell."""
        return self._nodes.get(bus_key(bus_id))

    def link(self, one: str, other: str) -> str | None:
        """`PIX`, `PXB`, `PHB`, `NODE` or `SYS`; None when either is not on the bus or the nodes are unknown.

        Between two devices behind one root: one switch is PIX, more bridges are PXB, only the root itself is PHB.
        Between roots the NUMA nodes decide.
        """
        a, b = self._paths.get(bus_key(one)), self._paths.get(bus_key(other))
        if not a or not b:
            return None
        if a[0] == b[0] and a[0].startswith("pci"):
            return _below_one_root(a[1:], b[1:])
        here, there = self.node(one), self.node(other)
        if here is None or there is None:
            return None
        return "NODE" if here == there else "SYS"


def _below_one_root(a: Sequence[str], b: Sequence[str]) -> str:
    common = 0
    while common < min(len(a), len(b)) and a[common] == b[common]:
        common += 1
    if common == 0:
        same_slot = len(a) == len(b) == 1 and _slot(a[0]) == _slot(b[0])
        return "PIX" if same_slot else "PHB"
    # What is left below the fork, the devices themselves aside: downstream ports and further switches.
    bridges = max(len(a), len(b)) - common - 1
    return "PIX" if bridges <= 1 else "PXB"


def _slot(address: str) -> str:
    return address.rpartition(".")[0]

"""The PCI bus from sysfs: accelerators that are there whether or not a driver answers, with their NUMA node. Pure."""

import re

from dynctl.core.command import Completed
from dynctl.discovery.facts import PciGpu
from dynctl.discovery.probe import Probe, fail, text_of

_SCRIPT = r"""
for device in "${DYNCTL_SYSFS:-/sys}"/bus/pci/devices/*; do
  [ -r "$device/class" ] || continue
  read -r class <"$device/class"
  case $class in 0x0300*|0x0302*|0x0380*|0x1200*) ;; *) continue ;; esac
  read -r vendor <"$device/vendor"
  node=-1
  [ -r "$device/numa_node" ] && read -r node <"$device/numa_node"
  echo "${device##*/} $vendor $class $node"
done 2>/dev/null
exit 0
"""
_VENDORS = {"0x10de": "nvidia", "0x1002": "amd"}


def parse(done: Completed) -> tuple[PciGpu, ...]:
    """Read the NVIDIA and AMD controllers; others (a server's own display chip) are left out.

    Raises:
        ProbeError: when a line is not `address vendor class node`.
    """
    found = []
    for number, line in enumerate(text_of(done).split("\n"), 1):
        words = line.split()
        if not words:
            continue
        if len(words) != 4 or not re.fullmatch(r"[0-9a-fA-F:.]{7,16}", words[0]):
            raise fail("/sys/bus/pci", number, line, "not an address, vendor, class and node")
        vendor = _VENDORS.get(words[1])
        # AMD's own bridges and consoles are class 0380 and 1200 too; Instinct cards are 0380/1200 on 1002.
        if vendor is not None:
            node = int(words[3]) if re.fullmatch(r"\d{1,4}", words[3]) else None
            found.append(PciGpu(words[0].lower(), vendor, node))
    return tuple(found)


PROBE = Probe(_SCRIPT, parse)

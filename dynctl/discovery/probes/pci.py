"""The PCI bus from sysfs: accelerators, network controllers and NVSwitches, with NUMA node and the bridges above each.

They are there whether or not a driver answers, and the bridges tell how near a NIC is to a GPU without nvidia-smi.
Source: Documentation/ABI/testing/sysfs-bus-pci of the Linux kernel.
Pure.
"""

import re

from dynctl.core.command import Completed
from dynctl.discovery.facts import PciFacts, PciGpu
from dynctl.discovery.probe import Probe, fail, text_of

_SCRIPT = r"""
for device in "${DYNCTL_SYSFS:-/sys}"/bus/pci/devices/*; do
  [ -r "$device/class" ] || continue
  read -r class <"$device/class"
  case $class in 0x0300*|0x0302*|0x0380*|0x1200*|0x02*|0x0680*) ;; *) continue ;; esac
  read -r vendor <"$device/vendor"
  case $class in 0x0680*) [ "$vendor" = 0x10de ] || continue ;; esac
  node=-1
  [ -r "$device/numa_node" ] && read -r node <"$device/numa_node"
  cd -P "$device" 2>/dev/null && path=$PWD || path=-
  echo "${device##*/} $vendor $class $node $path"
done 2>/dev/null
exit 0
"""
_VENDORS = {"0x10de": "nvidia", "0x1002": "amd"}
_ADDRESS = re.compile(r"[0-9a-fA-F:.]{7,16}")
_STEP = re.compile(r"pci[0-9a-fA-F]{4,8}:[0-9a-fA-F]{2}\Z|[0-9a-fA-F]{4,8}:[0-9a-fA-F]{2}:[0-9a-fA-F]{2}\.[0-7]\Z")  # fmt: skip


def parse(done: Completed) -> PciFacts:
    """Read the NVIDIA and AMD controllers, the NICs and the NVSwitches; a server's own display chip is left out.

    Raises:
        ProbeError: when a line is not `address vendor class node [path]`.
    """
    gpus, paths, nodes, num_switches = [], [], [], 0
    for number, line in enumerate(text_of(done).split("\n"), 1):
        words = line.split()
        if not words:
            continue
        if len(words) not in {4, 5} or not _ADDRESS.fullmatch(words[0]):
            raise fail("/sys/bus/pci", number, line, "not an address, vendor, class, node and path")
        address, vendor = words[0].lower(), _VENDORS.get(words[1])
        node = int(words[3]) if re.fullmatch(r"\d{1,4}", words[3]) else None
        is_nic = words[2].startswith("0x02")
        if words[2].startswith("0x0680"):
            num_switches += vendor == "nvidia"
            continue
        if vendor is None and not is_nic:
            continue
        if not is_nic and vendor is not None:
            gpus.append(PciGpu(address, vendor, node))
        nodes.append((address, node))
        if len(words) == 5 and (path := _path(words[4])):
            paths.append((address, path))
    return PciFacts(tuple(gpus), num_switches, tuple(paths), tuple(nodes))


def _path(text: str) -> tuple[str, ...]:
    """The steps from the root complex; what sysfs puts above it (a virtual bus) is no step."""
    return tuple(step.lower() for step in text[:2000].split("/") if _STEP.match(step))


PROBE = Probe(
    _SCRIPT,
    parse,
    marks=re.compile(
        r"(?m)^[0-9a-f]{4}:[0-9a-f]{2}:[0-9a-f]{2}\.[0-7] 0x[0-9a-f]{4} 0x[0-9a-f]{6} "
    ),
)

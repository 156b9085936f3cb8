"""PCI bridges that send requests between devices up to the root (ACS): copies between GPUs and NICs then crawl or hang.

Read from configuration space, of which only root sees more than the first 64 bytes: anybody else gets no answer, not
a good one. Layout: PCI Express Base Specification 6.0, 7.6.3 (list of extended capabilities, from 0x100) and 7.7.11
(ACS: capability 0x000d, control register at 6; bit 2 redirects requests, bit 3 completions).
Pure.
"""

import re

from dynctl.core.command import Completed
from dynctl.discovery.facts import AcsFacts
from dynctl.discovery.probe import Probe, fail, text_of

_SCRIPT = r"""
for device in "${DYNCTL_SYSFS:-/sys}"/bus/pci/devices/*; do
  { read -r class <"$device/class"; } 2>/dev/null
  case $class in 0x0604*) echo "bridge ${device##*/}"; od -An -v -tx4 -N4096 "$device/config" ;; esac
done 2>/dev/null | awk '
function value(hex,  i, n) {
  n = 0
  for (i = 1; i <= length(hex); i++) n = n * 16 + index("0123456789abcdef", substr(hex, i, 1)) - 1
  return n
}
function tell(  at, steps) {
  if (name == "") return
  if (count <= 64) { print name, "hidden"; return }
  at = 64
  for (steps = 0; at >= 64 && at < count && steps < 64; steps++) {
    if (substr(word[at], 5, 4) == "000d") { print name, substr(word[at + 1], 1, 4); return }
    at = int(value(substr(word[at], 1, 3)) / 4)
  }
  print name, "none"
}
$1 == "bridge" { tell(); name = $2; count = 0; next }
{ for (i = 1; i <= NF; i++) word[count++] = $i }
END { tell() }
'
"""
_REDIRECTS = 0b1100
_LINE = re.compile(r"([0-9a-f]{4,8}:[0-9a-f]{2}:[0-9a-f]{2}\.[0-7]) (hidden|none|[0-9a-f]{4})")


def parse(done: Completed) -> AcsFacts:
    """Read one line per bridge: its address, and the control register, `none` without ACS, `hidden` from this user.

    Raises:
        ProbeError: when a line is none of these.
    """
    redirecting, is_known = [], True
    for number, line in enumerate(text_of(done).split("\n"), 1):
        if not line.strip():
            continue
        match = _LINE.fullmatch(line.strip())
        if match is None:
            raise fail("PCI configuration space", number, line, "not a bridge and its ACS register")
        if match[2] == "hidden":
            is_known = False
        elif match[2] != "none" and int(match[2], 16) & _REDIRECTS:
            redirecting.append(match[1])
    return AcsFacts(tuple(redirecting) if is_known else None)


PROBE = Probe(_SCRIPT, parse, needs='[ -d "${DYNCTL_SYSFS:-/sys}/module/nvidia" ]')

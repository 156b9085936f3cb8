"""What joins GPUs beyond one board: the fabric manager of NVSwitch machines, and IMEX for NVLink between hosts. Pure."""

import re

from dynctl.core.command import Completed
from dynctl.core.machine import Fabric
from dynctl.discovery.facts import FabricFacts
from dynctl.discovery.probe import Probe, integer, text_of

_SCRIPT = r"""
state() {
  [ -d /run/systemd/system ] || return
  found=$(systemctl is-active "$1" 2>/dev/null)
  [ "$found" = inactive ] && [ -z "$(systemctl list-unit-files --no-legend "$1.service" 2>/dev/null)" ] && found=absent
  echo "$2 $found"
}
state nvidia-fabricmanager manager
state nvidia-imex imex
command -v nv-fabricmanager >/dev/null 2>&1 && echo "version $(nv-fabricmanager --version 2>/dev/null | head -n 1)"
count=0
for channel in /dev/nvidia-caps-imex-channels/channel*; do [ -e "$channel" ] && count=$((count+1)); done
echo "channels $count"
count=0
for switch in /dev/nvidia-nvswitch[0-9]*; do [ -e "$switch" ] && count=$((count+1)); done
echo "switches $count"
exit 0
"""


def parse(done: Completed) -> FabricFacts:
    """Read the states; what systemd does not know is None."""
    rows = dict(
        line[:200].split(" ", 1) for line in reversed(text_of(done).split("\n")) if " " in line
    )
    version = re.search(r"\d{3,4}\.\d{1,4}(?:\.\d{1,4})?", rows.get("version", ""))
    return FabricFacts(
        Fabric(
            num_switches=integer(rows.get("switches"), 4) or 0,
            manager_state=_word(rows.get("manager")),
            manager_version=version[0] if version else None,
            imex_state=_word(rows.get("imex")),
            num_imex_channels=integer(rows.get("channels"), 6),
        )
    )


def _word(text: str | None) -> str | None:
    match = re.fullmatch(r"[a-z-]{2,20}", (text or "").strip())
    return match[0] if match else None


PROBE = Probe(_SCRIPT, parse, needs="command -v nvidia-smi || [ -e /proc/driver/nvidia ]")

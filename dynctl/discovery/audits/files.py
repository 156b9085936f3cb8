"""Private files and directories below our root on a host: their modes. Pure."""

import re

from dynctl.core.audit import KeptFile
from dynctl.core.command import Completed
from dynctl.discovery.probe import Probe, fail, text_of

_SCRIPT = r"""
[ -n "$DYNCTL_ROOT" ] && [ -d "$DYNCTL_ROOT" ] || exit 0
cd "$DYNCTL_ROOT" || exit 0
for file in tls tls/*.key secrets secrets/* run state slice.json; do
  [ -e "$file" ] && stat -c "%a %u $DYNCTL_ROOT/%n" "$file"
done 2>/dev/null
exit 0
"""


def parse(done: Completed) -> tuple[KeptFile, ...]:
    """Read mode, owner and path of each file.

    Raises:
        ProbeError: when a line has no mode.
    """
    found = []
    for number, line in enumerate(text_of(done).split("\n"), 1):
        match = re.fullmatch(r"([0-7]{1,4}) (\d{1,10}) (/.{1,1024})", line)
        if match:
            found.append(KeptFile(match[3], int(match[1], 8), int(match[2])))
        elif line.strip():
            raise fail("stat", number, line, "not mode, owner and path")
    return tuple(found)


PROBE = Probe(_SCRIPT, parse)

"""NIXL in the engines' own interpreters: whether it loads, with its UCX plugin, in a process that may crash.

API: nixl 1.5.1, `nixl._api.nixl_agent`.
Pure.
"""

import re

from dynctl.core.audit import NixlLoad
from dynctl.core.command import Completed
from dynctl.core.text import clean
from dynctl.discovery.probe import Probe, fail, text_of

_SCRIPT = r"""
printf '%s\n' "$DYNCTL_ENGINE_PYTHONS" | while IFS= read -r python; do
  [ -n "$python" ] || continue
  program=$python
  case $python in '~/'*) program=$HOME/${python#??} ;; esac
  [ -x "$program" ] || continue
  said=$(UCX_LOG_LEVEL=error timeout -k 1 9 "$program" -I -c '
import importlib.util as find, os, sys
if find.find_spec("nixl") is None:
    sys.exit(3)
from nixl._api import nixl_agent, nixl_agent_config
nixl_agent("dynctl-audit-%d" % os.getpid(), nixl_agent_config(backends=["UCX"]))
sys.stdout.flush()
os._exit(0)
' 2>&1 </dev/null); status=$?
  printf 'nixl\t%s\t%s\t%s\n' "$status" "$python" "$(printf '%s' "$said" | tail -n 3 | tr '\n\t' '  ')"
done
exit 0
"""
_ABSENT, _TIMEOUTS, _FIRST_SIGNAL = 3, (124, 137), 128


def parse(done: Completed) -> tuple[NixlLoad, ...]:
    """Read one outcome per interpreter; those without NIXL give none.

    Raises:
        ProbeError: when a line is no outcome.
    """
    found = []
    for number, line in enumerate(text_of(done).split("\n"), 1):
        if not line.strip():
            continue
        match = re.fullmatch(r"nixl\t(\d{1,3})\t([^\t]{1,1024})\t(.*)", line[:4096])
        if match is None:
            raise fail("nixl", number, line, "no outcome")
        status = int(match[1])
        if status != _ABSENT:
            found.append(NixlLoad(match[2], _outcome(status), clean(match[3], 300)))
    return tuple(found)


def _outcome(status: int) -> str:
    if status in _TIMEOUTS:
        return "timeout"
    if status > _FIRST_SIGNAL:
        return f"killed by signal {status - _FIRST_SIGNAL}"
    return "failed" if status else "works"


PROBE = Probe(_SCRIPT, parse)

"""`config.json` of the inventory's models, for planning from captures alone: over SSH the planner reads them itself.

Paths come one a line in DYNCTL_MODELS. Pure.
"""

import re

from dynctl.core.command import Completed
from dynctl.discovery.probe import Probe, text_of

_SCRIPT = r"""
printf '%s\n' "$DYNCTL_MODELS" | while IFS= read -r model; do
  path=$model
  case $path in '~/'*) path=$HOME/${path#??} ;; esac
  [ -r "$path/config.json" ] || continue
  printf '== model %s\n' "$model"
  head -c 1048576 "$path/config.json"
  echo
done
exit 0
"""
_TITLE = re.compile(r"(?m)^== model (.{1,1000})$")


def parse(done: Completed) -> dict[str, str]:
    """Give the text of each file by the model's path."""
    pieces = _TITLE.split(text_of(done))
    return dict(zip(pieces[1::2], (text.strip() for text in pieces[2::2]), strict=True))


PROBE = Probe(_SCRIPT, parse, needs='[ -n "$DYNCTL_MODELS" ]')

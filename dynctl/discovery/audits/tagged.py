"""Processes that agents of dynctl started, by their tag in the environment, and the agents that run. Pure."""

import re

from dynctl.core.audit import TaggedProcess
from dynctl.core.command import Completed
from dynctl.core.text import clean
from dynctl.discovery.probe import Probe, fail, text_of

_SCRIPT = r"""
proc=${DYNCTL_PROC:-/proc}
for file in $(grep -lzs '^DYNCTL_INCARNATION=' "$proc"/[0-9]*/environ); do
  pid=${file%/environ}; pid=${pid##*/}
  vars=$(tr '\0' '\n' <"$file")
  tag=$(printf '%s\n' "$vars" | sed -n 's/^DYNCTL_INCARNATION=//p' | head -n 1)
  root=$(printf '%s\n' "$vars" | sed -n 's/^DYNCTL_ROOT=//p' | head -n 1)
  command=$(tr '\0\n\t' '   ' <"$proc/$pid/cmdline" | head -c 200)
  [ -n "$command" ] && printf 'tagged %s\t%s\t%s\t%s\n' "$pid" "$tag" "$root" "$command"
done 2>/dev/null
for file in $(grep -lzsx 'dynctl.agents' "$proc"/[0-9]*/cmdline); do
  root=$(tr '\0' '\n' <"$file" | grep -A 1 -x -e --root | tail -n 1)
  [ -n "$root" ] && printf 'agent %s\n' "$root"
done 2>/dev/null
exit 0
"""
_TAGGED = re.compile(r"^tagged (\d{1,10})\t([^\t]{0,128})\t([^\t]{0,1024})\t(.*)$")


def parse(done: Completed) -> tuple[TaggedProcess, ...]:
    """Read the processes, by pid; each knows whether an agent of its root runs.

    Raises:
        ProbeError: when a line is neither a process nor an agent.
    """
    found: list[tuple[int, str, str, str]] = []
    roots = set()
    for number, line in enumerate(text_of(done).split("\n"), 1):
        if match := _TAGGED.match(line[:2048]):
            found.append((int(match[1]), match[2], match[3], match[4]))
        elif line.startswith("agent "):
            roots.add(line[6:].rstrip("/"))
        elif line.strip():
            raise fail("/proc environ", number, line, "neither process nor agent")
    return tuple(
        TaggedProcess(
            pid, clean(root, 400), clean(tag, 128), clean(command, 80), root.rstrip("/") in roots
        )
        for pid, tag, root, command in sorted(found)
    )


PROBE = Probe(_SCRIPT, parse)

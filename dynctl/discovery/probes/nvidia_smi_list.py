"""`nvidia-smi -L`: GPUs and the MIG slices each is cut into. Pure."""

import re
from dataclasses import replace

from dynctl.core.command import Completed
from dynctl.discovery.facts import ListedGpu
from dynctl.discovery.probe import ABSENT_STATUS, Probe, check_smi, fail, text_of

_SCRIPT = """
exec nvidia-smi -L
"""
_GPU = re.compile(r"^\s*GPU (\d{1,3}): (.{1,200}?) \(UUID: ([\w-]{1,80})\)")
_SLICE = re.compile(r"^\s*MIG (\S{1,40})\s+Device\s+\d{1,3}: \(UUID: [\w/-]{1,120}\)")


def parse(done: Completed) -> tuple[ListedGpu, ...]:
    """Read the list; lines of other tools in the same stream are passed over.

    Raises:
        ProbeError: when the tool failed, or a slice stands before any GPU.
    """
    if done.exit_status == ABSENT_STATUS:
        return ()
    found: list[ListedGpu] = []
    for number, line in enumerate(text_of(done).split("\n"), 1):
        if gpu := _GPU.match(line[:2000]):
            found.append(ListedGpu(int(gpu[1]), gpu[2], gpu[3]))
        elif piece := _SLICE.match(line[:2000]):
            if not found:
                raise fail("nvidia-smi -L", number, line, "a MIG device without a GPU above it")
            last = found.pop()
            found.append(replace(last, slices=(*last.slices, piece[1])))
    if not found:
        check_smi(done)
    return tuple(found)


PROBE = Probe(
    _SCRIPT,
    parse,
    needs="command -v nvidia-smi",
    marks=re.compile(r"(?m)^\s*GPU \d{1,3}: .{1,200} \(UUID: GPU-"),
)

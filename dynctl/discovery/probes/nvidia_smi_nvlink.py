"""`nvidia-smi nvlink --status`: the rate of every NVLink, and which of them are inactive.

A GPU without a bridge says that all of its links are inactive, which is no fault by itself.
Pure.
"""

import re

from dynctl.core.command import Completed
from dynctl.discovery.facts import NvlinkGpu
from dynctl.discovery.probe import ABSENT_STATUS, Probe, check_smi, fail, text_of

_SCRIPT = "exec nvidia-smi nvlink --status"
_GPU = re.compile(r"\s*GPU (\d{1,3}): (.{1,200}?) \(UUID: ([\w-]{1,80})\)")
_LINK = re.compile(
    r"\s*Link (\d{1,2}): +(?:([0-9]{1,4}(?:\.[0-9]{1,6})?) GB/s|(<?inactive>?))", re.IGNORECASE
)
_SILENT = re.compile(r"all links are inactive", re.IGNORECASE)
_MAX_LINKS = 64


def parse(done: Completed) -> tuple[NvlinkGpu, ...]:
    """Read the rates; no output is right for machines without NVLink.

    Raises:
        ProbeError: when the tool failed, or a link stands before any GPU.
    """
    if done.exit_status == ABSENT_STATUS:
        return ()
    names: dict[int, tuple[str, str]] = {}
    rates: dict[int, dict[int, int | None]] = {}
    silent: set[int] = set()
    current = None
    for number, line in enumerate(text_of(done).split("\n"), 1):
        if gpu := _GPU.match(line[:2000]):
            current = int(gpu[1])
            names[current] = gpu[2], gpu[3]
        elif link := _LINK.match(line[:200]):
            if current is None:
                raise fail(
                    "nvidia-smi nvlink --status", number, line, "a link without a GPU above it"
                )
            if int(link[1]) < _MAX_LINKS:
                rate = int(float(link[2]) * 1e9) if link[2] else None
                rates.setdefault(current, {})[int(link[1])] = rate
        elif current is not None and _SILENT.search(line[:200]):
            silent.add(current)
    if not names:
        check_smi(done)
    return tuple(
        NvlinkGpu(index, name, uuid, _in_order(rates.get(index, {})), index in silent)
        for index, (name, uuid) in sorted(names.items())
    )


def _in_order(rates: dict[int, int | None]) -> tuple[int | None, ...]:
    """By link number; a number that was not printed is no link of this GPU."""
    return tuple(rates[number] for number in sorted(rates))


PROBE = Probe(
    _SCRIPT,
    parse,
    needs="command -v nvidia-smi",
    marks=re.compile(r"(?mi)^\s*Link \d{1,2}: +(?:[0-9.]+ GB/s|<?inactive)|all links are inactive"),
)

"""The plain table of `nvidia-smi`, for captures: what its cells still tell when nothing better was kept.

Names are cut by the table and said to be. Pure.
"""

import re

from dynctl.core.command import Completed
from dynctl.core.machine import GpuHealth
from dynctl.core.units import MIB
from dynctl.discovery.facts import QueryFacts, QueryGpu
from dynctl.discovery.probe import Probe, check_smi, fail, text_of

_HEAD = re.compile(r"Driver Version:\s*([\d.]{3,20})(?:.*?CUDA Version:\s*([\d.]{2,10}))?")
_FIRST = re.compile(
    r"\|\s*(\d{1,3})\s+(\S.{0,40}?)\s+(On|Off|N/A)\s*\|\s*([0-9A-Fa-f]{4,8}:[0-9A-Fa-f]{2}:[0-9A-Fa-f]{2}\.[0-9A-Fa-f])"
)
_SECOND = re.compile(
    r"\|\s*(ERR!|N/A|\d{1,3}%)\s+(ERR!|N/A|\d{1,3}C)\s.*?\|\s*(\d{1,8})MiB\s*/\s*(\d{1,8})MiB\s*\|\s*(?:(\d{1,3})%|N/A|ERR!)?\s*([\w. ]{0,20}?)\s*\|"
)
_MODES = {"E. Process": "Exclusive_Process", "Default": "Default", "Prohibited": "Prohibited"}


def parse(done: Completed) -> QueryFacts:
    """Read two lines per GPU; a first one without its second gives what it has.

    Raises:
        ProbeError: when the tool failed, or no row is in the output.
    """
    text = text_of(done)
    head = _HEAD.search(text)
    gpus: list[QueryGpu] = []
    for line in (raw[:400] for raw in text.split("\n")):
        if (first := _FIRST.match(line)) and len(gpus) < 128:
            gpus.append(
                QueryGpu(
                    int(first[1]),
                    first[4],
                    None,
                    first[2],
                    health=GpuHealth(has_persistence={"On": True, "Off": False}.get(first[3])),
                    is_complete=False,
                )
            )
        elif (second := _SECOND.match(line)) and gpus and not gpus[-1].is_complete:
            gpus[-1] = _completed(gpus[-1], second)
    if not gpus:
        check_smi(done)
        raise fail("nvidia-smi", 1, text[:200], "no GPU in the table")
    return QueryFacts(None, tuple(gpus), head[1] if head else None, head[2] if head else None)


def _completed(gpu: QueryGpu, second: re.Match[str]) -> QueryGpu:
    bad = tuple(n for n, cell in (("fan", second[1]), ("temperature", second[2])) if cell == "ERR!")
    temperature = second[2].removesuffix("C")
    return QueryGpu(
        gpu.index,
        gpu.pci_bus_id,
        None,
        gpu.name,
        memory_bytes=int(second[4]) * MIB,
        memory_used_bytes=int(second[3]) * MIB,
        utilization_ratio=int(second[5]) / 100 if second[5] else None,
        health=GpuHealth(
            has_persistence=gpu.health.has_persistence,
            temperature_celsius=float(temperature) if temperature.isdecimal() else None,
            compute_mode=_MODES.get(second[6].strip(), second[6].strip() or None),
            bad_readings=bad,
        ),
    )


PROBE = Probe("", parse, marks=re.compile(r"(?m)^\| NVIDIA-SMI \d"))

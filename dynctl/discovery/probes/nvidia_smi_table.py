"""The plain table of `nvidia-smi`, for captures: what its cells still tell when nothing better was kept.

Names are cut by the table and said to be. Pure.
"""

import re
from collections.abc import Mapping
from dataclasses import replace

from dynctl.core.command import Completed
from dynctl.core.machine import GpuHealth
from dynctl.core.units import MIB
from dynctl.discovery.bounds import MAX_GPUS
from dynctl.discovery.facts import GpuProcessFacts, QueryFacts, QueryGpu
from dynctl.discovery.probe import Probe, check_smi, fail, text_of

_HEAD = re.compile(r"Driver Version:\s*([\d.]{3,20})(?:.*?CUDA Version:\s*([\d.]{2,10}))?")
_FIRST = re.compile(
    r"\|\s*(\d{1,3})\s+(\S.{0,40}?)\s+(On|Off|N/A|ERR!|TCC|WDDM|MCDM)\s*\|\s*([0-9A-Fa-f]{4,8}:[0-9A-Fa-f]{2}:[0-9A-Fa-f]{2}\.[0-9A-Fa-f])"
)
_SECOND = re.compile(
    r"\|\s*(ERR!|N/A|\d{1,3}%)\s+(ERR!|N/A|\d{1,3}C)\s.*?\|\s*(?:(\d{1,8})MiB\s*/\s*(\d{1,8})MiB|N/A|Not Supported|(Unknown Error|ERR!))\s*\|"
    r"\s*(?:\d{1,3}%|N/A|ERR!)?\s*([\w.! ]{0,20}?)\s*\|"
)
_THIRD = re.compile(r"\|\s*\|\s*\|\s*(Enabled|Disabled)\*?\s*\|")
"""MIG mode; the asterisk says that it changes with the next reset."""
_SLICE = re.compile(
    r"\|\s*(\d{1,3})\s+\d{1,3}\s+\d{1,3}\s+\d{1,3}\s*\|\s*\d{1,8}MiB\s*/\s*(\d{1,8})MiB\s*\|"
)
_PROCESS = re.compile(
    r"\|\s*(\d{1,3})\s+(?:(?:N/A|\d{1,3})\s+(?:N/A|\d{1,3})\s+)?(\d{1,10})\s+(?:M\+)?[CG](?:\+[CG])?\s+(\S.{0,300}?)"
    r"\s+(?:(\d{1,8})MiB|N/A)\s*\|"
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
    processes: dict[tuple[int, int], GpuProcessFacts] = {}
    slices: dict[int, list[int]] = {}
    for line in (raw[:400] for raw in text.split("\n")):
        if (first := _FIRST.match(line)) and len(gpus) < MAX_GPUS:
            gpus.append(
                QueryGpu(
                    int(first[1]),
                    first[4],
                    None,
                    None if first[2] == "ERR!" else first[2],
                    health=GpuHealth(has_persistence={"On": True, "Off": False}.get(first[3])),
                    is_complete=False,
                )
            )
        elif (second := _SECOND.match(line)) and gpus and not gpus[-1].is_complete:
            gpus[-1] = _completed(gpus[-1], second)
        elif (third := _THIRD.match(line)) and gpus and gpus[-1].is_mig is None:
            gpus[-1] = replace(gpus[-1], is_mig=third[1] == "Enabled")
        elif piece := _SLICE.match(line):
            slices.setdefault(int(piece[1]), []).append(int(piece[2]) * MIB)
        elif process := _PROCESS.match(line):
            found = _process(process)
            processes.setdefault((int(process[1]), found.pid), found)
    if not gpus:
        check_smi(done)
        raise fail("nvidia-smi", 1, text[:200], "no GPU in the table")
    once = {gpu.index: gpu for gpu in sorted(gpus, key=lambda gpu: gpu.is_complete)}
    gpus = [
        replace(_with_processes(gpu, processes), mig_memory_bytes=tuple(slices.get(index, ())))
        for index, gpu in sorted(once.items())
    ]
    return QueryFacts(None, tuple(gpus), head[1] if head else None, head[2] if head else None)


def _process(row: re.Match[str]) -> GpuProcessFacts:
    memory = int(row[4]) * MIB if row[4] else None
    return GpuProcessFacts(gpu_uuid="", pid=int(row[2]), name=row[3], memory_bytes=memory)


def _with_processes(
    gpu: QueryGpu, processes: Mapping[tuple[int, int], GpuProcessFacts]
) -> QueryGpu:
    own = tuple(process for (index, _), process in processes.items() if index == gpu.index)
    return replace(gpu, processes=own)


def _completed(gpu: QueryGpu, second: re.Match[str]) -> QueryGpu:
    bad = tuple(n for n, cell in (("fan", second[1]), ("temperature", second[2])) if cell == "ERR!")
    bad += ("memory",) if second[5] else ()
    temperature = second[2].removesuffix("C")
    return QueryGpu(
        gpu.index,
        gpu.pci_bus_id,
        None,
        gpu.name,
        memory_bytes=int(second[4]) * MIB if second[4] else None,
        memory_used_bytes=int(second[3]) * MIB if second[3] else None,
        health=GpuHealth(
            has_persistence=gpu.health.has_persistence,
            temperature_celsius=float(temperature) if temperature.isdecimal() else None,
            compute_mode=_MODES.get(second[6].strip(), second[6].strip() or None),
            bad_readings=bad,
        ),
    )


PROBE = Probe("", parse, marks=re.compile(rf"(?m)^\| NVIDIA-SMI \d|^{_FIRST.pattern}"))

"""`nvidia-smi` as CSV: GPUs with their memory, and the processes that hold some of it.

When the whole query fails because of one lost GPU, every GPU that the kernel module knows is asked alone.
Columns: https://docs.nvidia.com/deploy/nvidia-smi/ (query-gpu, query-compute-apps), drivers 450 to 595.
Pure.
"""

import re
from collections.abc import Sequence
from dataclasses import replace

from dynctl.core.command import Completed
from dynctl.core.units import MIB
from dynctl.discovery.facts import GpuFacts, GpuProcessFacts, SmiFacts
from dynctl.discovery.probe import (
    ABSENT_STATUS,
    TIMEOUT_STATUS,
    Probe,
    check_smi,
    fail,
    text_of,
)

_SCRIPT = r"""
wide=index,uuid,name,pci.bus_id,memory.total,memory.used,driver_version,mig.mode.current
narrow=index,uuid,name,pci.bus_id,memory.total,memory.used,driver_version
ask() { nvidia-smi "$@" --format=csv,nounits; }
echo '== gpus'
got=$(ask --query-gpu=$wide 2>&1); status=$?
if [ $status -ne 0 ]; then
  more=$(ask --query-gpu=$narrow 2>&1) && { got=$more; status=0; }
fi
printf '%s\n' "$got"
if [ $status -ne 0 ]; then
  for dir in /proc/driver/nvidia/gpus/*/; do
    [ -d "$dir" ] || continue
    bus=${dir%/}; bus=${bus##*/}
    echo "== gpu $bus"
    ask -i "$bus" --query-gpu=$wide 2>&1
  done
fi
echo '== processes'
apps=$(ask --query-compute-apps=gpu_uuid,pid,process_name,used_gpu_memory 2>&1)
printf '%s\n' "$apps"
echo '== owners'
printf '%s\n' "$apps" | while IFS=, read -r _ pid _; do
  pid=$(printf '%s' "$pid" | tr -cd '0-9')
  [ -n "$pid" ] && [ -d "/proc/$pid" ] || continue
  user=$(stat -c %U "/proc/$pid" 2>/dev/null)
  ours=0
  tr '\0' '\n' 2>/dev/null <"/proc/$pid/environ" | grep -q '^DYNCTL_INCARNATION=' && ours=1
  echo "$pid $ours $user"
done 2>/dev/null
exit $status
"""

_WIDE = ("index", "uuid", "name", "pci.bus_id", "memory.total", "memory.used", "driver_version", "mig.mode.current")  # fmt: skip
_SHORT = ("uuid", "memory.total", "memory.used", "memory.free", "utilization.gpu")
_MAX_CELLS, _MAX_CELL_CHARS = 256, 1024
_TITLE = re.compile(r"(?m)^== gpus$")
_COLUMN = re.compile(r"[a-z][a-z0-9_]{1,40}(?:\.[a-z0-9_]{1,40}){0,6}(?: \[[^\]]{1,12}\])?")
_TELLING = "index|uuid|gpu_uuid|name|gpu_name|pid|pci\\.bus_id|gpu_bus_id|memory\\.total|memory\\.used|driver_version"
_ALIASES = {
    "gpu_uuid": "uuid",
    "gpu_name": "name",
    "gpu_bus_id": "pci.bus_id",
    "used_memory": "used_gpu_memory",
}
_PROCESS_ALIASES = {"uuid": "gpu_uuid", "name": "process_name"}
_PRODUCT = r"(?:NVIDIA|Tesla|GeForce|Quadro|RTX|A100|H100|H200|B200)[ -][^,|]{1,60}"
_KINDS = (
    ("uuid", re.compile(r"GPU-[0-9a-fA-F-]{8,60}\Z")),
    ("name", re.compile(rf"{_PRODUCT}\Z")),
    ("pci.bus_id", re.compile(r"[0-9A-Fa-f]{4,8}:[0-9A-Fa-f]{2}:[0-9A-Fa-f]{2}\.[0-9A-Fa-f]\Z")),
    ("driver_version", re.compile(r"[3-9]\d\d\.\d{1,3}(?:\.\d{1,3})?\Z")),
)
"""What a cell is by its looks alone, where the header was left out; sizes look all alike."""
_NO_VALUE = re.compile(r"^(?:\[.*\]|N/A|ERR!|Unknown Error|)$", re.IGNORECASE)
_ERRORS = re.compile(r"\[?(?:unknown error|gpu is lost|err!|gpu requires reset)\]?", re.IGNORECASE)
_UUID = re.compile(r"^(?:GPU|MIG)-[0-9a-fA-F-]{8,60}$")
_HANDLE = re.compile(
    r"device handle for GPU\s*(\d{1,3})?:?\s*([0-9a-f:.]{7,16})?:?\s*(.{0,120})", re.IGNORECASE
)


def parse(done: Completed) -> SmiFacts:
    """Read the probe's output.

    Raises:
        ProbeError: when the tool hangs, says that it cannot answer, or prints a row that is no row.
    """
    if done.exit_status == ABSENT_STATUS:
        return SmiFacts(is_installed=False)
    text = text_of(done)
    is_ours = _TITLE.search(text) is not None
    sections = _sections(text) if is_ours else _capture(text)
    gpus, broken = parse_gpus("\n".join(sections.get("gpus", [])))
    for name, lines in sections.items():
        if name.startswith("gpu "):
            one, one_broken = parse_gpus("\n".join(lines))
            gpus += one
            broken += one_broken
    # A capture may be of the processes alone; our own script always asks for the GPUs as well.
    if not gpus and not broken and (is_ours or "processes" not in sections):
        check_smi(done)
        if text.strip() and not is_ours:
            raise fail("nvidia-smi", 1, text.strip().split("\n")[0], "no row, and no message that is known")  # fmt: skip
    if not gpus and any("device handle" in text or "lost" in text for _, text in broken):
        check_smi(done)
    if done.exit_status == TIMEOUT_STATUS:
        broken = (*broken, (-1, "nvidia-smi did not end within its limit"))
    processes, known = parse_processes("\n".join(sections.get("processes", [])))
    owners = _owners(sections.get("owners", []))
    return SmiFacts(
        gpus=tuple({gpu.uuid: gpu for gpu in gpus}.values()),
        processes=tuple(_with_owner(process, owners) for process in processes),
        broken=tuple(dict.fromkeys(broken)),
        are_processes_known=known,
    )


def _capture(text: str) -> dict[str, list[str]]:
    """Sort the lines of a capture by the header above them: only processes have a pid."""
    sections: dict[str, list[str]] = {}
    current = "gpus"
    for line in text.split("\n"):
        if named := _header(_cells(line)):
            current = "processes" if "pid" in named else "gpus"
        sections.setdefault(current, []).append(line)
    return sections


def _sections(text: str) -> dict[str, list[str]]:
    """Split at `== name` lines; text before the first is the GPU list."""
    sections: dict[str, list[str]] = {}
    current = "gpus"
    for line in text.split("\n"):
        if line.startswith("== "):
            current = line[3:].strip()
            continue
        sections.setdefault(current, []).append(line)
    return sections


def parse_gpus(text: str) -> tuple[tuple[GpuFacts, ...], tuple[tuple[int, str], ...]]:
    """Read GPU rows, with or without a header line, with or without units; return facts and broken GPUs.

    Raises:
        ProbeError: when a line is neither a row nor a message of the tool.
    """
    gpus: list[GpuFacts] = []
    broken: list[tuple[int, str]] = []
    columns: Sequence[str] | None = None
    position = 0
    places: dict[str, int] = {}
    for number, line in enumerate(text.split("\n"), 1):
        cells = _cells(line)
        if not line.strip():
            continue
        if named := _header(cells):
            columns, position = named, 0
            continue
        if fault := _HANDLE.search(line):
            broken.append((int(fault[1]) if fault[1] else -1, line.strip()[:200]))
            continue
        if len(cells) < (len(columns) if columns else 2):
            continue  # a message of the tool: check_smi judges it when there are no rows
        row = dict(zip(columns, cells, strict=False)) if columns else _unnamed(cells)
        if row is None:
            continue
        place = places.setdefault(row.get("uuid") or row.get("pci.bus_id") or str(number), position)
        position = max(position, place + 1)
        gpu, error = _gpu(row, place, number, line)
        if gpu is not None:
            gpus.append(gpu)
        if error is not None:
            broken.append(error)
    return tuple(gpus), tuple(broken)


def _cells(line: str) -> list[str]:
    """Cells by themselves are cut, so that one without end does not hide those behind it."""
    return [cell[:_MAX_CELL_CHARS].strip() for cell in line.split(",", _MAX_CELLS)]


def _unnamed(cells: Sequence[str]) -> dict[str, str] | None:
    """Name the cells of a row without header: by our own order, by the usual short one, else by their looks."""
    is_ours = len(cells) >= len(_WIDE) - 1 and cells[0].isdecimal()
    if is_ours and (_UUID.match(cells[1]) or _NO_VALUE.match(cells[1])):
        return dict(zip(_WIDE, cells, strict=False))
    if len(cells) == len(_SHORT) and _UUID.match(cells[0]) and not re.match(_PRODUCT, cells[1]):
        return dict(zip(_SHORT, cells, strict=False))
    row = {}
    for kind, looks in _KINDS:
        found = [cell for cell in cells if looks.match(cell)]
        if len(found) == 1:
            row[kind] = found[0]
    if re.fullmatch(r"\d{1,3}", cells[0]):
        row["index"] = cells[0]
    if len(cells) >= len(_WIDE) - 1 and not row.keys() & {"name", "uuid"}:
        return dict(zip(_WIDE, cells, strict=False))  # a damaged row of ours: its line is named
    return row if row.keys() & {"name", "uuid"} else None


def _header(cells: Sequence[str]) -> tuple[str, ...] | None:
    """Column names without their units; None when the line is no header."""
    if len(cells) < 2 or not all(_COLUMN.fullmatch(cell) for cell in cells):
        return None
    names = [re.sub(r"\s*\[.*\]$", "", cell) for cell in cells]
    if not any(re.fullmatch(_TELLING, name) for name in names):
        return None
    names = [_ALIASES.get(name, name) for name in names]
    return tuple(_PROCESS_ALIASES.get(n, n) for n in names) if "pid" in names else tuple(names)


def _gpu(
    row: dict[str, str], position: int, number: int, line: str
) -> tuple[GpuFacts | None, tuple[int, str] | None]:
    index_text = row.get("index", str(position))
    if not index_text.isascii() or not index_text.isdecimal() or len(index_text) > 4:
        raise fail("nvidia-smi --query-gpu", number, line, "the first cell is no GPU index")
    index = int(index_text)
    errors = [cell for cell in row.values() if _ERRORS.fullmatch(cell)]
    uuid = row.get("uuid", f"unknown-{index}" if not errors else "")
    if "uuid" in row and not _UUID.match(uuid):
        if errors or _NO_VALUE.match(uuid):
            return None, (index, f"GPU {index}: {(errors or [uuid])[0]}")
        raise fail("nvidia-smi --query-gpu", number, line, "the second cell is no GPU UUID")
    facts = GpuFacts(
        index=index,
        uuid=uuid,
        name=_value(row.get("name")) or "unknown GPU",
        pci_bus_id=_value(row.get("pci.bus_id")),
        memory_bytes=_mebibytes(row["memory.total"], number, line) if "memory.total" in row else 0,
        memory_used_bytes=_mebibytes(row.get("memory.used"), number, line),
        is_mig=(row.get("mig.mode.current") or "").lower() == "enabled",
        driver_version=_value(row.get("driver_version")),
        is_use_known="memory.used" in row,
    )
    return facts, (index, f"GPU {index}: {errors[0]}") if errors else None


def _value(cell: str | None) -> str | None:
    return None if cell is None or _NO_VALUE.match(cell) else cell


def _mebibytes(cell: str | None, number: int, line: str) -> int | None:
    value = _value(cell)
    if value is None:
        return None
    match = re.fullmatch(r"(\d{1,9})(?:\.\d+)?\s*(?:MiB)?", value)
    if match is None:
        raise fail("nvidia-smi", number, line, f"{value[:20]!r} is no size in MiB")
    return int(match[1]) * MIB


def parse_processes(text: str) -> tuple[tuple[GpuProcessFacts, ...], bool]:
    """Read the rows of --query-compute-apps; the second value is False when the tool hides or refuses them."""
    columns: Sequence[str] = ("gpu_uuid", "pid", "process_name", "used_gpu_memory")
    found = []
    is_known = True
    for number, line in enumerate(text.split("\n"), 1):
        cells = [cell.strip() for cell in line[:8192].split(",")]
        if named := _header(cells):
            columns = named
            continue
        if len(cells) < 2:
            is_known = is_known and not _says_no(line)
            continue
        # A process name may hold commas: the surplus cells belong to it.
        if "process_name" in columns and (surplus := len(cells) - len(columns)) > 0:
            at = list(columns).index("process_name")
            cells = [
                *cells[:at],
                ", ".join(cells[at : at + surplus + 1]),
                *cells[at + surplus + 1 :],
            ]
        row = dict(zip(columns, cells, strict=False))
        pid = row.get("pid", "")
        if not pid.isascii() or not pid.isdecimal() or len(pid) > 10:
            is_known = False
            continue
        name = _value(row.get("process_name"))
        is_known = is_known and name is not None
        found.append(
            GpuProcessFacts(
                gpu_uuid=row.get("gpu_uuid", ""),
                pid=int(pid),
                name=name,
                memory_bytes=_mebibytes(row.get("used_gpu_memory"), number, line),
            )
        )
    return tuple({(process.gpu_uuid, process.pid): process for process in found}.values()), is_known


def _says_no(line: str) -> bool:
    return bool(re.search(r"permission|not supported|error|failed", line, re.IGNORECASE))


def _owners(lines: Sequence[str]) -> dict[int, tuple[bool, str | None]]:
    """By pid: whether a process carries our tag, and its user."""
    rows = (re.fullmatch(r"(\d{1,10}) ([01]) ?([\w.$-]{0,64})", line.strip()) for line in lines)
    return {int(row[1]): (row[2] == "1", row[3] or None) for row in rows if row}


def _with_owner(
    process: GpuProcessFacts, owners: dict[int, tuple[bool, str | None]]
) -> GpuProcessFacts:
    ours, user = owners.get(process.pid, (False, None))
    return replace(process, user=user, is_tagged=ours)


PROBE = Probe(
    _SCRIPT,
    parse,
    needs="command -v nvidia-smi",
    marks=re.compile(
        r"(?m)^(?:\d{1,3}, *)?GPU-[0-9a-fA-F-]{8,}, *\S|, *GPU-[0-9a-fA-F-]{36}(?:, |$)"
        rf"|^(?=(?:.*[ ,])?(?:{_TELLING})\b){_COLUMN.pattern}(?:, *{_COLUMN.pattern})+ *$"
        rf"|^(?:\d{{1,3}}, *)?{_PRODUCT}, *\S"
        r"|Failed to initialize NVML|NVIDIA-SMI has failed|^No devices were found|device handle for GPU"
    ),
)

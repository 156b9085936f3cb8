"""What `nvidia-smi -q` says, whichever form it was printed in: named values per GPU become facts.

Values come as (path, text) pairs in the order of the output, paths in lower case with `/` between levels; the two
forms differ in some names, so each fact lists all that were seen. Not here: reading either form.
Source: captures of drivers 450 to 595; https://docs.nvidia.com/deploy/nvidia-smi/.
Pure.
"""

import re
from collections.abc import Sequence
from dataclasses import dataclass, field

from dynctl.core.machine import GpuHealth
from dynctl.core.units import MIB
from dynctl.discovery.facts import GpuProcessFacts, QueryFacts, QueryGpu

Pairs = Sequence[tuple[str, str]]

_NO_VALUE = re.compile(
    r"(?:\[?N/A\]?|\[?Not Supported\]?|None|\[?Unknown Error\]?|ERR!|.*deprecated|\[?GPU is lost\]?|)\Z",
    re.IGNORECASE,
)
_ERROR = re.compile(r"\[?(?:Unknown Error|ERR!|GPU is lost)\]?\Z", re.IGNORECASE)
_COSTLY = ("hw_slowdown", "hw_thermal_slowdown", "hw_power_brake_slowdown", "sw_thermal_slowdown", "sw_power_cap")  # fmt: skip


@dataclass(slots=True)
class Record:
    """One GPU's values as they were printed."""

    bus_id: str
    pairs: list[tuple[str, str]] = field(default_factory=list)
    is_complete: bool = False


def facts_of(head: Pairs, records: Sequence[Record]) -> QueryFacts:
    """Make facts of the values before the first GPU and of each GPU's."""
    top = dict(reversed(head))
    once: dict[str, Record] = {}
    for record in records:
        if record.bus_id not in once or not once[record.bus_id].is_complete:
            once[record.bus_id] = record
    attached = re.fullmatch(r"\d{1,3}", top.get("attached_gpus", ""))
    return QueryFacts(
        num_attached=int(attached[0]) if attached else None,
        gpus=tuple(_gpu(i, record) for i, record in enumerate(once.values())),
        driver_version=_value(top.get("driver_version")),
        cuda_version=_value(top.get("cuda_version")),
    )


def _gpu(index: int, record: Record) -> QueryGpu:
    first: dict[str, str] = {}
    for path, text in record.pairs:
        first.setdefault(path, text)
    uuid = _pick(first, "uuid", "gpu_uuid")
    return QueryGpu(
        index=index,
        pci_bus_id=record.bus_id or _pick(first, "pci/pci_bus_id", "pci/bus_id"),
        uuid=uuid,
        name=_pick(first, "product_name"),
        memory_bytes=_mebibytes(_pick(first, "fb_memory_usage/total")),
        memory_used_bytes=_mebibytes(_pick(first, "fb_memory_usage/used")),
        is_mig=_switch(_pick(first, "mig_mode/current_mig", "mig_mode/current")),
        mig_memory_bytes=tuple(
            size
            for path, text in record.pairs
            if path.startswith("mig_device") and path.endswith("fb_memory_usage/total")
            if (size := _mebibytes(_value(text))) is not None
        ),
        health=_health(first, record.pairs),
        processes=tuple(_processes(record.pairs, uuid or "")),
        is_complete=record.is_complete,
    )


def _health(first: dict[str, str], pairs: Pairs) -> GpuHealth:
    link = "pci/pci_gpu_link_info", "pci/gpu_link_info"
    power = "gpu_power_readings", "power_readings", "module_power_readings"
    cluster = _pick(first, "fabric/cluster_uuid", "fabric/clusteruuid")
    clique = _pick(first, "fabric/clique_id", "fabric/cliqueid")
    action = _pick(first, "gpu_recovery_action", "gpu_recovery_action/recovery_action")
    reset = _switch(_pick(first, "gpu_reset_status/reset_required"))
    return GpuHealth(
        has_persistence=_switch(_pick(first, "persistence_mode")),
        has_ecc=_switch(_pick(first, "ecc_mode/current_ecc", "ecc_mode/current")),
        has_ecc_pending=_switch(_pick(first, "ecc_mode/pending_ecc", "ecc_mode/pending")),
        num_uncorrected=_uncorrected(pairs),
        num_remapped=_integer(_pick(first, "remapped_rows/remapped_row_unc", "remapped_rows/uncorrectable_error")),
        is_remap_pending=_any(
            _switch(_pick(first, "remapped_rows/remapped_row_pending", "remapped_rows/pending")),
            _switch(_pick(first, "retired_pages/pending_retirement", "retired_pages/pending_page_blacklist", "retired_pages/pending_blacklist")),
        ),
        has_remap_failed=_switch(_pick(first, "remapped_rows/remapped_row_failure", "remapped_rows/remapping_failure_occurred")),
        is_reset_required=_any(reset, None if action is None else "reset" in action.lower() or "reboot" in action.lower()),
        throttle_reasons=_throttling(pairs),
        temperature_celsius=_number(_pick(first, "temperature/gpu_temp", "temperature/gpu_current_temp"), "C"),
        power_w=_number(_pick(first, *(f"{p}/{n}" for p in power for n in ("power_draw", "instant_power_draw", "average_power_draw"))), "W"),
        power_limit_w=_number(_pick(first, *(f"{p}/{n}" for p in power for n in ("current_power_limit", "power_limit"))), "W"),
        pcie_generation=_integer(_pick(first, *(f"{p}/{n}" for p in link for n in ("pcie_gen/current_link_gen", "pcie_generation/current")))),
        pcie_generation_max=_integer(_pick(first, *(f"{p}/{n}" for p in link for n in ("pcie_gen/max_link_gen", "pcie_generation/max")))),
        pcie_width=_width(_pick(first, *(f"{p}/{n}" for p in link for n in ("link_widths/current_link_width", "link_width/current")))),
        pcie_width_max=_width(_pick(first, *(f"{p}/{n}" for p in link for n in ("link_widths/max_link_width", "link_width/max")))),
        compute_mode=_pick(first, "compute_mode"),
        fabric_state=_pick(first, "fabric/state"),
        fabric_status=_pick(first, "fabric/status"),
        fabric_clique=f"{cluster}/{clique or 0}" if cluster and set(cluster) - set("0-") else None,
        bad_readings=_bad_readings(pairs),
    )  # fmt: skip


def _pick(first: dict[str, str], *paths: str) -> str | None:
    return next((v for path in paths if (v := _value(first.get(path))) is not None), None)


def _value(text: str | None) -> str | None:
    return None if text is None or _NO_VALUE.match(text.strip()) else text.strip()[:400]


def _any(*answers: bool | None) -> bool | None:
    known = [answer for answer in answers if answer is not None]
    return any(known) if known else None


def _switch(text: str | None) -> bool | None:
    return {"enabled": True, "yes": True, "on": True, "disabled": False, "no": False, "off": False}.get((text or "").lower())  # fmt: skip


def _integer(text: str | None) -> int | None:
    return int(text) if text and re.fullmatch(r"[0-9]{1,12}", text) else None


def _number(text: str | None, unit: str) -> float | None:
    match = re.fullmatch(rf"([0-9]{{1,9}}(?:\.[0-9]{{1,6}})?)\s*{unit}", text or "")
    return float(match[1]) if match else None


def _mebibytes(text: str | None) -> int | None:
    value = _number(text, "MiB")
    return None if value is None else int(value) * MIB


def _width(text: str | None) -> int | None:
    match = re.fullmatch(r"([0-9]{1,2})x", text or "")
    return int(match[1]) if match else None


def _uncorrected(pairs: Pairs) -> int | None:
    """Volatile errors: newer drivers split them by memory and kind, older ones give a double-bit total."""
    counts = [
        int(text)
        for path, text in pairs
        if "ecc_errors/volatile/" in path
        and not path.startswith("mig_device")
        and ("uncorrectable" in path or path.endswith("double_bit/total"))
        and re.fullmatch(r"[0-9]{1,12}", text)
    ]
    return sum(counts) if counts else None


def _throttling(pairs: Pairs) -> tuple[str, ...]:
    found = []
    for path, text in pairs:
        group, _, name = path.rpartition("/")
        if not re.match(r"clocks_(?:event|throttle)_reasons", group) or text != "Active":
            continue
        short = re.sub(r"^(?:clocks_(?:event|throttle)_reason_|invalid_)", "", name)
        if short in _COSTLY:
            found.append(short)
    return tuple(dict.fromkeys(found))


def _bad_readings(pairs: Pairs) -> tuple[str, ...]:
    bad = [path.rsplit("/", 1)[-1] for path, text in pairs if _ERROR.match(text.strip())]
    return tuple(dict.fromkeys(re.sub(r"_speed$", "", name) for name in bad))[:8]


def _processes(pairs: Pairs, uuid: str) -> list[GpuProcessFacts]:
    """Group the values behind each process id; a hidden name or size is None."""
    found: list[dict[str, str]] = []
    for path, text in pairs:
        group, _, name = path.rpartition("/")
        if not group.startswith("processes"):
            continue
        if name in {"pid", "process_id"}:
            found.append({"pid": text})
        elif found:
            found[-1].setdefault(name, text)
    return [
        GpuProcessFacts(
            gpu_uuid=uuid,
            pid=int(row["pid"]),
            name=_pick(row, "process_name", "name"),
            memory_bytes=_mebibytes(_pick(row, "used_memory", "used_gpu_memory")),
        )
        for row in found
        if re.fullmatch(r"[0-9]{1,10}", row["pid"])
    ]

"""GPUs: their states, how many there are, how they fare. Pure."""

from collections.abc import Sequence

from dynctl.core.hardware import GpuState
from dynctl.core.units import format_bytes
from dynctl.discovery.facts import AmdFacts, NvmlFacts, PciFacts, PciGpu, SmiFacts
from dynctl.discovery.rules.case import Case, Found, Rule, gpus_in_words

_THERMAL = {"hw_slowdown", "hw_thermal_slowdown", "hw_power_brake_slowdown", "sw_thermal_slowdown"}
"""Reasons that are a fault; a power cap under load is not."""


def states(case: Case) -> Found:
    """GPUs that are not free, and by what."""
    unknown = [gpu.index for gpu in case.host.gpus if gpu.state is GpuState.UNKNOWN]
    is_amd = case.found.fact("rocm_smi", AmdFacts) is not None
    for gpu in case.host.gpus:
        name = f"GPU{gpu.index}"
        if gpu.state is GpuState.MIG:
            cut = f"{len(gpu.mig_slices)} slices: {', '.join(gpu.mig_slices)}"
            cut = cut if gpu.mig_slices else "no slices"
            yield (
                "gpu-mig",
                f"{name} is in MIG mode ({cut}): slices cannot be joined for tensor parallelism; not used",
            )
        elif gpu.state is GpuState.BUSY:
            holders = ", ".join(
                f"{p.name} (pid {p.pid}, {p.user or 'unknown user'}, {format_bytes(p.memory_bytes) if p.memory_bytes is not None else 'unknown memory'})"
                for p in gpu.processes
                if not p.is_ours
            )
            used = (
                format_bytes(gpu.memory_used_bytes) if gpu.memory_used_bytes is not None else "some"
            )
            yield (
                "gpu-busy",
                f"{name} is in use: {holders or used + ' held by a process that cannot be seen'}",
            )
        elif gpu.state is GpuState.LOST:
            yield (
                "gpu-lost",
                f"{name} does not answer the driver: see dmesg for Xid 79, reboot the host; not used",
            )
    # A capture of the matrix alone never asked for states: that is no news.
    if unknown and not is_amd and not case.found.is_capture:
        yield "gpu-unknown", f"{gpus_in_words(unknown)}: state unknown; not used"


def count(case: Case) -> Found:
    """GPUs on the bus against GPUs the driver shows, and what the tool does not tell of them."""
    smi = case.found.fact("nvidia_smi_csv", SmiFacts)
    pci = case.found.fact("pci", PciFacts) or PciFacts()
    nvidia = [card for card in pci.gpus if card.vendor == "nvidia"]
    nvml = case.found.fact("nvml", NvmlFacts)
    has_driver = nvml is not None and nvml.query.num_attached is not None
    if smi is not None:
        if (smi.is_installed or has_driver) and len(nvidia) > len(case.host.gpus):
            yield (
                "gpu-missing",
                f"{len(nvidia)} NVIDIA devices on the PCI bus, the driver shows {len(case.host.gpus)}",
            )
        if not smi.is_installed and nvidia and not has_driver:
            yield (
                "gpu-driver-absent",
                f"{len(nvidia)} NVIDIA devices on the PCI bus but no nvidia-smi: install the driver",
            )
        if not smi.are_processes_known:
            yield (
                "gpu-owners-hidden",
                "the driver hides who holds GPU memory: judged by free memory alone",
            )
        if any(gpu.memory_bytes is None for gpu in smi.gpus):
            yield (
                "gpu-memory-unified",
                "nvidia-smi gives no memory size (unified memory): the host's memory is taken instead",
            )


def kinds(case: Case) -> Found:
    """Mixed, AMD and declared GPUs, and numbers of them that groups do not use up."""
    host = case.host
    amd = case.found.fact("rocm_smi", AmdFacts)
    pci = case.found.fact("pci", PciFacts) or PciFacts()
    if amd and amd.links:
        yield (
            "gpu-amd",
            f"{len(amd.links)} AMD GPUs are recognised but not supported by the engines yet",
        )
        if amd.is_low_power:
            yield (
                "gpu-low-power",
                "AMD GPUs are in a low-power state: figures are those of idle devices",
            )
    elif not host.gpus and _has_amd_compute(pci.gpus):
        yield "gpu-amd", "AMD GPUs are recognised but not supported by the engines yet"
    if len({gpu.name for gpu in host.gpus if not gpu.is_simulated and gpu.memory_bytes}) > 1:
        yield "gpu-mixed", "GPUs of different kinds: never joined into one tensor-parallel group"
    if any(gpu.is_simulated for gpu in host.gpus):
        yield (
            "gpu-simulated",
            f"{len(host.gpus)} × {host.gpus[0].name} are declared in the inventory, not present",
        )
    elif case.entry.simulated_gpus is not None and host.gpus:
        yield "gpu-simulated-ignored", "real GPUs found: simulated_gpus of the inventory is ignored"
    whole = [gpu for gpu in host.gpus if gpu.state is not GpuState.MIG]
    if case.topo.gpu_indexes and len(host.gpus) == 1:
        yield "gpu-single", "a single GPU: tp=1 only"
    elif len(whole) > 2 and len(whole) % 2:
        by_four = f", {len(whole) % 4} by groups of four" if len(whole) > 4 else ""
        yield "gpu-odd-count", f"{len(whole)} GPUs: one is left over by groups of two{by_four}"


def _has_amd_compute(cards: Sequence[PciGpu]) -> bool:
    return sum(1 for card in cards if card.vendor == "amd") > 1


def health(case: Case) -> Found:
    """What `nvidia-smi -q` says of errors and brakes."""
    for gpu in case.host.gpus:
        name, h = f"GPU{gpu.index}", gpu.health
        if h.bad_readings:
            yield (
                "gpu-sensor",
                f"{name}: {', '.join(h.bad_readings)} reads as an error: sensor or part failure",
            )
        if braked := [reason for reason in h.throttle_reasons if reason in _THERMAL]:
            yield "gpu-throttled", f"{name} is slowed down: {', '.join(braked)}"
        if h.num_uncorrected:
            yield (
                "gpu-ecc-errors",
                f"{name}: {h.num_uncorrected} uncorrectable memory errors since the driver was loaded",
            )
        if h.is_remap_pending or h.has_remap_failed or h.is_reset_required:
            what = (
                "row remapping failed"
                if h.has_remap_failed
                else "a reset is pending for its memory"
            )
            yield "gpu-reset-pending", f"{name}: {what}: drain it and reset it"
        if h.has_ecc is not None and h.has_ecc_pending not in {None, h.has_ecc}:
            yield (
                "gpu-ecc-pending",
                f"{name}: ECC is {'on' if h.has_ecc else 'off'} and will be {'on' if h.has_ecc_pending else 'off'} after a reset",
            )
        if h.pcie_width and h.pcie_width_max and h.pcie_width < h.pcie_width_max:
            yield (
                "gpu-pcie-narrow",
                f"{name} runs on {h.pcie_width} of {h.pcie_width_max} PCIe lanes: reseat it",
            )
        if h.fabric_state and (
            h.fabric_state != "Completed" or h.fabric_status not in {None, "Success"}
        ):
            yield (
                "gpu-fabric",
                f"{name}: NVLink fabric is {h.fabric_state} ({h.fabric_status or 'no status'}): CUDA cannot start before it is Completed",
            )


RULES: tuple[Rule, ...] = (states, count, kinds, health)

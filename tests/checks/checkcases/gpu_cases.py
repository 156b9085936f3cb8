"""Cases of the checks of GPUs, their driver and what joins them. Outputs as nvidia-smi 550 to 580 prints them."""

from checkcases.build import (
    evidence,
    gpu,
    gpus,
    host,
    links,
    planned,
    replica,
    software,
    split_plan,
    warned,
)
from checkcases.world import Case, World, answers, says, smi

from dynctl.core.hardware import GpuProcess, GpuState
from dynctl.core.machine import Fabric
from dynctl.core.units import GIB

GOOD = planned()
LIST = "GPU 0: NVIDIA H100 80GB HBM3 (UUID: GPU-a-00000000)\nGPU 1: NVIDIA H100 80GB HBM3 (UUID: GPU-a-00000001)"
WORKS = World({"nvidia-smi": says(LIST)})
MISMATCH = (
    "Failed to initialize NVML: Driver/library version mismatch\nNVML library version: 580.95"
)
NO_DRIVER = "NVIDIA-SMI has failed because it couldn't communicate with the NVIDIA driver."


def sick(index=0, **health):
    """Host `a`, one of its GPUs with these health facts."""
    return planned(
        host("a", gpus=tuple(gpu(i, health=health if i == index else {}) for i in range(2)))
    )


def watts(*limits):
    return planned(
        host(gpus=tuple(gpu(i, health={"power_limit_w": w}) for i, w in enumerate(limits)))
    )


def with_gpu(**change):
    return planned(host("a", gpus=(gpu(0, **change), gpu(1))))


def query(field, bad, good):
    return smi((f"--query-gpu={field}", bad)), smi((f"--query-gpu={field}", good))


def section(bad, good, words="-q"):
    return smi((words, bad)), smi((words, good))


MIG, NO_MIG = query("mig.mode.current", "Enabled", "Disabled")
APPS, NO_APPS = section(
    "GPU-a-00000000, 4711", "GPU-a-00000000, 47110", "--query-compute-apps=gpu_uuid,pid"
)
HELD, FREE = query("memory.used", "40960", "4")
ECC, NO_ECC = query("ecc.mode.current,ecc.mode.pending", "Enabled, Disabled", "Enabled, Enabled")
ERRORS, NO_ERRORS = query("ecc.errors.uncorrected.volatile.total", "3", "0")
REMAP, NO_REMAP = section(
    "    Remapped Rows\n        Pending                           : Yes",
    "        Pending                           : No",
)
FAILED, NOT_FAILED = section(
    "        Remapping Failure Occurred        : Yes",
    "        Remapping Failure Occurred        : No",
)
HOT, COOL = section(
    "        HW Slowdown                       : Active\n            HW Thermal Slowdown           : Active",
    "        HW Slowdown                       : Not Active\n        SW Power Cap                      : Not Active",
)
UNKEPT, KEPT = query("persistence_mode", "Disabled", "Enabled")
PROHIBITED, DEFAULT = query("compute_mode", "Prohibited", "Default")
NARROW, WIDE = query("pcie.link.width.current,pcie.link.width.max", "8, 16", "16, 16")
CAPPED, UNCAPPED = query("power.limit", "400.00", "700.00")
FABRIC = "    Fabric\n        State                             : {}\n        Status                            : {}"
UNJOINED, JOINED = section(
    FABRIC.format("In Progress", "N/A"), FABRIC.format("Completed", "Success")
)
CLIQUES, CLIQUE = section(
    "        CliqueId : 1\n        CliqueId : 2", "        CliqueId : 1\n        CliqueId : 1"
)
DEAD, ALIVE = section(
    "GPU 0: NVIDIA H100\n\t Link 0: 26.562 GB/s\n\t Link 1: <inactive>",
    "GPU 0: NVIDIA H100\n\t Link 0: 26.562 GB/s",
    "nvlink --status -i 0",
)
MATRIX = "\tGPU0\tGPU1\tCPU Affinity\nGPU0\t X \t{0}\t0-31\nGPU1\t{0}\t X \t0-31"
SYS, NV = section(MATRIX.format("SYS"), MATRIX.format("NV18"), "topo -m")
P2P = " \tGPU0\tGPU1\n GPU0\tX\t{0}\n GPU1\t{0}\tX\n\nLegend:\n  NS  = Not supported"
OFF, ON = section(P2P.format("NS"), P2P.format("OK"), "topo -p2p r")
TWO, ONE = query("name", "NVIDIA H100\nNVIDIA L40S", "NVIDIA H100\nNVIDIA H100")
STATE = {"systemctl": "echo {}\n"}
BUS = {
    f"/sys/bus/pci/devices/0000:0{i}:00.0/{n}": v
    for i in (1, 2)
    for n, v in (("vendor", "0x10de\n"), ("class", "0x030200\n"))
}
BUS |= {
    "/sys/bus/pci/devices/0000:09:00.0/vendor": "0x10de\n",
    "/sys/bus/pci/devices/0000:09:00.0/class": "0x040300\n",
}
MANAGER = {"nv-fabricmanager": says("Fabric Manager version is : 570.10")}
DRIVER = answers(("--query-gpu=driver_version", "580.95.05"))
process = GpuProcess(4711, "python3", "bob", 40 * GIB, False)
ours = GpuProcess(4712, "VLLM::EngineCore", "root", 40 * GIB, True)
two_tp = split_plan(replica(indexes=(0, 1)), replica("chat-decode-0", "decode", "b"))
switched = {"fabric": Fabric(4, "active", "580.95.05")}

CASES = (
    Case(
        "driver-mismatch",
        evidence(warned("gpu-driver-library-mismatch")),
        GOOD,
        World({"nvidia-smi": says(MISMATCH, 18)}),
        WORKS,
        "red",
    ),
    Case(
        "driver-missing",
        evidence(warned("gpu-driver-not-loaded")),
        GOOD,
        World({"nvidia-smi": says(NO_DRIVER, 9)}),
        WORKS,
        "red",
    ),
    Case(
        "driver-hangs",
        evidence(warned("gpu-timeout")),
        GOOD,
        World(
            {"nvidia-smi": "sleep 60\n", "timeout": 'shift 3; exec /usr/bin/timeout -k 1 1 "$@"\n'}
        ),
        WORKS,
        "red",
    ),
    Case(
        "gpu-access-denied",
        evidence(warned("gpu-no-permission")),
        GOOD,
        World({"nvidia-smi": says("Failed to initialize NVML: Insufficient Permissions", 4)}),
        WORKS,
        "red",
    ),
    Case(
        "gpu-lost",
        with_gpu(state=GpuState.LOST),
        GOOD,
        smi(
            (
                "-i 00000000:01:00.0 -q",
                "Unable to determine the device handle for GPU0: 0000:01:00.0: GPU is lost.",
            )
        ),
        smi(("-i 00000000:01:00.0 -q", "Attached GPUs : 2")),
        "red",
        "planned for chat-prefill-0",
    ),
    Case(
        "gpu-missing",
        evidence(warned("gpu-missing", "2 NVIDIA devices on the PCI bus, the driver shows 1")),
        GOOD,
        World({"nvidia-smi": says(LIST.split("\n")[0])}, BUS),
        World({"nvidia-smi": says(LIST)}, BUS),
        "red",
    ),
    Case(
        "gpu-mig",
        with_gpu(state=GpuState.MIG, mig_slices=("1g.10gb",)),
        GOOD,
        MIG,
        NO_MIG,
        "red",
        "1g.10gb",
    ),
    Case(
        "gpu-foreign-process",
        with_gpu(state=GpuState.BUSY, processes=(process,)),
        with_gpu(processes=(ours,)),
        APPS,
        NO_APPS,
        "red",
        "user bob",
    ),
    Case(
        "gpu-memory-held",
        with_gpu(state=GpuState.BUSY, memory_used_bytes=40 * GIB),
        with_gpu(processes=(ours,), memory_used_bytes=40 * GIB),
        HELD,
        FREE,
        "red",
    ),
    Case(
        "gpu-ecc-pending",
        sick(has_ecc=True, has_ecc_pending=False),
        sick(has_ecc=True, has_ecc_pending=True),
        ECC,
        NO_ECC,
        "warning",
    ),
    Case(
        "gpu-ecc-errors",
        sick(num_uncorrected=3),
        sick(num_uncorrected=0),
        ERRORS,
        NO_ERRORS,
        "red",
        "3 uncorrected",
    ),
    Case(
        "gpu-remap-pending",
        sick(is_remap_pending=True),
        sick(is_remap_pending=False),
        REMAP,
        NO_REMAP,
        "red",
    ),
    Case(
        "gpu-remap-failed",
        sick(1, has_remap_failed=True),
        sick(1, has_remap_failed=False),
        FAILED,
        NOT_FAILED,
        "red",
    ),
    Case(
        "gpu-sensor",
        sick(1, bad_readings=("fan",)),
        sick(1, bad_readings=()),
        *section(
            "    Fan Speed                             : Unknown Error",
            "    Fan Speed                             : 30 %",
        ),
        "warning",
        "fan",
    ),
    Case(
        "gpu-throttled",
        sick(
            throttle_reasons=("hw_thermal_slowdown",),
            temperature_celsius=91.0,
            power_w=300.0,
            power_limit_w=700.0,
        ),
        sick(throttle_reasons=()),
        HOT,
        COOL,
        "warning",
        "91 °C",
    ),
    Case(
        "gpu-persistence-off",
        sick(has_persistence=False),
        sick(has_persistence=True),
        UNKEPT,
        KEPT,
        "info",
    ),
    Case(
        "gpu-compute-mode",
        sick(compute_mode="Prohibited"),
        sick(compute_mode="Default"),
        PROHIBITED,
        DEFAULT,
        "red",
    ),
    Case(
        "gpu-pcie-degraded",
        sick(pcie_width=8, pcie_width_max=16),
        sick(pcie_width=16, pcie_width_max=16, pcie_generation=1, pcie_generation_max=5),
        NARROW,
        WIDE,
        "red",
        "x8 of x16",
    ),
    Case(
        "gpu-power-uneven",
        watts(400.0, 700.0),
        watts(700.0, 700.0),
        CAPPED,
        UNCAPPED,
        "warning",
    ),
    Case(
        "fabric-manager-down",
        evidence(host(fabric=Fabric(4, "inactive"))),
        evidence(host(fabric=Fabric(0, "inactive"))),
        World({"systemctl": "echo inactive; exit 3\n"}),
        World({"systemctl": "echo active\n"}),
        "red",
    ),
    Case(
        "fabric-manager-version",
        evidence(host(fabric=Fabric(4, "active", "570.10"))),
        evidence(host(**switched)),
        World({**MANAGER, "nvidia-smi": DRIVER}),
        World(
            {
                "nv-fabricmanager": says("Fabric Manager version is : 580.95.05"),
                "nvidia-smi": DRIVER,
            }
        ),
        "red",
    ),
    Case(
        "fabric-not-ready",
        sick(fabric_state="In Progress"),
        sick(fabric_state="Completed", fabric_status="Success"),
        UNJOINED,
        JOINED,
        "red",
    ),
    Case(
        "fabric-cliques-differ",
        evidence(
            host(
                gpus=(
                    gpu(0, health={"fabric_clique": "u/1"}),
                    gpu(1, health={"fabric_clique": "u/2"}),
                )
            )
        ),
        evidence(host(gpus=gpus(health={"fabric_clique": "u/1"}))),
        CLIQUES,
        CLIQUE,
        "red",
    ),
    Case(
        "nvlink-inactive",
        with_gpu(nvlink_rates_bytes_s=(26 * 10**9, None)),
        with_gpu(nvlink_rates_bytes_s=(None, None)),
        DEAD,
        ALIVE,
        "warning",
        "inactive: 1",
    ),
    Case(
        "tp-crosses-island",
        planned(
            host(
                gpus=gpus(4),
                gpu_links=(
                    ("X", "SYS", "NV4", "SYS"),
                    ("SYS", "X", "SYS", "NV4"),
                    ("NV4", "SYS", "X", "SYS"),
                    ("SYS", "NV4", "SYS", "X"),
                ),
                nvlink_islands=((0, 2), (1, 3)),
            ),
            plan=two_tp,
        ),
        planned(plan=two_tp),
        SYS,
        NV,
        "warning",
        "GPU0–GPU1: SYS",
    ),
    Case(
        "p2p-off",
        planned(host(p2p=(("read", links(2, "NS")),)), plan=two_tp),
        planned(host(p2p=(("read", links(2, "OK")),)), plan=two_tp),
        OFF,
        ON,
        "warning",
    ),
    Case(
        "gpus-mixed",
        with_gpu(name="NVIDIA L40S"),
        GOOD,
        TWO,
        ONE,
        "info",
    ),
    Case(
        "drivers-differ",
        planned(host(software=software(driver_version="570.10"))),
        GOOD,
        World({"ssh": 'case "$*" in *192.168.0.1*) echo 570.10 ;; *) echo 580.95.05 ;; esac\n'}),
        World({"ssh": "echo 580.95.05\n"}),
        "warning",
    ),
    Case(
        "cuda-too-old",
        planned(
            host(
                software=software(
                    (("vllm", "0.33.0"), ("nixl", "1.5.1"), ("torch", "2.9.0+cu130")),
                    cuda_version="12.4",
                )
            )
        ),
        GOOD,
        World(
            {
                "nvidia-smi": says(
                    "| NVIDIA-SMI 550.54   Driver Version: 550.54   CUDA Version: 12.4     |"
                )
            }
        ),
        World(
            {
                "nvidia-smi": says(
                    "| NVIDIA-SMI 580.95   Driver Version: 580.95   CUDA Version: 13.0     |"
                )
            }
        ),
        "red",
    ),
)

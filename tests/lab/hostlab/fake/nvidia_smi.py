#!/usr/bin/python3
"""nvidia-smi for lab hosts: prints the topology file in the shapes of the real tool.

Understood: -L · -q -x · topo -m · nvlink --status|-s · --query-gpu=… and --query-compute-apps=… with
--format=csv[,noheader][,nounits] and -i. Anything else ends with status 6, as unknown options do there.
Written from captures of nvidia-smi 550 to 570. IO: reads one file.
"""

import os
import sys
import time
from pathlib import Path

PATH = os.environ.get("DYNCTL_LAB_GPUS", "/etc/dynctl-lab/gpus.tsv")
LEGEND = """
Legend:

  X    = Self
  SYS  = Connection traversing PCIe as well as the SMP interconnect between NUMA nodes (e.g., QPI/UPI)
  NODE = Connection traversing PCIe as well as the interconnect between PCIe Host Bridges within a NUMA node
  PHB  = Connection traversing PCIe as well as a PCIe Host Bridge (typically the CPU)
  PXB  = Connection traversing multiple PCIe bridges (without traversing the PCIe Host Bridge)
  PIX  = Connection traversing at most a single PCIe bridge
  NV#  = Connection traversing a bonded set of # NVLinks
"""


class Machine:
    """The records of the topology file."""

    def __init__(self):
        self.records = {"gpu": [], "process": [], "nic": [], "link": [], "driver": []}
        with Path(PATH).open(encoding="utf-8") as file:
            for line in file:
                kind, *fields = line.rstrip("\n").split("\t")
                if kind in self.records:
                    self.records[kind].append(dict(f.split("=", 1) for f in fields))
        self.driver = self.records["driver"][0]
        self.gpus = self.records["gpu"]
        self.nics = self.records["nic"]

    def processes(self, gpu):
        return [p for p in self.records["process"] if p["gpu"] == gpu["index"]]


def fail(text, status):
    print(text)
    sys.exit(status)


def switch(text):
    return {"enabled": "Enabled", "disabled": "Disabled", "na": "[N/A]"}[text]


def cell(machine, gpu, name, units):
    """One value of --query-gpu."""
    mib = " MiB" if units else ""
    free = int(gpu["memory_mib"]) - int(gpu["reserved_mib"]) - int(gpu["used_mib"])
    is_mig = gpu["mig"] == "enabled"
    unit = {True: lambda value, suffix: f"{value} {suffix}", False: lambda value, _: str(value)}[
        units
    ]
    is_hopper = "H100" in gpu["name"]
    values = {
        "index": gpu["index"],
        "count": str(len(machine.gpus)),
        "name": gpu["name"],
        "gpu_name": gpu["name"],
        "uuid": gpu["uuid"],
        "gpu_uuid": gpu["uuid"],
        "serial": f"16500{int(gpu['index']):08d}",
        "pci.bus_id": gpu["bus_id"],
        "gpu_bus_id": gpu["bus_id"],
        "pci.domain": "0x0000",
        "pci.bus": "0x" + gpu["bus_id"][9:11],
        "pci.device_id": "0x233010DE" if is_hopper else "0x26B910DE",
        "driver_version": machine.driver["version"],
        "memory.total": gpu["memory_mib"] + mib,
        "memory.used": gpu["used_mib"] + mib,
        "memory.free": f"{free}{mib}",
        "memory.reserved": gpu["reserved_mib"] + mib,
        "utilization.gpu": "[N/A]" if is_mig else unit(gpu["util"], "%"),
        "utilization.memory": "[N/A]" if is_mig else unit(int(gpu["util"]) // 2, "%"),
        "temperature.gpu": gpu["temperature"],
        "power.draw": unit(f"{int(gpu['power_mw']) / 1000:.2f}", "W"),
        "power.limit": unit(f"{int(gpu['power_limit_mw']) / 1000:.2f}", "W"),
        "mig.mode.current": switch(gpu["mig"]),
        "mig.mode.pending": switch(gpu["mig"]),
        "persistence_mode": "Enabled",
        "compute_mode": "Default",
        "compute_cap": "9.0" if is_hopper else "8.9",
        "ecc.mode.current": "Enabled",
        "ecc.errors.uncorrected.volatile.total": gpu["ecc_errors"],
        "ecc.errors.corrected.volatile.total": "0",
        "pstate": "P0",
        "fan.speed": "[N/A]",
        "pcie.link.gen.current": "5",
        "pcie.link.gen.max": "5",
        "pcie.link.width.current": "16",
        "pcie.link.width.max": "16",
        "clocks.sm": unit(1980 if int(gpu["util"]) else 345, "MHz"),
        "clocks.max.sm": unit(1980, "MHz"),
        "gpu_recovery_action": "None",
        "fabric.state": "Completed" if int(gpu["nvlinks"]) else "[N/A]",
        "fabric.status": "Success" if int(gpu["nvlinks"]) else "[N/A]",
        "timestamp": time.strftime("%Y/%m/%d %H:%M:%S.000"),
    }
    if name not in values:
        fail(f'Field "{name}" is not a valid field to query.\n', 2)
    return (
        "[GPU is lost]"
        if gpu["state"] == "lost" and name not in ("index", "count")
        else values[name]
    )


HEADS = {"memory.": "MiB", "utilization.": "%", "power.": "W", "clocks.": "MHz"}


def head(name, units):
    unit = next((u for prefix, u in HEADS.items() if name.startswith(prefix)), None)
    return f"{name} [{unit}]" if unit and units else name


def query_gpu(machine, names, style, only):
    units = "nounits" not in style
    if "noheader" not in style:
        print(", ".join(head(name, units) for name in names))
    for gpu in machine.gpus:
        if only is None or {gpu["index"], gpu["uuid"], gpu["bus_id"]} & only:
            print(", ".join(cell(machine, gpu, name, units) for name in names))


def query_apps(machine, names, style, only):
    units = "nounits" not in style
    if "noheader" not in style:
        print(", ".join("used_gpu_memory [MiB]" if "memory" in n and units else n for n in names))
    for gpu in machine.gpus:
        if only is not None and not {gpu["index"], gpu["uuid"], gpu["bus_id"]} & only:
            continue
        for process in machine.processes(gpu):
            memory = process["memory_mib"] + (" MiB" if units else "")
            values = {
                "pid": process["pid"],
                "process_name": process["name"],
                "name": process["name"],
                "gpu_uuid": gpu["uuid"],
                "gpu_name": gpu["name"],
                "gpu_bus_id": gpu["bus_id"],
                "gpu_serial": f"16500{int(gpu['index']):08d}",
                "used_gpu_memory": memory,
                "used_memory": memory,
                "timestamp": time.strftime("%Y/%m/%d %H:%M:%S.000"),
            }
            for name in names:
                if name not in values:
                    fail(f'Field "{name}" is not a valid field to query.\n', 2)
            print(", ".join(values[name] for name in names))


def topo(machine):
    gpus = [f"GPU{g['index']}" for g in machine.gpus]
    nics = [f"NIC{n['index']}" for n in machine.nics]
    names = gpus + nics
    kinds = {}
    for link in machine.records["link"]:
        kinds[link["a"], link["b"]] = kinds[link["b"], link["a"]] = link["kind"]
    print("\t" + "\t".join(names) + "\tCPU Affinity\tNUMA Affinity\tGPU NUMA ID")
    for row in names:
        cells = [" X " if row == column else kinds.get((row, column), "N/A") for column in names]
        tail = ""
        if row in gpus:
            gpu = machine.gpus[gpus.index(row)]
            # The real tool pads the NUMA column with a second tab, and leaves NIC rows open at the end.
            tail = f"\t{gpu['cpus']}\t{gpu['numa']}\t\tN/A"
        print(f"{row}\t" + "\t".join(cells) + (tail or "\t\t\t\t"))
    print(LEGEND)
    if nics:
        print("NIC Legend:\n")
        for nic in machine.nics:
            print(f"  NIC{nic['index']}: {nic['name']}")
        print()


def nvlink_status(machine):
    for gpu in machine.gpus:
        print(f"GPU {gpu['index']}: {gpu['name']} (UUID: {gpu['uuid']})")
        for link in range(int(gpu["nvlinks"])):
            print(f"\t Link {link}: {gpu['nvlink_gb_s']} GB/s")


def list_gpus(machine):
    for gpu in machine.gpus:
        if gpu["state"] == "lost":
            print(
                f"Unable to determine the device handle for gpu {gpu['bus_id']}: "
                "GPU is lost.  Reboot the system to recover this GPU"
            )
            continue
        print(f"GPU {gpu['index']}: {gpu['name']} (UUID: {gpu['uuid']})")


def query_xml(machine):
    print('<?xml version="1.0" ?>')
    print('<!DOCTYPE nvidia_smi_log SYSTEM "nvsmi_device_v12.dtd">')
    print("<nvidia_smi_log>")
    print(f"\t<timestamp>{time.strftime('%a %b %d %H:%M:%S %Y')}</timestamp>")
    print(f"\t<driver_version>{machine.driver['version']}</driver_version>")
    print(f"\t<cuda_version>{machine.driver['cuda']}</cuda_version>")
    print(f"\t<attached_gpus>{len(machine.gpus)}</attached_gpus>")
    for gpu in machine.gpus:
        free = int(gpu["memory_mib"]) - int(gpu["reserved_mib"]) - int(gpu["used_mib"])
        mig = switch(gpu["mig"]).strip("[]")
        print(f'\t<gpu id="{gpu["bus_id"]}">')
        tree = [
            ("product_name", gpu["name"]),
            ("product_brand", "NVIDIA"),
            ("product_architecture", "Hopper" if "H100" in gpu["name"] else "Ada Lovelace"),
            ("persistence_mode", "Enabled"),
            ("mig_mode", [("current_mig", mig), ("pending_mig", mig)]),
            ("serial", f"16500{int(gpu['index']):08d}"),
            ("uuid", gpu["uuid"]),
            ("minor_number", gpu["index"]),
            ("pci", [("pci_bus", gpu["bus_id"][9:11]), ("pci_bus_id", gpu["bus_id"])]),
            ("performance_state", "P0"),
            (
                "fb_memory_usage",
                [
                    ("total", f"{gpu['memory_mib']} MiB"),
                    ("reserved", f"{gpu['reserved_mib']} MiB"),
                    ("used", f"{gpu['used_mib']} MiB"),
                    ("free", f"{free} MiB"),
                ],
            ),
            ("compute_mode", "Default"),
            ("utilization", [("gpu_util", f"{gpu['util']} %")]),
            ("ecc_mode", [("current_ecc", "Enabled"), ("pending_ecc", "Enabled")]),
            ("temperature", [("gpu_temp", f"{gpu['temperature']} C")]),
            (
                "gpu_power_readings",
                [
                    ("power_draw", f"{int(gpu['power_mw']) / 1000:.2f} W"),
                    ("current_power_limit", f"{int(gpu['power_limit_mw']) / 1000:.2f} W"),
                ],
            ),
            (
                "processes",
                [
                    (
                        "process_info",
                        [
                            ("gpu_instance_id", "N/A"),
                            ("compute_instance_id", "N/A"),
                            ("pid", process["pid"]),
                            ("type", "C"),
                            ("process_name", process["name"]),
                            ("used_memory", f"{process['memory_mib']} MiB"),
                        ],
                    )
                    for process in machine.processes(gpu)
                ],
            ),
        ]
        show(tree, 2)
        print("\t</gpu>")
    print("</nvidia_smi_log>")


def show(tree, depth):
    tabs = "\t" * depth
    for name, value in tree:
        if isinstance(value, str):
            print(f"{tabs}<{name}>{value}</{name}>")
        else:
            print(f"{tabs}<{name}>")
            show(value, depth + 1)
            print(f"{tabs}</{name}>")


def main(argv):
    machine = Machine()
    if machine.driver["fault"] == "mismatch":
        fail(
            "Failed to initialize NVML: Driver/library version mismatch\n"
            f"NVML library version: {machine.driver['version'].rpartition('.')[0]}",
            18,
        )
    if machine.driver["fault"] == "unloaded":
        fail(
            "NVIDIA-SMI has failed because it couldn't communicate with the NVIDIA driver. "
            "Make sure that the latest NVIDIA driver is installed and running.\n",
            9,
        )
    options = {}
    words = []
    rest = list(argv)
    while rest:
        word = rest.pop(0)
        name, _, value = word.partition("=")
        if name in ("-i", "--id", "--format") and not value:
            value = rest.pop(0) if rest else ""
        if word.startswith("-"):
            options[name] = value
        else:
            words.append(word)
    only = options.get("-i", options.get("--id"))
    only = set(only.split(",")) if only else None
    style = [part.strip() for part in options.get("--format", "").split(",")]
    if words[:1] == ["topo"] and {"-m", "--matrix"} & set(options):
        topo(machine)
    elif words[:1] == ["nvlink"] and {"-s", "--status"} & set(options):
        nvlink_status(machine)
    elif {"-L", "--list-gpus"} & set(options):
        list_gpus(machine)
    elif {"-x", "--xml-format"} & set(options) and {"-q", "--query"} & set(options):
        query_xml(machine)
    elif "--query-gpu" in options and "csv" in style:
        query_gpu(machine, [n.strip() for n in options["--query-gpu"].split(",")], style, only)
    elif "--query-compute-apps" in options and "csv" in style:
        names = [n.strip() for n in options["--query-compute-apps"].split(",")]
        query_apps(machine, names, style, only)
    else:
        fail(f"Invalid combination of input arguments: {' '.join(argv)}", 6)


if __name__ == "__main__":
    main(sys.argv[1:])

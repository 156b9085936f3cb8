"""The fake GPUs answer alike wherever the real code may look: NVML, nvidia-smi's texts and its XML."""

import csv
import io
import json
import os
import shutil
import subprocess
import sys
import xml.etree.ElementTree as ET
from dataclasses import replace
from pathlib import Path

import pytest
from hostlab import gpu_files
from hostlab.gpus import PRESETS, FakeProcess, hgx_h100

pytestmark = [
    pytest.mark.lab,
    pytest.mark.skipif(shutil.which("gcc") is None, reason="no gcc to build the NVML library with"),
]

NVML_DUMP = """
import json, pynvml as n
n.nvmlInit()
gpus = []
for i in range(n.nvmlDeviceGetCount()):
    h = n.nvmlDeviceGetHandleByIndex(i)
    v1, v2 = n.nvmlDeviceGetMemoryInfo(h), n.nvmlDeviceGetMemoryInfo(h, n.nvmlMemory_v2)
    links = 0
    try:
        links = sum(n.nvmlDeviceGetNvLinkState(h, k) for k in range(18))
    except n.NVMLError_NotSupported:
        pass
    try:
        mig = n.nvmlDeviceGetMigMode(h)[0]
    except n.NVMLError_NotSupported:
        mig = None
    gpus.append({
        "index": n.nvmlDeviceGetIndex(h), "uuid": n.nvmlDeviceGetUUID(h), "name": n.nvmlDeviceGetName(h),
        "same": n.nvmlDeviceGetUUID(n.nvmlDeviceGetHandleByUUID(n.nvmlDeviceGetUUID(h))),
        "total": v2.total, "used": v2.used, "reserved": v2.reserved, "free": v2.free,
        "used_v1": v1.used, "free_v1": v1.free,
        "util": n.nvmlDeviceGetUtilizationRates(h).gpu, "power": n.nvmlDeviceGetPowerUsage(h),
        "temperature": n.nvmlDeviceGetTemperature(h, n.NVML_TEMPERATURE_GPU),
        "temperature_v": n.nvmlDeviceGetTemperatureV(h, n.NVML_TEMPERATURE_GPU),
        "bus": n.nvmlDeviceGetPciInfo(h).busId, "links": links, "mig": mig,
        "numa": n.nvmlDeviceGetNumaNodeId(h), "ecc": n.nvmlDeviceGetEccMode(h)[0],
        "cpus": list(n.nvmlDeviceGetCpuAffinity(h, 4)),
        "processes": [[p.pid, p.usedGpuMemory] for p in n.nvmlDeviceGetComputeRunningProcesses(h)],
        "ancestors": [n.nvmlDeviceGetTopologyCommonAncestor(h, n.nvmlDeviceGetHandleByIndex(j))
                      for j in range(n.nvmlDeviceGetCount())],
    })
print(json.dumps({"driver": n.nvmlSystemGetDriverVersion(), "cuda": n.nvmlSystemGetCudaDriverVersion(),
                  "gpus": gpus}))
n.nvmlShutdown()
"""


class Machine:
    """A GPU machine of a preset, asked in this process's own system."""

    def __init__(self, directory: Path, preset: str) -> None:
        self.directory = directory
        self.facts = PRESETS[preset]("m")
        gpu_files.install_beside(directory, self.facts)

    def run(self, *argv: str) -> subprocess.CompletedProcess[str]:
        env = os.environ | {
            "LD_LIBRARY_PATH": str(self.directory / "lib"),
            "DYNCTL_LAB_GPUS": str(self.directory / "gpus.tsv"),
        }
        return subprocess.run(
            argv, env=env, capture_output=True, text=True, timeout=60, check=False
        )

    def smi(self, *argv: str) -> str:
        done = self.run(str(self.directory / "bin/nvidia-smi"), *argv)
        assert done.returncode == 0, done
        return done.stdout

    def nvml(self) -> dict:
        done = self.run(sys.executable, "-c", NVML_DUMP)
        assert done.returncode == 0, done.stderr
        return json.loads(done.stdout)


@pytest.fixture(params=sorted(PRESETS))
def machine(request: pytest.FixtureRequest, tmp_path: Path) -> Machine:
    return Machine(tmp_path / "gpus", request.param)


def test_nvml_and_the_csv_of_nvidia_smi_agree(machine: Machine) -> None:
    names = [
        "index",
        "uuid",
        "name",
        "memory.total",
        "memory.used",
        "memory.reserved",
        "memory.free",
    ]
    names += ["utilization.gpu", "temperature.gpu", "pci.bus_id", "driver_version"]
    text = machine.smi(f"--query-gpu={','.join(names)}", "--format=csv,noheader,nounits")
    rows = list(csv.reader(io.StringIO(text), skipinitialspace=True))
    nvml = machine.nvml()
    assert len(rows) == len(nvml["gpus"]) == len(machine.facts.gpus)
    mib = 1024**2
    for row, gpu in zip(rows, nvml["gpus"], strict=True):
        assert row == [
            str(gpu["index"]),
            gpu["uuid"],
            gpu["name"],
            *(str(gpu[key] // mib) for key in ("total", "used", "reserved", "free")),
            str(gpu["util"]),
            str(gpu["temperature"]),
            gpu["bus"],
            nvml["driver"],
        ]
        assert gpu["same"] == gpu["uuid"]
        assert gpu["temperature_v"] == gpu["temperature"]
        assert gpu["used_v1"] == gpu["used"] + gpu["reserved"]
        assert gpu["free_v1"] == gpu["free"]


def test_units_and_header_appear_unless_asked_away(machine: Machine) -> None:
    head, first, *_ = machine.smi(
        "--query-gpu=index,memory.total,power.draw", "--format=csv"
    ).splitlines()
    assert head == "index, memory.total [MiB], power.draw [W]"
    assert first.split(", ")[1].endswith(" MiB")
    assert first.split(", ")[2].endswith(" W")


def test_processes_agree_between_nvml_and_nvidia_smi(machine: Machine) -> None:
    text = machine.smi(
        "--query-compute-apps=gpu_uuid,pid,used_memory", "--format=csv,noheader,nounits"
    )
    rows = [line.split(", ") for line in text.splitlines()]
    nvml = [
        [gpu["uuid"], str(pid), str(used // 1024**2)]
        for gpu in machine.nvml()["gpus"]
        for pid, used in gpu["processes"]
    ]
    assert rows == nvml
    assert len(rows) == len(machine.facts.processes)


def test_xml_and_list_name_the_same_gpus(machine: Machine) -> None:
    tree = ET.fromstring(machine.smi("-q", "-x"))
    uuids = [gpu.findtext("uuid") for gpu in tree.iter("gpu")]
    listed = [line.rsplit("UUID: ", 1)[1].rstrip(")") for line in machine.smi("-L").splitlines()]
    assert uuids == listed == [gpu.uuid for gpu in machine.facts.gpus]
    used = [gpu.findtext("fb_memory_usage/used") for gpu in tree.iter("gpu")]
    assert used == [f"{gpu['used'] // 1024**2} MiB" for gpu in machine.nvml()["gpus"]]
    pids = [p.findtext("pid") for p in tree.iter("process_info")]
    assert pids == [str(p.pid) for p in machine.facts.processes]


def test_matrix_is_square_symmetric_and_agrees_with_nvml(machine: Machine) -> None:
    lines = machine.smi("topo", "-m").splitlines()
    columns = [name for name in lines[0].split("\t") if name.startswith(("GPU", "NIC"))][
        : len(machine.facts.gpus) + len(machine.facts.nics)
    ]
    rows = {
        words[0]: words[1 : 1 + len(columns)]
        for line in lines[1 : 1 + len(columns)]
        if (words := line.split("\t"))
    }
    assert sorted(rows) == sorted(columns)
    for a in columns:
        for b in columns:
            cell = rows[a][columns.index(b)].strip()
            assert cell == rows[b][columns.index(a)].strip()
            assert (cell == "X") == (a == b)
    levels = {"PIX": 10, "PXB": 20, "PHB": 30, "NODE": 40, "SYS": 50}
    pcie = {(a, b): levels[p] for a, b, _, p in machine.facts.links}
    for gpu in machine.nvml()["gpus"]:
        for j, level in enumerate(gpu["ancestors"]):
            i = gpu["index"]
            wanted = pcie.get((f"GPU{i}", f"GPU{j}"), pcie.get((f"GPU{j}", f"GPU{i}"), 0))
            assert level == wanted


def test_nvlinks_agree_between_nvml_and_nvidia_smi(machine: Machine) -> None:
    text = machine.smi("nvlink", "--status")
    assert text.count(" Link ") == sum(gpu["links"] for gpu in machine.nvml()["gpus"])


def test_cpu_affinity_covers_the_ranges_of_the_matrix(machine: Machine) -> None:
    for fact, gpu in zip(machine.facts.gpus, machine.nvml()["gpus"], strict=True):
        bits = {
            i
            for word, value in enumerate(gpu["cpus"])
            for i in range(word * 64, word * 64 + 64)
            if value >> (i % 64) & 1
        }
        wanted = set()
        for part in fact.cpus.split(","):
            first, _, last = part.partition("-")
            wanted |= set(range(int(first), int(last or first) + 1))
        assert bits == wanted


def test_a_change_of_the_file_is_seen_at_the_next_call(tmp_path: Path) -> None:
    machine = Machine(tmp_path, "hgx-h100")
    assert machine.nvml()["gpus"][5]["processes"] == []
    job = FakeProcess(gpu=5, pid=77, name="job", memory_mib=1000)
    (tmp_path / "gpus.tsv").write_text(replace(machine.facts, processes=(job,)).text())
    gpu = machine.nvml()["gpus"][5]
    assert gpu["processes"] == [[77, 1000 * 1024**2]]
    assert gpu["used"] == 1001 * 1024**2


def test_a_lost_gpu_and_a_broken_driver_fail_as_the_real_ones_do(tmp_path: Path) -> None:
    machine = Machine(tmp_path, "hgx-h100")
    lost = tuple(replace(g, state="lost") if g.index == 2 else g for g in hgx_h100("m").gpus)
    (tmp_path / "gpus.tsv").write_text(replace(machine.facts, gpus=lost).text())
    assert "GPU is lost" in machine.smi("-L")
    done = machine.run(sys.executable, "-c", NVML_DUMP)
    assert "NVMLError_GpuIsLost" in done.stderr
    (tmp_path / "gpus.tsv").write_text(replace(machine.facts, fault="mismatch").text())
    done = machine.run(str(tmp_path / "bin/nvidia-smi"))
    assert done.returncode == 18
    assert "Driver/library version mismatch" in done.stdout
    assert "NVMLError_LibRmVersionMismatch" in machine.run(sys.executable, "-c", NVML_DUMP).stderr


def test_unknown_options_and_fields_are_refused(tmp_path: Path) -> None:
    machine = Machine(tmp_path, "hgx-h100")
    smi = str(tmp_path / "bin/nvidia-smi")
    assert machine.run(smi, "--fly").returncode == 6
    assert machine.run(smi, "--query-gpu=altitude", "--format=csv").returncode == 2


def discovered(machine: Machine, *, has_smi: bool) -> dict:
    path = f"{machine.directory / 'bin'}:{os.environ['PATH']}" if has_smi else os.environ["PATH"]
    done = machine.run("env", f"PATH={path}", sys.executable, "-m", "dynctl", "discover", "--local", "-o", "json")  # fmt: skip
    assert done.returncode == 0, done.stderr
    (host,) = json.loads(done.stdout)["hosts"]
    return host


def test_discover_finds_by_nvml_alone_what_it_finds_with_nvidia_smi(machine: Machine) -> None:
    both, alone = discovered(machine, has_smi=True), discovered(machine, has_smi=False)
    codes = {warning["code"] for warning in both["warnings"] + alone["warnings"]}
    assert not codes & {"sources-differ", "probe-failed", "gpu-driver-absent", "links-unknown"}
    for key in ("gpu_links", "nvlink_islands", "tp_groups"):
        assert both[key] == alone[key]
    assert len(alone["gpus"]) == len(machine.facts.gpus)
    for one, other, fact in zip(both["gpus"], alone["gpus"], machine.facts.gpus, strict=True):
        same = ("uuid", "name", "memory_bytes", "pci_bus_id", "numa_node", "state", "nvlinks_active", "nvlink_gbyte_s", "processes")  # fmt: skip
        assert {key: one[key] for key in same} == {key: other[key] for key in same}
        assert one["uuid"] == fact.uuid
        assert one["cpu_affinity"] == other["cpu_affinity"] == fact.cpus


def test_discover_names_an_nvlink_that_is_down(tmp_path: Path) -> None:
    machine = Machine(tmp_path, "hgx-h100")
    down = tuple(replace(g, nvlinks=17) if g.index == 3 else g for g in machine.facts.gpus)
    (tmp_path / "gpus.tsv").write_text(replace(machine.facts, gpus=down).text())
    host = discovered(machine, has_smi=True)
    said = {warning["code"]: warning["text"] for warning in host["warnings"]}
    assert said["nvlink-inactive"] == "GPU3: NVLink 17 of 18 inactive"
    assert "sources-differ" not in said
    assert [gpu["nvlinks_active"] for gpu in host["gpus"]] == [18, 18, 18, 17, 18, 18, 18, 18]


@pytest.mark.parametrize(
    ("fault", "code"),
    [("mismatch", "gpu-driver-library-mismatch"), ("unloaded", "gpu-driver-not-loaded")],
)
def test_discover_tells_a_driver_that_cannot_be_talked_to_once(tmp_path: Path, fault: str, code: str) -> None:  # fmt: skip
    machine = Machine(tmp_path, "hgx-h100")
    (tmp_path / "gpus.tsv").write_text(replace(machine.facts, fault=fault).text())
    host = discovered(machine, has_smi=True)
    assert [w["code"] for w in host["warnings"] if w["code"].startswith("gpu-")] == [code]
    assert host["gpus_known"] is False


def test_discover_keeps_the_other_gpus_when_one_is_lost(tmp_path: Path) -> None:
    machine = Machine(tmp_path, "hgx-h100")
    lost = tuple(replace(g, state="lost") if g.index == 2 else g for g in machine.facts.gpus)
    (tmp_path / "gpus.tsv").write_text(replace(machine.facts, gpus=lost).text())
    host = discovered(machine, has_smi=False)
    assert [gpu["state"] for gpu in host["gpus"]] == ["free", "free", "lost", *["free"] * 5]

"""NVML: the program that asks it on a host, what is read out of its lines, and how that joins what nvidia-smi prints."""

import ctypes
import json
import random
import re
import subprocess
import sys
from dataclasses import replace
from types import SimpleNamespace

import pynvml
import pytest

from dynctl.core.hardware import GpuState
from dynctl.core.inventory import HostEntry
from dynctl.core.machine import GpuHealth
from dynctl.core.units import GIB, MIB
from dynctl.discovery.assemble import assemble
from dynctl.discovery.facts import (
    GpuFacts,
    HostFacts,
    NvlinkGpu,
    PciFacts,
    PciGpu,
    QueryFacts,
    QueryGpu,
    SmiFacts,
    TopoFacts,
)
from dynctl.discovery.onhost import nvml as program
from dynctl.discovery.onhost import source
from dynctl.discovery.probes.nvml import PROBE
from dynctl.errors import ProbeError

SOURCE = source("nvml")
HEALTH = {
    "persistence": 1,
    "ecc": 1,
    "ecc_pending": 1,
    "uncorrected": 0,
    "remapped": 0,
    "remap_pending": 0,
    "remap_failed": 0,
    "pages_pending": None,
    "reasons": 1,
    "celsius": 34,
    "milliwatts": 70123,
    "limit_milliwatts": 700000,
    "pcie_generation": 5,
    "pcie_generation_max": 5,
    "pcie_width": 16,
    "pcie_width_max": 16,
    "compute_mode": 0,
    "fabric": None,
}
SWITCH = [True, 26_562_000_000, 2, "00000000:07:00.0"]
DOWN = [False, None, None, None]


def uuid(i):
    return f"GPU-0000000{i}-0000-0000-0000-000000000000"


def gpu(i, health=(), **change):
    return {
        "gpu": i,
        "uuid": uuid(i),
        "name": "NVIDIA H100 80GB HBM3",
        "bus_id": f"00000000:{i:02X}:00.0",
        "memory": [80 * GIB, MIB],
        "cpus": "0-31",
        "numa_nodes": str(i // 2),
        "mig": 0,
        "slices": [],
        "links": [SWITCH] * 18,
        "processes": [],
        "health": HEALTH | dict(health),
    } | change


def pair(a, b, ancestor=40, p2p=(0, 0, 0)):
    return {"pair": [a, b], "ancestor": ancestor, "p2p": list(p2p)}


def lines(*gpus, pairs=None, end=True, count=None):
    if pairs is None:
        pairs = [pair(a["gpu"], b["gpu"]) for a in gpus for b in gpus if a["gpu"] < b["gpu"]]
    head = {"driver": "570.1", "cuda": 12080, "count": len(gpus) if count is None else count}
    every = [head, *gpus, *pairs, *([{"end": True}] if end else [])]
    return "".join(json.dumps(line) + "\n" for line in every)


@pytest.fixture
def read(completed):
    def read(text, **how):
        return PROBE.parse(completed(text, **how))

    return read


def host_of(nvml=None, **facts):
    found = HostFacts({"nvml": nvml, "pci": PciFacts(), "nvidia_smi_list": ()} | facts)
    found.facts = {name: fact for name, fact in found.facts.items() if fact is not None}
    return assemble([HostEntry("h", "h")], {"h": found}, (), {}).hosts[0]


def codes(host):
    return {warning.code for warning in host.warnings}


def texts(host, code):
    return [warning.text for warning in host.warnings if warning.code == code]


def csv(*indexes, **change):
    def card(i):
        facts = (i, uuid(i), "NVIDIA H100 80GB HBM3", f"00000000:{i:02X}:00.0", 80 * GIB, MIB)
        return GpuFacts(*facts, driver_version=change.pop("driver_version", "570.1"), **change)

    return SmiFacts(tuple(card(i) for i in indexes))


def test_structures_are_laid_out_as_nvidias_own_binding_declares_them():
    pairs = [
        (program.Memory, pynvml.c_nvmlMemory_t),
        (program.MemoryV2, pynvml.c_nvmlMemory_v2_t),
        (program.Pci, pynvml.nvmlPciInfo_t),
        (program.Process, pynvml.c_nvmlProcessInfo_v2_t),
        (program.FieldValue, pynvml.c_nvmlFieldValue_t),
        (program.Fabric, pynvml.c_nvmlGpuFabricInfo_t),
        (program.FabricV2, pynvml.c_nvmlGpuFabricInfo_v2_t),
    ]
    for ours, theirs in pairs:
        assert ctypes.sizeof(ours) == ctypes.sizeof(theirs), ours
        offsets = [getattr(ours, field[0]).offset for field in ours._fields_]
        assert offsets == [getattr(theirs, field[0]).offset for field in theirs._fields_], ours
    assert program.versioned(program.MemoryV2(), 2).version == pynvml.nvmlMemory_v2
    assert program.versioned(program.FabricV2(), 2).version == pynvml.nvmlGpuFabricInfo_v2
    assert program.LINK_SPEED == pynvml.NVML_FI_DEV_NVLINK_GET_SPEED
    assert program.COMMON_LINK_SPEED == pynvml.NVML_FI_DEV_NVLINK_SPEED_MBPS_COMMON
    assert program.MAX_LINKS >= pynvml.NVML_NVLINK_MAX_LINKS


def test_every_function_that_is_called_is_one_of_nvmls():
    """Besides the first one: the binding begins with nvmlInitWithFlags, which older drivers lack."""
    asked = set(re.findall(r'"(nvml[A-Z]\w+)"', SOURCE)) - {"nvmlInit_v2"}
    assert len(asked) > 30
    known = pynvml.__loader__.get_data(pynvml.__file__).decode()
    assert {name for name in asked if f'"{name}"' not in known} == set()


def test_a_library_that_lacks_most_functions_still_names_the_gpus(monkeypatch, capsys):
    """An old driver: no fabric, no second version of anything, one GPU that fell off the bus."""

    def fill(value):
        def call(*args):
            args[-1]._obj.value = value
            return 0

        return call

    def name(gpu, room, size):
        room.value = b"Tesla V100-SXM2-16GB"
        return 0

    def handle(index, out):
        return 15 if index.value == 1 else 0

    old = SimpleNamespace(
        nvmlInit_v2=lambda: 0,
        nvmlShutdown=lambda: 0,
        nvmlDeviceGetCount_v2=fill(2),
        nvmlDeviceGetHandleByIndex_v2=handle,
        nvmlDeviceGetName=name,
        nvmlDeviceGetPersistenceMode=fill(1),
    )
    monkeypatch.setattr(program.ctypes, "CDLL", lambda path: old)
    program.main()
    said = [json.loads(line) for line in capsys.readouterr().out.splitlines()]

    assert said[0] == {"driver": None, "cuda": None, "count": 2}
    assert said[1]["name"] == "Tesla V100-SXM2-16GB"
    assert said[1]["health"]["persistence"] == 1
    assert said[1]["health"]["fabric"] is None
    assert said[1]["processes"] is None
    assert said[2] == {"gpu": 1, "failed": 15, "said": "error 15"}
    assert said[3:] == [{"end": True}]


def test_bits_become_ranges():
    assert program.bits([0b1011, 0]) == "0-1,3"
    assert program.bits([0, 1]) == "64"
    assert program.bits([0]) == ""


def test_facts_of_a_board_with_switches(read):
    facts = read(
        lines(
            gpu(0, health={"reasons": 0x41, "fabric": [3, 0, "0" * 31 + "1", 7]}),
            gpu(1, processes=[[77, "train", "ana", GIB, False], [78, None, None, None, True]]),
            gpu(2, mig=1, slices=[["NVIDIA H100 80GB HBM3 MIG 1g.10gb", 10 * GIB]]),
            gpu(3, health={"ecc_pending": 0, "remap_pending": 1}, links=[SWITCH] * 17 + [DOWN]),
        )
    )
    host = host_of(facts)

    assert [g.state for g in host.gpus] == [GpuState.FREE, GpuState.BUSY, GpuState.MIG, GpuState.FREE]  # fmt: skip
    assert host.gpus[0].health.throttle_reasons == ("hw_thermal_slowdown",)
    assert host.gpus[0].health.fabric_state == "Completed"
    assert host.gpus[0].health.fabric_clique == "00000000-0000-0000-0000-000000000001/7"
    assert host.gpus[0].health.power_w == 70.123
    assert [(p.pid, p.user, p.is_ours) for p in host.gpus[1].processes] == [(77, "ana", False), (78, None, True)]  # fmt: skip
    assert host.gpus[2].mig_slices == ("1g.10gb",)
    assert host.gpus[3].nvlink_rates_bytes_s == (26_562_000_000,) * 17 + (None,)
    assert host.gpu_links[0] == ("X", "NV18", "NV18", "NV17")
    assert host.nvlink_islands == ((0, 1, 2, 3),)
    assert dict(host.p2p)["read"][0] == ("X", "OK", "OK", "OK")
    assert [g.numa_node for g in host.gpus] == [0, 0, 1, 1]
    assert host.software.driver_version == "570.1"
    assert host.software.cuda_version == "12.8"
    assert {"gpu-throttled", "gpu-busy", "gpu-mig", "gpu-ecc-pending", "gpu-reset-pending", "nvlink-inactive"} <= codes(host)  # fmt: skip


def test_direct_links_are_counted_by_what_is_at_their_other_end(read):
    def to(i):
        return [True, 25_000_000_000, 0, f"00000000:0{i}:00.0"]

    facts = read(
        lines(
            gpu(0, links=[to(1), to(1), to(2)]),
            gpu(1, links=[to(0), to(0)]),
            gpu(2, links=[to(0)]),
        )
    )
    assert facts.topo.links == (("X", "NV2", "NV1"), ("NV2", "X", "NODE"), ("NV1", "NODE", "X"))


def test_links_that_end_at_something_unknown_leave_the_pair_unknown(read):
    """A virtual machine renumbers the bus: neither NVLink nor its absence can be told."""
    strange = [True, 25_000_000_000, 0, "00000000:F1:00.0"]
    facts = read(lines(gpu(0, links=[strange]), gpu(1, links=[strange])))
    assert facts.topo.links == (("X", None), (None, "X"))


def test_switches_that_keep_gpus_apart_are_no_link(read):
    facts = read(lines(gpu(0), gpu(1), pairs=[pair(0, 1, 50, (0, 0, 5))]))
    assert facts.topo.links == (("X", "SYS"), ("SYS", "X"))
    assert dict(facts.p2p)["nvlink"].links == (("X", "NS"), ("NS", "X"))


def test_cards_without_bridges_have_no_inactive_link(read):
    host = host_of(read(lines(gpu(0, links=[DOWN] * 12), gpu(1, links=[DOWN] * 12))))
    assert [g.nvlink_rates_bytes_s for g in host.gpus] == [(), ()]
    assert "nvlink-inactive" not in codes(host)


def test_what_nvml_does_not_tell_comes_from_nvidia_smi(read):
    silent = [True, None, 2, "00000000:07:00.0"]
    facts = read(lines(gpu(0, links=[silent, DOWN], memory=None), gpu(1, links=[silent] * 2)))
    printed = tuple(NvlinkGpu(i, "", uuid(i), (26_562_000_000,) * 2) for i in (0, 1))
    topo = TopoFacts((0, 1), (("X", "NV18"), ("NV18", "X")), ("mlx5_0",), (("PIX",), ("SYS",)))
    host = host_of(facts, nvidia_smi_csv=csv(0, 1), nvidia_smi_nvlink=printed, nvidia_smi_topo=topo)

    assert host.gpus[0].memory_bytes == 80 * GIB
    assert host.gpus[0].nvlink_rates_bytes_s == (26_562_000_000, None)
    assert host.gpu_links[0] == ("X", "NV18")
    assert host.gpu_nic_links == (("PIX",), ("SYS",))


def test_each_disagreement_is_told_and_the_slower_link_counts(read):
    facts = read(lines(gpu(0), gpu(1, links=[]), pairs=[pair(0, 1, 10)]))
    topo = TopoFacts((0, 1), (("X", "SYS"), ("SYS", "X")))
    smi = csv(0, 1, 2, driver_version="535.9")
    host = host_of(facts, nvidia_smi_csv=smi, nvidia_smi_topo=topo)

    assert host.gpu_links[0][1] == "SYS"
    assert host.software.driver_version == "570.1"
    said = "\n".join(texts(host, "sources-differ"))
    assert "driver version: 570.1, 535.9" in said
    assert f"GPUs: 2, 3; not in both: {uuid(2)}" in said
    assert "GPU0–GPU1 PIX, SYS" in said


def test_a_fault_that_only_one_of_them_shows_is_one(read):
    facts = read(lines(gpu(0), gpu(1, health={"uncorrected": 3}), gpu(2), gpu(3)))
    smi = replace(csv(0, 1, 3), broken=((2, "GPU is lost"),))
    worse = GpuHealth(has_ecc=True, has_ecc_pending=False, num_uncorrected=0, pcie_width=8, fabric_state="In Progress", throttle_reasons=("hw_slowdown",))  # fmt: skip
    printed = QueryFacts(4, tuple(QueryGpu(i, None, uuid(i), None, health=worse) for i in range(4)))
    nvlink = tuple(NvlinkGpu(i, "", uuid(i), (26_562_000_000,) * 17 + (None,)) for i in range(4))
    host = host_of(facts, nvidia_smi_csv=smi, nvidia_smi_qx=printed, nvidia_smi_nvlink=nvlink)

    assert [g.state for g in host.gpus] == [GpuState.FREE, GpuState.FREE, GpuState.LOST, GpuState.FREE]  # fmt: skip
    assert host.gpus[2].uuid == uuid(2)
    assert [g.health.num_uncorrected for g in host.gpus] == [0, 3, 0, 0]
    assert {"gpu-ecc-pending", "gpu-pcie-narrow", "gpu-fabric", "gpu-throttled", "nvlink-inactive", "sources-differ"} <= codes(host)  # fmt: skip


def test_gpus_are_not_free_while_nvidia_smi_cannot_answer(read):
    found = HostFacts({"nvml": read(lines(gpu(0))), "pci": PciFacts()})
    found.failures["nvidia_smi_csv"] = "nvidia-smi did not answer within its limit"
    found.kinds["nvidia_smi_csv"] = "timeout"
    host = assemble([HostEntry("h", "h")], {"h": found}, (), {}).hosts[0]
    assert [g.state for g in host.gpus] == [GpuState.UNKNOWN]
    assert {"gpu-timeout", "gpu-unknown"} <= codes(host)


def test_the_same_facts_from_both_are_no_disagreement(read):
    facts = read(lines(*(gpu(i) for i in range(4))))
    topo = TopoFacts(tuple(range(4)), tuple(tuple("X" if a == b else "NV18" for b in range(4)) for a in range(4)))  # fmt: skip
    host = host_of(facts, nvidia_smi_csv=csv(0, 1, 2, 3), nvidia_smi_topo=topo)
    assert "sources-differ" not in codes(host)


def test_a_driver_without_nvidia_smi_is_a_driver(read):
    cards = PciFacts(
        gpus=(PciGpu("0000:00:00.0", "nvidia", 0), PciGpu("0000:01:00.0", "nvidia", 0))
    )
    host = host_of(read(lines(gpu(0), gpu(1))), pci=cards, nvidia_smi_csv=SmiFacts(is_installed=False))  # fmt: skip
    assert len(host.gpus) == 2
    assert not codes(host) & {"gpu-driver-absent", "gpu-missing"}


def test_a_lost_gpu_is_lost_and_the_others_are_whole(read):
    lost = {"gpu": 1, "failed": 15, "said": "GPU is lost"}
    host = host_of(read(lines(gpu(0), lost, gpu(2), pairs=[pair(0, 2)])))
    assert [g.state for g in host.gpus] == [GpuState.FREE, GpuState.LOST, GpuState.FREE]
    assert "gpu-lost" in codes(host)
    assert "gpu-output-cut" not in codes(host)


def test_a_driver_that_hangs_on_a_gpu_still_told_of_those_before_it(read):
    facts = read(lines(gpu(0), gpu(1), pairs=[], end=False, count=8), exit_status=124)
    host = host_of(facts, nvidia_smi_csv=csv(0, 1, 2))
    assert [g.index for g in host.gpus] == [0, 1, 2]
    assert "gpu-output-cut" in codes(host)


def test_a_line_that_was_being_written_when_the_limit_came_is_left_out(read):
    text = lines(gpu(0), gpu(1), pairs=[], end=False)
    facts = read(text[:-40], exit_status=124)
    assert [record.index for record in facts.query.gpus] == [0]
    assert facts.is_cut


def test_gpus_that_a_hanging_driver_did_not_get_to_are_unknown_never_none(read):
    facts = read(lines(gpu(0), gpu(1), pairs=[], end=False, count=4), exit_status=124)
    cards = PciFacts(gpus=tuple(PciGpu(f"0000:0{i}:00.0", "nvidia", 0) for i in range(4)))
    found = HostFacts({"nvml": facts, "pci": cards})
    found.failures["nvidia_smi_csv"] = "nvidia-smi did not answer within its limit"
    found.kinds["nvidia_smi_csv"] = "timeout"
    host = assemble([HostEntry("h", "h")], {"h": found}, (), {}).hosts[0]

    assert [(g.index, g.state) for g in host.gpus] == [(i, GpuState.UNKNOWN) for i in range(4)]
    assert [g.memory_bytes for g in host.gpus] == [80 * GIB, 80 * GIB, 0, 0]


@pytest.mark.parametrize(
    ("text", "status", "kind", "says"),
    [
        ("", 124, "timeout", "hangs"),
        ('{"failed": 18, "said": "Driver/library version mismatch"}\n', 0, "driver_library_mismatch", "mismatch"),
        ('{"failed": 4, "said": "Insufficient Permissions"}\n', 0, "no_permission", "Permissions"),
        ('{"failed": 999, "said": "Unknown Error"}\n', 0, "nvml_failed", "Unknown"),
    ],
)  # fmt: skip
def test_a_driver_that_refuses_is_named(read, text, status, kind, says):
    with pytest.raises(ProbeError, match=says) as caught:
        read(text, exit_status=status)
    assert caught.value.kind == kind


def test_a_library_without_a_driver_tells_of_no_gpu(read):
    assert host_of(read('{"failed": 9, "said": "Driver Not Loaded"}\n')).gpus == ()


def test_damaged_lines_give_facts_or_a_named_error_and_nothing_else(read):
    whole = lines(gpu(0, processes=[[7, "x", "y", 1, False]]), gpu(1))
    chance = random.Random(5)
    kept = failed = 0
    for _ in range(3000):
        text = list(whole)
        for _ in range(chance.randint(1, 4)):
            at, size = chance.randrange(len(text)), chance.randint(0, 30)
            text[at : at + size] = chance.choice(["", "null", "-1", "1e99", '"\\ud800"', "[" * 50, "\n"])  # fmt: skip
        try:
            host_of(read("".join(text)))
            kept += 1
        except ProbeError as error:
            failed += "NVML line " in error.message or error.kind == "nvml_failed"
    assert kept > 20
    assert kept + failed == 3000


def test_the_script_asks_by_whatever_python_there_is_that_can(tmp_path):
    """The first one is too old, the second one answers."""
    old = tmp_path / "old"
    old.write_text("#!/bin/sh\nexit 127\n")
    old.chmod(0o755)
    (tmp_path / "python3").symlink_to(sys.executable)
    env = {"PATH": f"{tmp_path}:/usr/bin:/bin", "DYNCTL_PYTHON": str(old)}
    done = subprocess.run(["sh", "-c", PROBE.script], env=env, capture_output=True, check=True, timeout=60)  # fmt: skip
    said = [json.loads(line) for line in done.stdout.splitlines()]
    assert said[0].get("failed") == program.LIBRARY_NOT_FOUND or said[-1] == {"end": True}


def test_the_program_runs_on_its_own_and_says_why_there_is_nothing():
    done = subprocess.run([sys.executable, "-IS", "-c", SOURCE], capture_output=True, check=True)
    said = [json.loads(line) for line in done.stdout.splitlines()]
    assert said[0].get("failed") == program.LIBRARY_NOT_FOUND or said[-1] == {"end": True}

"""`nvidia-smi` as CSV, as a list, and what it says when it cannot answer."""

import random
from pathlib import Path

import pytest

from dynctl.core.units import MIB
from dynctl.discovery.probe import ToolError
from dynctl.discovery.probes import nvidia_smi_csv, nvidia_smi_list, nvidia_smi_topo
from dynctl.errors import ProbeError

FOLDER = Path(__file__).parent / "cases" / "nvidia_smi_csv"
ERRORS = sorted(p.name for p in FOLDER.iterdir() if p.name.startswith("err-"))
H100 = "0, GPU-11111111-2222-3333-4444-555555555555, NVIDIA H100 80GB HBM3, 00000000:1B:00.0, 81559, 1, 570.133.20, Disabled"
HEADER = "index, uuid, name, pci.bus_id, memory.total [MiB], memory.used [MiB], driver_version, mig.mode.current"


@pytest.mark.parametrize("name", ERRORS)
@pytest.mark.parametrize(
    "parse", [nvidia_smi_csv.parse, nvidia_smi_list.parse, nvidia_smi_topo.parse]
)
def test_an_error_text_is_named_and_never_taken_for_no_gpus(name, parse, case, completed):
    text, expected = case("nvidia_smi_csv", name)
    kinds = {"gpu_fell_off_bus": "gpu_lost"}
    wanted = expected["error_class"]

    with pytest.raises(ToolError) as caught:
        parse(completed(text, 255))

    assert caught.value.kind == kinds.get(wanted, wanted)
    assert caught.value.hint


def test_a_broken_gpu_is_named_beside_the_others(completed):
    text = f"== gpus\n{HEADER}\n{H100}\n1, [GPU is lost], [GPU is lost], [GPU is lost], [GPU is lost], [GPU is lost], [GPU is lost], [GPU is lost]\n"

    facts = nvidia_smi_csv.parse(completed(text))

    assert [gpu.index for gpu in facts.gpus] == [0]
    assert facts.broken == ((1, "GPU 1: [GPU is lost]"),)


def test_gpus_asked_one_by_one_are_collected_when_the_whole_query_fails(completed):
    text = (
        "== gpus\nUnable to determine the device handle for GPU 0000:3C:00.0: GPU is lost.\n"
        f"== gpu 0000:1b:00.0\n{HEADER}\n{H100}\n"
        "== gpu 0000:3c:00.0\nUnable to determine the device handle for GPU 0000:3C:00.0: Unknown Error\n"
    )

    facts = nvidia_smi_csv.parse(completed(text, 15))

    assert [gpu.uuid for gpu in facts.gpus] == ["GPU-11111111-2222-3333-4444-555555555555"]
    assert facts.gpus[0].memory_bytes == 81559 * MIB
    assert facts.broken


def test_unified_memory_has_no_size(case, completed):
    text, _ = case("nvidia_smi_csv", "csv-gb10-memory-na")

    facts = nvidia_smi_csv.parse(completed(text))

    assert len(facts.gpus) == 1
    assert facts.gpus[0].memory_bytes is None


def test_hidden_process_owners_are_unknown(case):
    text, expected = case("nvidia_smi_csv", "compute-apps-insufficient-permissions")

    processes, is_known = nvidia_smi_csv.parse_processes(text.decode())

    assert [p.pid for p in processes] == [p["pid"] for p in expected["processes"]]
    assert processes[0].name is None
    assert processes[0].memory_bytes is None
    assert not is_known


def test_a_process_carries_its_owner_and_our_tag(completed):
    uuid = "GPU-11111111-2222-3333-4444-555555555555"
    text = (
        f"== gpus\n{HEADER}\n{H100}\n== processes\ngpu_uuid, pid, process_name, used_gpu_memory [MiB]\n"
        f"{uuid}, 41, /usr/bin/python3, a, b, 4000\n{uuid}, 42, vllm, 10\n== owners\n41 1 ops\n42 0 bob\n"
    )

    facts = nvidia_smi_csv.parse(completed(text))

    assert [(p.pid, p.user, p.is_tagged, p.memory_bytes) for p in facts.processes] == [
        (41, "ops", True, 4000 * MIB),
        (42, "bob", False, 10 * MIB),
    ]
    assert facts.processes[0].name == "/usr/bin/python3, a, b"


def test_a_missing_tool_is_no_error(completed):
    assert not nvidia_smi_csv.parse(completed("", 127)).is_installed
    assert nvidia_smi_list.parse(completed("", 127)) == ()
    assert nvidia_smi_topo.parse(completed("", 127)).gpu_indexes == ()


def test_a_hanging_tool_is_told_from_no_gpus(completed):
    with pytest.raises(ToolError, match="hangs") as caught:
        nvidia_smi_csv.parse(completed("== gpus\n", 124))

    assert caught.value.kind == "timeout"


@pytest.mark.parametrize(
    "row",
    [
        H100.replace("81559", "many"),
        H100.replace("0, GPU-", "zero, GPU-"),
        H100.replace("GPU-11111111", "junk"),
    ],
)
def test_a_row_that_is_none_names_its_line(row, completed):
    with pytest.raises(ProbeError, match="line 2"):
        nvidia_smi_csv.parse(completed(f"== gpus\n{HEADER}\n{row}\n"))


def test_mig_slices_are_listed(case, completed):
    text, expected = case("nvidia_smi_list", "mig-l-two-a100-mixed")

    gpus = nvidia_smi_list.parse(completed(text))

    assert {f"GPU{g.index}": list(g.slices) for g in gpus} == expected["mig"]


@pytest.mark.parametrize("seed", range(200))
def test_mutated_rows_give_facts_or_a_probe_error(seed, completed):
    rng = random.Random(seed)
    text = f"== gpus\n{HEADER}\n{H100}\n{H100.replace('0, ', '1, ', 1)}\n== processes\nx, 1, y, 3\n== owners\n1 0 a\n"
    for _ in range(rng.randint(1, 8)):
        at = rng.randrange(len(text))
        text = text[:at] + rng.choice([",", "\n", "", " ", "[", "9", "\x00", "é"]) + text[at + 1 :]

    for parse in (nvidia_smi_csv.parse, nvidia_smi_list.parse):
        try:
            parse(completed(text, rng.choice([0, 1, 124])))
        except ProbeError as error:
            text = error.message

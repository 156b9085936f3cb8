"""Topologies from files: which file is of which host, the portable script, plans without access, drawings, hostile texts."""

import asyncio
import json
import os
import subprocess

import pytest
from typer.testing import CliRunner

from dynctl.cli import discover as discover_command
from dynctl.core.hardware import GpuState
from dynctl.core.inventory import DeploymentWish, EngineSpec, HostEntry, Inventory, SimulatedGpus
from dynctl.core.units import GIB
from dynctl.discovery.capture import Capture, portable_script, read_captures
from dynctl.discovery.drawing import WIDTH, drawing
from dynctl.discovery.offline import read_files, survey_files
from dynctl.discovery.view import document
from dynctl.errors import DynctlError, PlanError, UsageError

MATRIX = (
    b"\tGPU0\tGPU1\tCPU Affinity\tNUMA Affinity\nGPU0\t X \tNV4\t0-7\t0\nGPU1\tNV4\t X \t0-7\t0\n"
)
LIST = b"GPU 0: NVIDIA A100 (UUID: GPU-11111111-1111-1111-1111-111111111111)\n"
IBSTATUS = b"Infiniband device 'mlx5_0' port 1 status:\n\tstate:\t\t 4: ACTIVE\n\trate:\t\t 200 Gb/sec (4X HDR)\n\tlink_layer:\t InfiniBand\n"
LLAMA = {"model_type": "llama", "hidden_size": 4096, "num_hidden_layers": 32, "num_attention_heads": 32, "num_key_value_heads": 8, "intermediate_size": 14336, "vocab_size": 128256, "max_position_embeddings": 131072}  # fmt: skip


def hosts(*captures, entries=None):
    topology, _ = read_captures(captures, entries)
    return {host.name: host for host in topology.hosts}


def test_captures_of_different_tools_are_one_host():
    found = hosts(Capture("a/topo.txt", MATRIX), Capture("a/ib.txt", IBSTATUS))

    (host,) = found.values()
    assert (host.name, len(host.gpus), host.nics[0].rate_bits_s) == ("topo", 2, 200 * 10**9)


def test_the_same_tool_twice_is_two_hosts():
    assert list(hosts(Capture("a.txt", MATRIX), Capture("b.txt", MATRIX))) == ["a", "b"]


def test_a_name_or_a_directory_says_whose_a_capture_is(tmp_path):
    for name, content in (("n1/topo.txt", MATRIX), ("n1/ib.txt", IBSTATUS), ("n2.txt", MATRIX)):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_bytes(content)

    files = read_files([str(tmp_path / "n1"), f"gpu-07={tmp_path / 'n2.txt'}"])

    assert list(hosts(*files)) == ["n1", "gpu-07"]


@pytest.mark.parametrize("content", [b"", b"hello\n", b"\x00\xff" * 100])
def test_what_no_tool_prints_is_refused_with_the_known_kinds(content):
    with pytest.raises(UsageError) as caught:
        hosts(Capture("x.txt", content))

    assert "ibstat" in caught.value.hint


def test_a_capture_of_no_host_of_the_inventory_is_refused():
    entries = [HostEntry("gpu-01", "10.0.0.1")]

    assert list(hosts(Capture("10.0.0.1.txt", MATRIX), entries=entries)) == ["gpu-01"]
    with pytest.raises(UsageError, match="no host of the inventory"):
        hosts(Capture("other.txt", MATRIX), entries=entries)


@pytest.fixture
def machine(tmp_path):
    """A directory of tools as a GPU host has them, and the output of our script there."""
    tools = tmp_path / "bin"
    tools.mkdir()
    matrix = tmp_path / "matrix"
    matrix.write_bytes(MATRIX)
    rows = "\\n".join(
        f"{i}, GPU-0000000{i}-aaaa, NVIDIA A100-SXM4-80GB, 00000000:0{i}:00.0, 81920, 4, 570.1, Disabled"
        for i in range(2)
    )
    (tools / "nvidia-smi").write_text(
        f"#!/bin/sh\ncase \"$*\" in 'topo -m') cat {matrix} ;; *query-gpu*) printf '{rows}\\n' ;; esac\n"
    )
    (tools / "nvidia-smi").chmod(0o755)
    model = tmp_path / "llama"
    model.mkdir()
    (model / "config.json").write_text(json.dumps(LLAMA))

    def run(script):
        done = subprocess.run(["sh"], input=script.encode(), capture_output=True, timeout=60, check=True, env={**os.environ, "PATH": f"{tools}:{os.environ['PATH']}"})  # fmt: skip
        return done.stdout

    return run, model


def test_the_scripts_output_is_a_whole_host(machine):
    run, _ = machine

    (host,) = hosts(Capture("x", b"motd\r\n" + run(portable_script()))).values()

    assert host.name == os.uname().nodename
    assert host.nvlink_islands == ((0, 1),)
    assert host.gpus[0].memory_bytes == 80 * GIB
    assert host.software.driver_version == "570.1"
    assert host.num_cpus >= 1
    assert host.session_limits.nofile


def test_a_cut_output_of_the_script_is_named(machine):
    run, _ = machine
    whole = run(portable_script())

    with pytest.raises(DynctlError, match="ended early"):
        hosts(Capture("x", whole[: len(whole) // 2]))


def inventory(model, **entry):
    wish = DeploymentWish("chat", str(model), EngineSpec("vllm", python="/opt/vllm/bin/python"))
    return Inventory("c", (HostEntry("gpu-01", "10.0.0.1", **entry),), (wish,))


def test_a_plan_needs_no_access(machine):
    run, model = machine
    output = run(portable_script(models=[str(model)]))
    (model / "config.json").unlink()

    found = asyncio.run(survey_files(inventory(model), [Capture("x", output, "gpu-01")]))

    (planned,) = found.plan().deployments
    assert planned.pools
    with pytest.raises(PlanError, match="neither in the capture nor on this machine"):
        asyncio.run(
            survey_files(inventory(model), [Capture("x", run(portable_script()), "gpu-01")])
        )


def test_a_matrix_alone_is_planned_on_with_what_the_inventory_declares(machine):
    _, model = machine
    declared = SimulatedGpus(2, "NVIDIA A100-SXM4-80GB", 80 * GIB)

    found = asyncio.run(survey_files(inventory(model, simulated_gpus=declared), [Capture("gpu-01.txt", MATRIX)]))  # fmt: skip

    (host,) = found.topology.hosts
    assert {gpu.state for gpu in host.gpus} == {GpuState.FREE}
    assert all(gpu.is_simulated for gpu in host.gpus)
    assert host.nvlink_islands == ((0, 1),)


def test_hosts_without_a_capture_are_failures(machine):
    _, model = machine
    wanted = inventory(model)
    two = Inventory("c", (*wanted.hosts, HostEntry("gpu-02", "10.0.0.2")))

    found = asyncio.run(survey_files(two, [Capture("gpu-01.txt", MATRIX)]))

    assert [failure.name for failure in found.topology.failures] == ["gpu-02"]


def matrix_of(count, nics=0):
    names = [*(f"GPU{i}" for i in range(count)), *(f"NIC{i}" for i in range(nics))]
    lines = ["\t" + "\t".join(names) + "\tCPU Affinity\tNUMA Affinity"]
    for a in names:
        cells = [" X " if a == b else "NV18" if b[0] == a[0] == "G" else "PIX" for b in names]
        tail = f"\t0-{count}\t{int(a[3:]) * 2 // count}" if a[0] == "G" else ""
        lines.append(f"{a}\t" + "\t".join(cells) + tail)
    legend = "".join(f"  NIC{i}: a_very_long_device_name_{i}\n" for i in range(nics))
    return ("\n".join(lines) + f"\n\nNIC Legend:\n\n{legend}").encode()


@pytest.mark.parametrize("count", [1, 2, 4, 8, 13, 16, 72])
def test_drawings_fit_eighty_columns_and_lose_no_gpu(count):
    (host,) = hosts(Capture("x", matrix_of(count, nics=12))).values()

    lines = drawing(host)

    assert max(map(len, lines)) <= WIDTH
    assert all(any(f" GPU{i} " in f"{line} " for line in lines) for i in range(count))
    assert any("NUMA 1" in line for line in lines) == (count > 1)
    assert any("+" in line for line in lines if line.startswith("│ GPU0"))


def test_colours_stand_for_link_classes_and_only_where_asked():
    (host,) = hosts(Capture("x", MATRIX)).values()

    assert "\x1b[32m" in "".join(drawing(host, is_coloured=True))
    assert "\x1b" not in "".join(drawing(host))


HOSTILE = "\x1b[2J\x1b]0;owned\x07[red]$(touch /tmp/owned)`id`\u202e" + "A" * 2**20


@pytest.mark.parametrize(
    "content",
    [
        f"GPU 0: {HOSTILE[:150]} (UUID: GPU-11111111-1111-1111-1111-111111111111)\n",
        f"0, GPU-11111111-1111, {HOSTILE[:4000]}, 00000000:01:00.0, 81920, 1, {HOSTILE[:200]}\n",
        f"<nvidia_smi_log><driver_version>{HOSTILE}</driver_version><gpu id='0000:01:00.0'><product_name>{HOSTILE}</product_name></gpu></nvidia_smi_log>",
        f"CA 'mlx5_0'\n\tCA type: {HOSTILE[:150]}\n\tPort 1:\n\t\tState: {HOSTILE[:150]}\n\t\tPhysical state: {HOSTILE[:150]}\n",
        MATRIX.decode() + f"\nNIC Legend:\n  NIC0: {HOSTILE}\n",
        f"/sys/class/infiniband/mlx5_0/ports/1/state:{HOSTILE[:180]}\n/sys/class/infiniband/mlx5_0/hca_type:{HOSTILE[:180]}\n",
    ],
)
def test_hostile_captures_are_shown_cleaned_and_bounded(content):
    topology, _ = read_captures([Capture("x.txt", content.encode())])

    shown = json.dumps(document(topology), ensure_ascii=False, default=str)

    assert len(shown) < 40_000
    assert not {"\x1b", "\x07", "\u202e"} & set(shown)
    assert "\\u001b" not in shown


def test_the_command_reads_paths_and_prints_json(tmp_path, monkeypatch):
    import typer

    (tmp_path / "one.txt").write_bytes(MATRIX)
    (tmp_path / "two.txt").write_bytes(MATRIX)
    app = typer.Typer()
    app.command()(discover_command.command)
    monkeypatch.chdir(tmp_path)

    done = CliRunner().invoke(app, ["--from", "one.txt", "two.txt", "-o", "json"])

    assert done.exit_code == 0, done.output
    assert [host["name"] for host in json.loads(done.stdout)["hosts"]] == ["one", "two"]
    script = CliRunner().invoke(app, ["--script"])
    assert script.stdout.startswith("#!/bin/sh")

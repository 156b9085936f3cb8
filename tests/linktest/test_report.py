"""Who can measure NIXL and why others cannot, and what a run ends with."""

import asyncio
import json
from dataclasses import replace

import pytest

from dynctl.core.command import Completed
from dynctl.core.hardware import Gpu, GpuProcess, GpuState, Host, HostFailure, Nic, Topology
from dynctl.core.inventory import DeploymentWish, EngineSpec, HostEntry, Inventory
from dynctl.errors import ConnectError, DynctlError, ExitCode
from dynctl.linktest.engines import find_nixl
from dynctl.linktest.report import make_report
from dynctl.linktest.run import QUICK
from dynctl.remote.fake import FakeRemote
from dynctl.remote.fleet import Fleet

PYTHON = "~/engine/bin/python"
FULL_PATH = "/home/ops/engine/bin/python"
GPU = Gpu(3, "GPU-abc", "NVIDIA H100 80GB HBM3", 85_000_000_000)


def host(name, **more):
    return Host(name, name, "10.0.0.1", python="/usr/bin/python3", machine_id=f"m-{name}", **more)


def inventory(*names, env=(), python=PYTHON):
    engine = EngineSpec("vllm", python=python, env=env)
    entries = tuple(HostEntry(name, f"10.0.0.{i}") for i, name in enumerate(names, 1))
    return Inventory("lab", entries, (DeploymentWish("chat", "/models/m", engine),))


def look(nixl, num_gpus=0):
    return json.dumps({"nixl": nixl, "num_gpus": num_gpus}).encode() + b"\n"


def find(wanted, hosts, answers):
    remotes = {
        entry.name: FakeRemote(entry.name, {FULL_PATH: answer} if answer is not None else {})
        for entry, answer in zip(wanted.hosts, answers, strict=True)
    }
    seats, unmeasured = asyncio.run(find_nixl(wanted, hosts, Fleet(wanted.hosts, remotes)))
    return seats, {(u.host_name, u.kind): u.reason for u in unmeasured}


def test_hosts_with_nixl_are_found_and_others_named_with_the_reason():
    wanted = inventory("a", "b", "c", "d", "e")
    answers = [
        look("1.5.1"),
        look(None),
        None,
        Completed(None, 1, b"", b"boom \x1b[31mred"),
        ConnectError("e: no route"),
    ]

    seats, reasons = find(wanted, [host(n) for n in "abcde"], answers)

    assert list(seats) == ["a"]
    assert seats["a"].python == FULL_PATH
    assert reasons["b", "nixl"] == f"nixl is missing in {PYTHON}"
    assert reasons["c", "nixl"] == f"there is no {FULL_PATH}"
    assert reasons["d", "nixl"] == f"{FULL_PATH} ended with status 1: boom red"
    assert reasons["e", "nixl"] == "e: no route"
    assert reasons["", "nixl"] == "only a has nixl"


def test_without_an_engine_python_nixl_is_not_guessed():
    seats, reasons = find(inventory("a", python=None), [host("a")], [look("1.5.1")])

    assert seats == {}
    assert "no deployment names an engine's Python" in reasons["", "nixl"]


def test_an_engine_on_a_gpu_gets_its_device_and_its_nics_and_no_secrets():
    gpus = (replace(GPU, index=0, uuid="GPU-busy", state=GpuState.BUSY), GPU)
    nics = (
        Nic("mlx5_0", "infiniband", "up"),
        Nic("mlx5_3", "infiniband", "up"),
        Nic("mlx5_4:2", "infiniband", "up", port=2),
        Nic("mlx5_5", "infiniband", "down"),
    )
    near = ((0, ("mlx5_0",)), (3, ("mlx5_3", "mlx5_4:2", "mlx5_5")))
    one = host("a", gpus=gpus, nics=nics, gpu_nics=near)
    wanted = inventory("a", env=(("UCX_TLS", "rc,cuda"), ("HF_TOKEN", "hf_secret")))

    seats, reasons = find(wanted, [one], [look("1.5.1", 2)])

    env = dict(seats["a"].env)
    assert env["CUDA_VISIBLE_DEVICES"] == "GPU-abc"
    assert env["UCX_NET_DEVICES"] == "mlx5_3:1,mlx5_4:2"
    assert env["UCX_TLS"] == "rc,cuda"
    assert "HF_TOKEN" not in env
    assert seats["a"].wish == {"has_gpu": True}
    assert ("a", "nixl-vram") not in reasons


@pytest.mark.parametrize(
    ("gpus", "num_gpus", "reason"),
    [
        ((), 0, "no GPU"),
        ((replace(GPU, is_simulated=True),), 0, "no GPU"),
        ((GPU,), 0, "the CUDA driver shows this user no GPU"),
        ((replace(GPU, state=GpuState.BUSY),), 1, "no GPU is free"),
        ((replace(GPU, processes=(GpuProcess(1, "vllm", "ops", 1, True),)),), 1, "no GPU is free"),
    ],
)
def test_gpu_memory_is_left_out_with_the_reason(gpus, num_gpus, reason):
    seats, reasons = find(inventory("a"), [host("a", gpus=gpus)], [look("1.5.1", num_gpus)])

    assert seats["a"].wish == {"has_gpu": False}
    assert dict(seats["a"].env)["CUDA_VISIBLE_DEVICES"] == ""
    assert reasons["a", "nixl-vram"] == reason


@pytest.mark.parametrize(
    ("hosts", "failures", "code"),
    [
        (["a"], [], ExitCode.REFUSED),
        (["a"], [HostFailure("b", "b: no route", None, 4)], ExitCode.REFUSED),
        ([], [HostFailure("b", "key changed", "look", 7)], ExitCode.TRUST),
    ],
)
def test_fewer_than_two_hosts_are_refused_with_the_causes(hosts, failures, code):
    topology = Topology(tuple(host(n) for n in hosts), tuple(failures))

    with pytest.raises(DynctlError) as caught:
        asyncio.run(
            make_report(inventory("a", "b"), topology, Fleet((), {}), QUICK, lambda *_: None)
        )

    assert caught.value.exit_code == code
    assert all(f.name in caught.value.message for f in failures)
    assert "b: b:" not in caught.value.message


def test_a_host_without_python_is_a_failure_and_not_asked():
    topology = Topology((host("a"), replace(host("b"), python=None)))

    with pytest.raises(DynctlError, match=r"b: no Python ≥ 3\.11 found") as caught:
        asyncio.run(
            make_report(inventory("a", "b"), topology, Fleet((), {}), QUICK, lambda *_: None)
        )

    assert caught.value.exit_code == ExitCode.REFUSED

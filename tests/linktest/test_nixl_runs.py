"""The NIXL program on both ends: over a stand-in for NIXL anywhere, over NIXL itself where an engine has it."""

import asyncio
import os
import shutil
import subprocess
from dataclasses import replace
from pathlib import Path

import pytest

from dynctl.core.links import LinkKind
from dynctl.linktest.judge import is_on_one_machine
from dynctl.linktest.run import measure, nixl

FAKE = str(Path(__file__).parent / "fake_nixl")


def run(seats, short, ports):
    links = asyncio.run(measure(list(seats), [nixl(seats)], short, ports))
    return {(m.source_name, m.target_name, m.kind): m for m in links}


@pytest.fixture
def fake_seats(make_seat):
    """Makes two seats whose Python has the stand-in, with a fault on the second."""

    def make(fault="", has_gpu=False, env=()):
        seats = {}
        more = env
        for name, address, what in (("a", "127.0.0.1", ""), ("b", "127.0.0.2", fault)):
            env = (("PYTHONPATH", FAKE), ("FAKE_NIXL", what), *more)
            seats[name] = make_seat(name, address, env=env, wish={"has_gpu": has_gpu})
        return seats

    return make


def test_each_end_pulls_in_turn_and_says_what_ucx_used(fake_seats, short, ports):
    found = run(fake_seats(), short, ports)

    assert set(found) == {("a", "b", LinkKind.NIXL_DRAM), ("b", "a", LinkKind.NIXL_DRAM)}
    for link in found.values():
        assert link.error is None
        assert [(p.message_bytes, p.num_streams) for p in link.points] == list(short.points)
        assert all(p.bytes_s > 0 for p in link.points)
        assert link.round_trip.message_bytes == 64
        assert link.transport == "rc_mlx5/mlx5_3:1"
        assert link.target.interface == "mlx5_3:1"
        assert link.target.rate_bits_s is None


def test_without_a_cuda_driver_only_the_kinds_that_need_one_fail(fake_seats, short, ports):
    found = run(fake_seats(has_gpu=True), short, ports)

    assert found["a", "b", LinkKind.NIXL_DRAM].error is None
    assert found["a", "b", LinkKind.NIXL_VRAM].error.startswith("no CUDA driver")
    assert found["b", "a", LinkKind.NIXL_DRAM_VRAM].error.startswith("no CUDA driver")


@pytest.fixture
def cuda(tmp_path):
    """The stand-in for the CUDA driver, as environment."""
    source = Path(__file__).parent / "fake_cuda.c"
    built = ["cc", "-shared", "-fPIC", "-Wall", "-Werror", "-o", tmp_path / "libcuda.so.1", source]
    if shutil.which("cc") is None:
        pytest.skip("no C compiler")
    subprocess.run(built, check=True)
    return (("LD_LIBRARY_PATH", str(tmp_path)),)


def test_gpu_memory_is_made_registered_and_pulled_like_any_other(fake_seats, short, ports, cuda):
    """Over stand-ins for NIXL and the CUDA driver: this path was never run on a GPU."""
    found = run(fake_seats(has_gpu=True, env=cuda), short, ports)

    kinds = (LinkKind.NIXL_DRAM, LinkKind.NIXL_DRAM_VRAM, LinkKind.NIXL_VRAM)
    assert set(found) == {(a, b, kind) for a, b in ("ab", "ba") for kind in kinds}
    for (_, _, kind), link in found.items():
        assert link.error is None
        assert [(p.message_bytes, p.num_streams) for p in link.points] == list(short.points)
        port = "mlx5_3:1" if kind is LinkKind.NIXL_DRAM else "mlx5_0:1"
        assert link.transport == f"rc_mlx5/{port}"


def test_a_gpu_without_room_is_told_in_the_drivers_words(fake_seats, short, ports, cuda):
    full = (*cuda, ("FAKE_CUDA_BYTES", "1024"))
    found = run(fake_seats(has_gpu=True, env=full), short, ports)

    assert found["a", "b", LinkKind.NIXL_DRAM].error is None
    assert found["a", "b", LinkKind.NIXL_VRAM].error == "cuMemAlloc_v2: out of memory"


@pytest.mark.parametrize(
    ("fault", "said"),
    [
        ("start", "nixl cannot start: nixlBackendError: NIXL_ERR_BACKEND"),
        ("plugin", "this nixl has no UCX plugin"),
        ("metadata", "the other end's nixl does not fit: nixlBackendError: NIXL_ERR_MISMATCH"),
    ],
)
def test_an_end_whose_nixl_fails_is_named_with_its_cause(fake_seats, short, ports, fault, said):
    found = run(fake_seats(fault), short, ports)

    for link in found.values():
        assert f"b: {said}" in link.error


def test_a_transfer_that_fails_fails_its_direction_alone(fake_seats, short, ports):
    found = run(fake_seats("transfer"), short, ports)

    assert (
        found["a", "b", LinkKind.NIXL_DRAM].error
        == "the transfer failed; has the other end vanished?"
    )
    assert found["b", "a", LinkKind.NIXL_DRAM].error is None


def test_an_interpreter_without_nixl_is_named(two_seats, short, ports):
    seats = {name: replace(seat, wish={"has_gpu": False}) for name, seat in two_seats.items()}

    found = run(seats, short, ports)

    assert "nixl cannot start: ModuleNotFoundError" in found["a", "b", LinkKind.NIXL_DRAM].error


def engine_python():
    """The interpreter of real engines, where `make lab-vllm` has made one."""
    directory = os.environ.get("DYNCTL_LAB_ENGINE", "")
    return Path(directory) / "venv/bin/python" if directory else None


@pytest.mark.vllm
@pytest.mark.timeout(240)
@pytest.mark.skipif(engine_python() is None, reason="run make lab-vllm for it")
def test_nixl_itself_moves_bytes_and_says_how(make_seat, short, ports):
    env = (
        ("UCX_LOG_LEVEL", "info"),
        ("UCX_PROTO_INFO", "y"),
        ("UCX_TCP_PORT_RANGE", "30000-32699"),
    )
    seats = {
        name: make_seat(
            name, address, python=str(engine_python()), env=env, wish={"has_gpu": False}
        )
        for name, address in (("a", "127.0.0.1"), ("b", "127.0.0.2"))
    }

    found = run(seats, short, ports)

    for link in found.values():
        assert link.error is None
        assert link.bytes_s > 1e6
        assert link.transport in {"cma/memory", "posix/memory", "sysv/memory"}
        assert is_on_one_machine(link)

"""The end of a NIXL test is set up as an engine on that host would be."""

from dynctl.core.hardware import Gpu, GpuState, Host, Nic
from dynctl.core.inventory import EngineSpec
from dynctl.linktest.engines import _seat
from dynctl.remote.fake import FakeRemote

ENGINE = EngineSpec("vllm", python="/v/bin/python", env=(("UCX_TLS", "rc"), ("HF_TOKEN", "secret")))


def host(*states):
    """Two GPUs, the first one taken; RDMA devices beside the second one, a network card too."""
    nics = tuple(Nic(f"mlx5_{i}", "infiniband", state, port=1) for i, state in enumerate(states))
    near = (*(nic.name for nic in nics), "eth0")
    return Host(
        "a", "a", "10.0.0.1",
        gpus=(Gpu(0, "GPU-0", "H100", 1, state=GpuState.BUSY), Gpu(1, "GPU-1", "H100", 1, state=GpuState.FREE)),
        gpu_links=(("X", "SYS"), ("SYS", "X")),
        gpu_nics=((0, ("mlx5_9",)), (1, near)),
        nics=(*nics, Nic("mlx5_9", "infiniband", "up", port=1), Nic("eth0", "ethernet", "up")),
    )  # fmt: skip


def env(one, *, has_cuda=True):
    return dict(_seat(one, FakeRemote(), ENGINE, has_cuda=has_cuda).env)


def test_ucx_gets_the_devices_beside_the_free_gpu_that_are_up():
    found = env(host("up", "down", "up"))

    assert found["UCX_NET_DEVICES"] == "mlx5_0:1,mlx5_2:1"
    assert found["CUDA_VISIBLE_DEVICES"] == "GPU-1"
    assert found["UCX_TLS"] == "rc"
    assert "HF_TOKEN" not in found


def test_where_all_are_down_or_no_gpu_is_used_ucx_chooses_itself():
    assert "UCX_NET_DEVICES" not in env(host("down"))
    assert "UCX_NET_DEVICES" not in env(host("up"), has_cuda=False)

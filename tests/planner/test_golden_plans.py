"""Whole plans as text, for clusters of different kinds. DYNCTL_UPDATE_GOLDEN=1 rewrites them; review the diff."""

import os
from pathlib import Path

import pytest

from dynctl.core.hardware import GpuState
from dynctl.core.inventory import EngineSpec, Limits, PoolWish
from dynctl.core.plan import Parallelism, Role
from dynctl.core.workload import Slo, Workload
from dynctl.planner.check import check_plan
from dynctl.planner.search import make_plan
from dynctl.planner.text import from_yaml, to_yaml

GOLDEN = Path(__file__).parent / "golden"


def one_gpu(b):
    """One GPU, a small model: do not disaggregate."""
    return b.cluster([b.host("box", 1)], b.wish("llama-8b"))


def hgx_pair_with_cpu_host(b):
    """Two HGX hosts and one without GPUs, 70B: prefill beside decode, router on the host without GPUs."""
    pools = (
        PoolWish(Role.PREFILL, 1, Parallelism(4)),
        PoolWish(Role.DECODE, 2, Parallelism(4)),
    )
    hosts = [b.host("gpu-01", 8, nics=True), b.host("gpu-02", 8, nics=True), b.host("cpu-01")]
    return b.cluster(hosts, b.wish("llama-70b", pools=pools, slo=Slo(2000, 50)))


def rtx4090_pair(b):
    """Two consumer cards over PCIe: one each, and a context length cut to what fits."""
    return b.cluster(
        [b.host("desk", 2, "4090", "PHB")],
        b.wish("llama-8b", workload=Workload(rate_rps=4.0), limits=Limits()),
    )


def a6000_pairs(b):
    """Bridged pairs: tensor parallelism inside a pair, replicas over pairs."""
    matrix = "X NV4 SYS SYS\nNV4 X SYS SYS\nSYS SYS X NV4\nSYS SYS NV4 X"
    pools = (PoolWish(Role.AGGREGATED, 2, Parallelism(2)),)
    return b.cluster([b.host("ws", 4, "a6000", matrix)], b.wish("qwen3-32b-fp8", pools=pools))


def v100_cube_mesh(b):
    """A cube mesh: groups of four are whole on NVLink, larger ones are not."""
    pools = (PoolWish(Role.AGGREGATED, 2, Parallelism(4)),)
    return b.cluster([b.host("dgx1", 8, "v100", b.cube_mesh)], b.wish("llama-8b", pools=pools))


def mixed_sick_and_busy(b):
    """A100 and H100 hosts with busy, MIG and lost GPUs: the rest is used, kinds are not mixed in an engine."""
    hosts = [
        b.host("a-1", 8, "a100", "NV12", {0: GpuState.BUSY, 1: GpuState.MIG}),
        b.host("a-2", 8, "a100", "NV12"),
        b.host("h-1", 8, "h100", states={7: GpuState.LOST}),
        b.host("h-2", 8, "h100"),
    ]
    work = Workload(isl_tokens=2048, osl_tokens=256, rate_rps=12.0, shared_prefix_ratio=0.5)
    return b.cluster(hosts, b.wish("llama-70b", workload=work, slo=Slo(3000, 250)))


def goals_that_need_prefill_apart(b):
    """A tight ITL that long prompts would break: prefill and decode apart."""
    hosts = [b.host(f"gpu-{i}", 8, nics=True) for i in range(1, 5)]
    work = Workload(isl_tokens=4096, osl_tokens=256, rate_rps=4.0)
    return b.cluster(hosts, b.wish("llama-70b", workload=work, slo=Slo(3000, 40)))


def moe_and_mla_on_h200(b):
    """Two large models side by side, each on its own GPUs."""
    hosts = [b.host("h200-1", 8, "h200"), b.host("h200-2", 8, "h200"), b.host("head")]
    two = b.wish("qwen3-235b-fp8", name="small", limits=Limits(max_model_len_tokens=32768))
    from dataclasses import replace

    router = replace(two.router, listen="127.0.0.1:8001")
    return b.cluster(hosts, b.wish("deepseek-v3", name="large"), replace(two, router=router))


def simulated_engines(b):
    """Engines that need nothing: one prefill and two decode on declared slots."""
    pools = (PoolWish(Role.PREFILL, 1), PoolWish(Role.DECODE, 2))
    hosts = [b.host("a", cpu_slots=2), b.host("b", cpu_slots=2), b.host("c")]
    return b.cluster(hosts, b.wish("sim", kind="sim", pools=pools, slo=Slo(500, 50)))


def cpu_engines(b):
    """vLLM on CPU slots, prefill and decode."""
    pools = (PoolWish(Role.PREFILL, 1), PoolWish(Role.DECODE, 1))
    hosts = [b.host("a", cpu_slots=1), b.host("b", cpu_slots=1)]
    engine = EngineSpec("vllm", device="cpu", env=(("VLLM_CPU_KVCACHE_SPACE", "2"),))
    return b.cluster(hosts, b.wish("llama-8b", engine=engine, pools=pools))


CLUSTERS = [one_gpu, hgx_pair_with_cpu_host, rtx4090_pair, a6000_pairs, v100_cube_mesh, mixed_sick_and_busy, goals_that_need_prefill_apart, moe_and_mla_on_h200, simulated_engines, cpu_engines]  # fmt: skip


@pytest.fixture(params=CLUSTERS, ids=lambda make: make.__name__)
def made(request, build):
    topology, inventory, models = request.param(build)
    return request.param.__name__, topology, inventory, models


def test_the_plan_is_the_one_that_was_reviewed(made):
    name, *ground = made
    text = to_yaml(make_plan(*ground))
    path = GOLDEN / f"{name}.yaml"
    if os.environ.get("DYNCTL_UPDATE_GOLDEN"):
        path.parent.mkdir(exist_ok=True)
        path.write_text(text)

    assert text == path.read_text()


def test_the_text_reads_back_to_the_same_plan(made):
    _, *ground = made
    plan = make_plan(*ground)

    assert from_yaml(to_yaml(plan)) == plan


def test_a_plan_nobody_touched_passes_its_check_with_the_same_bytes(made):
    _, topology, inventory, models = made
    plan = make_plan(topology, inventory, models)

    assert to_yaml(check_plan(plan, topology, inventory, models)) == to_yaml(plan)

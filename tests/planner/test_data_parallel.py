"""Data- and expert-parallel engines on one host: laid out, fitted by rank, priced as the replicas their ranks are."""

import itertools
from dataclasses import replace

import pytest

from dynctl.core.inventory import EngineSpec, Limits, PoolWish
from dynctl.core.plan import Parallelism, Role
from dynctl.core.units import GIB
from dynctl.core.workload import Slo, Workload
from dynctl.errors import PlanError
from dynctl.planner.check import check_plan
from dynctl.planner.estimate import DeclaredPace, Layout, Side, by_rank, max_rate_rps, serve
from dynctl.planner.faults import PlanFaultsError
from dynctl.planner.memory import rank_tokens
from dynctl.planner.search import make_plan
from dynctl.planner.text import from_yaml, to_yaml
from dynctl.planner.virtual_plan import virtual_deployment

WORK = Workload(2048, 256, 4.0)
AGG, PREFILL, DECODE = Role.AGGREGATED, Role.PREFILL, Role.DECODE


def pools(*asked):
    return tuple(PoolWish(role, count, Parallelism(*sizes)) for role, count, sizes in asked)


def planned(build, host, model, *asked, **change):
    wish = build.wish(model, pools=pools(*asked), **({"workload": WORK} | change))
    return make_plan(*build.cluster([host], wish)).deployments[0]


def test_experts_over_all_ranks_of_one_host(build):
    deployment = planned(build, build.host("h", 8, "h200"), "deepseek-v3", (AGG, 1, (2, 1, 4, 8)))
    (pool,) = deployment.pools
    (replica,) = pool.replicas

    assert sorted(gpu.index for gpu in replica.gpus) == list(range(8))
    assert pool.memory.kv_bytes > 0
    assert deployment.estimate is not None
    assert deployment.verdict.startswith("single engine with KV routing: 4 ranks")
    assert replica.side_channel_port is None


def test_ranks_of_a_dense_model_are_priced_as_engines_of_their_own(build):
    host = build.host("a", 8)
    apart = planned(build, host, "llama-8b", (AGG, 2, (1,)))
    ranks = planned(build, host, "llama-8b", (AGG, 1, (1, 1, 2)))

    one, two = apart.estimate, ranks.estimate
    assert (two.ttft_ms, two.itl_ms, two.goodput_rps) == (one.ttft_ms, one.itl_ms, one.goodput_rps)
    assert two.out_tokens_s.expected == pytest.approx(one.out_tokens_s.expected, rel=0.02)
    assert ranks.max_model_len_tokens == apart.max_model_len_tokens
    one, two = apart.pools[0].memory, ranks.pools[0].memory
    # NCCL takes its part where an engine has several GPUs.
    assert two.kv_capacity_tokens == pytest.approx(2 * one.kv_capacity_tokens, rel=0.02)


def test_a_request_has_to_fit_one_rank_whatever_all_hold_together(build):
    host = build.host("a", 4, "a100-40", "NV4")
    long = {"workload": Workload(100_000, 100, 0.01), "limits": Limits(gpu_memory_utilization=0.7)}
    with pytest.raises(PlanError) as one:
        planned(build, host, "llama-8b", (AGG, 1, (1,)), **long)
    with pytest.raises(PlanError) as two:
        planned(build, host, "llama-8b", (AGG, 1, (1, 1, 2)), **long)

    assert "tp1 on NVIDIA A100-SXM4-40GB needs" in one.value.message
    assert "dp2 on NVIDIA A100-SXM4-40GB needs" in two.value.message
    planned(build, host, "llama-8b", (AGG, 1, (2,)), **long)


def test_the_longest_request_is_what_one_rank_holds(build):
    host = build.host("a", 2, "4090", "PHB")
    deployment = planned(build, host, "llama-8b", (AGG, 1, (1, 1, 2)))
    (pool,) = deployment.pools
    held = rank_tokens(pool.memory, pool.parallelism)

    assert held * 2 == pool.memory.kv_capacity_tokens
    assert deployment.max_model_len_tokens.value == held * 9 // 10


def test_the_worst_link_between_ranks_that_share_experts_counts(build):
    asked = (AGG, 1, (1, 1, 8, 8))
    fast = planned(build, build.host("h", 8, "h200"), "deepseek-v3", asked)
    slow = planned(build, build.host("h", 8, "h200", "SYS"), "deepseek-v3", asked)

    assert fast.estimate.ttft_ms.expected * 2 < (
        slow.estimate.ttft_ms.expected if slow.estimate else float("inf")
    )


def test_ranks_with_experts_of_their_own_are_said_to_be_priced_so(build):
    host = build.host("h", 8, "b200")
    reasons = planned(build, host, "qwen3-235b-fp8", (AGG, 1, (4, 1, 2))).reasons

    assert any("without ep vLLM slices experts over all ranks" in each for each in reasons)
    one, two = (
        planned(build, host, "qwen3-235b-fp8", (AGG, count, sizes)).estimate
        for count, sizes in ((2, (4,)), (1, (4, 1, 2)))
    )
    assert (two.ttft_ms, two.itl_ms) == (one.ttft_ms, one.itl_ms)
    assert two.out_tokens_s.expected == pytest.approx(one.out_tokens_s.expected, rel=0.02)
    shared = planned(build, host, "qwen3-235b-fp8", (AGG, 1, (4, 1, 2, 8))).reasons
    assert not any("without ep" in each for each in shared)


def test_each_rank_of_a_prefill_engine_has_a_port(build):
    deployment = planned(
        build, build.host("a", 8), "llama-8b", (PREFILL, 2, (1, 1, 2)), (DECODE, 1, (1, 1, 4))
    )
    ports = [r.side_channel_port for pool in deployment.pools for r in pool.replicas]

    assert [later - earlier for earlier, later in itertools.pairwise(ports)] == [2, 2]


def test_an_edited_plan_is_held_to_what_starts(build):
    wish = build.wish("deepseek-v3", pools=pools((AGG, 1, (2, 1, 4, 8))), workload=WORK)
    ground = build.cluster([build.host("h", 8, "h200")], wish)
    text = to_yaml(make_plan(*ground))

    assert check_plan(from_yaml(text), *ground).deployments[0].pools[0].parallelism.ep == 8
    with pytest.raises(PlanFaultsError) as caught:
        check_plan(from_yaml(text.replace("ep: 8", "ep: 4")), *ground)
    assert "experts go over all 8 ranks of tp 2 × dp 4" in str(caught.value)


def test_a_plan_edited_to_share_experts_no_longer_says_how_others_are_priced(build):
    wish = build.wish("qwen3-235b-fp8", pools=pools((AGG, 1, (4, 1, 2))), workload=WORK)
    ground = build.cluster([build.host("h", 8, "b200")], wish)
    text = to_yaml(make_plan(*ground))
    assert "without ep" in text

    edited = check_plan(from_yaml(text.replace("ep: 1", "ep: 8")), *ground)
    assert not any("without ep" in each for each in edited.deployments[0].reasons)


def cpu(build, model, sizes, memory_gib=64):
    host = build.host("c", cpu_slots=1, memory_bytes=memory_gib * GIB)
    wish = build.wish(
        model,
        engine=EngineSpec("vllm", device="cpu"),
        pools=pools((AGG, 1, sizes)),
        workload=Workload(512, 64, 1.0),
    )
    return make_plan(*build.cluster([host], wish)).deployments[0]


def test_ranks_on_a_cpu_share_its_slot(build):
    one, two = (cpu(build, "llama-8b", sizes).pools[0].memory for sizes in ((1,), (1, 1, 2)))

    assert two.total_bytes * 2 == one.total_bytes
    assert two.kv_capacity_tokens == 2 * one.kv_capacity_tokens
    with pytest.raises(PlanError, match="per rank"):
        cpu(build, "llama-8b", (1, 1, 4))


def test_experts_of_several_ranks_do_not_start_on_cpus(build):
    with pytest.raises(PlanError, match="cannot exchange tokens between ranks"):
        cpu(build, "qwen3-235b-fp8", (1, 1, 2), memory_gib=2048)


def test_ranks_of_simulated_engines_are_replicas_to_estimate_and_replay(build):
    def deployment(count, sizes):
        wish = build.wish("sim-8b", kind="sim", pools=pools((AGG, count, sizes)), workload=WORK)
        topology, inventory, models = build.cluster([build.host("a")], wish)
        made = make_plan(topology, inventory, models).deployments[0]
        return made, virtual_deployment(made, wish, None, topology).engines

    (apart, two), (ranks, split) = deployment(2, (1,)), deployment(1, (1, 1, 2))

    assert ranks.estimate == apart.estimate
    assert [engine.id for engine in split] == ["chat-aggregated-0_dp0", "chat-aggregated-0_dp1"]
    assert [replace(engine, id="") for engine in split] == [replace(e, id="") for e in two]


def test_ranks_are_replayed_with_their_share_of_the_cache(build):
    wish = build.wish("llama-8b", pools=pools((AGG, 1, (1, 1, 2))), workload=WORK)
    topology, inventory, models = build.cluster([build.host("a", 8)], wish)
    made = make_plan(topology, inventory, models).deployments[0]
    engines = virtual_deployment(made, wish, models["chat"], topology).engines

    assert len(engines) == 2
    held = sum((engine.num_blocks - 1) * engine.block_size for engine in engines)
    assert held == pytest.approx(made.pools[0].memory.kv_capacity_tokens, abs=32)


def test_servers_that_run_are_adopted_with_their_ranks(build):
    urls = ("http://a:8000", "http://a:8001")
    wish = build.wish(
        "m",
        engine=EngineSpec("external", urls=urls),
        pools=pools((AGG, 1, (1, 1, 4)), (AGG, 1, (8,))),
    )
    found = make_plan(*build.cluster([build.host("a")], wish)).deployments[0].pools

    assert [(pool.parallelism.dp, pool.replicas[0].id) for pool in found] == [
        (4, "chat-aggregated-0"),
        (1, "chat-aggregated-1"),
    ]


def test_servers_with_more_ranks_than_a_router_takes_are_refused(build):
    def ground(dp):
        asked = pools((AGG, 1, (1, 1, dp)))
        wish = build.wish("m", engine=EngineSpec("external", urls=("http://a:8000",)), pools=asked)
        return build.cluster([build.host("a")], wish)

    with pytest.raises(PlanError, match="dp 65 is more than 64 ranks"):
        make_plan(*ground(65))
    text = to_yaml(make_plan(*ground(64)))
    with pytest.raises(PlanFaultsError, match="dp 65 is more than 64 ranks"):
        check_plan(from_yaml(text.replace("dp: 64", "dp: 65")), *ground(64))


def test_a_rank_has_its_own_queue_and_shares_of_what_the_engine_holds():
    pace = DeclaredPace(0.0, 1e-4, 0.01, batches=2)
    side = by_rank(Side(pace, 3, 64, 1000.0, 512), 2)

    assert (side.replicas, side.max_sequences, side.kv_capacity_tokens) == (6, 32, 500.0)
    assert (side.engine.batches, side.max_num_batched_tokens) == (1, 512)
    assert side.engine.decode_s(4, 100) == pace.decode_s(8, 100)
    work = Workload(1000, 1)
    one = max_rate_rps(Layout(Side(pace, 1, 1e9)), work, Slo())
    two = max_rate_rps(Layout(by_rank(Side(pace, 1, 1e9), 2)), work, Slo())
    assert two == pytest.approx(2 * one, rel=0.01)
    assert serve(Layout(side), work, 1.0).is_stable


def test_each_rank_of_a_simulated_plan_pulls_over_its_share_of_the_link(build):
    wish = build.wish(pools=pools((PREFILL, 1, (1, 1, 4)), (DECODE, 1, (1, 1, 4))), workload=WORK)
    topology, inventory, models = build.cluster([build.host("a", 8)], wish)
    (deployment,) = make_plan(topology, inventory, models).deployments
    one = build.wish(pools=pools((PREFILL, 1, (4,)), (DECODE, 1, (4,))), workload=WORK)
    whole = make_plan(*build.cluster([build.host("a", 8)], one)).deployments[0]

    ranks = virtual_deployment(deployment, wish, models["chat"], topology)
    engines = virtual_deployment(whole, one, models["chat"], topology)

    assert ranks.transfer_bytes_s == pytest.approx(engines.transfer_bytes_s / 4)
    # What the plan's estimate is made with: 4 GPUs' NVLink, of which a transfer reaches 0.8.
    assert engines.transfer_bytes_s == pytest.approx(4 * 450e9 * 0.8)

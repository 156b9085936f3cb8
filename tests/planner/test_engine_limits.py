"""How engines are bounded, and where each bound comes from: pieces of prompts, sequences, memory, blocks, context."""

from dataclasses import replace

import pytest

from dynctl.core.inventory import EngineSpec, Limits, PoolWish
from dynctl.core.plan import ENGINE_DEFAULT, Parallelism, Role
from dynctl.core.units import GIB
from dynctl.core.workload import Slo, Workload
from dynctl.errors import InventoryError, PlanError
from dynctl.planner.check import check_plan
from dynctl.planner.digest import digest_of
from dynctl.planner.estimate import DeclaredPace, Layout, Side, max_rate_rps, serve
from dynctl.planner.limits import default_batched_tokens
from dynctl.planner.memory import Room, sheet
from dynctl.planner.search import make_plan
from dynctl.planner.text import from_yaml, to_yaml

PACE = DeclaredPace(prefill_base_s=0.0, prefill_s_per_token=1e-4, step_s=0.01)
CHAT = Workload(4096, 256, 4.0)


def side(tokens):
    return Side(PACE, 1, 64, max_num_batched_tokens=tokens)


def pool_of(plan, number=0):
    return plan.deployments[0].pools[number]


def test_a_token_waits_for_a_piece_and_a_prompt_for_a_step_per_piece():
    whole, pieces = (serve(Layout(side(n)), Workload(4000, 1000), 1.5) for n in (8192, 1024))
    room = 1024 - pieces.sequences

    assert whole.itl_p99_s == pytest.approx(0.01 + 4000 * 1e-4)
    assert pieces.itl_p99_s == pytest.approx(0.01 + room * 1e-4, rel=0.01)

    whole, pieces = (serve(Layout(side(n)), Workload(4000, 10), 0.01) for n in (8192, 1001))
    assert pieces.ttft_p50_s - whole.ttft_p50_s == pytest.approx(3 * 0.01)


def test_every_smaller_piece_shortens_the_wait_of_tokens_and_lowers_what_is_served():
    found = [serve(Layout(side(n)), Workload(4096, 256), 1.5) for n in (8192, 2048, 512, 256)]
    rates = [max_rate_rps(Layout(side(n)), Workload(4096, 256), Slo()) for n in (8192, 512, 256)]

    assert [s.itl_p99_s for s in found] == sorted((s.itl_p99_s for s in found), reverse=True)
    assert [s.ttft_s for s in found] == sorted(s.ttft_s for s in found)
    assert rates == sorted(rates, reverse=True)


def test_smaller_steps_leave_more_room_for_kv(build):
    model = build.model("llama-70b")
    few, many = (
        sheet(model, Parallelism(4), Room(80 * GIB, max_num_batched_tokens=n)) for n in (512, 8192)
    )

    assert many.activation_bytes - few.activation_bytes == (8192 - 512) * 8192 * 24 // 4
    assert few.kv_capacity_tokens > many.kv_capacity_tokens


def test_a_tight_goal_for_itl_is_held_by_smaller_pieces_instead_of_being_refused(build):
    wish = build.wish("llama-8b", workload=Workload(2048, 256, 4.0), slo=Slo(2000, 50))
    plan = make_plan(*build.cluster([build.host("box", 1)], wish))
    batched = pool_of(plan).max_num_batched_tokens

    assert batched.value == 1024
    assert batched.source == "modelled: bears most within slo.itl_ms 50"
    (reason,) = [r for r in plan.deployments[0].reasons if r.startswith("prompts in pieces")]
    assert "with 1024 tokens a step (max-num-batched-tokens)" in reason


@pytest.mark.parametrize(
    ("name", "gib", "tokens"),
    [
        ("NVIDIA L40S", 45, 2048),
        ("NVIDIA A100-SXM4-80GB", 80, 2048),
        ("NVIDIA A100 80GB PCIe", 80, 2048),
        ("NVIDIA H100 80GB HBM3", 80, 8192),
        ("NVIDIA H200", 140, 8192),
        ("NVIDIA B200", 179, 16384),
    ],
)
def test_the_default_of_a_step_is_what_vllm_takes_on_such_a_gpu(name, gib, tokens):
    """Source: vLLM 0.32, `EngineArgs.get_batch_defaults`, OpenAI server."""
    assert default_batched_tokens(gib * GIB, name) == tokens


def test_without_a_goal_for_itl_the_default_stays(build):
    wish = build.wish("llama-8b", workload=Workload(2048, 256, 1.0), slo=Slo(ttft_ms=4000))
    for kind, tokens in (("h100", 8192), ("l40s", 2048)):
        plan = make_plan(*build.cluster([build.host("box", 1, kind)], wish))

        assert pool_of(plan).max_num_batched_tokens.value == tokens
        assert pool_of(plan).max_num_batched_tokens.source.startswith("default")


def test_a_model_that_fits_only_beside_small_steps_gets_them(build):
    model = build.model("llama-8b")
    tight = sheet(model, Parallelism(), Room(24 * GIB, max_num_batched_tokens=2048))
    longest = tight.kv_capacity_tokens + 1024
    wish = build.wish("llama-8b", limits=Limits(max_model_len_tokens=longest))
    plan = make_plan(*build.cluster([build.host("box", 1, "4090")], wish))

    assert pool_of(plan).max_num_batched_tokens.value < 2048
    assert pool_of(plan).memory.kv_capacity_tokens >= longest


@pytest.mark.parametrize(
    ("change", "source"),
    [
        ({"limits": Limits(max_num_batched_tokens=3000)}, "declared in the inventory"),
        (
            {"engine": EngineSpec("vllm", args=(("max-num-batched-tokens", "3000"),))},
            "declared in engine.args",
        ),
    ],
)
def test_what_is_declared_stands(build, change, source):
    wish = build.wish("llama-8b", workload=CHAT, slo=Slo(8000, 400), **change)
    plan = make_plan(*build.cluster([build.host("box", 4)], wish))

    assert (pool_of(plan).max_num_batched_tokens.value, source) == (3000, source)
    assert pool_of(plan).max_num_batched_tokens.source == source


def test_a_step_is_never_bounded_below_the_sequences_of_a_step(build):
    wish = build.wish(
        "llama-8b",
        workload=Workload(2048, 256, 2.0),
        slo=Slo(2000, 60),
        limits=Limits(max_num_seqs=2048),
    )
    plan = make_plan(*build.cluster([build.host("box", 2)], wish))

    assert pool_of(plan).max_num_batched_tokens.value >= 2048


def test_roles_are_bounded_apart(build):
    pools = (
        PoolWish(Role.PREFILL, 1, Parallelism(4)),
        PoolWish(Role.DECODE, 1, Parallelism(4)),
    )
    wish = build.wish("llama-70b", workload=CHAT, slo=Slo(3000, 50), pools=pools)
    plan = make_plan(*build.cluster([build.host("box", 8)], wish))
    prefill, decode = (pool_of(plan, i) for i in (0, 1))

    assert prefill.max_num_batched_tokens.value == 8192
    assert decode.max_num_batched_tokens.value < 2048
    assert (
        decode.max_num_batched_tokens.source
        == "modelled: a prompt computed here holds slo.itl_ms 50"
    )
    assert decode.memory.kv_capacity_tokens > prefill.memory.kv_capacity_tokens


def test_every_limit_of_a_plan_says_how_it_was_got(build):
    plan = make_plan(*build.cluster([build.host("box", 1)], build.wish("llama-8b")))
    planned = plan.deployments[0]

    assert (planned.max_num_seqs.value, planned.max_num_seqs.source[:7]) == (256, "default")
    assert planned.gpu_memory_utilization.value == 0.9
    assert planned.block_size_tokens.source == ENGINE_DEFAULT
    assert planned.max_model_len_tokens.source == "default: the model's own limit"
    text = to_yaml(plan)
    for key in (
        "max_model_len_tokens",
        "max_num_seqs",
        "max_num_batched_tokens",
        "gpu_memory_utilization",
        "block_size_tokens",
    ):
        (line,) = [row for row in text.splitlines() if row.lstrip().startswith(f"{key}:")]
        assert "source: " in line
    assert from_yaml(text) == plan


def test_a_default_the_engine_is_not_told_is_told_once_somebody_changes_it(build):
    ground = build.cluster([build.host("box", 1)], build.wish("llama-8b"))
    plan = make_plan(*ground)
    edited = to_yaml(plan).replace("block_size_tokens: {value: 16", "block_size_tokens: {value: 32")
    read = from_yaml(edited)
    checked = check_plan(read, *ground)

    assert digest_of(read) != plan.digest
    assert checked.deployments[0].block_size_tokens.value == 32
    assert checked.deployments[0].block_size_tokens.is_told
    assert not plan.deployments[0].block_size_tokens.is_told


def test_an_edited_step_changes_memory_and_estimate_of_the_checked_plan(build):
    ground = build.cluster([build.host("box", 1)], build.wish("llama-8b", workload=CHAT))
    plan = make_plan(*ground)
    pool = pool_of(plan)
    smaller = replace(pool, max_num_batched_tokens=replace(pool.max_num_batched_tokens, value=512))
    planned = replace(plan.deployments[0], pools=(smaller,))
    checked = check_plan(replace(plan, deployments=(planned,)), *ground)

    assert pool_of(checked).memory.kv_capacity_tokens > pool.memory.kv_capacity_tokens
    assert (
        checked.deployments[0].estimate.ttft_ms.expected
        > plan.deployments[0].estimate.ttft_ms.expected
    )


def test_a_memory_share_beyond_the_whole_is_a_problem_with_its_place(build):
    plan = make_plan(*build.cluster([build.host("box", 1)], build.wish("llama-8b")))

    with pytest.raises(InventoryError, match="above 0 and at most 1"):
        from_yaml(to_yaml(plan).replace("{value: 0.9,", "{value: 9,"))


def test_a_simulated_engine_takes_what_is_declared_and_is_not_told_its_own_default(build):
    plain = make_plan(*build.cluster([build.host("box")], build.wish(kind="sim")))
    told = make_plan(
        *build.cluster(
            [build.host("box")], build.wish(kind="sim", limits=Limits(max_num_batched_tokens=512))
        )
    )

    assert pool_of(plain).max_num_batched_tokens.value == 2048
    assert not pool_of(plain).max_num_batched_tokens.is_told
    assert pool_of(told).max_num_batched_tokens.value == 512
    assert pool_of(told).max_num_batched_tokens.is_told


def test_a_step_of_few_tokens_has_no_more_sequences(build):
    few = build.wish("llama-8b", limits=Limits(max_num_batched_tokens=128))
    plan = make_plan(*build.cluster([build.host("box", 1)], few))

    assert plan.deployments[0].max_num_seqs.value == 128
    both = build.wish("llama-8b", limits=Limits(max_num_batched_tokens=128, max_num_seqs=200))
    with pytest.raises(PlanError, match="128 batched tokens a step are fewer than its 200"):
        make_plan(*build.cluster([build.host("box", 1)], both))


def test_the_context_length_is_what_the_smallest_cache_of_a_deployment_holds(build):
    pools = (
        PoolWish(Role.AGGREGATED, 1, Parallelism(1), ("big",)),
        PoolWish(Role.AGGREGATED, 1, Parallelism(1), ("small",)),
    )
    hosts = [build.host("big", 1, "h200"), build.host("small", 1, "4090")]
    plan = make_plan(*build.cluster(hosts, build.wish("llama-8b", pools=pools)))
    held = [pool.memory.kv_capacity_tokens for pool in plan.deployments[0].pools]

    assert held[0] > 131_072 > held[1]
    assert plan.deployments[0].max_model_len_tokens.value <= held[1]


@pytest.mark.parametrize("name", ["max-model-len", "max_model_len"])
def test_a_context_declared_as_a_flag_needs_its_room_as_one_under_limits_does(build, name):
    host = build.host("a", 1, "4090", "PHB")
    flag = build.wish(engine=EngineSpec("vllm", args=((name, "100k"),)))
    limit = build.wish(limits=Limits(max_model_len_tokens=100_000))

    for wish in (flag, limit):
        with pytest.raises(PlanError, match="fits no layout"):
            make_plan(*build.cluster([host], wish))
    room = build.wish(engine=EngineSpec("vllm", args=((name, "8k"),)))
    planned = make_plan(*build.cluster([host], room)).deployments[0]
    assert planned.max_model_len_tokens.value == 8000


@pytest.mark.parametrize(
    ("engine", "said"),
    [
        (EngineSpec("vllm", args=(("max-num-seqs", "²"),)), "engine.args.max-num-seqs"),
        (EngineSpec("vllm", args=(("gpu-memory-utilization", "²"),)), "engine.args.gpu-memory"),
        (EngineSpec("sim", args=(("max-num-batched-tokens", "8k"),)), "engine.args.max-num-batched"),
        (EngineSpec("vllm", device="cpu", env=(("VLLM_CPU_KVCACHE_SPACE", "²"),)), "engine.env.VLLM"),
    ],
)  # fmt: skip
def test_a_flag_no_engine_can_read_is_refused_before_it_is_started(build, engine, said):
    wish = build.wish("llama-8b", engine=engine)

    with pytest.raises(PlanError, match=said) as caught:
        make_plan(*build.cluster([build.host("a", 1, cpu_slots=1)], wish))
    assert caught.value.hint

"""Replays in virtual time: same input same report, policies matter where prefixes do, prefill hands over to decode."""

import pytest

from dynctl.core.inventory import PoolWish
from dynctl.core.plan import Parallelism, Role
from dynctl.core.workload import Slo, Workload
from dynctl.errors import PlanError
from dynctl.planner.prompts import Prompts, make_trace
from dynctl.planner.search import make_plan
from dynctl.planner.simulate import SimSetting, simulate
from dynctl.planner.trace import Call, Trace
from dynctl.planner.virtual import VirtualEngineSpec
from dynctl.planner.virtual_plan import paced, virtual_deployment
from dynctl.router.config import make_settings
from dynctl.sim.scheduler import StepCosts

COSTS = StepCosts()


def engines(num, role=Role.AGGREGATED, prefix="e", **change):
    facts = {"num_blocks": 4096, **change}
    return [VirtualEngineSpec(f"{prefix}{i}", role, COSTS, **facts) for i in range(num)]


def chats(num, turns, gap_s=0.5):
    """Prompts that grow turn by turn; a turn comes long after the one before."""
    calls = [
        Call(
            (turn * num + chat) * gap_s,
            (20 + turn * 10) * 16 + 5,
            20,
            tuple(chat * 1000 + i for i in range(20 + turn * 10)),
        )
        for turn in range(turns)
        for chat in range(num)
    ]
    return Trace(tuple(calls), 16, "chats")


def test_the_same_seed_gives_the_same_report_and_another_one_another():
    trace = make_trace(Workload(256, 16, 20, 0.5), 150, 1)

    one, same, other = (
        simulate(trace, engines(3), SimSetting("random", seed), Slo(500, 30)) for seed in (1, 1, 2)
    )

    assert one == same
    assert one != other


def test_one_idle_engine_takes_as_long_as_its_steps():
    trace = Trace((Call(0.0, 1000, 11),), 16)

    told = simulate(trace, engines(1), SimSetting(sending_s=0.0), Slo())

    prefill_ms = 1000 * 0.1 + 2.0
    assert told.ttft_ms.p50 == pytest.approx(prefill_ms + 1.0, abs=0.1)
    assert told.itl_ms.p50 == pytest.approx(10.05, abs=0.01)
    assert told.num_failed == 0


def test_prefixes_are_found_and_a_policy_without_them_finds_fewer():
    trace = chats(9, 5)

    kv = simulate(trace, engines(3), SimSetting("kv"), Slo())
    turns = simulate(trace, engines(3), SimSetting("random"), Slo())

    assert kv.hit_ratio > 0.6
    assert kv.hit_ratio > turns.hit_ratio + 0.15
    assert kv.ttft_ms.mean < turns.ttft_ms.mean


def test_prefill_engines_compute_prompts_and_decode_engines_say_the_rest():
    trace = make_trace(Workload(512, 32, 8), 60, 3)
    both = [*engines(2, Role.PREFILL, "p"), *engines(2, Role.DECODE, "d")]

    always = SimSetting("kv", settings=make_settings({"conditional_prefill": 0}))
    told = simulate(trace, both, always, Slo())

    loads = {load.id: load for load in told.engines}
    assert told.num_failed == 0
    # The router may compute a prompt in place where that is quicker.
    assert loads["p0"].num_output_tokens + loads["p1"].num_output_tokens > 50
    assert loads["d0"].num_output_tokens + loads["d1"].num_output_tokens > 60 * 20
    assert told.itl_ms.p99 < 15


def test_over_a_slow_link_more_prompts_are_computed_in_place():
    trace = make_trace(Workload(512, 8, 2), 20, 3)
    both = [*engines(1, Role.PREFILL, "p"), *engines(1, Role.DECODE, "d")]

    fast, slow = (
        simulate(trace, both, SimSetting("kv", transfer_bytes_s=speed), Slo())
        for speed in (1e11, 1e9)
    )

    # The router learns what a transfer takes, and no request is lost over it.
    assert slow.num_failed == fast.num_failed == 0
    assert slow.engines[1].num_prefill_tokens > fast.engines[1].num_prefill_tokens


def test_more_load_means_later_tokens_and_a_full_line_loses_requests():
    few, many = (
        simulate(make_trace(Workload(512, 32, rate), 200, 1), engines(1), SimSetting("kv"), Slo())
        for rate in (2, 12)
    )
    lost = simulate(
        make_trace(Workload(512, 64, 200), 200, 1),
        engines(1, max_num_seqs=2),
        SimSetting("kv", settings=make_settings({"queue_timeout_s": 1.0})),
        Slo(),
    )

    assert many.ttft_ms.p95 > few.ttft_ms.p95
    assert lost.num_failed > 50


def test_a_cache_that_is_too_small_preempts_or_waits_but_serves_all():
    trace = make_trace(Workload(256, 64, 10), 100, 1)

    told = simulate(trace, engines(1, num_blocks=120), SimSetting("kv"), Slo())

    assert told.num_failed == 0
    assert told.engines[0].peak_kv_ratio > 0.8


def test_goodput_counts_requests_within_the_goals():
    trace = make_trace(Workload(512, 32, 4), 60, 1)

    def share(slo):
        return simulate(trace, engines(1), SimSetting("kv"), slo).goodput_ratio

    assert share(Slo(10_000, 1000)) == 1
    assert share(Slo(1)) == 0
    assert 0 < share(Slo(70)) < 1


def test_equal_blocks_are_equal_tokens_and_the_rest_is_each_request_s_own():
    prompts = Prompts(16)
    one, two = (prompts.of(Call(0, 40, 1, (1, 2)), number) for number in (1, 2))

    assert len(one) == len(two) == 40
    assert one[:32] == two[:32]
    assert one[32:] != two[32:]


def test_a_plan_on_gpus_becomes_engines_with_its_pace(build):
    work = Workload(2048, 128, 4.0)
    wish = build.wish("llama-70b", workload=work, slo=Slo(6000))
    topology, inventory, models = build.cluster([build.host("a", 8)], wish)
    plan = make_plan(topology, inventory, models)

    made = virtual_deployment(plan.deployments[0], wish, models["chat"], topology)

    assert {spec.id for spec in made.engines} == {r.id for _, _, r in plan.replicas()}
    assert all(spec.num_blocks > 1000 for spec in made.engines)
    told = simulate(make_trace(work, 60, 1), made.engines, SimSetting(), wish.slo)
    assert told.num_failed == 0


class SharingPace:
    """Beside running sequences a prompt's tokens cost half: the weights are read anyway."""

    kv_bytes_per_token, host_s, stages, batches = 1, 0.0, 1, 1

    def prefill_s(self, new_tokens, past_tokens=0.0):
        return 0.003 + new_tokens * 1e-4

    def decode_s(self, sequences, context_tokens):
        return 0.01 + sequences * 1e-4

    def mixed_s(self, sequences, context_tokens, new, past):
        if not sequences:
            return self.prefill_s(new, past)
        return self.decode_s(sequences, context_tokens) + new * 5e-5


def test_steps_of_a_pace_cost_what_the_pace_says_where_prompts_are_computed():
    shared = paced(SharingPace(), Workload(1000, 100), 8192)

    assert shared.duration_s(0, 0, 0) == 0
    assert shared.duration_s(1000, 1, 0) == pytest.approx(0.103)
    assert shared.duration_s(0, 0, 10) == pytest.approx(0.011)
    assert shared.duration_s(500, 0, 10) == pytest.approx(0.011 + 500 * 5e-5)


def test_a_simulated_plan_says_what_its_estimate_says(build):
    work = Workload(4096, 256, 0.8)
    wish = build.wish("llama-70b", workload=work, slo=Slo(4000, 50))
    topology, inventory, models = build.cluster([build.host("a", 8)], wish)
    plan = make_plan(topology, inventory, models)
    planned = plan.deployments[0]
    made = virtual_deployment(planned, wish, models["chat"], topology)
    setting = SimSetting(sending_s=made.host_s)

    told = simulate(make_trace(work, 400, 1), made.engines, setting, wish.slo)

    assert [pool.role for pool in planned.pools] == [Role.AGGREGATED]
    assert told.itl_ms.mean == pytest.approx(planned.estimate.itl_ms.expected, rel=0.15)
    assert told.ttft_ms.mean == pytest.approx(planned.estimate.ttft_ms.expected, rel=0.25)


def test_a_prompt_computed_on_a_decode_engine_does_not_draw_all_others_there(build):
    work = Workload(8192, 256, 2.0)
    wish = build.wish("qwen3-32b-fp8", workload=work, slo=Slo(3000, 30))
    topology, inventory, models = build.cluster([build.host("a", 8, "h200")], wish)
    planned = make_plan(topology, inventory, models).deployments[0]
    made = virtual_deployment(planned, wish, models["chat"], topology)
    setting = SimSetting("kv", 3, made.transfer_bytes_s, made.host_s)

    told = simulate(make_trace(work, 200, 3), made.engines, setting, wish.slo)

    assert [pool.role for pool in planned.pools] == [Role.PREFILL, Role.DECODE]
    assert told.ttft_ms.p95 < wish.slo.ttft_ms


def test_engines_of_unknown_speed_are_not_simulated(build):
    from dynctl.core.inventory import EngineSpec

    wish = build.wish(engine=EngineSpec("external", urls=("http://a:1",)))
    topology, inventory, models = build.cluster([build.host("a")], wish)
    plan = make_plan(topology, inventory, models)

    with pytest.raises(PlanError, match="cannot be simulated"):
        virtual_deployment(plan.deployments[0], wish, None, topology)


def test_ranks_that_share_experts_are_simulated_at_the_pace_they_are_estimated_at(build):
    """Their steps grow steeply with the first sequences and little with more: no straight line goes through both."""
    work = Workload(4096, 512, 2.0)
    decode = PoolWish(Role.DECODE, 1, Parallelism(1, 1, 8, 8))
    pools = (PoolWish(Role.PREFILL, 1, Parallelism(8)), decode)
    wish = build.wish("deepseek-v3", workload=work, slo=Slo(4000, 100), pools=pools)
    hosts = [build.host(name, 8, "h200", nics=True) for name in "ab"]
    topology, inventory, models = build.cluster(hosts, wish)
    planned = make_plan(topology, inventory, models).deployments[0]
    made = virtual_deployment(planned, wish, models["chat"], topology)

    setting = SimSetting("kv", 1, made.transfer_bytes_s, made.host_s)
    told = simulate(make_trace(work, 200, 1), made.engines, setting, wish.slo)

    assert told.itl_ms.mean == pytest.approx(planned.estimate.itl_ms.expected, rel=0.15)

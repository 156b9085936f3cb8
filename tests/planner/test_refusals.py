"""What cannot be planned ends in one sentence with the binding limit, and the nearest change."""

from dataclasses import replace

import pytest

from dynctl.core.hardware import GpuState
from dynctl.core.inventory import EngineSpec, Limits, PoolWish
from dynctl.core.plan import Parallelism, Role
from dynctl.core.workload import Slo, Workload
from dynctl.errors import ExitCode, PlanError
from dynctl.planner.search import make_plan


def refused(ground):
    with pytest.raises(PlanError) as caught:
        make_plan(*ground)
    assert caught.value.exit_code is ExitCode.REFUSED
    assert caught.value.hint
    return caught.value


def test_gpu_engines_on_hosts_without_gpus(build):
    error = refused(build.cluster([build.host("a"), build.host("b")], build.wish()))

    assert "engine vllm needs GPUs and no host has one" in error.message
    assert "device: cpu" in error.hint


def test_no_host_at_all(build):
    refused(build.cluster([], build.wish()))


def test_gpus_that_are_all_taken_are_named(build):
    states = {0: GpuState.BUSY, 1: GpuState.MIG}

    error = refused(build.cluster([build.host("a", 2, states=states)], build.wish()))

    assert "a: GPU 0 left out: in use by other processes" in error.message
    assert "GPU 1 left out: in MIG mode" in error.message


def test_a_model_that_does_not_fit_names_the_smallest_shortfall(build):
    hosts = [build.host("a", 2, "a100-40", "NV4")]

    error = refused(build.cluster(hosts, build.wish("llama-70b")))

    assert "tp2 on NVIDIA A100-SXM4-40GB needs" in error.message
    assert "short" in error.message
    assert "2 GPUs of 80 GiB in one host would do" in error.hint


def test_goals_nobody_can_reach_name_the_best_that_can_be(build):
    error = refused(
        build.cluster([build.host("a", 8)], build.wish("llama-70b", slo=Slo(ttft_ms=5)))
    )
    assert "slo.ttft_ms 5 is infeasible: the best reachable TTFT is" in error.message

    error = refused(build.cluster([build.host("a", 8)], build.wish("llama-70b", slo=Slo(itl_ms=1))))
    assert "slo.itl_ms 1 is infeasible: the best reachable ITL is" in error.message


def test_a_rate_beyond_the_gpus_says_how_many_would_do(build):
    wish = build.wish("llama-70b", workload=Workload(rate_rps=1000))

    error = refused(build.cluster([build.host("a", 8)], wish))

    assert "1000 req/s is more than the free GPUs serve" in error.message
    assert "such GPUs would do" in error.hint


@pytest.mark.parametrize(
    ("change", "key"),
    [
        ({"slo": Slo(ttft_ms=float("nan"))}, "slo.ttft_ms"),
        ({"slo": Slo(ttft_ms=-1)}, "slo.ttft_ms"),
        ({"slo": Slo(itl_ms=0)}, "slo.itl_ms"),
        ({"slo": Slo(itl_ms=1e13)}, "slo.itl_ms"),
        ({"workload": Workload(rate_rps=float("inf"))}, "workload.rate_rps"),
        ({"workload": Workload(isl_tokens=0)}, "workload.isl_tokens"),
        ({"workload": Workload(shared_prefix_ratio=1.5)}, "shared_prefix_ratio"),
    ],
)
def test_absurd_wishes_are_refused_as_input(build, change, key):
    error = refused(build.cluster([build.host("a", 8)], build.wish(**change)))

    assert key in error.message


def pools(*wanted):
    return tuple(PoolWish(role, count, Parallelism(tp)) for role, count, tp in wanted)


def test_explicit_pools_are_refused_with_what_binds(build):
    hosts = [build.host("a", 8), build.host("b", 4)]

    def asking(*wanted, model="llama-70b"):
        return refused(build.cluster(hosts, build.wish(model, pools=pools(*wanted)))).message

    assert "give 3 such groups" in asking((Role.AGGREGATED, 4, 4))
    assert "the largest has 8 GPUs" in asking((Role.AGGREGATED, 1, 16))
    assert "tp1 on NVIDIA H100" in asking((Role.AGGREGATED, 1, 1))
    assert "tp 3 does not divide the 64 attention heads" in asking((Role.AGGREGATED, 1, 3))
    assert "without a decode pool" in asking((Role.PREFILL, 1, 4))
    assert "cannot be mixed" in asking((Role.PREFILL, 1, 4), (Role.DECODE, 1, 4), (Role.AGGREGATED, 1, 4))  # fmt: skip


@pytest.mark.parametrize(
    ("model", "sizes", "said"),
    [
        ("llama-70b", Parallelism(4, ep=4), "has no experts"),
        ("llama-70b", Parallelism(2, dp=65), "dp 65 is more than 64 ranks"),
        (
            "qwen3-235b-fp8",
            Parallelism(2, dp=4, ep=4),
            "experts go over all 8 ranks of tp 2 × dp 4",
        ),
        ("qwen3-235b-fp8", Parallelism(1, dp=2, ep=2), "dp2 ep2 on NVIDIA H100 80GB HBM3 needs"),
        ("qwen3-235b-fp8", Parallelism(4, dp=4, ep=16), "the largest has 8 GPUs"),
    ],
)
def test_parallelism_that_means_nothing_or_cannot_be_started(build, model, sizes, said):
    wanted = (PoolWish(Role.AGGREGATED, 1, sizes),)

    error = refused(build.cluster([build.host("a", 8)], build.wish(model, pools=wanted)))

    assert said in error.message


def test_weights_that_a_gpu_cannot_compute(build):
    error = refused(build.cluster([build.host("a", 8, "v100")], build.wish("qwen3-32b-fp8")))

    assert "need compute capability 7.5" in error.message


def test_a_pool_on_hosts_that_do_not_exist(build):
    wanted = (PoolWish(Role.AGGREGATED, 1, Parallelism(1), hosts=("gpu-*",)),)

    error = refused(build.cluster([build.host("a", 8)], build.wish(pools=wanted)))

    assert "no host with GPUs matches gpu-*" in error.message


def test_cpu_engines_need_slots_and_memory(build):
    engine = EngineSpec("vllm", device="cpu")

    none = refused(build.cluster([build.host("a")], build.wish(engine=engine)))
    few = refused(
        build.cluster(
            [build.host("a", cpu_slots=1)],
            build.wish(engine=engine, pools=(PoolWish(Role.AGGREGATED, 2),)),
        )
    )
    small = refused(
        build.cluster([build.host("a", cpu_slots=1)], build.wish("llama-70b", engine=engine))
    )

    assert "needs CPU slots and no host declares any" in none.message
    assert "the 1 CPU slots of its hosts are taken" in few.message
    assert "needs" in small.message
    assert "per engine" in small.message


def test_two_routers_on_one_port(build):
    hosts = [build.host("a", 8)]
    one, two = build.wish(name="one"), build.wish(name="two")

    assert "both listen on 127.0.0.1:8000 of a" in refused(build.cluster(hosts, one, two)).message
    moved = replace(two, router=replace(two.router, listen="127.0.0.1:8001"))
    assert len(make_plan(*build.cluster(hosts, one, moved)).deployments) == 2


def test_ports_that_run_out(build):
    wish = build.wish(pools=pools((Role.PREFILL, 2, 2), (Role.DECODE, 2, 2)))

    error = refused(build.cluster([build.host("a", 8)], wish, port_count=4))

    assert "4 ports from 18800 are not enough" in error.message


def test_an_unknown_shape_is_planned_only_as_written(build):
    hosts = [build.host("a", 8)]

    error = refused(build.cluster(hosts, build.wish("mystery")))
    plan = make_plan(
        *build.cluster(hosts, build.wish("mystery", pools=pools((Role.AGGREGATED, 1, 2))))
    )

    assert "the shape of /models/mystery is unknown" in error.message
    assert any("not checked against memory" in reason for reason in plan.deployments[0].reasons)


def test_external_servers_need_urls_one_per_replica(build):
    hosts = [build.host("a", address="10.1.1.1"), build.host("b")]
    urls = ("http://10.1.1.1:9000", "http://elsewhere:9000")

    def engine(*given):
        return EngineSpec("external", urls=given)

    assert "needs urls" in refused(build.cluster(hosts, build.wish(engine=engine()))).message
    wanted = pools((Role.PREFILL, 1, 1), (Role.DECODE, 2, 1))
    error = refused(build.cluster(hosts, build.wish(engine=engine(*urls), pools=wanted)))
    assert "pools ask for 3 replicas and engine.urls names 2" in error.message
    plan = make_plan(*build.cluster(hosts, build.wish(engine=engine(*urls))))
    assert [r.host_name for _, _, r in plan.replicas()] == [
        "a",
        plan.deployments[0].router.host_name,
    ]


def test_fp8_weights_are_named_only_where_they_would_fit(build):
    tiny = refused(build.cluster([build.host("a", 2, "4090")], build.wish("llama-70b")))
    near = refused(build.cluster([build.host("a", 1, "h200")], build.wish("llama-70b")))

    assert "fp8" not in tiny.hint
    assert near.hint.endswith("so would fp8 weights")


def test_a_request_too_long_for_the_cache_is_told_how_long_it_may_be(build):
    long = Workload(36_000, 100, 1.0)
    hosts = [build.host("a", 1, "l40s")]
    error = refused(build.cluster(hosts, build.wish("qwen3-32b-fp8", workload=long)))
    most = int(error.hint.rpartition("requests of at most ")[2].split()[0])

    fits = build.wish("qwen3-32b-fp8", workload=Workload(most - 100, 100, 0.01))
    assert make_plan(*build.cluster(hosts, fits)).deployments[0].pools


def test_gpus_of_which_nothing_is_known_are_to_be_described_anew(build):
    states = {0: GpuState.UNKNOWN, 1: GpuState.UNKNOWN}
    error = refused(build.cluster([build.host("a", 2, states=states)], build.wish()))

    assert error.hint.startswith("describe them anew: dynctl discover")


def test_what_is_most_with_prefill_and_decode_apart_can_be_had(build):
    slo = Slo(3000, 40)
    hosts = [build.host("a", 8)]
    error = refused(
        build.cluster(hosts, build.wish("llama-70b", workload=Workload(4096, 512, 20.0), slo=slo))
    )
    rate = float(error.hint.partition("workload.rate_rps ")[2].split(",")[0])
    work = Workload(4096, 512, rate)

    assert "prefill 2 × tp2" in error.message
    assert make_plan(*build.cluster(hosts, build.wish("llama-70b", workload=work, slo=slo)))


def test_pools_of_different_shapes_say_the_rule_or_what_speaks_against_it(build):
    def told(p, d):
        pools = (
            PoolWish(Role.PREFILL, 1, Parallelism(p)),
            PoolWish(Role.DECODE, 1, Parallelism(d)),
        )
        wish = build.wish("qwen3-235b-fp8", pools=pools)
        plan = make_plan(*build.cluster([build.host("a", 16, "h200")], wish))
        return [r for r in plan.deployments[0].reasons if r.startswith("prefill and decode")]

    assert told(4, 4) == []
    assert told(4, 8)[0].startswith("prefill and decode differ in tp: the connector takes")
    # 4 KV heads: each of 8 prefill ranks holds a copy that 4 decode ranks do not.
    assert told(8, 4) == [
        "prefill and decode may not fit: prefill tp 8 copies KV heads that decode tp 4 does not (vLLM NixlConnector matrix)"
    ]


@pytest.mark.parametrize(
    ("name", "kind", "said"),
    [
        ("deepseek-v3", "h100", "8 GPUs of 96 GiB in one host would do"),
        ("llama-70b", "4090", "2 GPUs of 80 GiB in one host would do"),
    ],
)
def test_a_model_that_fits_nowhere_is_told_gpus_that_one_host_can_have(build, name, kind, said):
    link = "NV18" if kind == "h100" else "PHB"
    error = refused(
        build.cluster([build.host("a", 8 if kind == "h100" else 2, kind, link)], build.wish(name))
    )

    assert error.hint.startswith(said)


def test_a_workload_no_engine_would_take_is_refused_before_it_is_priced(build):
    long = Workload(40_000, 1_000, 0.1)
    host = build.host("a", 8)

    error = refused(build.cluster([host], build.wish("qwen3-32b-fp8", workload=long)))
    assert (
        "40000 prompt and 1000 answer tokens, its engines take 40960 (the model's own limit)"
        in error.message
    )
    short = Limits(max_model_len_tokens=1024)
    error = refused(
        build.cluster([host], build.wish(workload=Workload(1000, 25, 1.0), limits=short))
    )
    assert "its engines take 1024 (declared in the inventory)" in error.message
    error = refused(
        build.cluster([host], build.wish("sim", "sim", workload=Workload(8192, 1, 1.0)))
    )
    assert "8192 (default of the simulated engine)" in error.message

    stretched = build.wish(
        "qwen3-32b-fp8", workload=long, limits=Limits(max_model_len_tokens=65536)
    )
    reasons = make_plan(*build.cluster([host], stretched)).deployments[0].reasons
    assert any("65536 is beyond the 40960 tokens of the model's config.json" in r for r in reasons)


def test_as_many_gpus_as_are_said_to_do_do(build):
    """Of a size of engine, whatever other kinds bear beside them."""
    wish = build.wish("llama-70b", workload=Workload(2048, 256, 12.0), slo=Slo(3000, 60))
    hosts = [build.host("h", 8), build.host("a", 8, "a100", "NV12")]
    error = refused(build.cluster(hosts, wish))

    num = int(error.hint.partition("about ")[2].split()[0])
    more = [build.host(f"h-{i}", 8) for i in range(-(-num // 8))]
    assert num % 8 == 0 or num % 4 == 0
    assert make_plan(*build.cluster(more, wish))


def test_cards_that_have_nvlink_and_show_none_are_said_to_be_the_matter(build):
    wish = build.wish("llama-70b", workload=Workload(4096, 256, 2.0), slo=Slo(3000, 60))
    dark = build.host("dark", 8, link="NODE")

    assert "dark: no NVLink is seen" in refused(build.cluster([dark], wish)).hint
    few = replace(wish, workload=Workload(4096, 256, 0.3))
    reasons = make_plan(*build.cluster([dark], few)).deployments[0].reasons
    assert any(r.endswith("on dark, whose cards should have it: dynctl doctor") for r in reasons)

    cheap = build.wish(workload=Workload(1024, 128, 100.0), slo=Slo(3000, 60))
    hint = refused(build.cluster([build.host("desk", 4, "4090", "PHB")], cheap)).hint
    assert "NVLink" not in hint

"""Percentiles, cache hits, pools and bands of estimates; the estimate and calibrate commands."""

import itertools
import json
import math
from dataclasses import replace

import pytest

from dynctl.cli.kept import read_calibration
from dynctl.cli.main import run
from dynctl.core.plan import Parallelism, Role
from dynctl.core.workload import Slo, Workload
from dynctl.planner.calibrating import Run, calibrate, joined
from dynctl.planner.calibration import REGIMES, fingerprint, own_text, shipped, with_own
from dynctl.planner.checkpoint import open_model
from dynctl.planner.closed_loop import Loop, Pair, run_loop, run_pair
from dynctl.planner.estimate import DeclaredPace, Layout, Side, hit_ratio, serve
from dynctl.planner.fitting import Unknown, fit, solve
from dynctl.planner.peaks import SPECS, find_spec, spec_named
from dynctl.planner.pricing import Query, price_engine
from dynctl.planner.roofline import Engine, group_link, load_of

PACE = DeclaredPace(prefill_base_s=0.0, prefill_s_per_token=1e-4, step_s=0.01)


def query(model="llama-3.1-8b", gpu="h100-sxm", **change):
    facts = {"parallelism": Parallelism(), "role": Role.AGGREGATED, "workload": Workload(1024, 256), "concurrency": 16.0, **change}  # fmt: skip
    return Query(open_model(model), spec_named(gpu), **facts)


def test_percentiles_rise_and_varied_lengths_spread_them():
    even = serve(Layout(Side(PACE, 1, 64)), Workload(1000, 100), 4.0)
    varied = serve(Layout(Side(PACE, 1, 64)), Workload(1000, 100, isl_cv=1.0), 4.0)

    for served in (even, varied):
        assert served.ttft_p50_s <= served.ttft_p95_s <= served.ttft_p99_s
    assert varied.ttft_p99_s > 1.5 * even.ttft_p99_s


def test_a_single_server_waits_as_the_textbook_says():
    """M/D/1 at half load: the mean wait is half of a service time."""
    pace = DeclaredPace(0.0, 1e-4, 1e-9)

    served = serve(Layout(Side(pace, 1, 1e9)), Workload(1000, 1), 5.0)

    assert served.ttft_s - 0.1 - pace.host_s == pytest.approx(0.05, rel=0.01)


def test_prefixes_that_do_not_fit_the_cache_are_not_hit():
    work = Workload(1000, 100, 1.0, shared_prefix_ratio=0.8, num_prefixes=100)
    side = Side(PACE, 4, 64, kv_capacity_tokens=10_000)

    routed, blind = Layout(side), Layout(side, routes_by_prefix=False)

    assert hit_ratio(Layout(Side(PACE, 4, 64)), work, 0) == 0.8
    assert hit_ratio(routed, work, 0) == pytest.approx(0.8 * 10_000 / (25 * 800))
    assert hit_ratio(blind, work, 0) == pytest.approx(0.8 * 10_000 / (100 * 800))
    assert hit_ratio(routed, work, 20) < hit_ratio(routed, work, 0)


def test_transfers_queue_for_their_link():
    pace = DeclaredPace(0.0, 1e-5, 0.01, kv_bytes_per_token=100_000)
    layout = Layout(Side(pace, 1, 256), Side(pace, 1, 256), 1e9)

    idle, loaded = (serve(layout, Workload(1000, 10), rate) for rate in (0.01, 5.0))

    assert loaded.transfer_s > 1.3 * idle.transfer_s
    assert serve(layout, Workload(1000, 10), 8.0).limit == "transfer"


def test_users_that_the_cache_cannot_hold_wait():
    load = load_of(open_model("llama-3.1-8b"), spec_named("h100-sxm"), Parallelism(), group_link(spec_named("h100-sxm"), 18, None))  # fmt: skip
    c = shipped().constants("vllm", spec_named("h100-sxm"))

    free, tight = (run_loop(load, c, Loop(1000, 200, 64, 0, limit)) for limit in (64, 16))

    assert tight.ttft_s > 5 * free.ttft_s
    assert tight.tpot_s < free.tpot_s
    assert tight.tokens_s < free.tokens_s


def test_more_prefill_engines_help_long_prompts_and_more_decode_engines_long_answers():
    model, spec = open_model("gpt-oss-120b"), spec_named("h200-sxm")
    load = load_of(model, spec, Parallelism(2), group_link(spec, 18, None))
    c = shipped().constants("sglang", spec)

    def tokens_s(isl, osl, prefill, decode):
        return run_pair(Pair(load, prefill, load, decode, 0.01), c, Loop(isl, osl, 128)).tokens_s

    assert tokens_s(2048, 64, 3, 1) > tokens_s(2048, 64, 1, 3)
    assert tokens_s(128, 680, 1, 3) > tokens_s(128, 680, 2, 2) > tokens_s(128, 680, 3, 1)


@pytest.mark.parametrize("engine", ["vllm", "sglang", "trtllm", "other"])
def test_narrow_weights_are_never_slower(engine):
    spec = spec_named("h100-sxm")
    wide, narrow = (
        Engine(open_model(n), spec, Parallelism(2), group_link(spec, 18, None), engine)
        for n in ("qwen3-32b", "qwen3-32b-fp8")
    )

    for batch in (1, 16, 128, 512):
        assert narrow.decode_s(batch, 1000) <= wide.decode_s(batch, 1000)
    assert narrow.prefill_s(4000) <= wide.prefill_s(4000)


@pytest.mark.parametrize("gpu", ["a100-sxm-80", "l40s", "h100-pcie", "h100-sxm", "b200-sxm"])
@pytest.mark.parametrize("users", [1.0, 16.0, 64.0])
def test_narrow_weights_are_never_slower_to_many_users(gpu, users):
    """Also where the GPU multiplies them no faster: users who ask again sooner do not wait longer."""
    wide, narrow = (
        price_engine(query(f"llama-3.1-8b{suffix}", gpu, concurrency=users, workload=Workload(1500, 128)))
        for suffix in ("", "-fp8")
    )  # fmt: skip

    assert narrow.ttft_ms.expected <= wide.ttft_ms.expected
    assert narrow.tpot_ms.expected <= wide.tpot_ms.expected
    assert narrow.req_s.expected >= wide.req_s.expected


@pytest.mark.parametrize("role", list(Role))
@pytest.mark.parametrize("concurrency", [16.0, None])
def test_every_role_is_priced_with_bands(role, concurrency):
    found = price_engine(query(role=role, concurrency=concurrency))

    assert found.feasible
    assert (found.ttft_ms is None) == (role is Role.DECODE)
    assert (found.tpot_ms is None) == (role is Role.PREFILL)
    for figure in (
        found.ttft_ms,
        found.tpot_ms,
        found.req_s,
        found.memory_gib,
        found.kv_capacity_tokens,
    ):
        if figure is not None:
            assert 0 < figure.low <= figure.expected <= figure.high < math.inf
            assert figure.source


@pytest.mark.parametrize(
    ("model", "parallelism", "said"),
    [
        ("llama-3.1-70b", Parallelism(1), "does not fit"),
        ("llama-3.1-8b", Parallelism(3), "does not divide"),
        ("llama-3.1-8b", Parallelism(2, ep=2), "dense"),
        ("gpt-oss-120b", Parallelism(2, ep=3), "ranks"),
        ("llama-3.1-8b", Parallelism(1, pp=64), "layers"),
    ],
)
def test_what_cannot_be_says_why(model, parallelism, said):
    found = price_engine(query(model, parallelism=parallelism))

    assert not found.feasible
    assert said in found.reason


def test_what_does_not_fit_names_the_nearest_that_does():
    assert price_engine(query("llama-3.1-70b")).reason.endswith("it fits with tp 2")
    assert price_engine(query("llama-3.1-70b", parallelism=Parallelism(2))).feasible
    long = query("phi-4", workload=Workload(700_000, 100), parallelism=Parallelism(2))
    assert "it fits with tp 2 and pp 2" in price_engine(long).reason
    assert "sixteen" in price_engine(query("deepseek-v3", "l4")).reason


def test_formats_without_kernels_are_refused():
    found = price_engine(query("qwen3-32b-fp8", "v100-sxm", parallelism=Parallelism(4)))

    assert not found.feasible
    assert "compute capability" in found.reason
    assert price_engine(query("qwen3-14b", "v100-sxm", parallelism=Parallelism(4))).feasible


def test_too_high_a_rate_names_what_binds():
    found = price_engine(
        query(concurrency=None, workload=Workload(1024, 256, 1e4), slo=Slo(1000, 50))
    )

    assert not found.feasible
    assert "at most" in found.reason


@pytest.mark.parametrize("figure", ["ttft", "tpot", "tokens"])
@pytest.mark.parametrize(
    ("known", "unknown"),
    [("llama-3.1-8b", "gemma-2-9b"), ("gpt-oss-120b", "glm-4.5-air")],
)
def test_who_knows_less_promises_no_more(figure, known, unknown):
    """A fitted model on a fitted GPU; a model without points there; a GPU without any; a flood of requests."""
    known, unknown = open_model(known), open_model(unknown)
    bands = [
        shipped().band(figure, known, "trtllm", spec_named("h100-sxm")),
        shipped().band(figure, unknown, "trtllm", spec_named("h100-sxm")),
        shipped().band(figure, unknown, "trtllm", spec_named("a100-sxm-80")),
    ]

    assert bands[0] != bands[1]
    for (low, high), (wider_low, wider_high) in itertools.pairwise(bands):
        assert wider_low <= low < 1 < high <= wider_high
    assert shipped().band(f"{figure}-flood", known, "trtllm", spec_named("h100-sxm")) == bands[2]


def test_sources_say_what_was_fitted():
    def source(model, gpu):
        return price_engine(query(model, gpu)).tpot_ms.source

    assert "this model included" in source("llama-3.1-8b", "h100-sxm")
    assert "this model not" in source("gemma-2-9b", "h100-sxm")
    assert "not fitted for vllm on ampere" in source("llama-3.1-8b", "a100-sxm-80")


def test_requests_beyond_the_published_context_are_noted(capsys):
    found = price_engine(query("gemma-2-9b", workload=Workload(16_000, 100)))

    assert found.feasible
    assert "8192" in found.note
    assert not price_engine(query("gemma-2-9b", workload=Workload(8_000, 100))).note


def test_a_lucky_band_of_the_unknown_is_held_to_that_of_the_known():
    narrow = {f"tpot/dense/{regime}": (0.99, 1.01) for regime in REGIMES}
    lucky = replace(shipped(), bands=narrow | {"tpot/dense/fitted": (0.7, 1.4)})

    assert lucky.band("tpot", open_model("gemma-2-9b"), "trtllm", spec_named("l40s")) == (0.7, 1.4)


def test_models_alike_in_all_but_their_keys_and_values_are_told_apart():
    model = open_model("llama-3.1-8b")

    assert fingerprint(replace(model, num_kv_heads=32)) != fingerprint(model)
    assert fingerprint(replace(model, name="mine", weight_bytes=1)) == fingerprint(model)


def test_pipelines_cost_latency_and_hold_more():
    flat = price_engine(query("llama-3.1-70b", parallelism=Parallelism(4)))
    staged = price_engine(query("llama-3.1-70b", parallelism=Parallelism(4, pp=2)))

    assert staged.kv_capacity_tokens.expected > flat.kv_capacity_tokens.expected
    assert staged.out_tok_s_per_gpu.expected < flat.out_tok_s_per_gpu.expected


def test_linear_systems_are_solved_and_undetermined_directions_stay():
    assert solve([[2, 1], [1, 3]], [5, 10]) == pytest.approx([1, 3])
    assert solve([[1, 0], [0, 0]], [2, 0]) == [2, 0]


def test_a_fit_finds_what_made_the_data():
    truth = (0.5, -0.3)

    def residuals(x, rows):
        return [
            (math.exp(x[0]) * i + math.exp(x[1]) - math.exp(truth[0]) * i - math.exp(truth[1]),)
            for i in rows
        ]

    found = fit(residuals, [Unknown(0.0, 1e-3, range(10))] * 2, 10, rounds=40)

    assert found == pytest.approx(truth, abs=0.01)


def hidden_runs(factor, model, spec):
    """Results of an engine whose floors are `factor` times what is thought."""
    from dynctl.planner.calibrating import moved

    c = moved(
        shipped().constants("vllm", spec, model),
        {"floors": factor, "memory": 0.8, "host": 2.0},
    )
    load = load_of(model, spec, Parallelism(), group_link(spec, 18, None))
    for users in (1, 8, 64):
        got = run_loop(load, c, Loop(1000, 200, users))
        yield Run(f"c{users}", 1000, 200, users, got.ttft_s, got.tpot_s)


@pytest.mark.parametrize("factor", [0.5, 1.0, 2.5])
def test_calibration_finds_an_engine_with_hidden_constants(factor):
    model, spec = open_model("llama-3.1-8b"), spec_named("h100-sxm")
    runs = tuple(hidden_runs(factor, model, spec))

    found = calibrate(runs, model, spec, Parallelism(), "vllm", shipped())

    assert found.tpot_after < 0.1
    assert found.tpot_after <= found.tpot_before


def test_kept_factors_come_back_and_are_cited():
    model, spec = open_model("llama-3.1-8b"), spec_named("h100-sxm")
    found = calibrate(
        tuple(hidden_runs(2.0, model, spec)), model, spec, Parallelism(), "vllm", shipped()
    )
    kept = own_text(joined(shipped(), "vllm/h100-sxm", found, "3 results"))

    again = with_own(shipped(), kept, "kept.json")

    assert again.constants("vllm", spec) != shipped().constants("vllm", spec)
    assert "3 results" in again.source("vllm", spec, model)
    other = spec_named("h200-sxm")
    assert again.constants("vllm", other) == shipped().constants("vllm", other)


def test_the_command_prints_one_json_document(capsys):
    code = run(["estimate", "--model", "llama-3.1-70b", "--gpu", "h100-sxm", "--tp", "8", "--isl", "2048", "--osl", "256", "--concurrency", "32", "-o", "json"])  # fmt: skip

    found = json.loads(capsys.readouterr().out)
    assert code == 0
    assert found["feasible"] is True
    for key in (
        "ttft_ms",
        "tpot_ms",
        "out_tok_s_per_gpu",
        "req_s",
        "memory_gib",
        "kv_capacity_tokens",
    ):
        assert set(found[key]) == {"low", "expected", "high", "source"}


def test_the_command_refuses_with_a_reason_and_exit_4(capsys):
    code = run(["estimate", "--model", "deepseek-v3", "--gpu", "h100-sxm", "--tp", "8", "--concurrency", "1", "-o", "json"])  # fmt: skip

    found = json.loads(capsys.readouterr().out)
    assert code == 4
    assert found["feasible"] is False
    assert "short" in found["reason"]


@pytest.mark.parametrize(
    ("said", "meant"),
    [
        ("H200_SXM", "h200-sxm"), ("h20", "h20-sxm"), ("GH200", "gh200"), ("NVIDIA H100 PCIe", "h100-pcie"), ("a100", "a100-sxm-80"),
        ("NVIDIA A100-SXM4-40GB", "a100-sxm-40"), ("NVIDIA A10", "a10"), ("NVIDIA A10G", "a10g"), ("rtx4090", "rtx-4090"),
        ("NVIDIA RTX A6000", "a6000"), ("NVIDIA A40", "a40"), ("Tesla V100-SXM2-16GB", "v100-sxm-16"), ("l40s", "l40s"), ("Tesla T4", "t4"),
    ],
)  # fmt: skip
def test_gpus_go_by_their_short_and_product_names(said, meant):
    assert spec_named(said).name == meant


@pytest.mark.parametrize("spec", SPECS, ids=lambda spec: spec.name)
def test_each_table_row_is_found_by_its_own_name_and_halves_8_bit(spec):
    assert spec_named(spec.name) is spec
    assert find_spec(f"NVIDIA {spec.name}").generation == spec.generation
    assert spec.fp8_flops is None or spec.fp8_flops == pytest.approx(2 * spec.bf16_flops, rel=0.02)


def test_accelerators_of_others_are_refused_by_their_maker(capsys):
    assert run(["estimate", "--model", "llama-3.1-8b", "--gpu", "mi300x", "--rate", "1"]) == 2
    assert "AMD" in capsys.readouterr().err


@pytest.mark.parametrize(
    "flags",
    [
        [], ["--model", "llama-3.1-8b"], ["--model", "llama-3.1-8b", "--gpu", "h100-sxm"],
        ["--model", "llama-3.1-8b", "--gpu", "abacus", "--rate", "1"],
        ["--model", "llama-3.1-8b", "--gpu", "h100-sxm", "--rate", "nan"],
        ["--model", "llama-3.1-8b", "--gpu", "h100-sxm", "--rate", "1", "--concurrency", "1"],
    ],
)  # fmt: skip
def test_wrong_flags_are_usage_errors(flags, capsys):
    assert run(["estimate", *flags]) == 2
    assert capsys.readouterr().err


def result(ttft_ms=50.0, tpot_ms=9.0, **change):
    return {
        "metrics": {"ttft_ms": {"mean": ttft_ms}, "tpot_ms": {"mean": tpot_ms}, "e2e_ms": {"mean": ttft_ms + 200 * tpot_ms}},
        "requests": {"completed_rps": 1.0}, "lengths": {"isl_mean": 1000, "osl_got_mean": 200},
        "kv": {"cached_ratio": 0.0}, "client_limited": "", **change,
    }  # fmt: skip


def test_calibrate_keeps_what_it_found(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    told = {**result(), "facts": {"started_unix_s": 1764547200.5}}
    (tmp_path / "r.json").write_text(json.dumps(told))

    code = run(["calibrate", "r.json", "--model", "llama-3.1-8b", "--gpu", "h100-sxm"])

    kept = json.loads((tmp_path / ".dynctl" / "calibration.json").read_text())["calibrations"][
        "vllm/h100-sxm"
    ]
    assert code == 0
    assert "r.json 2025-12-01" in kept["origin"]
    assert "TPOT" in capsys.readouterr().out


def test_memory_is_corrected_by_what_an_engine_reports(tmp_path, monkeypatch, capsys):
    """The same engine then holds what it said; another model on that GPU moves as many bytes."""
    monkeypatch.chdir(tmp_path)
    before = [price_engine(query(name)).kv_capacity_tokens for name in ("llama-3.1-8b", "qwen3-8b")]
    reported = int(before[0].expected) - 16_384
    asked = ["calibrate", "--model", "llama-3.1-8b", "--gpu", "h100-sxm", "--kv-capacity", str(reported)]  # fmt: skip

    assert run(asked) == 0
    assert "2 GiB more beside" in capsys.readouterr().out
    kept = {"calibration": read_calibration()}
    names = ("llama-3.1-8b", "qwen3-8b")
    after = [price_engine(query(name, **kept)).kv_capacity_tokens for name in names]
    other = price_engine(query(gpu="h200-sxm", **kept)).kv_capacity_tokens

    assert after[0].expected == reported
    assert before[1].expected - after[1].expected == pytest.approx(
        16_384 * 131_072 / 147_456, abs=16
    )
    assert f"{reported} tokens an engine of llama-3.1-8b reported" in after[1].source
    assert "corrected" not in other.source


@pytest.mark.parametrize("flags", [[], ["--kv-capacity", "1000"]])
def test_calibrate_needs_results_or_a_cache_that_can_be(tmp_path, monkeypatch, flags):
    monkeypatch.chdir(tmp_path)

    assert run(["calibrate", "--model", "llama-3.1-8b", "--gpu", "h100-sxm", *flags]) == 2
    assert not (tmp_path / ".dynctl").exists()


@pytest.mark.parametrize(
    "content",
    ["", "{}", "[]", json.dumps(result(tpot_ms=0)), json.dumps(result(client_limited="cpu"))],
)
def test_calibrate_refuses_results_that_say_nothing(tmp_path, monkeypatch, content):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "r.json").write_text(content)

    assert run(["calibrate", "r.json", "--model", "llama-3.1-8b", "--gpu", "h100-sxm"]) == 2
    assert not (tmp_path / ".dynctl").exists()


def test_window_layers_make_room_for_more_requests():
    found = price_engine(
        query("gemma-3-27b", parallelism=Parallelism(2), workload=Workload(8192, 256))
    )
    model = open_model("gemma-3-27b")

    flat = found.memory.kv_bytes / (model.kv_bytes_per_token / 2)

    assert found.kv_capacity_tokens.expected > 3 * flat

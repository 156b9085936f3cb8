"""What was calibrated reaches every figure of a plan, and only what is handed in does."""

import json
from dataclasses import replace

import pytest

from dynctl.cli.main import run
from dynctl.core.plan import Role
from dynctl.core.units import GIB
from dynctl.core.workload import Slo, Workload
from dynctl.planner.calibration import shipped
from dynctl.planner.check import check_plan
from dynctl.planner.memory import Beside
from dynctl.planner.opinion import questions
from dynctl.planner.search import make_plan
from dynctl.planner.virtual_plan import virtual_deployment

KEY = "vllm/h100-sxm"
HALF = ("eta_weights", "eta_kv", "eta_gemm16", "eta_attention")
OWN = replace(
    shipped(),
    factors={**shipped().factors, KEY: dict.fromkeys(HALF, 0.5)},
    origins={KEY: "two results"},
    beside={KEY: Beside(80 * GIB, 4 * GIB, "said so")},
)


@pytest.fixture
def ground(build):
    wish = build.wish("llama-8b", workload=Workload(2048, 128, 2.0), slo=Slo(6000))
    return build.cluster([build.host("a", 8)], wish)


def pool_of(plan):
    return plan.deployments[0].pools[0]


def test_memory_and_estimate_of_a_plan_are_those_of_the_calibration(ground):
    plain, own = make_plan(*ground), make_plan(*ground, calibration=OWN)

    assert pool_of(plain).memory.kv_bytes - pool_of(own).memory.kv_bytes == 4 * GIB
    assert "two results" in own.deployments[0].estimate.ttft_ms.source
    assert (
        own.deployments[0].estimate.ttft_ms.expected
        > plain.deployments[0].estimate.ttft_ms.expected
    )


def test_a_plan_checked_by_the_calibration_it_was_made_with_stays_as_it_is(ground):
    own = make_plan(*ground, calibration=OWN)

    assert check_plan(own, *ground, calibration=OWN) == own
    assert pool_of(check_plan(own, *ground)).memory != pool_of(own).memory


def test_another_predictor_is_compared_with_calibrated_figures(ground):
    plan = make_plan(*ground)
    plain, own = (
        questions(plan, *ground, calibration).questions[0].ours["tpot_ms"].expected
        for calibration in (None, OWN)
    )

    assert own > 1.3 * plain


def test_simulated_engines_have_the_calibrated_pace(ground):
    topology, inventory, models = ground
    planned, wish = make_plan(*ground).deployments[0], inventory.deployments[0]
    plain, own = (
        virtual_deployment(planned, wish, models["chat"], topology, calibration).engines[0]
        for calibration in (None, OWN)
    )

    assert own.role is Role.AGGREGATED
    assert own.costs.duration_s(0, 0, 1) > 1.3 * plain.costs.duration_s(0, 0, 1)


def test_plan_uses_what_calibrate_kept_below_the_working_directory(
    tmp_path, monkeypatch, capsys, build
):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "llama").mkdir()
    (tmp_path / "llama" / "config.json").write_text(json.dumps(build.configs["llama-8b"]))
    host = f"{{name: a, address: local, root: {tmp_path}, simulated_gpus: {{count: 1, name: NVIDIA H100 80GB HBM3, memory: 80 GiB}}}}"
    deployment = (
        f"{{name: chat, model: {tmp_path}/llama, engine: {{kind: vllm, python: /v/bin/python}}}}"
    )
    text = f"cluster: c\nhosts: [{host}]\ndeployments: [{deployment}]\n"
    (tmp_path / "inventory.yaml").write_text(text)

    def planned():
        assert run(["plan", "-o", "json"]) == 0
        return json.loads(capsys.readouterr().out)["deployments"][0]["pools"][0]["memory"]

    before = planned()
    capacity = str(before["kv_capacity_tokens"] - 16_384)
    asked = ["--model", "llama", "--gpu", "h100-sxm", "--kv-capacity", capacity]
    assert run(["calibrate", *asked]) == 0
    capsys.readouterr()

    assert planned()["kv_bytes"] < before["kv_bytes"]


def test_what_was_kept_and_is_damaged_is_named_by_its_file(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    (tmp_path / ".dynctl").mkdir()
    (tmp_path / ".dynctl" / "calibration.json").write_text("{")

    assert (
        run(["estimate", "--model", "llama-3.1-8b", "--gpu", "h100-sxm", "--concurrency", "1"]) != 0
    )
    assert ".dynctl/calibration.json is damaged" in capsys.readouterr().err

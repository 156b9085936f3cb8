"""Sweeps: which loads are tried, where the knee lies, and the command against engines."""

import json
import os
import signal
import threading
from dataclasses import replace

import pytest

from dynctl.bench.arrivals import parse_load
from dynctl.bench.report import Setting
from dynctl.bench.sweep import (
    MAX_STAGES,
    Search,
    Stage,
    Steps,
    make_sweep,
    parse_course,
)
from dynctl.bench.sweep_text import footnotes, knee_lines, rows
from dynctl.cli import bench_series
from dynctl.cli.bench_driving import Router
from dynctl.cli.main import run as dynctl
from dynctl.core.plan import (
    Member,
    Parallelism,
    Plan,
    PlannedDeployment,
    PlannedGpu,
    Pool,
    Replica,
    Role,
    RouterPlan,
)
from dynctl.core.workload import Slo
from dynctl.errors import ExitCode, UsageError

SETTING = Setting("http://h:1", "m", "chat", "mixed", "poisson:1", 30.0, 0.0, 1, Slo(ttft_ms=500.0))


def stage(load, is_met, **fields):
    parsed = parse_load(load)
    known = {
        "load": load,
        "amount": parsed.rate_rps or float(parsed.concurrency),
        "is_met": is_met,
        "missed": ("ttft_ms p99",) if is_met is False else (),
        "client_limited": "it used 100% of a core" if is_met is None else "",
        "num_requests": 100,
        "failed_ratio": 0.0,
        "completed_rps": 10.0,
        "output_tok_s": 1000.0,
        "tok_s_user": 50.0,
        "ttft_p50_ms": 90.0,
        "ttft_p99_ms": 400.0,
        "itl_p99_ms": 20.0,
        "e2e_p50_ms": 900.0,
        "hit_ratio": 0.5,
        "goodput_rps": 9.0,
        "hint": "",
    }
    return Stage(**(known | fields))


def played(course, limit, limited_from=float("inf")):
    """The loads a course tries of a server that holds its goals up to a limit."""
    stages = []
    while (load := course.next(stages)) is not None:
        amount = load.rate_rps or load.concurrency
        stages.append(stage(str(load), None if amount >= limited_from else amount <= limit))
        assert len(stages) <= MAX_STAGES
    return stages


def test_a_search_doubles_then_halves_the_gap():
    loads = [each.load for each in played(parse_course("sweep"), 11.0)]

    assert loads == ["poisson:1", "poisson:2", "poisson:4", "poisson:8", "poisson:16", "poisson:11.3", "poisson:9.51", "poisson:10.4"]  # fmt: skip


@pytest.mark.parametrize("limit", [0.4, 1.0, 3.3, 57.0, 100.0])
def test_a_search_ends_close_to_the_limit(limit):
    stages = played(parse_course("sweep:constant"), limit)
    found = make_sweep(SETTING, stages, None)

    assert found.knee.is_bounded
    assert limit / 1.1 * 0.99 <= found.knee.amount <= limit


@pytest.mark.parametrize("limit", range(1, 20))
def test_a_search_for_requests_at_a_time_ends_at_whole_numbers(limit):
    stages = played(parse_course("sweep:concurrency:2"), limit)
    found = make_sweep(SETTING, stages, None)

    assert limit / 1.2 <= found.knee.amount <= limit
    assert len({each.load for each in stages}) == len(stages)


def test_a_search_gives_up_where_nothing_is_met_and_stops_where_the_client_is_the_limit():
    assert len(played(parse_course("sweep:poisson:8"), 0.0)) == 5
    assert [s.load for s in played(parse_course("sweep:concurrency"), 0)] == ["concurrency:1"]
    limited = played(parse_course("sweep"), 100.0, limited_from=8.0)
    assert [s.is_met for s in limited] == [True, True, True, None]


def test_named_loads_are_played_from_the_lowest_up():
    course = parse_course("concurrency:8,1,4")

    assert [s.load for s in played(course, 4)] == [
        "concurrency:1",
        "concurrency:4",
        "concurrency:8",
    ]
    assert str(course) == "3 loads from concurrency:1 to concurrency:8"


@pytest.mark.parametrize(
    ("text", "kind"),
    [("poisson:4", None), ("poisson:1,2", Steps), ("sweep", Search), ("sweep:concurrency", Search), ("sweep:poisson:0.5", Search)],
)  # fmt: skip
def test_what_several_loads_are(text, kind):
    found = parse_course(text)

    assert found is None if kind is None else isinstance(found, kind)


@pytest.mark.parametrize("text", ["poisson:1,", "poisson:1,x", "sweep:burst", "sweep:poisson:0", "poisson:2,2.0", "x:1,2"])  # fmt: skip
def test_what_is_no_course_is_refused(text):
    with pytest.raises(UsageError, match="load"):
        parse_course(text)


def test_the_knee_is_below_the_lowest_load_that_missed():
    found = make_sweep(
        SETTING,
        [stage("poisson:1", True), stage("poisson:2", False), stage("poisson:4", True)],
        None,
    )

    assert (found.knee.load, found.knee.is_bounded) == ("poisson:1", True)
    assert found.exit_code is ExitCode.OK
    assert [row[-1] for row in rows(found)] == ["met: the knee", "missed: TTFT", "met"]


def test_the_knee_per_gpu_and_what_ends_it():
    missed = stage(
        "poisson:8", False, hint="TTFT misses its goal while ITL holds: add prefill engines"
    )
    found = make_sweep(SETTING, [stage("poisson:4", True), missed], 4)

    assert found.knee.completed_rps_per_gpu == pytest.approx(2.5)
    assert found.knee.missed_above == ("ttft_ms p99",)
    assert knee_lines(found) == [
        "knee poisson:4: 10 req/s done, 1k tok/s out; per GPU (4) 2.5 req/s, 250 tok/s"
    ]
    assert (
        found.advice
        == "up to poisson:4 the goals hold; at poisson:8: TTFT misses its goal while ITL holds: add prefill engines"
    )
    assert footnotes(found)[0].startswith("* fewer than 1000 requests")


def test_a_knee_that_nothing_ended_is_a_lower_bound():
    found = make_sweep(SETTING, [stage("poisson:4", True)], None)

    assert not found.knee.is_bounded
    assert knee_lines(found)[0].startswith("knee: at least poisson:4")
    assert "try higher ones" in found.advice


def test_no_knee_exits_6_and_a_client_that_is_the_limit_says_so():
    none = make_sweep(SETTING, [stage("poisson:1", False)], None)
    limited = make_sweep(SETTING, [stage("poisson:1", None)], None)

    assert (none.knee, none.exit_code) == (None, ExitCode.GATE)
    assert none.advice.startswith("no load up to poisson:1 is known to meet the goals; there: ")
    assert knee_lines(limited) == ["knee: unknown, as the load generator was the limit"]
    assert (limited.knee, limited.exit_code) == (None, ExitCode.GATE)
    assert "another machine" in limited.advice
    assert (
        footnotes(limited)[0]
        == "UNKNOWN poisson:1: the load generator was the limit: it used 100% of a core"
    )


@pytest.mark.parametrize(
    ("is_met", "missed"), [((False, True), "poisson:1"), ((None, False), "poisson:2")]
)
def test_a_load_that_met_by_luck_or_is_unknown_is_not_said_to_have_missed(is_met, missed):
    found = make_sweep(
        SETTING, [stage("poisson:1", is_met[0]), stage("poisson:2", is_met[1])], None
    )

    assert found.knee is None
    assert found.advice.startswith(f"no load up to {missed} is known to meet the goals; there: ")
    assert knee_lines(found) == [
        f"knee: none; {missed} missed the goals, and no lower load met them"
    ]


def bench(url, *args):
    quick = ["--workload", "synthetic:isl=48,osl=3", "--duration", "500ms", "--warmup", "0s"]
    return dynctl(["bench", "run", "--url", url, "--yes", *quick, *args])


def test_named_loads_against_engines_end_in_the_knee(routed, tmp_path, monkeypatch, capsys):
    # A busy machine makes the load generator late, which is another test's matter.
    monkeypatch.setattr("dynctl.bench.report._client_limited", lambda *_: "")
    out = tmp_path / "out"
    loads = [
        "--load",
        "constant:10,40",
        "--slo",
        "ttft=60000,itl=60000",
        "--gpus",
        "2",
        "--seed",
        "3",
    ]
    assert bench(routed[0], *loads, "--out", str(out), "-o", "json") == 0
    found = json.loads(capsys.readouterr().out)

    assert found["schema"] == "dynctl.bench.sweep/1"
    assert [s["load"] for s in found["stages"]] == ["constant:10", "constant:40"]
    assert [s["num_requests"] for s in found["stages"]] == [5, 20]
    knee = found["knee"]
    assert (knee["load"], knee["is_bounded"]) == ("constant:40", False)
    assert knee["output_tok_s_per_gpu"] == pytest.approx(knee["output_tok_s"] / 2)
    assert json.loads((out / "sweep.json").read_text()) == found
    second = json.loads((out / "stage-2" / "result.json").read_text())
    assert (second["setting"]["load"], second["setting"]["seed"]) == ("constant:40", 3001)
    assert second["router"]["decision"]["num"] >= 1

    assert dynctl(["bench", "show", str(out)]) == 0
    shown = capsys.readouterr().out.splitlines()
    assert any(line.startswith("knee: at least constant:40") for line in shown)
    assert shown[-1].startswith("advice: the goals hold at constant:40")
    assert dynctl(["bench", "compare", str(out), str(out)]) == ExitCode.USAGE
    assert f"name one of them: {out}/stage-1" in capsys.readouterr().err


def test_a_search_finds_that_no_load_meets_goals_that_cannot_be_met(served, monkeypatch, capsys):
    monkeypatch.setattr("dynctl.bench.report._client_limited", lambda *_: "")
    server = served(ttft_s=0.05)

    assert bench(server.url, "--load", "sweep:constant:8", "--slo", "ttft=1") == ExitCode.GATE
    said = capsys.readouterr()
    assert "stage 3: constant:2 misses the goals" in said.err
    assert "stage 4" not in said.err, "a load that brings fewer than two requests tells nothing"
    assert "knee: none; constant:2 missed the goals, and no lower load met them" in said.out


@pytest.mark.parametrize(
    ("args", "said"),
    [(["--load", "sweep"], "--slo"), (["--gpus", "2"], "of several loads"), (["--load", "poisson:1,2", "--slo", "ttft=1", "--repeat", "2"], "exclude each other")],
)  # fmt: skip
def test_what_does_not_go_together_is_refused_before_anything_is_sent(served, capsys, args, said):
    server = served()

    assert bench(server.url, *args) == ExitCode.USAGE
    assert said in capsys.readouterr().err
    assert not server.paths


def test_an_interrupt_keeps_the_loads_that_ended(served, tmp_path, monkeypatch, capsys, until):
    monkeypatch.setattr("dynctl.bench.report._client_limited", lambda *_: "")
    server = served(ttft_s=0.0)

    def interrupt():
        until(lambda: (tmp_path / "stage-1" / "result.json").exists(), "the first load ended")
        os.kill(os.getpid(), signal.SIGINT)

    interrupting = threading.Thread(target=interrupt)
    interrupting.start()
    loads = ",".join(str(20 + at) for at in range(100))
    code = bench(
        server.url, "--load", f"constant:{loads}", "--slo", "ttft=60000", "--out", str(tmp_path)
    )
    interrupting.join()
    found = json.loads((tmp_path / "sweep.json").read_text())

    assert code == ExitCode.INTERRUPTED
    assert found["is_partial"]
    assert found["knee"] is not None
    assert "PARTIAL" in capsys.readouterr().out


def test_a_load_is_played_once_more_when_the_load_generator_was_the_limit(
    served, tmp_path, monkeypatch, capsys
):
    limits = ["late", "", "late", "late", ""]
    monkeypatch.setattr("dynctl.bench.report._client_limited", lambda *_: limits.pop(0))
    server = served(ttft_s=0.0)
    code = bench(
        server.url,
        "--load",
        "constant:10,20,30",
        "--slo",
        "ttft=60000",
        "--out",
        str(tmp_path),
        "--seed",
        "5",
    )
    found = json.loads((tmp_path / "sweep.json").read_text())

    assert code == 0
    assert [stage["is_met"] for stage in found["stages"]] == [True, None, True]
    assert (
        capsys.readouterr().err.count("once more, as the load generator was the limit: late") == 2
    )
    seeds = [
        json.loads((tmp_path / f"stage-{at}" / "result.json").read_text())["setting"]["seed"]
        for at in (1, 2, 3)
    ]
    assert seeds == [5001, 5003, 5004]


def plan_of(*gpus_by_engine):
    replicas = tuple(
        Replica(f"e{at}", Role.DECODE, "h", tuple(PlannedGpu(f"{at}-{i}", i) for i in range(num)))
        for at, num in enumerate(gpus_by_engine)
    )
    pools = (Pool(Role.DECODE, Parallelism(), replicas),)
    router = RouterPlan("h", "127.0.0.1:0", "kv")
    ours, others = (
        PlannedDeployment(name, "m", "vllm", pools, router) for name in ("ours", "others")
    )
    return Plan("c", (), (ours, others), "d1")


def test_gpus_are_those_of_the_deployment_in_the_plan_that_runs(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("dynctl.cli.kept.read_plan", lambda _: plan_of(2, 4))

    def found(digest="d1", deployment="ours"):
        return bench_series.gpus_of(Router("http://h:1", digest, deployment), tmp_path, local=True)

    assert found() == 6
    assert found(deployment=None) is None
    assert not capsys.readouterr().err
    assert found(digest="d2") is None
    assert "--gpus N" in capsys.readouterr().err
    monkeypatch.setattr("dynctl.cli.kept.read_plan", lambda _: plan_of(0, 0))
    assert found() is None, "simulated engines have none"


def test_gpus_are_those_on_all_hosts_of_an_engine(tmp_path, monkeypatch):
    plan = plan_of(2)
    ours = plan.deployments[0]
    (pool,) = ours.pools
    part = Member("h2", (PlannedGpu("h2-0", 0), PlannedGpu("h2-1", 1)))
    pool = replace(pool, replicas=(replace(pool.replicas[0], others=(part,)),))
    plan = replace(plan, deployments=(replace(ours, pools=(pool,)),))
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("dynctl.cli.kept.read_plan", lambda _: plan)

    router = Router("http://h:1", "d1", "ours")
    assert bench_series.gpus_of(router, tmp_path, local=True) == 4

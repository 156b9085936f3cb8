"""Runs that were repeated: their spread, what a comparison makes of it, and the command against a router with engines."""

import json
import random
import statistics
from dataclasses import replace

import pytest

from dynctl.bench.changes import Run, Verdict
from dynctl.bench.compare import Stored, compare
from dynctl.bench.compare_text import advice as compare_advice
from dynctl.bench.compare_text import footnotes as compare_footnotes
from dynctl.bench.record import Record
from dynctl.bench.repeat import columns, footnotes, make_repeat, rows
from dynctl.bench.repeats import changed_between, over_runs
from dynctl.bench.report import ClientFacts, Measured, Setting, make_report
from dynctl.bench.resampling import student
from dynctl.bench.stream import Chunk
from dynctl.cli.main import run as dynctl
from dynctl.core.workload import Slo
from dynctl.errors import ExitCode


def made(name, ttft_s, *, seed=1, slo=None, cpu_ratio=0.1, is_partial=False, num=20):
    records = []
    for number in range(num):
        at_s = number * 0.5
        chunks = tuple(Chunk(at_s + ttft_s + i * 0.01, i + 1) for i in range(5))
        records.append(
            Record(number, "ok", at_s, at_s, first_s=chunks[0].at_s, first_answer_s=chunks[0].at_s,
                   end_s=chunks[-1].at_s, chunks=chunks, prompt_tokens=100, output_tokens=5, cached_tokens=48)
        )  # fmt: skip
    setting = Setting(
        "http://h:1",
        "m",
        "chat",
        "synthetic:isl=100,osl=5",
        "constant:2",
        10.0,
        0.0,
        seed,
        slo or Slo(),
    )
    measured = Measured(tuple(records), 0.0, 10.0, ClientFacts(cpu_ratio, 0.5), None, is_partial)
    return Run(name, make_report(setting, measured), tuple(records))


def repeated(*ttfts_s, **settings):
    return [made(f"run-{at}", ttft_s, seed=at, **settings) for at, ttft_s in enumerate(ttfts_s, 1)]


def figure(found, name):
    return next(each for each in found.figures if each.figure == name)


@pytest.mark.parametrize(("freedom", "value"), [(1, 12.706), (2, 4.303), (6, 2.447), (7, 2.365), (30, 2.042)])  # fmt: skip
def test_students_t_is_that_of_the_tables(freedom, value):
    assert student(freedom) == pytest.approx(value, rel=0.002)


def test_a_figure_over_runs_has_its_mean_spread_and_interval():
    found = over_runs("ttft_p50", [100.0, 110.0, 120.0])

    assert (found.num, found.mean, found.deviation) == (3, 110.0, 10.0)
    assert found.cv == pytest.approx(1 / 11)
    half = 4.3027 * 10 / 3**0.5
    assert found.interval == (pytest.approx(110 - half), pytest.approx(110 + half))


def test_one_run_has_no_spread_and_none_no_figure():
    assert over_runs("ttft_p50", [None, 7.0]).interval is None
    assert over_runs("ttft_p50", [None, None]) is None


def test_the_change_of_means_is_bounded_by_welchs_t():
    found = changed_between("hit_rate", [0.5, 0.52, 0.54], [0.6, 0.64, 0.68, 0.72], 0.05)

    spread = (
        statistics.variance([0.5, 0.52, 0.54]) / 3
        + statistics.variance([0.6, 0.64, 0.68, 0.72]) / 4
    ) ** 0.5
    # Welch's degrees of freedom are 4.2 here: t of 4 is 2.776.
    assert found.change == pytest.approx(0.14)
    assert found.interval == (
        pytest.approx(0.14 - 2.7764 * spread),
        pytest.approx(0.14 + 2.7764 * spread),
    )
    assert found.verdict is Verdict.BETTER
    assert found.num_samples == (3, 4)


def test_intervals_between_runs_hold_the_true_change_about_as_often_as_they_say():
    rng = random.Random(4)
    held = 0
    for _ in range(400):
        before = [rng.gauss(100, 8) for _ in range(3)]
        after = [rng.gauss(110, 8) for _ in range(4)]
        low, high = changed_between("ttft_p50", before, after, 0.05).interval
        held += low <= 0.1 <= high

    assert 0.92 <= held / 400 <= 0.99


def test_a_single_run_is_taken_to_vary_as_the_other_sides_runs_do():
    found = changed_between("ttft_p50", [100.0, 110.0, 120.0], [165.0], 0.05)

    assert found.change == pytest.approx(0.5)
    # Two degrees of freedom; a relative spread of 1/11 on both sides.
    half = 4.3027 * (1 / 11) * (1 / 3 + 1) ** 0.5
    assert found.interval[1] == pytest.approx(1.5 * 2.718281828**half - 1)
    assert found.verdict is Verdict.UNKNOWN


def test_runs_that_do_not_differ_at_all_are_the_same():
    found = changed_between("failed", [0.0, 0.0], [0.0, 0.0, 0.0], 0.01)

    assert found.interval == (0.0, 0.0)
    assert found.verdict is Verdict.SAME


def test_a_repeat_tells_of_each_figure_by_run():
    found = make_repeat(repeated(0.10, 0.11, 0.12))

    ttft = figure(found, "ttft_mean")
    assert ttft.values == (pytest.approx(100.0), pytest.approx(110.0), pytest.approx(120.0))
    assert figure(found, "hit_rate").mean == pytest.approx(0.48)
    assert (found.num_runs, found.seeds, found.exit_code) == (3, (1, 2, 3), ExitCode.OK)
    assert columns(found)[-3:] == ("run 1", "run 2", "run 3")
    row = next(row for row in rows(found) if row[0] == "TTFT ms (from scheduled) mean")
    assert row[1:] == ("110", "85.2 to 135", "9.1%", "100", "110", "120")
    assert "by less than about" in found.advice


def test_runs_that_differ_much_are_said_to():
    assert "differs by 50% from run to run" in make_repeat(repeated(0.05, 0.10, 0.15)).advice


def remade(run, change):
    records = tuple(change(record) for record in run.records)
    measured = Measured(records, 0.0, 10.0, ClientFacts(0.1, 0.5))
    return Run(run.name, make_report(run.report.setting, measured), records)


def test_runs_whose_answers_take_differently_long_do_not_agree():
    runs = [remade(run, lambda r, at=at: replace(r, end_s=r.end_s + at))
            for at, run in enumerate(repeated(0.1, 0.1, 0.1))]  # fmt: skip

    assert make_repeat(runs).advice.startswith(
        "mean time end to end differs by 88% from run to run"
    )


def test_one_run_with_first_tokens_says_nothing_of_how_far_runs_differ():
    one, other = repeated(0.1, 0.1)
    blank = remade(other, lambda r: replace(r, outcome="http 503", first_s=None, chunks=()))

    assert make_repeat([one, blank]).advice.startswith("fewer than two runs had a first token")


def test_a_goal_is_held_to_the_mean_over_runs():
    met, missed = (
        make_repeat(repeated(0.10, 0.12, slo=Slo(ttft_ms=goal))) for goal in (115.0, 105.0)
    )

    assert met.exit_code is ExitCode.OK
    assert missed.exit_code is ExitCode.GATE
    assert "MISSED ttft_ms p99 110 ms, goal 105 ms" in footnotes(missed)
    assert "ttft_ms p99 misses its goal on average" in missed.advice


def test_a_run_in_which_the_load_generator_was_the_limit_is_left_out():
    runs = [*repeated(0.10, 0.10), made("run-3", 0.9, seed=3, cpu_ratio=1.0)]
    found = make_repeat(runs)

    assert found.num_runs == 2
    assert figure(found, "ttft_mean").values[2] is None
    assert figure(found, "ttft_mean").mean == pytest.approx(100.0)
    assert footnotes(found) == [
        "LEFT OUT: run-3: the load generator was the limit: the load generator used 100% of a core"
    ]


def test_figures_of_a_load_generator_that_always_was_the_limit_pass_no_gate():
    found = make_repeat(repeated(0.1, 0.1, cpu_ratio=1.0, slo=Slo(ttft_ms=500.0)))

    assert (found.num_runs, found.exit_code) == (0, ExitCode.GATE)
    assert footnotes(found)[-1].startswith("INVALID: run-2: ")
    assert found.advice.startswith("run the load generator on another machine")


def test_an_interrupted_run_does_not_count():
    runs = [*repeated(0.1, 0.1), made("run-3", 0.9, is_partial=True)]

    assert make_repeat(runs, is_partial=True).seeds == (1, 2)
    assert make_repeat(runs[2:], is_partial=True) is None


def compared(before, after, **thresholds):
    return compare(Stored("a", tuple(before)), Stored("b", tuple(after)), thresholds)


def test_repeated_runs_are_compared_by_how_far_they_differ():
    before, after = repeated(0.10, 0.11, 0.12), repeated(0.11, 0.12, 0.13)
    noisy = compared(before, after, ttft_mean=0.05)
    clear = compared(before, repeated(0.20, 0.21, 0.22), ttft_mean=0.05)

    change = next(c for c in noisy.changes if c.figure == "ttft_mean")
    assert (noisy.num_runs, change.num_samples, change.verdict) == ((3, 3), (3, 3), Verdict.UNKNOWN)
    assert change.change == pytest.approx(120 / 110 - 1)
    assert noisy.exit_code is ExitCode.OK
    assert "run both with about --repeat" in compare_advice(noisy)
    wild = compared(repeated(0.10, 0.30), repeated(0.11, 0.50), ttft_mean=0.01)
    assert "run both with a longer --duration and more --repeat" in compare_advice(wild)
    assert clear.regressions == ("ttft_mean",)
    assert clear.exit_code is ExitCode.GATE


def test_prompts_that_only_some_runs_have_in_common_may_have_been_cached():
    three, others = (
        repeated(0.10, 0.11, 0.12),
        [made("run-1", 0.1, seed=8), made("run-2", 0.1, seed=9)],
    )
    warnings = [
        [note for note in compare_footnotes(compared(three, after)) if "same prompts" in note]
        for after in (repeated(0.10, 0.11), three[2:], others)
    ]

    assert [len(each) for each in warnings] == [1, 1, 0]


def test_p99_of_few_requests_is_judged_where_runs_were_repeated():
    found = compared(repeated(0.10, 0.101), repeated(0.2, 0.201))

    assert next(c for c in found.changes if c.figure == "ttft_p99").verdict is Verdict.WORSE


def test_what_was_left_out_of_a_repeat_is_left_out_of_a_comparison():
    limited = made("run-3", 0.9, seed=3, cpu_ratio=1.0)
    found = compared([*repeated(0.10, 0.11), limited], repeated(0.10, 0.11))

    assert found.num_runs == (2, 2)
    assert not found.client_limited
    assert next(c for c in found.changes if c.figure == "ttft_p50").change == pytest.approx(0.0)


def bench(url, *args):
    load = [
        "--workload",
        "synthetic:isl=48,osl=3",
        "--load",
        "constant:20",
        "--duration",
        "500ms",
        "--warmup",
        "0s",
    ]
    return dynctl(["bench", "run", "--url", url, "--yes", *load, *args])


def test_a_repeat_against_engines_is_stored_shown_compared_and_cold_each_time(
    routed, tmp_path, monkeypatch, capsys
):
    # A busy machine makes the load generator late, which is another test's matter.
    monkeypatch.setattr("dynctl.bench.report._client_limited", lambda *_: "")
    out = tmp_path / "three"
    assert bench(routed[0], "--repeat", "3", "--seed", "7", "--out", str(out), "-o", "json") == 0
    found = json.loads(capsys.readouterr().out)

    assert found["schema"] == "dynctl.bench.repeat/1"
    assert found["seeds"] == [7000, 7001, 7002]
    assert json.loads((out / "repeat.json").read_text()) == found
    ttft = next(f for f in found["figures"] if f["figure"] == "ttft_mean")
    for number, value in enumerate(ttft["values"], 1):
        run = json.loads((out / f"run-{number}" / "result.json").read_text())
        assert run["requests"]["ok"] == 10
        assert value == pytest.approx(run["metrics"]["ttft_ms"]["mean"])
    first = json.loads((out / "run-2" / "requests.jsonl").read_text().splitlines()[0])
    assert first["cached_tokens"] <= 16, "no more than the chat template"

    assert dynctl(["bench", "show", str(out)]) == 0
    assert "3 runs, seeds 7000, 7001, 7002" in capsys.readouterr().out
    assert dynctl(["bench", "show", str(out), "--definitions"]) == 0
    assert "Student's t" in capsys.readouterr().out
    assert dynctl(["bench", "compare", str(out), str(out)]) == 0
    assert "; means of 3 and 3 runs" in capsys.readouterr().out.splitlines()[0]
    assert bench(routed[0], "--seed", "9", "--out", str(tmp_path / "one")) == 0
    assert dynctl(["bench", "compare", str(tmp_path / "one"), str(out), "-o", "json"]) == 0


def test_a_directory_tells_what_was_written_there_last(served, tmp_path, capsys):
    url, out = served(ttft_s=0.0).url, str(tmp_path / "out")

    def schema():
        capsys.readouterr()
        assert dynctl(["bench", "show", out, "-o", "json"]) == 0
        return json.loads(capsys.readouterr().out)["schema"]

    assert bench(url, "--out", out, "--repeat", "2") == 0
    assert schema() == "dynctl.bench.repeat/1"
    assert bench(url, "--out", out) == 0
    assert schema() == "dynctl.bench/1"


def test_a_run_without_answers_ends_the_repeat(served, capsys):
    server = served(ttft_s=0.0)
    server.faults = [""] * (5 + 10) + ["503"] * 1000

    assert bench(server.url, "--repeat", "3") == ExitCode.REFUSED
    assert "run 2: 0 of 10 requests were answered (http 503)" in capsys.readouterr().err

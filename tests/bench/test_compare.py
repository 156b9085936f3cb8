"""Verdicts of comparisons, what is refused, and the command with stored runs."""

import json
import random
from dataclasses import replace

import pytest

from dynctl.bench import results
from dynctl.bench.changes import Run, Verdict, judge
from dynctl.bench.compare import Stored, parse_thresholds
from dynctl.bench.compare import compare as compare_stored
from dynctl.bench.compare_text import advice, footnotes, rows
from dynctl.bench.record import Record
from dynctl.bench.report import ClientFacts, Measured, Setting, make_report
from dynctl.bench.stream import Chunk
from dynctl.cli.main import run as dynctl
from dynctl.core.workload import Slo
from dynctl.errors import DynctlError, ExitCode, UsageError

SETTING = Setting("http://h:1", "m", "chat", "synthetic:isl=100,osl=5", "poisson:10", 60.0, 0.0, 1)


def request(number, rng, factor, cached_tokens):
    at_s = number * 0.1
    first_s = at_s + factor * rng.lognormvariate(-2, 0.2)
    chunks = tuple(Chunk(first_s + i * 0.01, i + 1) for i in range(5))
    return Record(
        number,
        "ok",
        at_s,
        at_s,
        first_s=first_s,
        first_answer_s=first_s,
        end_s=chunks[-1].at_s,
        chunks=chunks,
        prompt_tokens=100,
        output_tokens=5,
        cached_tokens=cached_tokens,
    )


def made(
    name="a",
    *,
    seed=1,
    factor=1.0,
    num=600,
    cached_tokens=48,
    num_failed=0,
    with_records=(),
    **setting,
):
    rng = random.Random(seed)
    records = [request(i, rng, factor, cached_tokens) for i in range(num)]
    records += [
        Record(num + i, "http 503", i * 0.1, i * 0.1, is_warmup=False) for i in range(num_failed)
    ]
    records += with_records
    asked = replace(SETTING, seed=seed, **setting)
    measured = Measured(tuple(records), 0.0, 60.0, ClientFacts(0.1, 0.5))
    return Run(name, make_report(asked, measured), tuple(records))


def compare(before, after, thresholds):
    return compare_stored(Stored(before.name, (before,)), Stored(after.name, (after,)), thresholds)


def changes(before, after, **thresholds):
    return {c.figure: c for c in compare(before, after, thresholds).changes}


@pytest.mark.parametrize(
    ("bounds", "verdict"),
    [((-0.02, 0.03), "same"), ((0.01, 0.04), "same"), ((0.01, 0.2), "worse"), ((-0.2, -0.01), "better"),
     ((-0.01, 0.2), "not enough data"), (None, "not enough data")],
)  # fmt: skip
def test_an_interval_decides_the_verdict(bounds, verdict):
    assert judge(bounds, 0.05, more_is_better=False) == verdict


def test_more_hits_are_better():
    assert judge((0.1, 0.2), 0.05, more_is_better=True) is Verdict.BETTER


def test_the_same_server_twice_is_the_same():
    found = changes(made(), made("b", seed=2))

    assert found["ttft_p50"].verdict is Verdict.SAME
    assert found["hit_rate"].verdict is Verdict.SAME
    assert found["failed"].verdict is Verdict.SAME
    assert not [c for c in found.values() if c.verdict in {Verdict.BETTER, Verdict.WORSE}]


def test_figures_are_those_of_the_report_warm_up_and_what_broke_off_left_out():
    slow = [request(600 + i, random.Random(i), 50.0, 0) for i in range(60)]
    cold = [replace(record, is_warmup=True) for record in slow[:51]]
    broken = [replace(record, outcome="broken stream") for record in slow[51:]]
    run = made(with_records=[*cold, *broken])
    found, report = changes(run, run, ttft_mean=0.05, itl_p50=0.05), run.report

    for figure in (
        "ttft_mean",
        "ttft_p50",
        "ttft_p99",
        "itl_p50",
        "itl_p99",
        "tpot_p90",
        "e2e_p99",
    ):
        metric, _, name = figure.rpartition("_")
        assert found[figure].before == pytest.approx(getattr(report.metrics[f"{metric}_ms"], name))
    assert found["hit_rate"].before == pytest.approx(report.kv.cached_ratio)
    assert found["output_tok_s"].before == pytest.approx(report.throughput.output_tok_s)
    assert found["failed"].before == pytest.approx(9 / 609)


def test_a_slower_server_is_worse_and_a_faster_one_better():
    found = changes(made(), made("b", seed=2, factor=1.3))["ttft_p90"]

    assert found.verdict is Verdict.WORSE
    assert found.interval[0] < 0.3 < found.interval[1]
    assert changes(made(seed=2, factor=1.3), made())["ttft_p90"].verdict is Verdict.BETTER


def test_shares_are_compared_in_points():
    found = changes(made(), made("b", seed=2, cached_tokens=32, num_failed=30))

    assert found["hit_rate"].change == pytest.approx(-0.16)
    assert found["hit_rate"].verdict is Verdict.WORSE
    assert found["failed"].change == pytest.approx(30 / 630)
    assert found["failed"].verdict is Verdict.WORSE


def test_few_samples_give_a_change_and_no_verdict():
    found = changes(made(num=200), made("b", seed=2, num=200, factor=2.0))

    assert found["ttft_p99"].change > 0.5
    assert found["ttft_p99"].verdict is Verdict.UNKNOWN
    assert found["ttft_p90"].verdict is Verdict.WORSE


def test_the_same_results_give_the_same_intervals():
    one, other = made(), made("b", seed=2)

    assert compare(one, other, {}) == compare(one, other, {})


def test_a_regression_beyond_its_threshold_exits_6_and_others_do_not():
    slower = made("b", seed=2, factor=1.3)

    gated = compare(made(), slower, {"ttft_p99": 0.05})
    assert gated.exit_code is ExitCode.GATE
    assert gated.regressions == ("ttft_p99",)
    assert any(line.startswith("REGRESSION TTFT") for line in footnotes(gated))
    assert "regressed in ttft_p99" in advice(gated)
    assert compare(made(), slower, {"ttft_p99": 2.0}).exit_code is ExitCode.OK
    assert compare(made(), slower, {"tpot_p50": 0.05}).exit_code is ExitCode.OK
    assert compare(made(), slower, {}).exit_code is ExitCode.OK


def test_worse_by_less_than_the_threshold_is_no_regression():
    found = changes(made(), made("b", seed=2, factor=1.3), ttft_p90=0.05)["ttft_p90"]

    assert found.is_regression
    assert not replace(found, change=0.04).is_regression
    assert not replace(found, is_gate=False).is_regression
    assert not replace(found, verdict=Verdict.UNKNOWN).is_regression


def test_a_gate_that_cannot_be_judged_says_so():
    found = compare(made(num=100), made("b", seed=2, num=100), {"ttft_p99": 0.05})

    assert found.exit_code is ExitCode.OK
    assert any(line.startswith("UNDECIDED") for line in footnotes(found))
    assert "longer --duration" in advice(found)


def test_figures_of_a_client_at_its_limit_pass_no_gate():
    limited = made("b", seed=2)
    limited = replace(limited, report=replace(limited.report, client_limited="too slow"))

    assert compare(made(), limited, {"ttft_p50": 0.5}).exit_code is ExitCode.GATE
    assert any("INVALID" in line for line in footnotes(compare(made(), limited, {})))


def test_goodput_is_compared_where_the_goals_are_the_same():
    goal = Slo(150.0)

    assert "goodput" in changes(made(slo=goal), made("b", seed=2, slo=goal))
    assert "goodput" not in changes(made(slo=goal), made("b", seed=2))


@pytest.mark.parametrize(
    ("goals", "said"),
    [((Slo(150.0), Slo(itl_ms=40.0)), "a had ttft=150, b itl=40"), ((Slo(), Slo()), "a had none, b none")],
)  # fmt: skip
def test_goodput_of_other_goals_passes_and_fails_no_gate(goals, said):
    one, other = made(slo=goals[0]), made("b", seed=2, slo=goals[1])

    with pytest.raises(DynctlError, match=said) as caught:
        compare(one, other, {"goodput": 0.05})
    assert caught.value.exit_code is ExitCode.REFUSED


@pytest.mark.parametrize(
    ("setting", "said"),
    [({"load": "poisson:20"}, "load poisson:10 and poisson:20"), ({"duration_s": 30.0}, "duration_s 60.0 and 30.0"),
     ({"workload": "synthetic:isl=200,osl=5"}, "synthetic:isl=100,osl=5 and synthetic:isl=200,osl=5"), ({"api": "completions"}, "api chat and completions"),
     ({"fixed_lengths": False}, "fixed_lengths"), ({"warmup_s": 5.0}, "warmup_s 0.0 and 5.0")],
)  # fmt: skip
def test_another_workload_is_refused_with_what_differs(setting, said):
    with pytest.raises(DynctlError, match="not of one workload") as caught:
        compare(made(), made("b", **setting), {})

    assert said in caught.value.message
    assert caught.value.exit_code is ExitCode.REFUSED


def test_how_a_workload_is_spelled_does_not_matter():
    one, other = made(), made("b", seed=2, workload="synthetic:osl=5,isl=100", url="http://h:2")
    found = compare(one, other, {})

    assert one.report.workload_digest == other.report.workload_digest == found.workload_digest
    assert found.differs == {"url": ("http://h:1", "http://h:2"), "seed": (1, 2)}
    assert made(load="poisson:20").report.workload_digest != found.workload_digest


def test_the_same_prompts_to_the_same_server_are_noticed():
    assert any("found them cached" in line for line in footnotes(compare(made(), made("b"), {})))
    others = made("b", seed=2), made("b", url="http://h:2")
    for other in others:
        assert not any("cached" in line for line in footnotes(compare(made(), other, {})))


def test_an_interrupted_run_is_refused():
    cut = made()
    cut = replace(cut, report=replace(cut.report, is_partial=True))

    with pytest.raises(DynctlError, match="a was interrupted"):
        compare(cut, made("b"), {})


def test_a_run_without_answers_is_refused():
    with pytest.raises(DynctlError, match="b: 0 of 9 requests were answered") as caught:
        compare(made(), made("b", num=0, num_failed=9), {})

    assert caught.value.exit_code is ExitCode.REFUSED


def test_thresholds():
    assert parse_thresholds(["ttft_p99=5%", "hit_rate=2.5%,failed=0%"]) == {
        "ttft_p99": 0.05,
        "hit_rate": 0.025,
        "failed": 0.0,
    }


@pytest.mark.parametrize("text", ["", "ttft=5%", "ttft_p99", "ttft_p99=5", "ttft_p42=5%", "x_p99=1%", "hit_rate=-1%"])  # fmt: skip
def test_what_is_no_threshold_is_refused_with_the_figures_there_are(text):
    with pytest.raises(UsageError) as caught:
        parse_thresholds([text])

    assert "ttft" in caught.value.hint
    assert "hit_rate" in caught.value.hint


@pytest.fixture
def stored(tmp_path):
    def store(name, run):
        results.write(tmp_path / name, run.report, run.records)
        return str(tmp_path / name)

    return store


def test_compare_reads_what_was_stored(stored, capsys):
    before, after = stored("one", made()), stored("two", made(seed=2, factor=1.3))

    assert dynctl(["bench", "compare", before, after]) == 0
    out = capsys.readouterr().out
    assert "TTFT ms (from scheduled) p90" in out
    assert "differs: seed 1 → 2" in out
    assert out.splitlines()[-1].startswith("advice: B is worse in ttft_p50")
    assert dynctl(["bench", "compare", before, after, "--threshold", "ttft_p99=5%"]) == 6
    assert dynctl(["bench", "compare", before, before, "--threshold", "ttft_p99=5%"]) == 0


def test_results_of_an_earlier_version_are_compared_too(stored, tmp_path):
    for name in ("one", "two"):
        stored(name, made(seed=len(name) + ord(name[0])))
        path = tmp_path / name / "result.json"
        result = json.loads(path.read_text())
        del result["workload_digest"], result["spread"], result["setting"]["recorded"]
        del result["kv"]["trace_ideal_ratio"], result["kinds"], result["router"]
        path.write_text(json.dumps(result))

    assert dynctl(["bench", "compare", str(tmp_path / "one"), str(tmp_path / "two")]) == 0


def test_compare_is_one_document_with_the_same_values(stored, capsys):
    before, after = stored("one", made()), stored("two", made(seed=2, factor=1.3))

    assert dynctl(["bench", "compare", before, after, "-o", "json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["schema"] == "dynctl.bench.compare/1"
    assert found["workload_digest"] == made().report.workload_digest
    ttft = found["changes"][0]
    assert (ttft["figure"], ttft["verdict"]) == ("ttft_p50", "worse")
    assert ttft["interval"][0] <= ttft["change"] <= ttft["interval"][1]
    assert rows(compare(made(), made("b", seed=2, factor=1.3), {}).changes)[0][5] == "worse"


def test_show_is_the_table_of_the_run_and_definitions_are_those_stored(stored, capsys):
    where = stored("one", made())

    assert dynctl(["bench", "show", where]) == 0
    assert "TTFT ms (from scheduled)" in capsys.readouterr().out
    assert dynctl(["bench", "show", f"{where}/result.json", "--definitions"]) == 0
    assert "ttft_ms" in capsys.readouterr().out
    assert dynctl(["bench", "show", where, "-o", "json"]) == 0
    assert json.loads(capsys.readouterr().out)["requests"]["ok"] == 600


@pytest.mark.parametrize(
    ("name", "content", "said"),
    [("result.json", b"{", "no result of dynctl bench"), ("result.json", b'{"schema": "dynctl.bench/9"}', "dynctl.bench/9"),
     ("result.json", b"{}", "of no schema"), ("requests.jsonl", b'{"number": 0}\n', "requests.jsonl:1: no request"),
     ("requests.jsonl", b"", "holds 0 measured requests"), ("requests.jsonl", None, "cannot be read: No such file")],
)  # fmt: skip
def test_damaged_results_are_refused_and_named(stored, tmp_path, capsys, name, content, said):
    where = stored("one", made(num=5))
    path = tmp_path / "one" / name
    if content is None:
        path.unlink()
    else:
        path.write_bytes(content)

    assert dynctl(["bench", "compare", where, where]) == ExitCode.USAGE
    assert said in capsys.readouterr().err

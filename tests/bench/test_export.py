"""Stored results for other tools: flat rows, and AIPerf's two files by AIPerf's own definitions."""

import csv
import io
import json
from dataclasses import replace

import pytest

from dynctl.bench import aiperf, results
from dynctl.bench.arrivals import parse_load
from dynctl.bench.changes import Run
from dynctl.bench.record import Record
from dynctl.bench.repeat import make_repeat
from dynctl.bench.report import ClientFacts, Measured, Setting, make_report
from dynctl.bench.stream import Chunk
from dynctl.bench.sweep import make_sweep, stage_of
from dynctl.cli.main import run as dynctl
from dynctl.core.workload import Slo
from dynctl.errors import ExitCode

START_S = 1_700_000_000.0


def answered(number, *, lag_s=0.01, ttft_s=0.2, gap_s=0.02, chat=None, turn=1, is_warmup=False):
    at_s = 1.0 * number
    # Two tokens come with the first chunk, one with each of the other three.
    chunks = tuple(Chunk(at_s + ttft_s + i * gap_s, i + 2) for i in range(4))
    return Record(number, "ok", at_s, at_s + lag_s, is_warmup, first_s=chunks[0].at_s, first_answer_s=chunks[0].at_s,
                  end_s=chunks[-1].at_s + 0.005, chunks=chunks, isl_asked_tokens=100, osl_asked_tokens=5,
                  prompt_tokens=100, output_tokens=5, cached_tokens=48, chat=chat, turn=turn)  # fmt: skip


def failed(number):
    return Record(number, "http 503", 1.0 * number, 1.0 * number, error="no engine, not one")


def made(records, slo=None, *, seed=7):
    setting = Setting(
        "http://h:1",
        "m",
        "chat",
        "synthetic:isl=100,osl=5",
        "constant:1",
        10.0,
        0.0,
        seed,
        slo or Slo(),
    )
    report = make_report(setting, Measured(tuple(records), 0.0, 10.0, ClientFacts(0.1, 0.5)))
    report.facts["started_unix_s"] = START_S
    return report


@pytest.fixture
def stored(tmp_path):
    def store(records, slo=None):
        results.write(tmp_path / "run", made(records, slo), records)
        return str(tmp_path / "run")

    return store


def exported(capsys, where, form):
    assert dynctl(["bench", "export", str(where), "--format", form]) == 0
    return capsys.readouterr().out


def test_csv_has_a_row_per_request_that_reads_back(stored, capsys):
    where = stored([answered(0, is_warmup=True), answered(1), failed(2)])
    found = list(csv.DictReader(io.StringIO(exported(capsys, where, "csv"))))

    assert [row["outcome"] for row in found] == ["ok", "ok", "http 503"]
    assert [row["is_warmup"] for row in found] == ["True", "False", "False"]
    assert float(found[1]["ttft_ms"]) == pytest.approx(200.0)
    assert float(found[1]["ttft_service_ms"]) == pytest.approx(190.0)
    assert found[2]["ttft_ms"] == ""
    assert found[2]["error"] == "no engine, not one"


def test_what_a_server_said_is_no_formula_to_a_spreadsheet(stored, capsys):
    said = '=HYPERLINK("http://x")'
    where = stored([answered(0), replace(failed(1), error=said)])
    rows = list(csv.DictReader(io.StringIO(exported(capsys, where, "csv"))))
    lines = exported(capsys, where, "jsonl").splitlines()

    assert [row["error"] for row in rows] == ["", f"'{said}"]
    assert json.loads(lines[1])["error"] == said


def test_jsonl_has_the_same_columns(stored, capsys):
    where = stored([answered(0), failed(1)])
    found = [json.loads(line) for line in exported(capsys, where, "jsonl").splitlines()]
    columns = exported(capsys, where, "csv").splitlines()[0].split(",")

    assert list(found[0]) == list(found[1]) == columns
    assert found[0]["cached_tokens"] == 48
    assert found[1]["ttft_ms"] is None


def test_the_summary_is_by_aiperfs_definitions(stored, capsys):
    records = [answered(0, is_warmup=True), answered(1), answered(2, ttft_s=0.4), failed(3)]
    found = json.loads(exported(capsys, stored(records, Slo(ttft_ms=300.0)), "aiperf-json"))

    ttft = found["time_to_first_token"]
    assert (ttft["unit"], ttft["count"]) == ("ms", 2)
    assert (ttft["min"], ttft["max"], ttft["avg"]) == (
        pytest.approx(190),
        pytest.approx(390),
        pytest.approx(290),
    )
    assert (ttft["p50"], ttft["p99"]) == (pytest.approx(290), pytest.approx(388))
    assert ttft["std"] == pytest.approx(100.0), "of the population, as AIPerf's own"
    assert ttft["sum"] == pytest.approx(580)
    # To the last chunk, not to [DONE]; over one token less than there are, however many came first.
    assert found["request_latency"]["min"] == pytest.approx(250.0)
    assert found["inter_token_latency"]["avg"] == pytest.approx(60 / 4)
    assert found["inter_chunk_latency"]["avg"] == pytest.approx(20.0)
    assert found["inter_chunk_latency"]["count"] == 6
    assert found["time_to_second_token"]["avg"] == pytest.approx(20.0)
    assert found["output_token_throughput_per_user"]["avg"] == pytest.approx(1000 / 15)
    assert found["request_count"] == {"unit": "requests", "avg": 2}
    assert found["error_request_count"] == {"unit": "requests", "avg": 1}
    # From the first request sent (1.01 s) to the last chunk (2.46 s).
    assert found["benchmark_duration"] == {"unit": "sec", "avg": pytest.approx(1.45)}
    assert found["request_throughput"]["avg"] == pytest.approx(2 / 1.45)
    assert found["output_token_throughput"]["avg"] == pytest.approx(10 / 1.45)
    assert found["goodput"]["avg"] == pytest.approx(1 / 1.45)
    assert found["start_time"] == "2023-11-14T22:13:21.010000+00:00"
    assert found["error_summary"] == [
        {
            "error_details": {"code": 503, "type": "http 503", "message": "no engine, not one"},
            "count": 1,
        }
    ]
    assert found["run_info"]["random_seed"] == 7
    assert found["dynctl"]["setting"]["workload"] == "synthetic:isl=100,osl=5"


def test_lines_are_the_measured_requests(stored, capsys):
    records = [answered(0, is_warmup=True), answered(1, chat=4, turn=2), failed(2)]
    good, bad = map(json.loads, exported(capsys, stored(records), "aiperf-jsonl").splitlines())

    assert (good["metadata"]["session_num"], good["metadata"]["turn_index"]) == (4, 1)
    assert good["metadata"]["request_start_ns"] == pytest.approx((START_S + 1.01) * 1e9, abs=1e3)
    assert good["metrics"]["time_to_first_token"] == {"value": pytest.approx(190.0), "unit": "ms"}
    assert len(good["metrics"]["inter_chunk_latency"]["value"]) == 3
    assert good["error"] is None
    assert (bad["metrics"], bad["error"]["code"]) == ({}, 503)
    assert bad["metadata"]["benchmark_phase"] == "profiling"


def test_a_run_without_answers_is_exported_too():
    found = aiperf.summary(made([failed(0)]), [failed(0)])

    assert "time_to_first_token" not in found
    assert found["request_count"]["avg"] == 0
    assert "request_throughput" not in found


def test_an_answer_of_one_token_has_no_gap():
    one = replace(answered(0), chunks=answered(0).chunks[:1], output_tokens=1)

    assert set(aiperf.metrics_of(one)) == {
        "time_to_first_token", "request_latency", "time_to_first_output_token", "output_sequence_length",
        "input_sequence_length", "usage_prompt_cache_read_tokens",
    }  # fmt: skip


def test_a_sweep_is_a_row_per_load_and_a_repeat_a_row_per_run(tmp_path, capsys):
    records = [answered(1), answered(2)]
    report = made(records, Slo(ttft_ms=300.0))
    stages = [stage_of(parse_load(load), report) for load in ("poisson:1", "poisson:2")]
    results.write_summary(tmp_path / "sweep", make_sweep(report.setting, stages, 4))
    runs = [Run(f"run-{at}", made(records, seed=at), tuple(records)) for at in (1, 2)]
    results.write_summary(tmp_path / "repeat", make_repeat(runs))

    loads = list(csv.DictReader(io.StringIO(exported(capsys, tmp_path / "sweep", "csv"))))
    assert [(row["load"], row["is_knee"], row["num_gpus"]) for row in loads] == [
        ("poisson:1", "False", "4"), ("poisson:2", "True", "4"),
    ]  # fmt: skip
    each = [
        json.loads(line) for line in exported(capsys, tmp_path / "repeat", "jsonl").splitlines()
    ]
    assert [(row["run"], row["seed"]) for row in each] == [(1, 1), (2, 2)]
    assert each[0]["ttft_mean"] == pytest.approx(200.0)
    assert (
        dynctl(["bench", "export", str(tmp_path / "sweep"), "--format", "aiperf-json"])
        == ExitCode.USAGE
    )
    assert f"name one: {tmp_path / 'sweep' / 'stage-1'}" in capsys.readouterr().err

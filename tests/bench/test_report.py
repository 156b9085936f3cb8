"""Reports from records: what is averaged, what is counted apart, verdicts, exit codes, text."""

from dataclasses import replace

import msgspec
import pytest

from dynctl.bench.advice import advice
from dynctl.bench.record import DEFINITIONS, Record
from dynctl.bench.report import (
    ClientFacts,
    Measured,
    Report,
    RouterCounts,
    Setting,
    ideal_hits,
    make_report,
)
from dynctl.bench.router_times import growth
from dynctl.bench.stream import Chunk
from dynctl.bench.summary import check_lines, fact_rows, footnotes, kind_rows, metric_rows
from dynctl.core.snapshot import Histogram
from dynctl.core.workload import Slo
from dynctl.errors import ExitCode


def answered(number, ttft_s=0.1, gap_s=0.01, tokens=5, at_s=None, **fields):
    scheduled_s = number * 0.1 if at_s is None else at_s
    first_s = scheduled_s + ttft_s
    chunks = tuple(Chunk(first_s + i * gap_s, i + 1) for i in range(tokens))
    known = {
        "number": number,
        "outcome": "ok",
        "scheduled_s": scheduled_s,
        "sent_s": scheduled_s,
        "first_s": first_s,
        "first_answer_s": first_s,
        "end_s": chunks[-1].at_s,
        "chunks": chunks,
        "isl_asked_tokens": 100,
        "osl_asked_tokens": tokens,
        "prompt_tokens": 100,
        "output_tokens": tokens,
        "cached_tokens": 48,
    }
    return Record(**(known | fields))


def failed(number, outcome="http 503"):
    return Record(number, outcome, number * 0.1, number * 0.1, error="x")


def report_of(
    records, slo=None, client=None, router=None, is_partial=False, until_s=10.0, since_s=0.0
):
    setting = Setting(
        "http://h:1",
        "m",
        "chat",
        "synthetic:isl=100,osl=5",
        "poisson:10",
        10.0,
        0.0,
        1,
        slo or Slo(),
    )
    client = client or ClientFacts(0.2, 0.5)
    return make_report(
        setting, Measured(tuple(records), since_s, until_s, client, router, is_partial)
    )


def test_latencies_are_of_successful_requests_and_failures_are_counted_apart():
    report = report_of([*(answered(i) for i in range(98)), failed(98), failed(99, "broken stream")])

    assert report.metrics["ttft_ms"].num == 98
    assert report.metrics["ttft_ms"].p99 == pytest.approx(100.0)
    assert report.metrics["itl_ms"].num == 98 * 4
    assert report.metrics["itl_ms"].p50 == pytest.approx(10.0)
    assert report.metrics["tpot_ms"].mean == pytest.approx(10.0)
    assert report.requests.failed == 2
    assert report.requests.failed_by_kind == {"broken stream": 1, "http 503": 1}


def test_warm_up_requests_enter_no_figure_but_their_late_tokens_count():
    warm = answered(0, at_s=0.0, ttft_s=2.0, gap_s=0.1, is_warmup=True)
    report = report_of(
        [warm, answered(1, at_s=2.5), answered(2, at_s=2.6)], since_s=2.0, until_s=4.0
    )

    assert report.metrics["ttft_ms"].num == 2
    assert report.requests.sent == 2
    assert report.throughput.output_tok_s == pytest.approx((5 + 5 + 5) / 2.0)


def test_rates_are_over_the_measured_time():
    report = report_of([answered(i) for i in range(100)], until_s=10.0)

    assert report.requests.offered_rps == pytest.approx(10.0)
    assert report.requests.completed_rps == pytest.approx(9.9)
    assert report.throughput.tok_s_user == pytest.approx(100.0)


def test_spread_tells_a_steady_run_from_one_with_a_bad_minute():
    steady = report_of([answered(i) for i in range(100)])
    bad = report_of([answered(i, ttft_s=0.5 if 50 <= i < 60 else 0.1) for i in range(100)])

    assert steady.spread.window_s == pytest.approx(0.5)
    assert steady.spread.ttft_cv == pytest.approx(0.0, abs=1e-6)
    assert sum(steady.spread.output_tok_s) / 20 == pytest.approx(steady.throughput.output_tok_s)
    assert [round(v) for v in bad.spread.ttft_ms] == [100] * 10 + [500] * 2 + [100] * 8
    assert bad.spread.ttft_cv > 0.5
    assert "100 to 500 ms" in dict(fact_rows(bad))["spread"]


def test_goodput_counts_failures_and_misses_as_bad():
    records = [answered(i) for i in range(6)] + [answered(6, ttft_s=0.6), answered(7, gap_s=0.05)]
    report = report_of([*records, failed(8), failed(9)], Slo(500.0, 40.0))

    assert report.goodput.ratio == pytest.approx(0.6)
    assert report.goodput.rps == pytest.approx(0.6)
    assert report.goodput.tok_s == pytest.approx(3.0)


def test_goals_that_hold_exit_0():
    report = report_of([answered(i) for i in range(100)], Slo(500.0, 40.0))

    assert [c.is_met for c in report.checks] == [True, True, True]
    assert report.exit_code is ExitCode.OK
    assert "room" in advice(report)


@pytest.mark.parametrize(
    ("change", "word"), [({"ttft_s": 0.6}, "prefill"), ({"gap_s": 0.05}, "decode engines"),
                         ({"ttft_s": 0.6, "gap_s": 0.05}, "TTFT and ITL")]
)  # fmt: skip
def test_a_missed_goal_exits_6_and_the_advice_names_the_side(change, word):
    report = report_of([answered(i, **change) for i in range(100)], Slo(500.0, 40.0))

    assert report.exit_code is ExitCode.GATE
    assert word in advice(report)
    assert any(line.startswith("MISSED") for line in check_lines(report.checks))


def test_too_many_failures_miss_the_goal_even_with_fast_answers():
    report = report_of(
        [*(answered(i) for i in range(97)), *(failed(97 + i) for i in range(3))], Slo(500.0)
    )

    assert report.exit_code is ExitCode.GATE
    assert "failed" in advice(report)


def test_without_goals_slow_answers_exit_0():
    assert report_of([answered(i, ttft_s=9.0) for i in range(20)]).exit_code is ExitCode.OK


@pytest.mark.parametrize(
    ("client", "records", "word"),
    [
        (ClientFacts(0.95, 0.1), {}, "95% of a core"),
        (ClientFacts(0.2, 25.0), {}, "woke up 25.0 ms late"),
        (ClientFacts(0.2, 0.1), {"lag_s": 0.03}, "left 30.0 ms late"),
    ],
)
def test_a_load_generator_at_its_limit_makes_the_run_invalid(client, records, word):
    lag_s = records.get("lag_s", 0.0)
    made = [answered(i, sent_s=i * 0.1 + lag_s) for i in range(50)]

    with_goal = report_of(made, Slo(500.0), client)
    without = report_of(made, None, client)

    assert word in with_goal.client_limited
    assert with_goal.exit_code is ExitCode.GATE
    assert without.exit_code is ExitCode.OK
    assert any(note.startswith("INVALID") for note in footnotes(without))
    assert "another machine" in advice(without)


def test_one_late_request_is_a_hiccup():
    made = [answered(i, sent_s=i * 0.1 + (0.05 if i == 7 else 0.0)) for i in range(60)]

    assert report_of(made).client_limited == ""


def test_lag_that_is_small_beside_the_ttft_is_no_limit():
    made = [answered(i, ttft_s=2.0, sent_s=i * 0.1 + 0.03) for i in range(50)]

    assert report_of(made).client_limited == ""


@pytest.mark.parametrize(
    ("records", "word"),
    [
        ([], "nothing was sent"),
        ([failed(0, "connect"), failed(1, "connect")], "connect"),
        ([failed(0, "empty")], "empty"),
    ],
)
def test_zero_successes_report_no_percentiles_and_exit_4(records, word):
    report = report_of(records, Slo(500.0))

    assert "ttft_ms" not in report.metrics
    assert report.exit_code is ExitCode.REFUSED
    assert word in advice(report)
    assert report.kv.cached_ratio is None
    assert fact_rows(report)
    msgspec.json.encode(report)


def test_one_success_has_no_percentiles_and_exits_4():
    report = report_of([answered(0)])

    assert report.metrics["ttft_ms"].p99 is None
    assert report.exit_code is ExitCode.REFUSED
    assert metric_rows(report)[0][2] == "–"


def test_an_interrupted_run_is_marked_and_exits_130():
    report = report_of([answered(i) for i in range(5)], is_partial=True, until_s=0.5)

    assert report.exit_code is ExitCode.INTERRUPTED
    assert any(note.startswith("PARTIAL") for note in footnotes(report))


def test_few_samples_are_marked():
    report = report_of([answered(i) for i in range(20)])

    assert metric_rows(report)[0][5].endswith("*")
    assert any(note.startswith("*") for note in footnotes(report))


def test_lengths_compare_asked_and_got():
    made = [answered(i) for i in range(8)]
    made += [answered(8, prompt_tokens=110), answered(9, osl_asked_tokens=50)]
    lengths = report_of(made).lengths

    assert lengths.isl_asked_mean == 100.0
    assert lengths.isl_got_mean == pytest.approx(101.0)
    assert lengths.isl_mismatch_ratio == pytest.approx(0.1)
    assert lengths.osl_mismatch_ratio == pytest.approx(0.1)


def test_hit_rates_are_shares_of_prompt_tokens():
    kv = report_of([answered(i) for i in range(10)], router=RouterCounts(1000.0, 500.0)).kv

    assert kv.cached_ratio == pytest.approx(0.48)
    assert kv.predicted_ratio == pytest.approx(0.5)
    assert kv.ideal_ratio == 0.0


def test_ideal_hits_of_a_group_are_whole_blocks_after_its_first_request():
    made = [answered(i, group=0, shared_tokens=50, prompt_tokens=100) for i in range(3)]

    assert ideal_hits(made, 16, 5) == {0: 0, 1: 48, 2: 48}


def test_ideal_hits_never_include_the_last_prompt_token():
    made = [answered(i, group=0, shared_tokens=64, prompt_tokens=64) for i in range(2)]

    assert ideal_hits(made, 16, 0)[1] == 48


def test_ideal_hits_of_a_turn_are_what_the_turn_before_computed():
    first = answered(0, chat=7, group=0, shared_tokens=10, prompt_tokens=40, output_tokens=9)
    second = answered(1, chat=7, group=0, shared_tokens=10, prompt_tokens=80, turn=2)

    assert ideal_hits([first, second], 16, 0) == {0: 0, 1: 48}
    assert ideal_hits([first, second], 1, 0)[1] == 48
    assert ideal_hits([first, second], 7, 0)[1] == 42


def test_the_chat_template_is_shared_by_all_prompts():
    made = [answered(i) for i in range(2)]

    assert ideal_hits(made, 16, 20) == {0: 0, 1: 16}


def test_failed_requests_warm_no_ideal_cache():
    records = [failed(0), answered(1, group=0, shared_tokens=50)]

    assert ideal_hits(records, 16, 0) == {1: 0}


def test_warm_up_requests_do_warm_the_ideal_cache():
    made = [answered(i, group=0, shared_tokens=64, is_warmup=i == 0) for i in range(3)]

    assert report_of(made).kv.ideal_ratio == pytest.approx(0.64)


def test_a_hit_rate_far_below_the_ideal_is_worth_a_line():
    made = [answered(i, group=0, shared_tokens=80, cached_tokens=0) for i in range(1200)]

    assert "KV hit rate is 0%, and one cache of everything would give 80%" in advice(
        report_of(made)
    )


def test_a_cache_that_was_warm_before_the_run_is_noticed():
    notes = footnotes(report_of([answered(i, group=0, shared_tokens=16) for i in range(20)]))

    assert any("cached before the run" in note and "--seed" in note for note in notes)


def test_the_result_explains_itself_and_survives_json():
    report = report_of(
        [answered(i) for i in range(30)], Slo(500.0, 40.0), router=RouterCounts(10.0, 5.0)
    )
    again = msgspec.json.decode(msgspec.json.encode(report), type=Report)

    assert again == report
    assert again.schema == "dynctl.bench/1"
    assert set(report.metrics) <= set(DEFINITIONS)
    assert again.setting.seed == 1


def mixed_report():
    setting = Setting(
        "http://h:1", "m", "chat", "mixed:isl=either(100,900),osl=5", "poisson:10", 10.0, 0.0, 1
    )
    records = [
        *(answered(i, ttft_s=0.1) for i in range(6)),
        *(answered(i, ttft_s=0.5, isl_asked_tokens=900) for i in range(6, 9)),
        replace(failed(9), isl_asked_tokens=900, osl_asked_tokens=5),
    ]
    return make_report(setting, Measured(tuple(records), 0.0, 10.0, ClientFacts(0.2, 0.5)))


def test_a_mixed_run_is_told_by_kind_of_request_and_as_a_whole():
    whole, short, long = mixed_report().kinds

    assert [kind.name for kind in (whole, short, long)] == ["all", "100 in", "900 in"]
    assert (whole.num_ok, short.num_ok, long.num_ok, long.num_failed) == (9, 6, 3, 1)
    assert (short.ttft_ms, long.ttft_ms) == (pytest.approx(100.0), pytest.approx(500.0))
    assert (short.requests_s, long.requests_s) == (pytest.approx(0.6), pytest.approx(0.3))
    assert whole.output_tok_s == pytest.approx(4.5) == short.output_tok_s + long.output_tok_s
    assert whole.tok_s_user == pytest.approx(100.0)
    assert kind_rows(mixed_report())[1][0] == "100 in"


def test_runs_of_one_kind_have_no_table_of_kinds():
    assert report_of([answered(0), answered(1)]).kinds == ()


def test_what_the_router_added_is_read_from_its_histograms():
    decision = Histogram((0.0001, 0.0002), (90.0, 100.0, 100.0), 0.008)
    queue = Histogram((0.001, 0.002), (50.0, 100.0, 100.0), 0.1)
    report = report_of([answered(0), answered(1)], router=RouterCounts(10, 5, decision, queue))

    assert report.router.decision.num == 100
    assert report.router.decision.mean_ms == pytest.approx(0.08)
    assert report.router.decision.p99_ms == pytest.approx(0.19)
    assert report.router.waiting.p50_ms == pytest.approx(1.0)
    assert dict(fact_rows(report))["router added"] == (
        "until it decides 1.0 ms on average, p50 1.0, p99 2.0; decision 0.08 ms on average, p50 0.06, p99 0.19"
    )


def test_a_router_that_was_started_anew_meanwhile_says_nothing():
    one, other = Histogram((0.1,), (5.0, 5.0), 0.2), Histogram((0.1,), (3.0, 7.0), 0.4)

    assert growth(one, other) is None
    assert growth(None, other) is None
    assert growth(one, Histogram((0.1,), (6.0, 8.0), 0.5)) == Histogram(
        (0.1,), (1.0, 3.0), pytest.approx(0.3)
    )
    assert report_of([answered(0), answered(1)], router=RouterCounts(10, 5)).router is None

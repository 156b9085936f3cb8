"""Verdicts on two arms that played one trace in turn, from records alone."""

import random
from dataclasses import replace

import pytest

from dynctl.bench.changes import Change, Verdict
from dynctl.bench.record import Record
from dynctl.bench.report import ClientFacts, Measured, Setting, make_report
from dynctl.bench.stream import Chunk
from dynctl.bench.trial import Outcome, Turn, _sides, judge_trial, order_of, outcome_of
from dynctl.bench.workload import Recorded
from dynctl.errors import ExitCode

NUM = 300
ARMS = ("least_loaded", "kv")


def turn(
    arm, *, factor=1.0, cached_tokens=0, seed=1, ideal=0.6, num_failed=0, gap_s=0.01, **changed
):
    """Lines differ widely, and alike in each turn; what a turn adds differs a little."""
    lines, own = random.Random(7), random.Random(f"{arm}/{seed}")
    records = []
    for number in range(NUM):
        at_s, base_s = number * 0.1, lines.lognormvariate(-2, 0.8)
        if number < num_failed:
            records.append(Record(number, "http 503", at_s, at_s))
            continue
        first_s = at_s + factor * base_s * own.lognormvariate(0, 0.02)
        chunks = tuple(Chunk(first_s + i * gap_s, i + 1) for i in range(3))
        records.append(
            Record(
                number, "ok", at_s, at_s, first_s=first_s, end_s=chunks[-1].at_s, chunks=chunks,
                prompt_tokens=1000, output_tokens=3, cached_tokens=cached_tokens,
            )
        )  # fmt: skip
    setting = Setting("u", "m", "chat", "trace:t", "recorded times", 30.0, 0.0, seed)
    setting = replace(setting, recorded=Recorded("d", NUM, 1.0, 512, ideal))
    report = make_report(setting, Measured(tuple(records), 0.0, 30.0, ClientFacts(0.1, 0.5)))
    return Turn(arm, replace(report, **changed), tuple(records))


def trial(before, after, **options):
    turns = [
        turn(arm, seed=at, **(after if arm else before)) for at, arm in enumerate((0, 1, 1, 0))
    ]
    return judge_trial(ARMS, turns, **options)


def test_arms_take_turns_and_neither_is_always_first():
    assert order_of(3) == [0, 1, 1, 0, 0, 1]


def test_a_faster_arm_improves_and_the_advice_says_by_how_much():
    found = trial({}, {"factor": 0.7, "cached_tokens": 600})

    assert found.outcome is Outcome.IMPROVED
    assert found.order == ("least_loaded", "kv", "kv", "least_loaded")
    assert found.advice.startswith("use kv: ttft_mean −29")
    assert found.advice.endswith("KV hit rate 0% → 60%")
    assert found.exit_code is ExitCode.OK


def test_what_an_improvement_costs_is_said_though_it_does_not_decide():
    found = trial({}, {"factor": 0.7, "gap_s": 0.02})

    assert found.outcome is Outcome.IMPROVED
    assert found.advice.endswith(
        "; but itl_p99 +100.0%, tpot_p50 +100.0%: weigh that by your goals"
    )


def test_a_slower_arm_is_worse():
    found = trial({"cached_tokens": 600}, {"factor": 1.5})

    assert found.outcome is Outcome.WORSE
    assert found.advice.startswith("stay with least_loaded: with kv ttft_mean +5")


def test_pairs_of_lines_tell_a_tie_that_independent_runs_could_not():
    found = trial({}, {})
    ttft = {c.figure: c for c in found.changes}["ttft_p50"]

    assert found.outcome is Outcome.NO_CHANGE
    assert ttft.interval[1] - ttft.interval[0] < 0.05


def test_neighbouring_lines_of_both_arms_and_all_rounds_are_drawn_together():
    before, after = _sides([turn(0), turn(1), turn(1, seed=2), turn(0, seed=3)])

    for side in (before, after):
        drawn = [sorted({record.number for record in stretch}) for stretch in side.stretches]
        assert drawn == [list(range(at, min(NUM, at + 17))) for at in range(0, NUM, 17)]
        assert {len(stretch) for stretch in side.stretches} == {2 * 17, 2 * (NUM % 17)}


def test_no_change_has_its_cause():
    assert "nothing to route by" in trial({"ideal": 0.0}, {"ideal": 0.0}).advice
    assert "suspect the configuration" in trial({}, {}).advice
    assert "--speed" in trial({}, {"cached_tokens": 500}).advice


def test_more_failures_are_worse_however_fast_the_others():
    assert trial({}, {"num_failed": 60}).outcome is Outcome.WORSE


def test_figures_that_disagree_are_inconclusive():
    found = trial({}, {"factor": 0.7, "num_failed": 60})

    assert found.outcome is Outcome.INCONCLUSIVE
    assert found.advice.startswith("weigh them by your goals: ttft_mean")


def change(verdict, amount, bounds=None):
    return Change(
        "ttft_mean", 1.0, 1.0 + amount, amount, bounds, verdict, 0.05, False, (99, 99), 10
    )


@pytest.mark.parametrize(
    ("found", "outcome"),
    [(change(Verdict.BETTER, -0.2), "improved"), (change(Verdict.BETTER, -0.04), "inconclusive"),
     (change(Verdict.WORSE, 0.2), "worse"), (change(Verdict.SAME, 0.01), "no change"),
     (change(Verdict.UNKNOWN, 0.01), "inconclusive")],
)  # fmt: skip
def test_only_a_change_beyond_the_tolerance_decides(found, outcome):
    assert outcome_of([found]) == outcome


def test_an_interrupted_round_is_left_out():
    ended, cut = [turn(0), turn(1)], replace(turn(1).report, is_partial=True)
    for more in ([Turn(1, cut, ())], [turn(1), Turn(0, cut, ())]):
        found = judge_trial(ARMS, [*ended, *more], is_partial=True)
        assert found.order == ARMS
        assert found.exit_code is ExitCode.INTERRUPTED
    assert judge_trial(ARMS, ended[:1], is_partial=True) is None


def test_a_client_at_its_limit_says_nothing_of_the_arms():
    found = trial({"client_limited": "too slow"}, {"factor": 0.5})

    assert found.client_limited["round 2, least_loaded"] == "too slow"
    assert (found.num_rounds, found.outcome) == (0, Outcome.INCONCLUSIVE)
    assert "another machine" in found.advice


def test_a_round_in_which_the_client_was_the_limit_is_left_out():
    late = turn(1, factor=9.0, client_limited="too slow")
    found = judge_trial(ARMS, [turn(0), turn(1, seed=2), late, turn(0, seed=3)])

    assert found.num_rounds == 1
    assert found.client_limited == {"round 2, kv": "too slow"}
    assert found.outcome is Outcome.NO_CHANGE

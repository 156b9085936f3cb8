"""Replays of recorded workloads: what is sent, when, what hits it can have, and what is refused."""

import asyncio
import json

import pytest

from dynctl.bench.client import open_target
from dynctl.bench.replay import Replay, first_part
from dynctl.bench.report import make_report
from dynctl.bench.run import Drive, Wish, learn_counting
from dynctl.bench.summary import fact_rows
from dynctl.bench.words import TokenCount
from dynctl.bench.workload import prompt_text
from dynctl.cli.main import run
from dynctl.errors import ExitCode
from dynctl.planner.trace_lines import read_trace

COUNT = TokenCount(overhead_tokens=5.0)


def line(at_ms, ids, isl=None, osl=3, **more):
    isl = isl or 32 * len(ids)
    return {"timestamp": at_ms, "input_length": isl, "output_length": osl, "hash_ids": ids} | more


def trace_of(*lines, **options):
    return read_trace(map(json.dumps, lines), "t", block_tokens=32, **options)


def asks_of(trace, seed=1, count=COUNT):
    script = Replay(trace).script(count, seed)
    return [script.next() for _ in trace.calls]


def words(ask):
    return prompt_text(ask.messages).split()


def alike(one, other):
    return next((i for i, (a, b) in enumerate(zip(one, other, strict=False)) if a != b), len(one))


def test_prompts_have_the_recorded_length_and_share_the_recorded_blocks():
    first, second, third = asks_of(
        trace_of(line(0, [7, 8, 9]), line(1, [7, 8, 5]), line(2, [4, 8, 9], isl=90))
    )

    assert [len(words(a)) + 5 for a in (first, second, third)] == [96, 96, 90]
    assert [a.isl_tokens for a in (first, second, third)] == [96, 96, 90]
    assert alike(words(first), words(second)) >= 1 + 64
    assert alike(words(first), words(third)) < 10
    assert words(first)[33:65] == words(third)[33:65]
    assert [a.shared_tokens for a in (first, second, third)] == [0, 64, 0]


def test_what_no_block_names_is_a_requests_own():
    one, other = asks_of(trace_of(line(0, [1], isl=64), line(1, [1], isl=64)))

    assert 33 <= alike(words(one), words(other)) < 45


def test_another_seed_shares_nothing_and_the_same_seed_all():
    trace = trace_of(line(0, [1, 2]), line(5, [1, 3]))

    assert asks_of(trace, 1) == asks_of(trace, 1)
    assert alike(words(asks_of(trace, 1)[0]), words(asks_of(trace, 2)[0])) < 10


def test_words_that_cost_more_are_fewer():
    count = TokenCount(overhead_tokens=4.0, per_word_tokens=2.0)
    [ask] = asks_of(trace_of(line(0, [1, 2, 3])), count=count)

    assert len(words(ask)) == 46


def test_recorded_texts_are_sent_as_they_are_behind_a_line_that_names_the_seed():
    shared = "hello there " * 60
    made = [
        {"timestamp": i, "messages": [{"role": "system", "content": shared}, {"role": "user", "content": f"{i}"}],
         "max_tokens": 4, "session": "s"}
        for i in range(2)
    ]  # fmt: skip
    first, second = asks_of(trace_of(*made, keep_texts=True), seed=9)

    assert first.messages == (("system", f"replay 9\n{shared}"), ("user", "0"))
    assert (first.osl_tokens, first.isl_tokens, first.session) == (4, None, "9/s")
    assert first.shared_ratio == 0
    assert second.shared_ratio == pytest.approx(0.7, abs=0.05)


def test_times_are_divided_by_the_speed_and_cut_at_the_end():
    trace = trace_of(*(line(1000 * i, [i]) for i in range(4)))
    played = Replay(trace, speed=2.0)

    assert list(played.load.offsets_s(None, 9.0)) == [0.0, 0.5, 1.0, 1.5]
    assert played.duration_s == 2.0
    assert str(played.load) == "recorded times at 2×"
    assert len(first_part(trace, 2.0).calls) == 2
    assert Replay(trace_of(line(5, [1]))).duration_s == 1.0


def test_lines_are_put_in_order_of_time_before_anything_is_said_of_them():
    late, early = line(9000, [1, 2]), line(7000, [1, 2])
    trace = trace_of(late, early)

    assert [call.at_s for call in trace.calls] == [0.0, 2.0]
    assert [ask.shared_tokens for ask in asks_of(trace)] == [0, 63]


async def play(server, trace, *, speed=1.0, seed=1, api="chat", block_size=16):
    played = Replay(trace, speed)
    wish = Wish(played, played.load, played.duration_s, seed=seed, block_size_tokens=block_size)
    async with open_target(server.url, api, None, 60.0) as target:
        await target.find_model(None)
        count = await learn_counting(target, played)
        measured = await Drive(target, wish, count, asyncio.Event()).run(lambda _: None)
        return make_report(wish.setting(target, count), measured), measured.records


SHARING = [line(10 * i, [0, 1 + i % 3, 10 + i % 15, 100 + i]) for i in range(40)]


@pytest.mark.parametrize("api", ["chat", "completions"])
def test_hits_reach_the_ideal_on_a_server_that_never_forgets(with_server, api):
    async def scenario(server):
        return await play(server, trace_of(*SHARING), api=api)

    report, records = with_server(scenario, ttft_s=0.0)

    assert {r.prompt_tokens for r in records} == {128}
    assert [r.scheduled_s for r in records[:3]] == [0.0, 0.01, 0.02]
    assert all(r.send_lag_ms >= 0 for r in records)
    assert report.kv.ideal_ratio > 0.3
    assert report.kv.cached_ratio == pytest.approx(report.kv.ideal_ratio, abs=0.05)


def test_the_traces_own_hit_rate_stands_beside_the_achieved(with_server):
    async def scenario(server):
        return await play(server, trace_of(line(0, [1, 2]), line(1, [1, 2]), line(2, [1, 3])))

    report, _ = with_server(scenario, ttft_s=0.0)

    # Of 3 × 64 tokens: none, all but the last, and one block of 32.
    assert report.kv.trace_ideal_ratio == pytest.approx((0 + 63 + 32) / 192)
    assert "of the trace itself 49.5% (blocks of 32)" in dict(fact_rows(report))["KV hit rate"]
    assert "kv_trace_ideal_ratio" in report.definitions


def test_a_second_replay_finds_nothing_of_the_first(with_server):
    async def scenario(server):
        trace = trace_of(*(line(i, [i, 50 + i]) for i in range(10)))
        return [(await play(server, trace, seed=seed))[0] for seed in (1, 2, 1)]

    first, second, again = with_server(scenario, ttft_s=0.0)

    assert first.kv.cached_ratio < 0.2
    assert second.kv.cached_ratio < 0.2
    assert again.kv.cached_ratio > 0.7
    assert first.workload_digest == second.workload_digest


def test_sessions_are_sent_along(with_server):
    async def scenario(server):
        made = [line(i, [i], session=f"s{i}") for i in range(2)]
        await play(server, trace_of(*made), seed=3)
        return server.headers

    heads = with_server(scenario)

    assert any(b"x-dynctl-session: 3/s1" in head.lower() for head in heads)


def test_any_session_of_a_trace_fits_a_header(with_server):
    async def scenario(server):
        made = [line(i, [i], session=name) for i, name in enumerate(("a\r\nb: c", "\x00", "é 1"))]
        report, _ = await play(server, trace_of(*made), seed=3)
        return report, b"".join(server.headers).lower()

    report, heads = with_server(scenario)

    assert report.requests.ok == 3
    for name in (b"a%0d%0ab%3a%20c", b"%00", b"%c3%a9%201"):
        assert b"x-dynctl-session: 3/" + name + b"\r\n" in heads


def test_texts_are_replayed_with_an_ideal_by_their_share(with_server):
    async def scenario(server):
        shared = "one two three four " * 100
        made = [{"timestamp": i, "prompt": f"{shared}{i}", "max_tokens": 2} for i in range(6)]
        return await play(server, trace_of(*made, keep_texts=True))

    report, records = with_server(scenario, ttft_s=0.0)

    assert all(r.is_ok for r in records)
    assert (
        Replay(
            trace_of({"timestamp": 0, "prompt": "x", "max_tokens": 1}, keep_texts=True)
        ).longest_tokens
        is None
    )
    assert report.kv.cached_ratio == pytest.approx(report.kv.ideal_ratio, abs=0.1)


@pytest.fixture
def stored(tmp_path):
    path = tmp_path / "trace.jsonl"

    def store(*lines):
        path.write_text("".join((x if isinstance(x, str) else json.dumps(x)) + "\n" for x in lines))
        return str(path)

    return store


def test_replay_writes_what_compare_reads(served, stored, tmp_path, capsys):
    server, path = served(ttft_s=0.0), stored(*SHARING)
    for name in "ab":
        command = ["bench", "replay", path, "--url", server.url, "--block-tokens", "32"]
        assert run([*command, "--out", str(tmp_path / name)]) == 0
    assert "fake at" in capsys.readouterr().out
    assert run(["bench", "compare", str(tmp_path / "a"), str(tmp_path / "b")]) == 0
    assert "trace:trace.jsonl, recorded times" in capsys.readouterr().out


def test_a_servers_name_of_a_model_does_not_reach_the_terminal_as_a_command(
    served, stored, tmp_path, capsys
):
    server = served(ttft_s=0.0, models=("fa\x1b[2Jke",))
    out = str(tmp_path / "out")

    assert run(["bench", "replay", stored(*SHARING), "--url", server.url, "--out", out]) == 0
    assert run(["bench", "show", out]) == 0
    assert run(["bench", "compare", out, out]) == 0
    said = capsys.readouterr()
    assert "fake at" in said.out
    assert "\x1b" not in said.out + said.err
    assert server.bodies[0]["model"] == "fa\x1b[2Jke"


def test_runs_of_other_traces_are_not_compared(served, stored, tmp_path, capsys):
    server = served(ttft_s=0.0)
    for name, lines in (("a", SHARING), ("b", SHARING[:-1])):
        command = ["bench", "replay", stored(*lines), "--url", server.url]
        assert run([*command, "--out", str(tmp_path / name)]) == 0
    assert run(["bench", "compare", str(tmp_path / "a"), str(tmp_path / "b")]) == ExitCode.REFUSED
    assert "not of one workload" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("lines", "args", "said"),
    [((line(0, [1]), '{"timestamp": 1, "input_length": "x", "output_length": 1}'), [], ":2:18: input_length has to be"),
     (("{",), [], ":1:"), ((), [], "holds no request"), ((line(0, [1]),), ["--duration", "0s"], "holds no request"),
     (('{"timestamp": 0, "prompt": "a\\ud800", "max_tokens": 1}',), [], ":1:18: prompt holds half of a character"),
     (('{"timestamp": 0, "input_length": 9, "output_length": 1, "session": "\\ud800"}',), [], ": session holds half"),
     ((line(0, [1]),), ["--speed", "nan"], "'--speed': nan is no number"), ((line(0, [1]),), ["--speed", "inf"], "'--speed': inf is not in"),
     ((line(0, [1]),), ["--speed", "0"], "--speed"), ((line(0, [1]),), ["--duration", "soon"], "--duration")],
)  # fmt: skip
def test_bad_traces_are_refused_where_they_are_wrong_before_anything_is_sent(
    served, stored, capsys, lines, args, said
):
    server, path = served(), stored(*lines)

    assert run(["bench", "replay", path, "--url", server.url, *args]) == ExitCode.USAGE
    assert said in capsys.readouterr().err
    assert server.bodies == []


def test_a_trace_that_is_not_there_is_named(tmp_path, capsys):
    assert run(["bench", "replay", str(tmp_path / "no.jsonl")]) == ExitCode.USAGE
    assert "no.jsonl: No such file" in capsys.readouterr().err


def test_a_trace_too_long_for_the_model_is_refused(served, stored, capsys):
    server = served(max_model_len=100)

    assert run(["bench", "replay", stored(line(0, [1], isl=512)), "--url", server.url]) == 4
    assert "leave them out of the trace" in capsys.readouterr().err

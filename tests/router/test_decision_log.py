"""Decisions on disk: all that is needed to make them again, bounded, and never in a request's way."""

import asyncio
import json
import math
import os
import random
import re
import stat
import threading

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from router_bench import routed, until
from router_fakes import MODEL, FakeEngine
from router_sims import Sim, generate, prompt_of, routed_sims

from dynctl.cli import explain
from dynctl.cli.options import Output
from dynctl.errors import DynctlError
from dynctl.http1.upstream import Address, Upstream
from dynctl.router.choosing import Load, Need
from dynctl.router.decision_files import DecisionFiles, paths_in
from dynctl.router.decision_log import DecisionLog
from dynctl.router.decisions import Decision
from dynctl.router.desk import load_policy
from dynctl.router.loading import Loadable
from dynctl.router.recorded import RecordError, from_line, to_line
from dynctl.router.server import Entrance
from dynctl.router.sessions import Following
from dynctl.router.transfer_cost import PathCosts
from dynctl.sim.options import MODEL_DIR

NUMBERS = st.floats(0, 1e6)
LOADS = st.lists(
    st.builds(
        Load,
        *(st.just("e"), NUMBERS, NUMBERS, NUMBERS, NUMBERS, NUMBERS),
        st.one_of(NUMBERS, st.just(math.inf)),
        *(
            st.integers(1, 10**6),
            st.integers(0, 99),
            st.integers(0, 10**5),
            NUMBERS,
            NUMBERS,
            NUMBERS,
        ),
    ),
    min_size=1,
    max_size=5,
)


def decision(request_id="r1", **facts):
    loads = [Load("e0", *[0.5] * 5, math.inf, 0, 0, 0, 0.5)]
    known = {
        "request_id": request_id,
        "leg": "whole",
        "is_tokenized": True,
        "need": Need(100, 10, 0, popularity=math.inf),
        "loads": loads,
        "overlaps_tokens": [16],
        "draw": 0.25,
        "position": 0,
        "asked": load_policy("kv"),
        "outcome": "done",
        "unix_s": 1.5,
        "policy": "kv",
    }
    return Decision(**(known | facts))


@given(
    loads=LOADS,
    draw=st.floats(0, 0.999999),
    name=st.sampled_from(("kv", "prefix", "random")),
    data=st.data(),
)
@settings(max_examples=100, deadline=None)
def test_a_decision_read_back_is_the_same_to_the_bit_and_chooses_the_same(loads, draw, name, data):
    loads = [load._replace(engine=f"e{number}") for number, load in enumerate(loads)]
    policy = load_policy(name)
    if data.draw(st.booleans()):
        policy = Following(policy, data.draw(st.sampled_from(["e0", "gone"])))
    need = Need(
        *(1000, 10, 3, data.draw(NUMBERS)),
        is_moved=data.draw(st.booleans()),
        popularity=data.draw(st.one_of(NUMBERS, st.just(math.inf))),
    )
    overlaps = [data.draw(st.integers(0, 999)) for _ in loads]
    position = policy.choose(need, loads, overlaps, draw)
    made = decision(
        need=need,
        loads=loads,
        overlaps_tokens=overlaps,
        draw=draw,
        position=position,
        asked=policy,
        costs=data.draw(st.one_of(st.none(), st.builds(PathCosts, NUMBERS, NUMBERS))),
        link_price=data.draw(st.sampled_from(("", "measured", "learned"))),
        loadable=[Loadable(16, 32, 1.5, 1), *[None] * (len(loads) - 1)],
        ttft_ms=data.draw(st.one_of(st.none(), NUMBERS)),
    )

    read, version = from_line(to_line(made))

    assert version
    assert read.to_json() == made.to_json()
    assert (read.need, read.loads) == (need, loads)
    assert read.recompute() == position


def test_lines_from_before_prices_of_links_were_told_are_read():
    read, _ = from_line(to_line(decision()).replace(b'"link_price":"",', b""))
    assert read.link_price == ""
    assert read.recompute() == 0


@pytest.mark.parametrize(
    "line",
    [
        b"",
        b"{}",
        b"[1]",
        b'{"schema":"dynctl.decision/2"}',
        to_line(decision())[:-30],
        to_line(decision()).replace(b'"position":0', b'"position":7'),
        to_line(decision()).replace(b'"asked":"kv"', b'"asked":"../../kv"'),
        to_line(decision()).replace(b'"active_requests"', b'"something_else"'),
    ],
)
def test_what_is_no_whole_decision_is_refused(line):
    with pytest.raises(RecordError):
        from_line(line)


def test_files_are_begun_anew_by_size_closed_to_others_and_bounded_together(tmp_path):
    log = tmp_path / "deep" / "log"
    first, second = DecisionFiles(str(log), 80_000), DecisionFiles(str(log), 80_000)
    (tmp_path / "deep").mkdir()
    lines = {number: b'{"id":"%d","pad":"%s"}\n' % (number, b"x" * 500) for number in range(600)}
    stay = tmp_path / "deep" / "log" / "mine.txt"
    for number, line in lines.items():
        (first if number % 3 else second).write(line)
        stay.write_text("not ours")
        assert sum(path.stat().st_size for path in paths_in(log)) <= 80_000

    paths = paths_in(log)
    assert 7 <= len(paths) <= 11
    assert {stat.S_IMODE(path.stat().st_mode) for path in paths} == {0o600}
    assert stat.S_IMODE(log.stat().st_mode) == 0o700
    kept = [line for path in paths for line in path.read_bytes().splitlines(keepends=True)]
    assert set(kept) <= set(lines.values())
    assert stay.read_text() == "not ours"
    assert first.find("599", 5) == [lines[599][:-1]]
    assert first.find("3", 5) == [], "the oldest are gone"
    assert second.find("no such", 5) == []


def test_the_file_of_a_process_with_little_to_do_is_not_the_first_to_go(tmp_path):
    """Its name is the oldest, its last line is not."""
    quiet, busy = (DecisionFiles(str(tmp_path), 8_000) for _ in range(2))
    quiet.write(b'{"id":"quiet-0"}\n')
    (own,) = paths_in(tmp_path)
    for number in range(1, 30):
        for part in range(4):
            busy._current = tmp_path / f"decisions-20990101T{number:06}{part:03}-1.jsonl"
            busy._current.touch()
            busy.write(b"x" * 900 + b"\n")
            os.utime(busy._current, (number * 10 + part, number * 10 + part))
        quiet.write(b'{"id":"quiet-%d"}\n' % number)
        os.utime(own, (number * 10 + 5, number * 10 + 5))
    assert quiet.find("quiet-0", 5) == [b'{"id":"quiet-0"}']
    assert quiet.find("quiet-29", 5) == [b'{"id":"quiet-29"}']
    assert 6 <= len(paths_in(tmp_path)) <= 9


def test_lines_that_do_not_fit_leave_no_part_of_them(tmp_path, monkeypatch):
    files = DecisionFiles(str(tmp_path), 1_000_000)
    files.write(b"whole\n")
    write, calls = os.write, []

    def full(descriptor, data):
        calls.append(len(data))
        if len(calls) > 1:
            raise OSError(28, "No space left on device")
        return write(descriptor, data[:3])

    monkeypatch.setattr(os, "write", full)
    with pytest.raises(OSError, match="No space"):
        files.write(b"broken\n")
    monkeypatch.undo()
    (path,) = paths_in(tmp_path)
    assert path.read_bytes() == b"whole\n"
    path.unlink()
    files.write(b"again\n")
    assert [one.read_bytes() for one in paths_in(tmp_path)] == [b"again\n"]


def test_only_files_are_files_of_the_log(tmp_path):
    log, secret = tmp_path / "log", tmp_path / "secret"
    log.mkdir()
    secret.write_text('{"id":"x"}\n')
    (log / "decisions-20260101T000000000-1.jsonl").symlink_to(secret)
    (log / "decisions-20260101T000000001-1.jsonl").mkdir()
    os.mkfifo(log / "decisions-20260101T000000002-1.jsonl")
    files = DecisionFiles(str(log), 100)
    found = []
    reader = threading.Thread(target=lambda: found.append(files.find("x", 5)), daemon=True)
    reader.start()
    reader.join(5)
    assert found == [[]]
    for _ in range(6):
        files.write(b"a" * 40 + b"\n")
    assert secret.read_text() == '{"id":"x"}\n'
    assert len(list(log.iterdir())) == 3 + len(paths_in(log))


def test_a_file_that_cannot_be_removed_does_not_end_the_log_while_others_can(tmp_path, monkeypatch):
    old = tmp_path / "decisions-20260101T000000000-1.jsonl"
    old.write_bytes(b"o" * 300)
    os.utime(old, (1, 1))
    files = DecisionFiles(str(tmp_path), 1000)
    unlink = type(tmp_path).unlink

    def refuse(path, **options):
        if path == old:
            raise PermissionError(1, "Operation not permitted")
        unlink(path, **options)

    monkeypatch.setattr(type(tmp_path), "unlink", refuse)
    for number in range(30):
        files._current = None
        monkeypatch.setattr(os, "getpid", lambda number=number: 100 + number)
        files.write(b"%d" % (10 + number) + b"x" * 90 + b"\n")
        assert sum(path.stat().st_size for path in paths_in(tmp_path)) <= 1000
    assert old in paths_in(tmp_path)
    old.write_bytes(b"o" * 999)
    files._current = None
    with pytest.raises(OSError, match="not permitted"):
        files.write(b"there is no room for this\n")


def test_every_so_manieth_request_is_kept_with_all_its_decisions_once_it_has_ended(tmp_path):
    async def main():
        log = DecisionLog(str(tmp_path), 10, 10_000_000)
        running = decision("last", outcome="")
        for number in range(2000):
            for leg in ("decode", "prefill"):
                log.add(decision(f"r{number}", leg=leg))
        log._waiting.append(running)
        await log.flush()
        read = [
            from_line(line)[0]
            for path in paths_in(tmp_path)
            for line in path.read_bytes().splitlines()
        ]
        legs = {}
        for one in read:
            legs.setdefault(one.request_id, []).append(one.leg)
        assert 140 <= len(legs) <= 260
        assert all(found == ["decode", "prefill"] for found in legs.values())
        assert log.num_written == len(read)
        running.outcome = "done"
        await log.close()
        await log.close()
        assert log.num_written == len(read) + 1
        assert await log.find("last") == []

    asyncio.run(main())


def test_a_log_that_cannot_be_written_is_a_finding_until_it_can(tmp_path, caplog):
    async def main():
        (tmp_path / "log").write_text("in the way")
        log = DecisionLog(str(tmp_path / "log"), 1, 10_000_000)
        for number in range(3):
            log.add(decision(f"r{number}"))
            await log.flush()
        assert (log.num_lost, log.num_written) == (3, 0)
        (finding,) = log.findings()
        assert (finding.engine, finding.cause) == ("", "decision_log")
        assert "File exists" in finding.text
        assert "3 are lost" in finding.text
        assert caplog.text.count("cannot be written: File exists") == 1
        (tmp_path / "log").unlink()
        log.add(decision("r3"))
        await log.flush()
        assert len(log.findings()) == 1, "a few lines fit on a full disk now and then"
        for number in range(19):
            log.add(decision(f"more-{number}"))
            await log.flush()
        assert (log.findings(), log.num_written, log.num_lost) == ([], 20, 3)
        assert [one.request_id for one, _ in await log.find("r3")] == ["r3"]
        await log.close()

    asyncio.run(main())


def test_a_fault_is_over_on_a_quiet_router_a_minute_after_it_if_one_write_worked(tmp_path):
    async def main():
        now_s = [0.0]
        (tmp_path / "log").write_text("in the way")
        log = DecisionLog(str(tmp_path / "log"), 1, 10_000_000, now_s=lambda: now_s[0])
        log.add(decision("lost"))
        await log.flush()
        now_s[0] = 100.0
        assert log.findings(), "nothing shows that it is over"
        (tmp_path / "log").unlink()
        log._failed_s = 100.0
        log.add(decision("written"))
        await log.flush()
        now_s[0] = 159.0
        assert log.findings()
        now_s[0] = 160.0
        assert log.findings() == []
        await log.close()

    asyncio.run(main())


async def caught_writing(tmp_path, num_turns):
    """A log of a thousand decisions, so many turns of the loop after it began to write them."""
    log = DecisionLog(str(tmp_path), 1, 10_000_000)
    for number in range(1000):
        log.add(decision(f"r{number}"))
    writing = asyncio.create_task(log.flush())
    for _ in range(num_turns):
        await asyncio.sleep(0)
    return log, writing


@pytest.mark.parametrize("num_turns", [1, 7, 13, 19, 25, 31, 60, 130])
def test_a_log_closed_while_it_writes_loses_nothing(tmp_path, num_turns):
    async def main():
        log, writing = await caught_writing(tmp_path, num_turns)
        await log.close()
        await writing
        assert (log.num_written, log.num_lost) == (1000, 0)
        written = b"".join(path.read_bytes() for path in paths_in(tmp_path))
        assert written.count(b"\n") == 1000

    asyncio.run(main())


@pytest.mark.parametrize("num_turns", [1, 7, 25, 130])
def test_a_log_whose_writer_is_cancelled_writes_the_rest_when_it_is_closed(tmp_path, num_turns):
    async def main():
        log, writing = await caught_writing(tmp_path, num_turns)
        writing.cancel()
        with pytest.raises(asyncio.CancelledError):
            await writing
        await log.close()
        assert (log.num_written, log.num_lost) == (1000, 0)

    asyncio.run(main())


def test_a_disk_that_hangs_does_not_hold_the_end_up_and_what_is_lost_is_counted(
    tmp_path, monkeypatch, caplog
):
    monkeypatch.setattr("dynctl.router.decision_log._CLOSE_S", 0.05)
    monkeypatch.setattr("dynctl.router.decision_log._FIND_S", 0.05)
    hangs, goes_on = threading.Event(), threading.Event()

    def hang(_files, _lines):
        hangs.set()
        goes_on.wait(60)

    monkeypatch.setattr(DecisionFiles, "write", hang)

    async def main():
        log = DecisionLog(str(tmp_path), 1, 10_000_000)
        for number in range(200):
            log.add(decision(f"r{number}"))
        writing = asyncio.create_task(log.flush())
        await asyncio.to_thread(hangs.wait, 60)
        assert await log.find("r1") == []
        log.add(decision("late"))
        await log.close()
        assert (log.num_written, log.num_lost) == (0, 201)
        assert "the last 201 decisions may not be in the log" in caplog.text
        log.add(decision("too late"))
        assert log.num_lost == 202
        with pytest.raises(asyncio.CancelledError):
            await writing
        (thread,) = [one for one in threading.enumerate() if one.name == "decisions"]
        assert thread.daemon, "the interpreter would wait for it"
        goes_on.set()
        await asyncio.to_thread(thread.join, 60)

    asyncio.run(main())


def test_a_disk_that_hangs_is_a_finding_before_anything_is_lost_and_until_it_answers(
    tmp_path, monkeypatch
):
    hangs, goes_on = threading.Event(), threading.Event()
    write = DecisionFiles.write

    def hang(files, lines):
        hangs.set()
        goes_on.wait(60)
        write(files, lines)

    monkeypatch.setattr(DecisionFiles, "write", hang)

    async def main():
        now_s = [100.0]
        log = DecisionLog(str(tmp_path), 1, 10_000_000, now_s=lambda: now_s[0])
        log.add(decision("hangs"))
        writing = asyncio.create_task(log.flush())
        await asyncio.to_thread(hangs.wait, 60)
        now_s[0] = 104.0
        assert log.findings() == []
        log.add(decision("waits"))
        now_s[0] = 112.0
        (finding,) = log.findings()
        assert (finding.engine, finding.cause) == ("", "decision_log_lost")
        assert finding.text == (
            f"a write to {tmp_path} has not ended for 12 s; 1 decisions wait for it, 0 are lost"
        )
        assert "dmesg" in finding.hint
        goes_on.set()
        await writing
        assert log.findings() == []
        await log.close()
        assert (log.num_written, log.num_lost) == (2, 0)

    asyncio.run(main())


def test_gaps_are_a_finding_for_a_minute_though_no_write_failed(tmp_path, monkeypatch, caplog):
    monkeypatch.setattr("dynctl.router.decision_log._MAX_WAITING", 2)

    async def main():
        now_s = [100.0]
        log = DecisionLog(str(tmp_path), 1, 10_000_000, now_s=lambda: now_s[0])
        for number in range(5):
            log.add(decision(f"r{number}", outcome=""))
        (finding,) = log.findings()
        assert (finding.engine, finding.cause) == ("", "decision_log_lost")
        assert finding.text == (
            f"decisions are missing in {tmp_path}, 3 so far: 2 wait, and no more are kept"
        )
        assert "decision_log_every" in finding.hint
        assert caplog.text.count("decisions are missing in the decision log: 2 wait") == 1
        now_s[0] = 160.0
        assert log.findings() == []
        await log.close()

    asyncio.run(main())


def test_of_short_requests_that_were_answered_few_are_written_and_all_that_went_wrong(tmp_path):
    async def main():
        log = DecisionLog(str(tmp_path), 2, 10_000_000, short_every=16)
        for number in range(4000):
            log.add(decision(f"r{number}", policy="short"))
            log.add(decision(f"f{number}", policy="short", outcome="failed"))
            log.add(decision(f"k{number}"))
        await log.close()
        read = [
            from_line(line)[0].request_id
            for path in paths_in(tmp_path)
            for line in path.read_bytes().splitlines()
        ]
        num = {kind: sum(name.startswith(kind) for name in read) for kind in "rfk"}
        assert 80 <= num["r"] <= 180
        assert min(num["f"], num["k"]) >= 1800
        assert log.num_lost == 0
        none = DecisionLog(str(tmp_path), 1, 10_000_000, short_every=0)
        none.add(decision("r", policy="short"))
        none.add(decision("w", policy="short", outcome=""))
        await none.close()
        assert none.num_written == 1

    asyncio.run(main())


def test_explain_finds_on_disk_what_the_ring_has_forgotten(run, short_dir, capsys):
    async def main():
        folder = short_dir / "log"
        sims = [Sim("e0", short_dir), Sim("e1", short_dir)]
        async with routed_sims(*sims, settings={"decisions": 2}, decision_log=str(folder)) as bench:
            entrance = Entrance(bench.desk)
            await entrance.open_admin(f"{short_dir}/admin.sock")
            rng = random.Random(1)
            for number in range(6):
                body = {
                    "model": "sim",
                    "prompt": "secret words of the client " * 40,
                    "max_tokens": 4,
                }
                answer = await bench.client.post(
                    "/v1/completions",
                    body,
                    x_request_id=f"mine-{number}",
                    x_dynctl_session="whose-session",
                )
                assert answer.status == 200
                await generate(bench, prompt_of(rng, bench.text.words, 40), 2)
            log = bench.desk.decision_log
            await until(lambda: log.num_written == 12)
            found = await asked(short_dir / "admin.sock", "/decisions?request=mine-0")
            assert [one["shown_id"] for one in found] == ["mine-0"]
            assert found[0]["is_reproduced"]
            assert found[0]["version"]
            assert found[0]["cached_tokens"] == 0
            assert await asked(short_dir / "admin.sock", "/decisions?request=nobody") == []
            remembered = await asked(short_dir / "admin.sock", "/decisions?request=mine-5")
            assert "version" not in remembered[0]
            counted = bench.desk.exposition().decode()
            assert 'dynctl_router_logged_decisions_total{result="written"} 12' in counted
            await entrance.close(0.0)
        text = b"".join(path.read_bytes() for path in paths_in(folder))
        assert b"secret words" not in text
        assert b"whose-session" not in text

        explain.command("mine-3", recorded=folder)
        shown = capsys.readouterr()
        assert "mine-3: prefill and decode on e" in shown.out
        assert "the recorded inputs give the same engine" in shown.out
        (path,) = paths_in(folder)
        path.write_bytes(path.read_bytes() + b'{"cut off')
        explain.command("last", recorded=path, output=Output.JSON)
        shown = capsys.readouterr()
        (last,) = json.loads(shown.out)["decisions"]
        assert last["is_reproduced"]
        assert "1 of 13 lines" in shown.err
        with pytest.raises(DynctlError, match="holds no decision of request nobody"):
            explain.command("nobody", recorded=folder)
        with pytest.raises(DynctlError, match="cannot read"):
            explain.command("last", recorded=folder / "nothing")
        with pytest.raises(DynctlError, match="no hit rates"):
            explain.command("hits", recorded=folder)

    run(main)


async def asked(path, target):
    upstream = Upstream(Address(path=str(path)))
    try:
        answer = await upstream.fetch("GET", target)
    finally:
        await upstream.close()
    assert answer.status == 200
    return json.loads(answer.body)


def test_short_requests_are_written_if_asked_and_what_runs_is_when_the_router_stops(run, tmp_path):
    async def main():
        engine = FakeEngine()
        options = {"tokenizer": str(MODEL_DIR), "decision_log": str(tmp_path)}
        every = {"decision_log_short_every": 1}
        async with routed(engine, settings=every, **options) as bench:
            assert (await bench.client.complete()).status == 200
            engine.go.clear()
            waiting = asyncio.create_task(bench.client.complete(model=MODEL, prompt="x " * 400))
            await until(lambda: engine.num_running)
            await bench.router.desk.close(0.0)
            assert (await waiting).status == 503
        read = [
            from_line(line)[0]
            for path in paths_in(tmp_path)
            for line in path.read_bytes().splitlines()
        ]
        assert [one.policy for one in read] == ["short", "kv"]
        assert [bool(one.outcome) for one in read] == [True, True]
        assert read[0].recompute() == read[0].position

    run(main)


def test_without_a_directory_or_with_none_of_the_requests_nothing_is_opened(run, tmp_path):
    async def main():
        async with routed(FakeEngine()) as bench:
            assert bench.desk.decision_log is None
            assert not re.search("logged_decisions", bench.desk.exposition().decode())
        settings_ = {"decision_log_every": 0}
        async with routed(FakeEngine(), settings=settings_, decision_log=str(tmp_path)) as bench:
            assert bench.desk.decision_log is None

    run(main)

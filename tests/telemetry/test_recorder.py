"""Writing recordings: bounds, what ends them, and what is asked beside snapshots."""

import asyncio
import contextlib
import gzip
import resource
import stat

import pytest

from dynctl.errors import UsageError
from dynctl.telemetry.answers import Answers
from dynctl.telemetry.recorder import Recorded, Recorder
from dynctl.telemetry.recording import MAX_LINES
from dynctl.telemetry.tape import Tape
from dynctl.telemetry.traces import Told


def lines(path):
    data = path.read_bytes()
    data = gzip.decompress(data) if data[:2] == b"\x1f\x8b" else data
    return data.splitlines()


def test_a_recording_is_a_header_and_a_line_for_every_snapshot(record, snapshot):
    path = record([snapshot(tick) for tick in range(1, 6)])

    assert len(lines(path)) == 6
    assert lines(path)[0].startswith(b'{"schema":"dynctl.recording/1"')
    assert stat.S_IMODE(path.stat().st_mode) == 0o600


def test_a_name_that_ends_in_gz_is_compressed_and_holds_the_same(record, snapshot):
    taken = [snapshot(tick) for tick in range(1, 60)]
    packed, plain = record(taken, "a.jsonl.gz"), record(taken, "b.jsonl")

    assert lines(packed)[1:] == lines(plain)[1:]
    assert packed.stat().st_size < plain.stat().st_size / 5


@pytest.mark.parametrize("name", ["r.jsonl", "r.jsonl.gz"])
def test_two_parts_are_never_larger_than_the_limit_and_hold_the_newest(record, snapshot, name):
    limit_bytes = 100_000 if name.endswith("l") else 10_000
    path = record([snapshot(tick) for tick in range(1, 500)], name, limit_bytes)
    older = path.with_name(f"{name}.1")

    assert path.stat().st_size + older.stat().st_size <= limit_bytes
    assert sorted(p.name for p in path.parent.iterdir()) == [name, f"{name}.1"]
    with Tape(path) as tape:
        assert len(tape.snapshots) == len(lines(path)) + len(lines(older)) - 2
        last = tape.entry(tape.snapshots[-1])
    assert last.snapshot.taken_unix_s == 1.7e9 + 499


@pytest.mark.parametrize(("name", "most"), [("MAX_LINES", 20), ("MAX_PART_BYTES", 20_000)])
def test_no_part_grows_beyond_what_is_read_again(record, snapshot, monkeypatch, name, most):
    monkeypatch.setattr(f"dynctl.telemetry.recorder.{name}", most)
    monkeypatch.setattr(f"dynctl.telemetry.tape.{name}", most)
    path = record([snapshot(tick) for tick in range(1, 101)])

    with Tape(path) as tape:
        assert tape.header.part > 2
        assert tape.entry(tape.snapshots[-1]).snapshot.taken_unix_s == 1.7e9 + 100


def test_a_line_for_which_the_limit_is_too_small_ends_the_recording(tmp_path, snapshot):
    path = tmp_path / "r.jsonl"
    with Recorder(path, 1000, "c", {}) as recorder:
        recorder.take(snapshot(1))

    assert recorder.failure.startswith("a line of ")
    assert path.stat().st_size <= 500


def test_nothing_is_overwritten(record, snapshot):
    path = record([snapshot(1)])

    with pytest.raises(UsageError, match=r"rec\.jsonl exists"):
        Recorder(path, 1000, "c", {})
    path.rename(path.with_name("rec.jsonl.1"))
    with pytest.raises(UsageError, match=r"rec\.jsonl\.1 exists"):
        Recorder(path, 1000, "c", {})


def test_a_place_that_cannot_be_written_is_told_at_once(tmp_path):
    with pytest.raises(UsageError, match="No such file or directory"):
        Recorder(tmp_path / "missing" / "r.jsonl", 1000, "c", {})


@pytest.mark.parametrize("name", ["r.jsonl", "r.jsonl.gz"])
def test_a_disk_that_fails_ends_the_recording_and_not_the_watch(tmp_path, snapshot, name):
    recorder = Recorder(tmp_path / name, 10_000, "c", {})
    # The next part cannot be begun where the directory is gone.
    recorder.take(snapshot(1))
    (tmp_path / name).unlink()
    for tick in range(2, 2000):
        recorder.take(snapshot(tick))

    assert recorder.failure == "No such file or directory"
    assert 0 < recorder.num_snapshots < 1999
    recorder.close()


@contextlib.contextmanager
def full_disk():
    """No file can hold anything."""
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (10, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)


@pytest.mark.parametrize("name", ["r.jsonl", "r.jsonl.gz"])
def test_on_a_full_disk_no_recording_is_begun_and_none_is_left(tmp_path, name):
    with full_disk(), pytest.raises(UsageError, match=r"cannot record to .*: File too large"):
        Recorder(tmp_path / name, 10_000, "c", {})

    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("name", ["r.jsonl", "r.jsonl.gz"])
def test_what_was_recorded_keeps_its_name_where_no_part_can_follow(tmp_path, snapshot, name):
    path = tmp_path / name
    with Recorder(path, 10_000, "c", {}) as recorder:
        recorder.take(snapshot(1))
        # So that the next line begins a part.
        recorder._num_lines = MAX_LINES
        with full_disk():
            recorder.take(snapshot(2))

        assert recorder.failure == "File too large"
    assert list(tmp_path.iterdir()) == [path]
    with Tape(path) as tape:
        assert len(tape.snapshots) == 1


class Watched:
    """Ten snapshots, and answers that count how often they were asked."""

    def __init__(self, snapshot, may_go_on):
        self.snapshot, self.may_go_on, self.asked = snapshot, may_go_on, []

    async def __aiter__(self):
        for tick in range(1, 11):
            yield self.snapshot(tick)
        await self.may_go_on.wait()

    async def answer(self, asks):
        self.asked.append(asks)
        if len(self.asked) == 2:
            self.may_go_on.set()
        return Answers((Told("r", "whole", "chat-0", 1.7e9),), {"r": {"requests": 3.0}})


def test_decisions_and_hits_are_asked_for_and_recorded_whichever_screen_is_shown(
    tmp_path, snapshot
):
    path = tmp_path / "r.jsonl"

    async def main():
        with Recorder(path, 2**20, "c", {}) as recorder:
            watched = Watched(snapshot, asyncio.Event())
            async with Recorded(watched, recorder, ask_period_s=0.01) as recorded:
                seen = [one async for one in recorded]
            return seen, watched.asked

    seen, asked = asyncio.run(main())

    assert seen == [snapshot(tick) for tick in range(1, 11)]
    assert asked[0].num_decisions == 60
    assert asked[0].hits
    assert asked[0].logs == ()
    with Tape(path) as tape:
        entries = [tape.entry(number) for number in range(len(tape.times_s))]
    assert [e.snapshot.taken_unix_s for e in entries if e.snapshot] == [
        1.7e9 + tick for tick in range(1, 11)
    ]
    assert {e.asked.decisions[0].engine for e in entries if e.asked} == {"chat-0"}
    assert {e.asked.hits["r"]["requests"] for e in entries if e.asked} == {3.0}


def test_a_recording_that_holds_nothing_leaves_no_file(tmp_path):
    path = tmp_path / "r.jsonl"
    with Recorder(path, 1000, "c", {}) as recorder:
        recorder.take_answers(Answers())

    assert not path.exists()
    recorder.close()
    path.touch()
    recorder.close()
    assert path.exists()

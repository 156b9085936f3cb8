"""Opening recordings, whole, cut and damaged."""

import gzip
import os

import pytest

from dynctl.errors import UsageError
from dynctl.telemetry import recording, tape
from dynctl.telemetry.tape import Tape

NAMES = ("r.jsonl", "r.jsonl.gz")


@pytest.mark.parametrize("name", NAMES)
def test_any_entry_is_read_in_any_order(record, snapshot, name):
    path = record([snapshot(tick) for tick in range(1, 101)], name)

    with Tape(path) as found:
        assert not found.is_cut
        assert list(found.times_s) == [float(at) for at in range(100)]
        for number in (99, 0, 50, 51, 3):
            assert found.entry(number).snapshot == snapshot(number + 1)


def test_the_content_says_whether_it_is_compressed(record, snapshot):
    path = record([snapshot(1)], "r.jsonl.gz")
    other = path.with_name("no-suffix")
    path.rename(other)

    with Tape(other) as found:
        assert found.entry(0).snapshot == snapshot(1)


def test_places_are_found_by_time(record, snapshot):
    with Tape(record([snapshot(tick) for tick in range(1, 11)], step_s=2.0)) as found:
        assert [found.first_from(at_s) for at_s in (-5.0, 0.0, 0.1, 2.0, 17.9, 18.0, 1e9)] == [
            0, 0, 1, 1, 9, 9, 9,
        ]  # fmt: skip


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("missing_bytes", [1, 20, 200])
def test_what_was_written_before_a_kill_can_be_read(record, snapshot, name, missing_bytes):
    path = record([snapshot(tick) for tick in range(1, 101)], name)
    os.truncate(path, path.stat().st_size - missing_bytes)

    with Tape(path) as found:
        assert found.is_cut
        # Compressed, a line takes few bytes, and the end of the file some of its own.
        assert 90 <= len(found.snapshots) <= 100
        assert found.entry(89).snapshot == snapshot(90)


def test_a_part_of_another_recording_is_left_alone(record, snapshot):
    newest = record([snapshot(tick) for tick in range(1, 500)], limit_bytes=100_000)
    other = record([snapshot(1), snapshot(2)], "other.jsonl")
    older = newest.with_name("rec.jsonl.1")
    with Tape(newest) as found:
        num_of_both = len(found.snapshots)
    older.unlink()
    other.rename(older)

    with Tape(newest) as found:
        assert 0 < len(found.snapshots) < num_of_both


def edited(path, number, change):
    lines = path.read_bytes().splitlines(keepends=True)
    lines[number - 1] = change(lines[number - 1])
    path.write_bytes(b"".join(lines))


@pytest.mark.parametrize(
    ("number", "change", "why"),
    [
        (1, lambda line: b"{}\n", "schema"),
        (1, lambda line: line.replace(b"recording/1", b"recording/9"), "recording/9"),
        (3, lambda line: b"\n", "truncated"),
        (3, lambda line: line[:-10] + b"\n", "malformed"),
        (4, lambda line: line.replace(b'"at_s":2.0', b'"at_s":0.5'), "older than the line before"),
        (4, lambda line: line.replace(b'"at_s":2.0', b'"at_s":NaN'), ""),
        (5, lambda line: b'{"at_s":3.0}\n', "neither"),
        (2, lambda line: b"\x00" * 100 + b"\n", ""),
    ],
)
def test_damaged_lines_are_refused_with_their_number(record, snapshot, number, change, why):
    path = record([snapshot(tick) for tick in range(1, 6)])
    edited(path, number, change)

    with pytest.raises(UsageError, match=rf"rec\.jsonl:{number}: this line .*{why}") as found:
        Tape(path)
    assert found.value.hint


def test_what_is_wrong_inside_a_line_is_told_with_its_number_when_it_is_read(record, snapshot):
    path = record([snapshot(tick) for tick in range(1, 6)])
    edited(path, 4, lambda line: line.replace(b'"host_name":"gpu-01"', b'"host_name":7'))

    with Tape(path) as found, pytest.raises(UsageError, match=r"rec\.jsonl:4: .*host"):
        found.entry(2)


def test_lines_without_end_are_not_read_whole(record, snapshot, monkeypatch):
    path = record([snapshot(1), snapshot(2)])
    for module in (tape, recording):
        monkeypatch.setattr(module, "MAX_LINE_BYTES", 100)

    with pytest.raises(UsageError, match=r"rec\.jsonl:1:"):
        Tape(path)


def test_what_unpacks_to_more_than_a_recording_is_refused(tmp_path, record, snapshot, monkeypatch):
    path = record([snapshot(tick) for tick in range(1, 100)], "r.jsonl.gz")
    monkeypatch.setattr(tape, "MAX_PART_BYTES", 20_000)

    with pytest.raises(UsageError, match=r"r\.jsonl\.gz:\d+: .*more of it"):
        Tape(path)
    bomb = tmp_path / "bomb.gz"
    bomb.write_bytes(gzip.compress(b" " * (64 * 2**20)))
    with pytest.raises(UsageError, match=r"bomb\.gz:1:"):
        Tape(bomb)


def test_damaged_compressed_data_are_refused(record, snapshot):
    path = record([snapshot(tick) for tick in range(1, 200)], "r.jsonl.gz")
    data = bytearray(path.read_bytes())
    middle = len(data) // 2
    data[middle : middle + 50] = b"\xff" * 50
    path.write_bytes(data)

    with pytest.raises(UsageError, match=r"r\.jsonl\.gz:\d+: "):
        Tape(path)


def test_what_is_no_file_or_empty_is_refused(tmp_path, record, snapshot):
    headless = record([snapshot(1)])
    headless.write_bytes(headless.read_bytes().splitlines(keepends=True)[0])
    fifo, empty, cut = tmp_path / "fifo", tmp_path / "empty", tmp_path / "cut.gz"
    os.mkfifo(fifo)
    empty.write_bytes(b"")
    cut.write_bytes(gzip.compress(b"x" * 1000)[:12])

    for path, why in (
        (tmp_path / "missing", "No such file"),
        (tmp_path, "is no file"),
        (fifo, "is no file"),
        (empty, "empty:1:"),
        (cut, "cut.gz:1:"),
        (headless, "holds no snapshot"),
    ):
        with pytest.raises(UsageError, match=why):
            Tape(path)

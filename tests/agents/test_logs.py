"""Log files: bounded, read from the end."""

import pytest

from dynctl.agents.host.logs import LogFile, LogLimits


@pytest.fixture
def log(tmp_path):
    return LogFile(tmp_path / "e0.log", LogLimits(max_bytes=1000))


def write(log, text):
    with log.path.open("ab") as file:
        file.write(text)


def test_last_lines_of_this_start_leave_earlier_ones_out(log):
    write(log, b"old 1\nold 2\n")
    log.mark_start("--- start")
    write(log, b"new 1\nnew 2\n")

    assert log.last_lines(10, this_start=True) == ["new 1", "new 2"]
    assert log.last_lines(3) == ["--- start", "new 1", "new 2"]
    assert log.last_lines(0) == []


def test_rotation_keeps_the_tail_and_writers_go_on(log):
    with log.path.open("ab", buffering=0) as writer:
        for number in range(300):
            writer.write(b"line %d\n" % number)
        assert log.is_too_large
        log.rotate()
        writer.write(b"after\n")

    assert log.size_bytes() == len(b"after\n")
    lines = log.last_lines(4)
    assert lines == ["line 297", "line 298", "line 299", "after"]
    assert log.path.with_name("e0.log.1").stat().st_size <= 1000 + 64 * 1024


def test_follower_starts_over_after_a_cut(log):
    write(log, b"x" * 2000)
    _, offset = log.read_from(0)
    log.rotate()
    write(log, b"fresh\n")

    assert log.read_from(offset)[0] == b"fresh\n"


def test_many_lines_are_read_without_reading_the_whole_file(log):
    write(log, b"".join(b"%06d\n" % n for n in range(50_000)))

    assert log.last_lines(2) == ["049998", "049999"]
    assert len(log.last_lines(20_000)) == 20_000


def test_absent_file_is_empty(log):
    assert log.last_lines(5) == []
    assert log.read_from(7) == (b"", 0)
    assert not log.is_too_large


def test_foreign_bytes_do_not_stop_a_reader(log):
    write(log, b"\xff\xfe caf\xc3\xa9\n")

    assert log.last_lines(1) == ["\ufffd\ufffd café"]

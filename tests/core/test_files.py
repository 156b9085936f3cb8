"""Files are replaced whole, those of an operator stay his; directories are tried before they are needed."""

import errno
import os
import stat

import pytest

from dynctl import files
from dynctl.files import make_writable, rewrite, write_atomic


def mode_of(path):
    return stat.S_IMODE(path.stat().st_mode)


def test_a_file_is_replaced_with_the_mode_that_is_asked_for(tmp_path):
    path = tmp_path / "new" / "one"
    write_atomic(path, b"1")
    path.chmod(0o644)
    write_atomic(path, b"2")

    assert (path.read_bytes(), mode_of(path)) == (b"2", 0o600)
    assert [one.name for one in path.parent.iterdir()] == ["one"]


@pytest.mark.parametrize("mode", [0o600, 0o664])
def test_who_may_read_a_file_of_the_operators_stays(tmp_path, mode):
    path = tmp_path / "plan.yaml"
    rewrite(path, b"1")
    path.chmod(mode)
    rewrite(path, b"2")

    assert (path.read_bytes(), mode_of(path)) == (b"2", mode)


@pytest.mark.skipif(os.geteuid() != 0, reason="only root may give files away")
def test_root_leaves_a_file_to_whom_it_belongs(tmp_path):
    path = tmp_path / "plan.yaml"
    rewrite(path, b"1")
    os.chown(path, 1234, 2345)
    rewrite(path, b"2")

    assert (path.read_bytes(), path.stat().st_uid, path.stat().st_gid) == (b"2", 1234, 2345)


def test_a_link_of_the_operators_is_followed(tmp_path):
    real, link, loose = tmp_path / "real", tmp_path / "link", tmp_path / "loose"
    real.write_bytes(b"1")
    link.symlink_to("real")
    loose.symlink_to("later")
    rewrite(link, b"2")
    rewrite(loose, b"3")

    assert (real.read_bytes(), (tmp_path / "later").read_bytes()) == (b"2", b"3")
    assert link.is_symlink()
    assert loose.is_symlink()


def test_what_cannot_be_replaced_names_the_file_that_was_meant(tmp_path):
    (tmp_path / "file").write_bytes(b"")
    for replace in (write_atomic, rewrite):
        with pytest.raises(NotADirectoryError) as caught:
            replace(tmp_path / "file" / "one", b"")
        assert caught.value.filename == str(tmp_path / "file" / "one")


@pytest.mark.parametrize("replace", [write_atomic, rewrite])
def test_nothing_is_written_through_a_link_that_lies_in_wait(tmp_path, replace):
    (tmp_path / "others").write_bytes(b"theirs")
    (tmp_path / f".one.{os.getpid()}.tmp").symlink_to("others")

    with pytest.raises(OSError, match="one"):
        replace(tmp_path / "one", b"ours")

    assert (tmp_path / "others").read_bytes() == b"theirs"


def test_a_directory_is_made_and_left_empty(tmp_path):
    place = tmp_path / "a" / "b"
    make_writable(place, 0o700)
    make_writable(place, 0o755)

    assert (list(place.iterdir()), mode_of(place)) == ([], 0o700)


def test_a_full_disk_is_noticed_though_a_name_can_still_be_made(tmp_path, monkeypatch):
    def full(*_):
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(files.os, "write", full)
    with pytest.raises(OSError, match="No space left"):
        make_writable(tmp_path)
    assert list(tmp_path.iterdir()) == []

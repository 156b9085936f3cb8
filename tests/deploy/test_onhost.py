"""The on-host programs, run the way hosts run them: source on stdin, JSON in argv."""

import gzip
import io
import json
import os
import socket
import subprocess
import sys
import tarfile
import time
from pathlib import Path

import msgspec
import pytest

from dynctl.deploy.onhost import lock, program
from dynctl.deploy.onhost.launch import is_alive


def call(name, **wish):
    command = program(name, sys.executable, msgspec.json.encode(wish), 60)
    done = subprocess.run(
        command.argv, input=command.stdin, capture_output=True, timeout=120, check=True
    )
    return json.loads(done.stdout)


def preflight(root, **wish):
    return call(
        "preflight", root=str(root), **{"needed_bytes": 0, "ports": [], "paths": [], **wish}
    )


def test_preflight_finds_nothing_wrong_on_a_good_host(tmp_path):
    assert (
        preflight(
            tmp_path / "new",
            needed_bytes=1024,
            ports=[["127.0.0.1", 0]],
            paths=[[sys.executable, "x"]],
        )
        == []
    )


def test_preflight_names_the_process_that_has_the_port(tmp_path):
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
        [problem] = preflight(tmp_path, ports=[["127.0.0.1", port]])

    assert problem["code"] == "port-in-use"
    assert f"port {port} on 127.0.0.1 is in use by pid {os.getpid()} (" in problem["text"]


def test_preflight_refuses_an_address_that_is_not_the_hosts(tmp_path):
    [problem] = preflight(tmp_path, ports=[["192.0.2.1", 18800]])

    assert problem["code"] == "address-unknown"


def test_preflight_reports_a_full_disk_and_a_missing_model(tmp_path):
    problems = preflight(
        tmp_path, needed_bytes=2**60, paths=[["/nowhere/config.json", "the model's"]]
    )

    assert [p["code"] for p in problems] == ["disk-full", "path-missing"]
    assert "the model's /nowhere/config.json does not exist" in problems[1]["text"]


def archive(root, digest, files):
    incoming = root / "incoming"
    incoming.mkdir(parents=True, exist_ok=True)
    raw = io.BytesIO()
    with (
        gzip.GzipFile(fileobj=raw, mode="wb") as packed,
        tarfile.open(fileobj=packed, mode="w") as tar,
    ):
        for name, content in files.items():
            entry = tarfile.TarInfo(name)
            entry.size = len(content)
            tar.addfile(entry, io.BytesIO(content))
    (incoming / f"{digest}.tar.gz").write_bytes(raw.getvalue())


def test_install_unpacks_beside_the_others_and_keeps_the_last_three(tmp_path):
    for number in range(5):
        archive(tmp_path, f"d{number}", {"dynctl/x.py": b"x = 1"})
        call("install", root=str(tmp_path), digest=f"d{number}")
        os.utime(tmp_path / "bundles" / f"d{number}", (number, number))

    assert sorted(p.name for p in (tmp_path / "bundles").iterdir()) == ["d2", "d3", "d4"]
    assert (tmp_path / "bundles/d4/dynctl/x.py").read_bytes() == b"x = 1"
    assert list((tmp_path / "incoming").iterdir()) == []


def test_install_keeps_what_a_process_still_imports_from(tmp_path, until):
    old = tmp_path / "bundles" / "d-old"
    old.mkdir(parents=True)
    os.utime(old, (1, 1))
    with subprocess.Popen(
        ["sleep", "600"], env={"PYTHONPATH": str(old), "PATH": os.environ["PATH"]}
    ) as user:
        try:
            until(Path(f"/proc/{user.pid}/environ").read_bytes, "its environment is shown")
            for number in range(4):
                archive(tmp_path, f"d{number}", {"x": b"x"})
                call("install", root=str(tmp_path), digest=f"d{number}")
            assert old.is_dir()
        finally:
            user.kill()
    archive(tmp_path, "d4", {"x": b"x"})
    call("install", root=str(tmp_path), digest="d4")

    assert not old.exists()


def test_install_refuses_members_that_leave_the_directory(tmp_path):
    archive(tmp_path, "evil", {"../../outside.py": b"x"})

    answer = call("install", root=str(tmp_path), digest="evil")

    assert "unsafe member" in answer["error"]
    assert not (tmp_path.parent / "outside.py").exists()
    assert not (tmp_path / "bundles" / "evil").exists()


def owner(token):
    return {
        "token": token,
        "user": "ana",
        "machine": "laptop",
        "pid": "7",
        "operation": "dynctl up",
    }


def test_a_directory_that_was_made_for_the_lock_alone_goes_with_it(tmp_path):
    root = tmp_path / "root" / "c"
    call("lock", root=str(root), action="take", owner=owner("t1"))
    assert (root / ".dynctl-root").exists()

    assert call("lock", root=str(root), action="release", owner=owner("t2")) == {"lost": True}
    assert call("lock", root=str(root), action="release", owner=owner("t1")) == {"ok": True}
    assert not root.exists()


def test_a_directory_that_is_not_ours_is_not_made_ours_by_a_lock(tmp_path):
    (tmp_path / "thesis.txt").write_text("x")
    call("lock", root=str(tmp_path), action="take", owner=owner("t1"))
    call("lock", root=str(tmp_path), action="release", owner=owner("t1"))

    assert sorted(path.name for path in tmp_path.iterdir()) == ["fence", "thesis.txt"]


def test_lock_is_held_by_one_and_its_fence_grows(tmp_path):
    (tmp_path / "launch.json").write_text("{}")
    first = call("lock", root=str(tmp_path), action="take", owner=owner("t1"))
    second = call("lock", root=str(tmp_path), action="take", owner=owner("t2"))
    call("lock", root=str(tmp_path), action="release", owner=owner("t1"))
    third = call("lock", root=str(tmp_path), action="take", owner=owner("t3"))

    assert first == {"fence": 1}
    assert second["held_by"]["user"] == "ana"
    assert third == {"fence": 2}


@pytest.mark.parametrize("counted", ["", "\0", "12x"])
def test_a_count_that_cannot_be_read_is_begun_again_above_what_the_agent_was_sent(
    tmp_path, counted
):
    (tmp_path / "launch.json").write_text("{}")
    (tmp_path / "fence").write_text(counted)
    assert call("lock", root=str(tmp_path), action="take", owner=owner("t1")) == {"fence": 1}
    call("lock", root=str(tmp_path), action="release", owner=owner("t1"))

    (tmp_path / "fence").write_text(counted)
    (tmp_path / "slice.json").write_text('{"fence": 6}')
    assert call("lock", root=str(tmp_path), action="take", owner=owner("t2")) == {"fence": 7}


@pytest.mark.parametrize("slice_", ["", "[]", "{}", '{"fence": "6"}', '{"fence": 2}'])
def test_the_count_goes_on_whatever_the_agents_slice_says_below_it(tmp_path, slice_):
    (tmp_path / "fence").write_text("3")
    (tmp_path / "slice.json").write_text(slice_)

    assert call("lock", root=str(tmp_path), action="take", owner=owner("t1")) == {"fence": 4}


def test_the_count_is_never_half_written(tmp_path):
    lock.keep_fence(tmp_path, 1)
    os.link(tmp_path / "fence", tmp_path / "before")
    lock.keep_fence(tmp_path, 2)

    # It was replaced, not written over: at no time was there an empty one under the name.
    assert (tmp_path / "before").read_text() == "1"
    assert (tmp_path / "fence").read_text() == "2"


def test_only_the_holder_raises_the_count_and_never_lowers_it(tmp_path):
    (tmp_path / "launch.json").write_text("{}")

    def ask(action, token, fence=0):
        return call("lock", root=str(tmp_path), action=action, owner=owner(token), fence=fence)

    assert ask("take", "t1") == {"fence": 1}
    assert ask("raise", "t2", 50) == {"lost": True}
    assert ask("raise", "t1", 9) == {"ok": True}
    assert ask("raise", "t1", 4) == {"ok": True}
    ask("release", "t1")
    assert ask("take", "t3") == {"fence": 10}


def test_a_lock_nobody_renewed_is_taken_over(tmp_path):
    call("lock", root=str(tmp_path), action="take", owner=owner("dead"))
    long_ago = time.time() - 3600
    os.utime(tmp_path / "lock" / "holder.json", (long_ago, long_ago))

    assert call("lock", root=str(tmp_path), action="take", owner=owner("t2")) == {"fence": 2}
    assert call("lock", root=str(tmp_path), action="renew", owner=owner("dead")) == {"lost": True}


def test_remove_leaves_a_directory_alone_that_is_not_dynctls(tmp_path):
    precious = tmp_path / "home"
    precious.mkdir()
    (precious / "thesis.txt").write_text("x")

    answer = call("remove", root=str(precious))

    assert "was not made by dynctl" in answer["error"]
    assert (precious / "thesis.txt").exists()


def test_remove_refuses_while_something_runs_from_there(tmp_path, until):
    root = tmp_path / "root"
    root.mkdir()
    (root / ".dynctl-root").touch()
    runner = subprocess.Popen(
        [sys.executable, "-c", "import time; time.sleep(600)", f"{root}/run/x.sock"]
    )
    try:
        until(Path(f"/proc/{runner.pid}/cmdline").read_bytes, "its arguments are shown")
        answer = call("remove", root=str(root))
        assert f"pid {runner.pid}" in answer["error"]
    finally:
        runner.kill()
        runner.wait()

    assert call("remove", root=str(root)) == {"removed": True}
    assert not root.exists()


def test_an_agent_that_ended_is_not_waited_for_whether_it_was_reaped_or_not():
    child = subprocess.Popen([sys.executable, "-c", ""])
    os.waitid(os.P_PID, child.pid, os.WEXITED | os.WNOWAIT)
    assert not is_alive(child.pid)
    child.wait()
    assert not is_alive(child.pid)
    assert is_alive(os.getpid())


def test_observe_reads_files_of_this_home_and_never_of_anothers(tmp_path, monkeypatch):
    home = tmp_path / "home"
    home.mkdir()
    (home / "model").write_text("m")
    (tmp_path / "inside").write_text("i")
    monkeypatch.setenv("HOME", str(home))

    files = call("observe", root=str(tmp_path), files=["inside", "~/model", "~root/model"])["files"]

    assert [bool(files[name]) for name in ("inside", "~/model", "~root/model")] == [
        True,
        True,
        False,
    ]

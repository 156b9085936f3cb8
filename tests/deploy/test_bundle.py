import asyncio
import gzip
import io
import sys
import sysconfig
import tarfile
from dataclasses import replace

import pytest

from dynctl.core.hardware import Host
from dynctl.deploy import bundle
from dynctl.errors import DeployError, ExitCode


def test_target_is_read_from_the_hosts_facts():
    host = Host(
        "a",
        "a",
        "a",
        python="/usr/bin/python3",
        python_version="3.11.2",
        platform="glibc-2.36-x86_64",
    )

    target = bundle.target_of(host)

    assert target.tag == "cp311-glibc-2.36-x86_64"
    platforms = target.pip_platforms()
    assert platforms[0] == "manylinux_2_36_x86_64"
    assert "manylinux_2_17_x86_64" in platforms
    assert "manylinux_2_37_x86_64" not in platforms


@pytest.mark.parametrize(
    "facts", [{}, {"python": "/p", "python_version": "3.11.2", "platform": "bionic-1-arm"}]
)
def test_a_host_without_python_or_of_unknown_libc_is_refused_with_its_name(facts):
    with pytest.raises(DeployError) as caught:
        bundle.target_of(Host("gpu-07", "a", "a", **facts))

    assert "gpu-07" in caught.value.message
    assert caught.value.exit_code is ExitCode.REFUSED


def test_equal_content_gives_equal_bytes_and_only_what_hosts_need(tmp_path):
    for name in ("one.tar.gz", "two.tar.gz"):
        bundle._pack(tmp_path / name, bundle._code_files(bundle.local_target()), [])

    assert (tmp_path / "one.tar.gz").read_bytes() == (tmp_path / "two.tar.gz").read_bytes()
    with tarfile.open(
        fileobj=io.BytesIO(gzip.decompress((tmp_path / "one.tar.gz").read_bytes()))
    ) as tar:
        tops = {name.split("/")[1] for name in tar.getnames()}
    assert {"agents", "router", "sim", "core"} <= tops
    assert not {"cli", "tui", "remote", "inventory", "planner"} & tops


@pytest.mark.parametrize(
    ("target", "fits"),
    [
        (bundle.Target("3.11", "glibc-2.36", "x86_64"), True),
        (bundle.Target("3.11", "glibc-2.41", "x86_64"), True),
        (bundle.Target("3.11", "glibc-2.36.9000", "x86_64"), True),
        (bundle.Target("3.11", "glibc-2.31", "x86_64"), False),
        (bundle.Target("3.12", "glibc-2.36", "x86_64"), False),
        (bundle.Target("3.11", "glibc-2.36", "aarch64"), False),
        (bundle.Target("3.11", "musl-1.2", "x86_64"), False),
    ],
)
def test_compiled_modules_travel_to_hosts_that_can_run_them_beside_their_sources(
    target, fits, tmp_path, monkeypatch
):
    package = tmp_path / "dynctl"
    (package / "http1").mkdir(parents=True)
    for name in ("__init__.py", "http1/call.py", "http1/call.cpython.so"):
        (package / name).touch()
    library = f"dynctl__mypyc{sysconfig.get_config_var('EXT_SUFFIX')}"
    (tmp_path / library).touch()
    monkeypatch.setattr(bundle.dynctl, "__file__", str(package / "__init__.py"))
    monkeypatch.setattr(bundle, "CODE", ("__init__.py", "http1"))
    here = bundle.Target("3.11", "glibc-2.36", "x86_64")
    monkeypatch.setattr(bundle, "local_target", lambda: here)

    names = {name for name, _ in bundle._code_files(target)}

    compiled = {library, "dynctl/http1/call.cpython.so"} if fits else set()
    assert names == {"dynctl/__init__.py", "dynctl/http1/call.py"} | compiled


def test_digest_differs_between_targets():
    one = bundle.Target("3.11", "glibc-2.36", "x86_64")
    two = bundle.Target("3.12", "glibc-2.36", "x86_64")

    assert bundle.bundle_digest(one) != bundle.bundle_digest(two)


@pytest.fixture
def code(tmp_path, monkeypatch):
    """Our own files as they are in a directory of the test; nothing is read twice by accident."""
    reads = []

    def files(target):
        reads.append(target)
        return [("dynctl/a.py", (tmp_path / "a.py").read_bytes())]

    async def wheels(target):
        return []

    (tmp_path / "a.py").write_text("1")
    monkeypatch.setenv("DYNCTL_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr(bundle, "_code_files", files)
    monkeypatch.setattr(bundle, "fetch_wheels", wheels)
    bundle.bundle_digest.cache_clear()
    yield reads
    bundle.bundle_digest.cache_clear()


def test_our_own_files_are_read_once_for_all_hosts_of_one_make(code):
    target = bundle.local_target()
    made = asyncio.run(bundle.make_bundle(target))
    code.clear()

    digests = {bundle.bundle_digest(replace(target)) for _ in range(64)}

    assert digests == {made.digest}
    assert asyncio.run(bundle.make_bundle(target)).digest == made.digest
    assert code == []


def test_files_that_change_while_a_command_runs_never_get_the_old_name(code, tmp_path):
    digest = bundle.bundle_digest(bundle.local_target())
    (tmp_path / "a.py").write_text("2")

    with pytest.raises(DeployError, match="files changed while it ran"):
        asyncio.run(bundle.make_bundle(bundle.local_target()))
    assert bundle.bundle_digest(bundle.local_target()) == digest
    assert not list((tmp_path / "cache").rglob("*.tar.gz"))


def test_pip_that_fails_or_hangs_is_told_in_one_line(monkeypatch):
    def fault(code):
        return asyncio.run(bundle._run_pip([sys.executable, "-c", code]))

    assert fault("") == ""
    told = fault("print('ERROR: no matching\\nERROR: none at all\\nbye'); raise SystemExit(1)")
    assert told == "ERROR: none at all"
    assert fault("raise SystemExit(1)") == "pip failed"

    monkeypatch.setattr(bundle, "PIP_TIMEOUT_S", 0.2)
    assert fault("import time; time.sleep(600)") == "pip did not end within 0 s"

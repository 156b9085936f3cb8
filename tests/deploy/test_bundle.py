import asyncio
import gzip
import io
import sys
import tarfile

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
    bundle._pack(tmp_path / "one.tar.gz", [])
    bundle._pack(tmp_path / "two.tar.gz", [])

    assert (tmp_path / "one.tar.gz").read_bytes() == (tmp_path / "two.tar.gz").read_bytes()
    with tarfile.open(
        fileobj=io.BytesIO(gzip.decompress((tmp_path / "one.tar.gz").read_bytes()))
    ) as tar:
        tops = {name.split("/")[1] for name in tar.getnames()}
    assert {"agents", "router", "sim", "core"} <= tops
    assert not {"cli", "tui", "remote", "inventory", "planner"} & tops


def test_digest_differs_between_targets():
    one = bundle.Target("3.11", "glibc-2.36", "x86_64")
    two = bundle.Target("3.12", "glibc-2.36", "x86_64")

    assert bundle.bundle_digest(one) != bundle.bundle_digest(two)


def test_pip_that_fails_or_hangs_is_told_in_one_line(monkeypatch):
    def fault(code):
        return asyncio.run(bundle._run_pip([sys.executable, "-c", code]))

    assert fault("") == ""
    told = fault("print('ERROR: no matching\\nERROR: none at all\\nbye'); raise SystemExit(1)")
    assert told == "ERROR: none at all"
    assert fault("raise SystemExit(1)") == "pip failed"

    monkeypatch.setattr(bundle, "PIP_TIMEOUT_S", 0.2)
    assert fault("import time; time.sleep(600)") == "pip did not end within 0 s"

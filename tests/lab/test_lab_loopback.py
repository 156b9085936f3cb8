"""Hosts on loopback: the plain user's lab, with homes and GPUs of their own."""

import subprocess
from collections.abc import Callable

import pytest
from hostlab.lab import wait_until
from hostlab.loopback import Loopback
from hostlab.operator_home import new_key

pytestmark = [pytest.mark.lab, pytest.mark.sshd]


def test_each_host_has_a_home_of_its_own(loopback: Callable[..., Loopback]) -> None:
    hosts = loopback("one", "two")
    for name in ("one", "two"):
        done = hosts.ssh(name, "pwd; echo $HOME; echo mark > mark")
        assert done.stdout.split() == [str(hosts[name].home)] * 2, done.stderr
        assert (hosts[name].home / "mark").read_text() == "mark\n"


def test_sftp_works_and_starts_in_the_hosts_home(loopback: Callable[..., Loopback]) -> None:
    hosts = loopback("one")
    host = hosts["one"]
    argv = ["sftp", "-q", "-F", "none", "-P", str(host.port), "-i", str(hosts.key), "-b", "-"]
    argv += ["-o", "BatchMode=yes", "-o", f"UserKnownHostsFile={hosts.known_hosts}"]
    (hosts.home / "sent").write_text("content")
    done = subprocess.run(
        [*argv, f"{hosts.entries[0]['user']}@{host.address}"],
        input=f"put {hosts.home}/sent got\n",
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert (host.home / "got").read_text() == "content"


def test_a_stranger_is_refused(loopback: Callable[..., Loopback]) -> None:
    hosts = loopback("one")
    new_key(hosts.home / "stranger")
    assert hosts.ssh("one", "true", key=hosts.home / "stranger").returncode == 255


def test_gpus_belong_to_the_host_that_has_them(loopback: Callable[..., Loopback]) -> None:
    hosts = loopback("one", "two", gpus={"one": "l40s-pair"})
    assert hosts.ssh("one", "nvidia-smi", "-L").stdout.count("NVIDIA L40S") == 2
    assert hosts.ssh("two", "nvidia-smi", "-L").returncode == 127


def test_what_was_started_over_ssh_is_found_and_ends_with_the_host(
    loopback: Callable[..., Loopback],
) -> None:
    hosts = loopback("one")
    hosts.ssh("one", "setsid sleep 1000 </dev/null >/dev/null 2>&1 &")
    wait_until(
        lambda: any(line == "sleep 1000" for line in hosts["one"].processes().values()),
        "it runs",
    )
    hosts.close()
    assert hosts["one"].processes() == {}

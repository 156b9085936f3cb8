"""The lab keeps what it promises: real hosts that boot, fail and recover as a test says."""

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path

import pynvml
import pytest
from hostlab import gpu_files, network, teardown
from hostlab.gpus import FakeProcess, hgx_h100
from hostlab.lab import HostSpec, Lab, wait_until
from hostlab.operator_home import new_key
from hostlab.rootfs import OPS_UID, cache_dir
from hostlab.shell import LabError

pytestmark = [pytest.mark.lab, pytest.mark.root, pytest.mark.timeout(600)]


@pytest.fixture
def healed(lab3: Lab) -> Iterator[Lab]:
    """The three hosts, plugged in and running again after the test."""
    yield lab3
    for host in lab3.hosts.values():
        host.thaw()
        host.heal()
        host.throttle(None)


def test_all_hosts_run_systemd_and_are_machines_of_their_own(lab3: Lab) -> None:
    ids = set()
    for host in lab3.hosts.values():
        assert host.run(["systemctl", "is-system-running", "--wait"]).stdout.strip() == "running"
        assert host.run(["hostname"]).stdout.strip() == host.name
        ids.add(host.run(["cat", "/etc/machine-id"]).stdout)
    assert len(ids) == 3


def test_ssh_lets_in_ops_and_root_with_the_labs_key_only(lab3: Lab) -> None:
    for name in lab3.hosts:
        for user in ("ops", "root"):
            done = lab3.ssh(name, "id", "-un", user=user)
            assert done.stdout.strip() == user, done.stderr
    stranger = lab3.home / "stranger"
    new_key(stranger)
    done = lab3.ssh("head", "true", key=stranger)
    assert done.returncode == 255
    assert "Permission denied" in done.stderr


def test_ops_has_a_user_manager_with_scopes_and_units(lab3: Lab) -> None:
    scope = "systemd-run --user --scope --quiet sh -c 'cat /proc/self/cgroup'"
    done = lab3.ssh("gpu-1", scope)
    assert "user@5000.service" in done.stdout, done.stderr
    unit = "systemd-run --user --wait --quiet --pipe id -un"
    assert lab3.ssh("gpu-1", unit).stdout.strip() == "ops"


def test_hosts_reach_each_other_and_nothing_else(lab3: Lab) -> None:
    knock = "exec 3<>/dev/tcp/gpu-2/22 && head -c4 <&3"
    assert lab3["gpu-1"].run(["bash", "-c", knock]).stdout == "SSH-"
    routes = lab3["gpu-1"].run(["ip", "route"]).stdout.split("\n")
    assert [line for line in routes if line and not line.startswith(network.PREFIX)] == []


def test_a_host_sees_its_own_network_device_and_rdma_devices(lab3: Lab) -> None:
    host = lab3["gpu-1"]
    assert sorted(host.run(["ls", "/sys/class/net"]).stdout.split()) == ["eth0", "lo"]
    names = host.run(["ls", "/sys/class/infiniband"]).stdout.split()
    assert names == [f"mlx5_{i}" for i in range(8)]
    for name in names:
        port = f"/sys/class/infiniband/{name}/ports/1"
        text = host.run(["cat", f"{port}/rate", f"{port}/state", f"{port}/link_layer"]).stdout
        assert text == "400 Gb/sec (4X NDR)\n4: ACTIVE\nInfiniBand\n"
    assert lab3["head"].run(["ls", "/sys/class/infiniband"], check=False).returncode != 0


def test_nvml_and_nvidia_smi_on_a_host_show_the_same_gpus_also_while_they_change(lab3: Lab) -> None:
    host = lab3["gpu-2"]
    host.write("/opt/nvml/pynvml.py", Path(pynvml.__file__).read_bytes())
    script = (
        "import pynvml as n; n.nvmlInit(); import json\n"
        "hs = [n.nvmlDeviceGetHandleByIndex(i) for i in range(n.nvmlDeviceGetCount())]\n"
        "print(json.dumps([[n.nvmlDeviceGetUUID(h), n.nvmlDeviceGetMemoryInfo(h, n.nvmlMemory_v2).used"
        ">> 20, len(n.nvmlDeviceGetComputeRunningProcesses(h))] for h in hs]))"
    )
    query = ["nvidia-smi", "--query-gpu=uuid,memory.used", "--format=csv,noheader,nounits"]
    seen = []
    for machine in (
        hgx_h100("gpu-2"),
        replace(hgx_h100("gpu-2"), processes=(FakeProcess(3, 1, "job", 70_000),)),
    ):
        gpu_files.write_topology(host.root, machine)
        nvml = json.loads(
            host.run(["env", "PYTHONPATH=/opt/nvml", "python3", "-c", script], user="ops").stdout
        )
        smi = [line.split(", ") for line in host.run(query, user="ops").stdout.splitlines()]
        assert smi == [[uuid, str(used)] for uuid, used, _ in nvml]
        seen.append([row[2] for row in nvml])
    assert seen == [[0] * 8, [0, 0, 0, 1, 0, 0, 0, 0]]
    gpu_files.write_topology(host.root, hgx_h100("gpu-2"))


def test_reboot_keeps_files_and_starts_a_new_pid_one(lab3: Lab) -> None:
    host = lab3["head"]
    host.run(["sh", "-c", "echo kept > /home/ops/file"], user="ops")
    started, boot = (
        host.pid_one_started(),
        host.run(["cat", "/proc/sys/kernel/random/boot_id"]).stdout,
    )
    host.reboot()
    assert host.exit_statuses[-1] == 133
    assert host.pid_one_started() != started
    assert host.run(["cat", "/proc/sys/kernel/random/boot_id"]).stdout != boot
    assert lab3.ssh("head", "cat", "file").stdout == "kept\n"


def test_power_off_and_a_power_cut_keep_the_disk(lab3: Lab) -> None:
    host = lab3["head"]
    host.run(["sh", "-c", "echo kept > /home/ops/file; sleep 1000 >/dev/null 2>&1 &"], user="ops")
    host.power_off()
    assert not host.is_on
    assert host.exit_statuses[-1] == 0
    host.power_on()
    host.wait_ready()
    host.cut_power()
    assert not host.is_on
    assert lab3.ssh("head", "true", timeout_s=40).returncode == 255
    host.power_on()
    host.wait_ready()
    assert host.run(["cat", "/home/ops/file"]).stdout == "kept\n"
    assert host.processes("sleep 1000") == []


@pytest.mark.parametrize("how", ["unplug", "cut_off", "freeze"])
def test_a_host_falls_silent_and_comes_back(healed: Lab, how: str) -> None:
    host = healed["gpu-1"]
    getattr(host, how)()
    assert not host.answers_ssh()
    assert healed["gpu-2"].answers_ssh()
    host.thaw()
    host.heal()
    wait_until(host.answers_ssh, f"gpu-1 answers after {how}")


def test_a_partition_cuts_two_hosts_apart_but_not_from_the_operator(healed: Lab) -> None:
    one, two = healed["gpu-1"], healed["gpu-2"]
    knock = ["timeout", "2", "bash", "-c", f"exec 3<>/dev/tcp/{two.address}/22"]
    assert one.run(knock, check=False).returncode == 0
    one.cut_off([two.address])
    assert one.run(knock, check=False).returncode != 0
    assert one.answers_ssh()
    assert two.answers_ssh()


def test_a_throttled_link_is_slow_both_ways(healed: Lab) -> None:
    host = healed["gpu-1"]
    num_bytes, bits_s = 1_000_000, 4_000_000
    host.throttle(bits_s)
    # Only a lower bound: load on this machine can make it slower, never faster than the link.
    least_s = (num_bytes - 100_000) * 8 / bits_s
    started_s = time.monotonic()
    done = healed.ssh("gpu-1", "head", "-c", str(num_bytes), "/dev/zero", timeout_s=60)
    assert len(done.stdout) == num_bytes
    assert time.monotonic() - started_s > least_s
    started_s = time.monotonic()
    done = healed.ssh("gpu-1", "wc", "-c", stdin="0" * num_bytes, timeout_s=60)
    assert done.stdout.strip() == str(num_bytes)
    assert time.monotonic() - started_s > least_s


def test_an_outsider_sees_sshd_and_what_listens_to_all_but_not_loopback(lab3: Lab) -> None:
    host = lab3["gpu-1"]
    listen = (
        "import socket, time\n"
        "a = socket.create_server(('0.0.0.0', 40123)); b = socket.create_server(('127.0.0.1', 40124))\n"
        "time.sleep(3000)"
    )
    host.run(["systemd-run", "--quiet", "--unit=listen", "python3", "-c", listen])
    wait_until(lambda: ("127.0.0.1", 40124) in host.listening(), "the test's ports listen")
    assert {("0.0.0.0", 40123), ("127.0.0.1", 40124)} <= set(host.listening())
    assert lab3.open_ports("gpu-1") == [22, 40123]
    host.run(["systemctl", "stop", "listen"])
    assert lab3.open_ports("gpu-1") == [22]


def test_a_small_disk_is_full_soon(lab3: Lab) -> None:
    host = lab3["gpu-1"]
    host.mount_small_disk("/srv/small", 1_000_000)
    done = host.run(
        ["dd", "if=/dev/zero", "of=/srv/small/file", "bs=1M", "count=3"], user="ops", check=False
    )
    assert "No space left" in done.stderr
    host.run(["umount", "/srv/small"])


def leftovers(lab_id: str) -> list[str]:
    """What of a lab is still on this machine."""
    found = teardown.lab_namespaces(lab_id) + teardown.lab_mounts(lab_id)
    found += [str(root / f"dynlab-{lab_id}") for root in teardown.cgroup_roots()]
    found = [what for what in found if "/" not in what or Path(what).exists()]
    if (cache_dir() / "run" / lab_id).exists():
        found.append("its directory")
    for entry in Path("/proc").glob("[0-9]*"):
        try:
            line = (entry / "cmdline").read_bytes()
        except OSError:
            continue
        if f"dynlab-{lab_id}".encode() in line or f"/run/{lab_id}/".encode() in line:
            found.append(line.decode(errors="replace"))
    return found


def machine_state() -> tuple[list[str], list[str], list[int]]:
    """The machine's own routes, addresses, and processes of the lab's user."""
    routes = subprocess.run(["ip", "route"], capture_output=True, text=True, check=True).stdout
    links = subprocess.run(["ip", "-br", "addr"], capture_output=True, text=True, check=True).stdout
    ops = [int(e.name) for e in Path("/proc").glob("[0-9]*") if _uid(e) == OPS_UID]
    return routes.splitlines(), links.splitlines(), ops


def _uid(entry: Path) -> int:
    try:
        return entry.stat().st_uid
    except OSError:
        return -1


def test_closing_leaves_nothing_and_the_machines_network_as_it_was() -> None:
    before = machine_state()
    with Lab([HostSpec("a", gpus="l40s-pair"), HostSpec("b")]) as lab:
        lab["a"].run(["sh", "-c", "sleep 1000 >/dev/null 2>&1 &"], user="ops")
        during = machine_state()
        assert during[:2] == before[:2]
        assert leftovers(lab.id)
    assert leftovers(lab.id) == []
    after = machine_state()
    assert after[:2] == before[:2]
    assert set(after[2]) <= set(before[2])


@pytest.mark.parametrize("who_dies", ["the test process", "the test process and its reaper"])
def test_a_killed_test_process_takes_its_hosts_with_it(who_dies: str) -> None:
    code = (
        "import sys, time\n"
        f"sys.path.insert(0, {str(Path(__file__).resolve().parent)!r})\n"
        "from hostlab.lab import HostSpec, Lab\n"
        "with Lab([HostSpec('a')]) as lab:\n"
        "    print(lab.id, lab.reaper_pid, flush=True)\n"
        "    time.sleep(3000)\n"
    )
    child = subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, text=True)
    assert child.stdout is not None
    lab_id, reaper = child.stdout.readline().split()
    assert leftovers(lab_id)
    if "reaper" in who_dies:
        os.kill(int(reaper), signal.SIGKILL)
    child.kill()
    child.wait()
    child.stdout.close()
    if "reaper" in who_dies:
        assert lab_id in teardown.sweep()
    wait_until(lambda: leftovers(lab_id) == [], "the lab of a dead process is gone")


def test_a_living_lab_is_not_swept(lab3: Lab) -> None:
    assert lab3.id not in teardown.sweep()
    assert lab3["head"].answers_ssh()


def test_a_bind_shows_a_directory_read_only_at_its_place(
    make_lab: Callable[..., Lab], tmp_path: Path
) -> None:
    (tmp_path / "file").write_text("seen")
    tmp_path.chmod(0o755)
    lab = make_lab(
        HostSpec("a", binds=((str(tmp_path), "/opt/shown"),)), HostSpec("b", has_python=False)
    )
    assert lab.ssh("a", "cat", "/opt/shown/file").stdout == "seen"
    assert "Read-only" in lab.ssh("a", "touch", "/opt/shown/new").stderr
    assert lab.ssh("b", "python3", "-V").returncode == 127


def test_a_name_without_a_host_is_an_error_and_so_is_a_dead_host(lab3: Lab) -> None:
    with pytest.raises(KeyError):
        lab3["nobody"]
    host = lab3["head"]
    host.cut_power()
    with pytest.raises(LabError, match="head is off"):
        host.run(["true"])
    host.power_on()
    host.wait_ready()

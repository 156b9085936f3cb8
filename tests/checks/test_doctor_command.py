"""`dynctl doctor` as it is typed: exit codes, output, fixes; hosts are this machine."""

import asyncio
import json
import os
import stat
import subprocess
import sys
from pathlib import Path

import pytest

from dynctl.checks.examine import load_checks
from dynctl.cli.doctor_evidence import _compare_ssh, differences
from dynctl.core.inventory import HostEntry, Inventory, SshSettings
from dynctl.remote.routes import Hop, Route

LOCAL = """
cluster: lab
hosts:
  - {{name: here, address: local, cpu_slots: 2}}
{more}
deployments:
  - name: chat
    model: sim
    engine: {{kind: sim{engine}}}
    router: {{listen: "{listen}", allow_insecure_listen: {open}}}
"""


@pytest.fixture
def doctor(tmp_path):
    """Run the command in an empty home; returns its status, stdout and stderr."""

    def run(*args, more="", engine="", listen="127.0.0.1:0", mode=0o600):
        path = tmp_path / "inventory.yaml"
        path.write_text(
            LOCAL.format(
                more=more, engine=engine, listen=listen, open=str(listen[0] == "0").lower()
            )
        )
        path.chmod(mode)
        env = {**os.environ, "HOME": str(tmp_path), "DYNCTL_INVENTORY": str(path)}
        done = subprocess.run(
            [sys.executable, "-m", "dynctl", "doctor", *args],
            capture_output=True, text=True, timeout=150, check=False, env=env, cwd=tmp_path, stdin=subprocess.DEVNULL,
        )  # fmt: skip
        return done.returncode, done.stdout, done.stderr

    return run


def found(stdout):
    return {finding["code"]: finding for finding in json.loads(stdout)["findings"]}


def test_a_sound_machine_exits_with_0(doctor):
    status, stdout, stderr = doctor(
        "-o", "json", "--check", "router-without-key", "--check", "python-missing"
    )

    assert status == 0, stderr
    value = json.loads(stdout)
    assert value["schema"] == "dynctl.doctor/1"
    assert value["findings"] == []
    assert value["passed"] == ["python-missing", "router-without-key"]


def test_a_red_finding_exits_with_6_and_shows_cure_and_proof(doctor):
    status, stdout, stderr = doctor(listen="0.0.0.0:18000")

    assert status == 6, stderr
    assert "RED     router-without-key" in stdout
    assert "fix     add api_keys" in stdout
    assert "$ curl -sk" in stdout


def test_json_carries_every_part_of_a_finding(doctor):
    _, stdout, _ = doctor("-o", "json", listen="0.0.0.0:18000")

    finding = found(stdout)["router-without-key"]
    assert finding["severity"] == "red"
    assert finding["verify"]
    assert finding["evidence"]
    assert not finding["is_fix_safe"]
    assert "skipped" in json.loads(stdout)


def test_a_fix_asks_first_and_says_how_to_run_it_unasked(doctor, tmp_path):
    status, _, stderr = doctor("--fix", engine=", env: {HF_TOKEN: hf_secret}", mode=0o644)

    assert status == 2
    assert "chmod 600" in stderr
    assert "--fix --yes" in stderr
    assert stat.S_IMODE((tmp_path / "inventory.yaml").stat().st_mode) == 0o644


def test_a_safe_fix_cures_and_is_looked_at_again(doctor, tmp_path):
    secret = {"engine": ", env: {HF_TOKEN: hf_secret}", "mode": 0o644}
    status, stdout, _ = doctor("-o", "json", **secret)
    assert status == 6
    assert found(stdout)["inventory-readable"]["is_fix_safe"]

    status, stdout, stderr = doctor("--fix", "--yes", "-o", "json", **secret)

    assert status == 0, stderr
    assert "inventory-readable" not in found(stdout)
    assert "cured" in stderr
    assert stat.S_IMODE((tmp_path / "inventory.yaml").stat().st_mode) == 0o600
    assert "hf_secret" not in stdout + stderr


def test_nothing_is_changed_without_fix(doctor, tmp_path):
    doctor(engine=", env: {HF_TOKEN: hf_secret}", mode=0o644)

    assert stat.S_IMODE((tmp_path / "inventory.yaml").stat().st_mode) == 0o644
    assert sorted(path.name for path in tmp_path.iterdir()) == ["inventory.yaml"]


def test_a_host_that_cannot_be_reached_exits_with_3_and_the_others_are_judged(doctor):
    gone = "  - {name: gone, address: 127.0.0.1, port: 1}"
    status, stdout, stderr = doctor("-o", "json", more=gone)

    assert status == 3, stderr
    assert [f["host"] for f in json.loads(stdout)["failures"]] == ["gone"]
    assert "1 of 2 hosts" in stderr


def test_no_host_at_all_exits_with_4(doctor):
    status, _, stderr = doctor(
        "--limit", "gone", more="  - {name: gone, address: 127.0.0.1, port: 1}"
    )

    assert status == 4, stderr


def test_an_unknown_check_exits_with_2(doctor):
    status, _, stderr = doctor("--check", "no-such-check")

    assert status == 2
    assert "no-such-check" in stderr


def test_it_works_without_an_inventory(tmp_path):
    done = subprocess.run(
        [sys.executable, "-m", "dynctl", "doctor", "--local", "-o", "json"],
        capture_output=True, text=True, timeout=150, check=False, cwd=tmp_path, env={**os.environ, "HOME": str(tmp_path)},
    )  # fmt: skip

    assert done.returncode in (0, 6), done.stderr
    assert json.loads(done.stdout)["schema"] == "dynctl.doctor/1"


def route(**change):
    known = {
        "hop": Hop("gpu-01"), "host": "10.0.0.1", "port": 22, "user": "bob", "key_name": "gpu-01", "jump": None,
        "identity_files": (), "agent_path": None, "dials_itself": False, "has_proxy_command": False, "family": 0,
    }  # fmt: skip
    return Route(**(known | change))


def test_equal_ways_to_connect_are_no_difference():
    theirs = {"hostname": ["10.0.0.1"], "port": ["22"], "user": ["bob"], "proxyjump": ["none"]}

    assert differences("a", route(), theirs, ("ssh",)) == []


@pytest.mark.parametrize(
    ("keyword", "value"),
    [("hostname", "10.0.0.2"), ("port", "2222"), ("user", "eve"), ("proxyjump", "bastion")],
)
def test_each_way_to_connect_otherwise_is_named(keyword, value):
    theirs = {"hostname": ["10.0.0.1"], "port": ["22"], "user": ["bob"], keyword: [value]}

    assert [d.keyword for d in differences("a", route(), theirs, ("ssh",))] == [keyword]


def test_jump_hosts_are_compared_as_ssh_writes_them():
    theirs = {
        "hostname": ["10.0.0.1"],
        "port": ["22"],
        "user": ["bob"],
        "proxyjump": ["first,ops@bastion:2222"],
    }
    ours = route(jump=Hop("bastion", "ops", 2222, None, "first"))

    assert differences("a", ours, theirs, ("ssh",)) == []


def test_keys_named_with_tokens_are_compared_by_what_they_mean():
    theirs = {
        "hostname": ["10.0.0.1"],
        "port": ["22"],
        "user": ["bob"],
        "identityfile": ["~/.ssh/lab_%r_%h"],
    }
    key = str(Path("~/.ssh/lab_bob_10.0.0.1").expanduser())

    assert differences("a", route(identity_files=(key,)), theirs, ("ssh",)) == []
    other = differences("a", route(identity_files=("/other",)), theirs, ("ssh",))
    assert [d.keyword for d in other] == ["identityfile"]


def test_ssh_itself_agrees_on_an_ordinary_configuration(tmp_path):
    """Asked for real: aliases, users, ports, jumps, keys and a Match block."""
    (tmp_path / "config").write_text(
        "Host gpu\n  HostName 127.0.0.1\n  User x\n  Port 2201\n  ProxyJump ops@b:2222\n"
        "  IdentityFile ~/.ssh/lab_%r\nHost plain\n  HostName 127.0.0.1\nMatch host 127.0.0.1\n  Port 2299\n"
    )
    inventory = Inventory(
        "s",
        (HostEntry("gpu", "gpu"), HostEntry("plain", "plain", user="bob")),
        ssh=SshSettings(config=str(tmp_path / "config")),
    )

    assert asyncio.run(_compare_ssh(inventory, ["gpu", "plain"])) == ()


def test_every_check_is_documented_and_nothing_else_is():
    text = (Path(__file__).parents[2] / "docs" / "findings.md").read_text()
    section = text.partition("\n# Checks of `dynctl doctor`\n")[2]
    listed = {
        line.split("|")[2].strip().strip("`")
        for line in section.splitlines()
        if line.startswith("|") and "`" in line
    }

    assert listed == set(load_checks())


def test_a_file_that_the_inventory_takes_a_secret_from_is_closed(doctor, tmp_path):
    secret = tmp_path / "team.key"
    secret.write_text("sk-test\n")
    secret.chmod(0o644)
    keys = "api_keys:\n  - {name: team, key: '${file:team.key}'}"

    status, stdout, _ = doctor("-o", "json", "--check", "inventory-readable", more=keys)
    assert (status, found(stdout)["inventory-readable"]["evidence"]) == (6, ["mode 0644"])

    status, _, _ = doctor("--fix", "--yes", "--check", "inventory-readable", more=keys)
    assert (status, stat.S_IMODE(secret.stat().st_mode)) == (0, 0o600)

"""`dynctl top` from the command line, with agents that answer from synthetic snapshots."""

import json
from contextlib import asynccontextmanager

import pytest

from dynctl.cli.main import run
from dynctl.cli.output import ReaderGoneError
from dynctl.core.inventory import HostEntry, Inventory
from dynctl.errors import ConnectError, ExitCode


class Agent:
    """Reports one host of the synthetic cluster, a second further on at each call."""

    def __init__(self, snapshots, number):
        self.snapshots, self.number, self.tick = snapshots, number, 0

    async def sample(self):
        self.tick += 1
        return self.snapshots(self.tick).hosts[self.number]


@pytest.fixture
def cluster(monkeypatch, snapshots):
    """Let `top` find these agents (or errors) by host name."""

    def use(**agents):
        made = {
            name.replace("_", "-"): agent
            if isinstance(agent, Exception)
            else Agent(snapshots, agent)
            for name, agent in agents.items()
        }
        inventory = Inventory("prod", tuple(HostEntry(name, "local") for name in made))

        @asynccontextmanager
        async def open_fleet(*_):
            yield None

        @asynccontextmanager
        async def steady_agents(*_):
            yield made

        monkeypatch.setattr("dynctl.cli.session.load", lambda *_, **__: inventory)
        monkeypatch.setattr("dynctl.remote.fleet.open_fleet", open_fleet)
        monkeypatch.setattr("dynctl.deploy.reach.steady_agents", steady_agents)
        monkeypatch.setattr("dynctl.telemetry.watch.PERIOD_S", 0.3)

    return use


def test_once_prints_a_table_with_rates(cluster, capsys):
    cluster(gpu_01=0, gpu_02=1)

    assert run(["top", "--once"]) == 0
    out = capsys.readouterr().out
    assert "chat-prefill-0" in out
    assert "chat-decode-2" in out
    assert "req/s –" not in out
    assert "\x1b" not in out


def test_once_prints_one_json_document(cluster, capsys):
    cluster(gpu_01=0, gpu_02=1)

    assert run(["top", "--once", "-o", "json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["schema"] == "dynctl.top/1"
    assert len(found["engines"]) == 4
    assert found["deployments"][0]["requests_s"] > 0


def test_once_with_a_lost_host_prints_the_rest_and_exits_3(cluster, capsys):
    cluster(gpu_01=0, gpu_09=ConnectError("gpu-09: no route to host"))

    assert run(["top", "--once"]) == ExitCode.PARTIAL
    said = capsys.readouterr()
    assert "chat-prefill-0" in said.out
    assert "gpu-09: no route to host" in said.err


@pytest.mark.parametrize("args", [["--once"], ["--once", "-o", "json"]])
def test_nothing_reachable_exits_4_with_the_causes(cluster, args, capsys):
    cluster(gpu_01=ConnectError("gpu-01: no agent"), gpu_02=ConnectError("gpu-02: no agent"))

    assert run(["top", *args]) == ExitCode.REFUSED
    said = capsys.readouterr()
    assert said.out == ""
    assert "gpu-01: no agent" in said.err


def test_without_a_terminal_it_says_to_use_once(cluster, capsys):
    cluster(gpu_01=0)

    assert run(["top"]) == ExitCode.USAGE
    assert "--once" in capsys.readouterr().err


def test_json_without_once_is_a_usage_error(cluster, capsys):
    cluster(gpu_01=0)

    assert run(["top", "-o", "json"]) == ExitCode.USAGE


def test_jsonl_prints_a_document_a_line_until_its_reader_has_enough(cluster, capsys, monkeypatch):
    cluster(gpu_01=0, gpu_02=1)
    lines = []

    def emit(text):
        lines.append(text)
        if len(lines) > 1 and json.loads(text)["deployments"][0]["requests_s"]:
            raise ReaderGoneError

    monkeypatch.setattr("dynctl.cli.top.emit", emit)

    run(["top", "-o", "jsonl"])
    found = [json.loads(line) for line in lines]
    assert not any("\n" in line for line in lines)
    assert {one["schema"] for one in found} == {"dynctl.top/1"}
    assert found[-1]["deployments"][0]["requests_s"] > 0


def test_once_prints_one_line_of_jsonl(cluster, capsys):
    cluster(gpu_01=0, gpu_02=1)

    assert run(["top", "--once", "-o", "jsonl"]) == 0
    (line,) = capsys.readouterr().out.splitlines()
    assert len(json.loads(line)["engines"]) == 4

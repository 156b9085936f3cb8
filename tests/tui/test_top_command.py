"""`dynctl top` from the command line, with agents that answer from synthetic snapshots."""

import json
from contextlib import asynccontextmanager

import pytest

from dynctl.cli.main import run
from dynctl.cli.output import ReaderGoneError
from dynctl.core.inventory import HostEntry, Inventory
from dynctl.core.workload import Slo
from dynctl.errors import ConnectError, ExitCode
from dynctl.telemetry.recorder import Recorder
from dynctl.telemetry.tape import Tape


class Agent:
    """Reports one host of the synthetic cluster, a second further on at each call."""

    def __init__(self, snapshots, number):
        self.snapshots, self.number, self.tick = snapshots, number, 0

    async def sample(self):
        self.tick += 1
        return self.snapshots(self.tick).hosts[self.number]

    async def ask_router(self, unit_id, target):
        return b"[]" if "decisions" in target else b"{}"


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


@pytest.fixture
def recorded(tmp_path, snapshots):
    """A recording of half a minute, without its last byte."""
    now, path = [0.0], tmp_path / "r.jsonl"
    with Recorder(path, 2**30, "prod", {"chat": Slo(500.0)}, lambda: now[0]) as recorder:
        for tick in range(1, 31):
            recorder.take(snapshots(tick))
            now[0] += 1.0
    path.write_bytes(path.read_bytes()[:-1])
    return path


def test_a_replay_prints_its_last_look_or_the_one_at_a_time(recorded, capsys):
    assert run(["top", "--replay", str(recorded), "--once", "-o", "json"]) == 0
    said = capsys.readouterr()
    assert json.loads(said.out)["taken_unix_s"] == 1.7e9 + 29
    assert "ends in the middle of a line" in said.err

    assert run(["top", "--replay", str(recorded), "--once", "-o", "json", "--at", "+10"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["taken_unix_s"] == 1.7e9 + 11
    assert found["deployments"][0]["requests_s"] == 14.0
    assert found["deployments"][0]["slo"] == {"ttft_ms": 500.0, "itl_ms": None}

    assert run(["top", "--replay", str(recorded), "--once"]) == 0
    shown = capsys.readouterr().out
    assert "chat-prefill-0" in shown
    assert "■ end 0:00:28/0:00:28" in shown
    assert "live" not in shown


def test_a_replay_goes_into_a_pipe_as_documents(recorded, capsys):
    assert run(["top", "--replay", str(recorded), "-o", "jsonl", "--at", "+20"]) == 0
    found = [json.loads(line) for line in capsys.readouterr().out.splitlines()]

    assert [one["taken_unix_s"] - 1.7e9 for one in found] == list(range(21, 30))
    assert {one["schema"] for one in found} == {"dynctl.top/1"}


def test_a_replay_asks_for_no_inventory(recorded, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)

    assert run(["top", "--replay", str(recorded), "--once"]) == 0
    capsys.readouterr()


@pytest.mark.parametrize(
    "args",
    [
        ["--replay", "R", "--record", "x"],
        ["--replay", "R", "--local"],
        ["--replay", "R", "--limit", "gpu-01"],
        ["--replay", "R"],
        ["--replay", "R", "-o", "json"],
        ["--replay", "R", "--once", "--at", "noon"],
        ["--replay", "R", "--once", "--at", "+9999"],
        ["--replay", "missing", "--once"],
        ["--replay", "/dev/null", "--once"],
        ["--at", "03:07"],
        ["--speed", "2"],
        ["--record-mib", "5"],
        ["--record", "x", "--once"],
        ["--record", "R"],
        ["--record", "/missing/x"],
        ["--record", "x", "--record-mib", "0"],
    ],
)
def test_what_does_not_go_together_is_a_usage_error(cluster, recorded, args, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    cluster(gpu_01=0)

    assert run(["top", *(str(recorded) if a == "R" else a for a in args)]) == ExitCode.USAGE
    assert not (tmp_path / "x").exists()


def test_without_a_terminal_it_records_until_it_is_ended(cluster, tmp_path, monkeypatch, capsys):
    cluster(gpu_01=0, gpu_02=1)
    path = tmp_path / "r.jsonl.gz"
    take, num = Recorder.take, []

    def take_some(recorder, snapshot):
        take(recorder, snapshot)
        num.append(1)
        if len(num) == 4:
            raise KeyboardInterrupt

    monkeypatch.setattr(Recorder, "take", take_some)

    assert run(["top", "--record", str(path)]) == ExitCode.INTERRUPTED
    monkeypatch.undo()
    said = capsys.readouterr()
    assert said.out == ""
    assert f"recording to {path}" in said.err
    assert f"dynctl top --replay {path}" in said.err
    with Tape(path) as tape:
        assert len(tape.snapshots) == 4
        assert not tape.is_cut
        assert tape.header.cluster == "prod"


def test_a_stream_can_be_recorded_and_ends_when_that_fails(cluster, tmp_path, monkeypatch, capsys):
    cluster(gpu_01=0, gpu_02=1)
    path = tmp_path / "r.jsonl"

    def fail(recorder, _):
        recorder.failure = "No space left on device"

    monkeypatch.setattr(Recorder, "take_answers", fail)

    assert run(["top", "--record", str(path), "-o", "jsonl"]) == ExitCode.ERROR
    said = capsys.readouterr()
    assert f"recording to {path} ended: No space left on device" in said.err
    assert json.loads(said.out.splitlines()[0])["cluster"] == "prod"

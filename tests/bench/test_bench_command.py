"""`dynctl bench run` as a person or a script meets it: output, files, exit codes."""

import json
import os
import signal
import threading

import pytest

from dynctl.bench import report
from dynctl.cli import bench_driving
from dynctl.cli.bench_driving import reachable_url
from dynctl.cli.bench_options import parse_slo
from dynctl.cli.main import run
from dynctl.core.inventory import HostEntry, Inventory
from dynctl.core.workload import Slo
from dynctl.errors import DynctlError, ExitCode, UsageError

QUICK = [
    "--workload",
    "synthetic:isl=30,osl=3",
    "--load",
    "constant:20",
    "--duration",
    "500ms",
    "--warmup",
    "0s",
]


def bench(server, *args):
    return run(["bench", "run", "--url", server.url, *QUICK, *args])


def test_the_table_has_the_figures_and_ends_in_advice(served, capsys):
    assert bench(served(), "--seed", "7") == 0
    out = capsys.readouterr().out

    assert "synthetic:isl=30,osl=3, constant:20, 0.5 s, seed 7" in out.splitlines()[0]
    for expected in (
        "TTFT ms (from scheduled)",
        "ITL ms (per token)",
        "10 sent, 10 answered",
        "asked 30.0, got 30.0",
    ):
        assert expected in out
    assert out.splitlines()[-1].startswith("advice: ")


def test_json_is_one_document_that_explains_itself(served, monkeypatch, capsys):
    # A goal is not held to be reached where this machine was too busy to tell.
    monkeypatch.setattr(report, "_client_limited", lambda *_: "")
    assert bench(served(), "-o", "json", "--seed", "7", "--slo", "ttft=60000,itl=60000") == 0
    found = json.loads(capsys.readouterr().out)

    assert found["schema"] == "dynctl.bench/1"
    assert found["setting"]["seed"] == 7
    assert found["setting"]["slo"] == {"ttft_ms": 60000.0, "itl_ms": 60000.0}
    assert found["facts"]["server_version"] == "1.2.3"
    facts = {"dynctl_version", "python_version", "aiohttp_version", "started_unix_s", "plan_digest"}
    assert facts <= set(found["facts"])
    assert found["workload_digest"]
    assert set(found["metrics"]) <= set(found["definitions"])
    assert found["requests"]["ok"] == 10
    assert found["goodput"]["ratio"] == 1.0


def test_out_gets_the_result_and_a_line_per_request_without_secrets(
    served, tmp_path, monkeypatch, capsys
):
    monkeypatch.setenv("BENCH_KEY", "s3cr3t-key")
    assert bench(served(), "--out", str(tmp_path / "r"), "--api-key-env", "BENCH_KEY") == 0
    result = (tmp_path / "r" / "result.json").read_text()
    lines = (tmp_path / "r" / "requests.jsonl").read_text().splitlines()
    said = capsys.readouterr()

    assert json.loads(result)["requests"]["sent"] == len(lines) == 10
    assert json.loads(lines[0])["outcome"] == "ok"
    assert "s3cr3t" not in result + "".join(lines) + said.out + said.err


def test_the_address_that_up_prints_is_taken_as_it_is(served, capsys):
    server = served()

    assert run(["bench", "run", "--url", f"{server.url}/v1/", *QUICK]) == 0
    assert {path.removeprefix("/v1").startswith("/v1") for path in server.paths} == {False}
    assert f"fake at {server.url}:" in capsys.readouterr().out


@pytest.mark.parametrize(
    "url", ["http://user:s3cr3t@127.0.0.1:1", "http://s3cr3t@h/v1", "user:s3cr3t@h", "http://u:s3/cr3t@h"]
)  # fmt: skip
def test_a_password_in_the_address_is_refused_and_not_shown(url, tmp_path, capsys):
    assert run(["bench", "run", "--url", url, "--out", str(tmp_path), *QUICK]) == ExitCode.USAGE
    said = capsys.readouterr()

    assert "s3" not in said.out + said.err
    assert "--api-key-env NAME" in said.err
    assert not list(tmp_path.iterdir())


def test_a_server_that_is_silent_is_named_with_how_long_it_is_waited_for(
    served, monkeypatch, capsys
):
    monkeypatch.setattr(bench_driving, "TOLD_AFTER_S", 0.0)
    monkeypatch.setattr(bench_driving, "REQUEST_TIMEOUT_S", 0.5)
    server = served()
    server.faults = ["hang"]

    assert bench(server) != 0
    told = "its first answers, to learn how it counts tokens; each at most 0.5 s"
    assert f"bench waits for the server: {told}\n" in capsys.readouterr().err


def test_a_missed_goal_exits_6(served, capsys):
    assert bench(served(ttft_s=0.05), "--slo", "ttft=10") == ExitCode.GATE
    assert "MISSED ttft_ms p99" in capsys.readouterr().out


def test_zero_successes_exit_4_and_say_why(served, capsys):
    server = served()
    server.faults = [""] * 5 + ["503"] * 1000

    assert bench(server) == ExitCode.REFUSED
    assert "no request succeeded (http 503)" in capsys.readouterr().out


def test_nothing_listening_exits_4(capsys):
    assert run(["bench", "run", "--url", "http://127.0.0.1:1", *QUICK]) == ExitCode.REFUSED
    assert "127.0.0.1:1" in capsys.readouterr().err


def test_traffic_of_others_needs_yes(served, capsys):
    server = served(metrics="dynctl_router_inflight 3\n")

    assert bench(server) == ExitCode.USAGE
    assert server.bodies == []
    said = capsys.readouterr().err
    assert "3 requests of others" in said
    assert "--yes" in said
    assert bench(server, "--yes") == 0


def test_an_interrupt_writes_the_partial_result_and_exits_130(served, tmp_path, capsys, until):
    server = served()

    def interrupt():
        until(lambda: len(server.bodies) >= 20, "the run is under way")
        os.kill(os.getpid(), signal.SIGINT)

    interrupting = threading.Thread(target=interrupt)
    interrupting.start()
    code = bench(server, "--duration", "120s", "--out", str(tmp_path))
    interrupting.join()
    result = json.loads((tmp_path / "result.json").read_text())

    assert code == ExitCode.INTERRUPTED
    assert result["is_partial"]
    assert result["requests"]["ok"] > 0
    assert "PARTIAL" in capsys.readouterr().out


def test_a_directory_that_cannot_be_written_is_refused_before_anything_is_sent(
    served, tmp_path, capsys
):
    (tmp_path / "file").write_text("")
    server = served()

    assert bench(server, "--out", str(tmp_path / "file" / "x")) == ExitCode.USAGE
    assert "cannot write there: Not a directory" in capsys.readouterr().err
    assert server.bodies == []


def test_what_was_measured_is_shown_though_it_cannot_be_written(served, tmp_path, capsys):
    (tmp_path / "result.json").mkdir()

    assert bench(served(), "--out", str(tmp_path)) == ExitCode.ERROR
    out, err = capsys.readouterr()
    assert "10 sent, 10 answered" in out
    assert f"cannot write to {tmp_path}: Is a directory" in err


@pytest.mark.parametrize(
    "args",
    [["--workload", "nonsense"], ["--load", "fast"], ["--duration", "soon"], ["--duration", "0s"], ["--slo", "p99=3"],
     ["--slo", "ttft=-1"], ["--api", "soap"], ["--api-key-env", "NO_SUCH_VARIABLE"], ["--model", "other"],
     ["--block-size", "0"], ["--url", "127.0.0.1:8000"], ["--url", "http://:80"], ["--url", "http://h:70000"]],
)  # fmt: skip
def test_what_makes_no_sense_exits_2_before_anything_is_sent(served, args, capsys):
    server = served()

    assert bench(server, *args) == ExitCode.USAGE
    assert server.bodies == []


def test_slo_spellings():
    assert parse_slo("ttft=500,itl=40") == Slo(500.0, 40.0)
    assert parse_slo("ttft_ms=500, itl_ms=40") == Slo(500.0, 40.0)
    assert parse_slo(None) == Slo()
    with pytest.raises(UsageError):
        parse_slo("itl")


INVENTORY = Inventory(
    "c", (HostEntry("here", "local"), HostEntry("far", "10.0.0.7", data_address="10.1.0.7"))
)


@pytest.mark.parametrize(
    ("host", "url", "found"),
    [("here", "http://127.0.0.1:8000", "http://127.0.0.1:8000"), ("here", "0.0.0.0:8000", "http://127.0.0.1:8000"),
     ("far", "0.0.0.0:8000", "http://10.1.0.7:8000"), ("far", "https://10.0.0.7:8443", "https://10.0.0.7:8443"),
     ("far", "[fd00::1]:8000", "http://[fd00::1]:8000")],
)  # fmt: skip
def test_where_a_router_listens_becomes_where_it_is_reached(host, url, found):
    assert reachable_url(INVENTORY, host, url) == found


def test_a_router_on_the_loopback_of_another_host_is_explained():
    with pytest.raises(DynctlError) as caught:
        reachable_url(INVENTORY, "far", "127.0.0.1:8000")

    assert "ssh -N -L 8000:127.0.0.1:8000 10.0.0.7" in caught.value.hint
    assert caught.value.exit_code is ExitCode.REFUSED

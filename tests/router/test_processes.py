"""The router as a process: flags, configuration files, ports, signals."""

import asyncio
import json
import os
import re
import signal
import socket
import subprocess
import sys
from pathlib import Path

import pytest
from router_bench import Client, events
from router_fakes import MODEL, FakeEngine

from dynctl.cli.main import run as run_cli
from dynctl.cli.route import build_config, parse_engine
from dynctl.errors import UsageError
from dynctl.http1.upstream import Address, Upstream

PLAIN = {
    "engines": ["http://127.0.0.1:9100"],
    "listen": "127.0.0.1:0",
    "policy": "kv",
    "tokenizer": None,
    "models": [],
    "api_keys": None,
    "tls": (None, None),
    "insecure_listen": False,
    "settings": [],
}


def test_engine_options_are_read():
    target = parse_engine(
        "http://127.0.0.1:9100,role=prefill,kv-events=tcp://127.0.0.1:9300,kv-replay=tcp://127.0.0.1:9301,topic=kv",
        3,
    )

    assert (target.id, target.role, target.url) == ("engine-3", "prefill", "http://127.0.0.1:9100")
    assert target.kv_events == "tcp://127.0.0.1:9300"
    assert target.kv_replay == "tcp://127.0.0.1:9301"
    assert target.topic == "kv"


@pytest.mark.parametrize(
    "change",
    [
        {"engines": ["http://127.0.0.1:9100,rol=prefill"]},
        {"engines": ["http://127.0.0.1:9100,role=x"]},
        {"engines": ["http://127.0.0.1:9100,role=prefill,role=decode"]},
        {"engines": ["127.0.0.1:9100"]},
        {"engines": ["http://a:1,id=x", "http://b:1,id=x"]},
        {"listen": "8000"},
        {"listen": "0.0.0.0:8000"},
        {"settings": ["max_retries=many"]},
        {"settings": ["nope=1"]},
        {"tls": ("cert.pem", None)},
    ],
)
def test_flags_that_make_no_sense_are_usage_errors(change):
    with pytest.raises(UsageError):
        build_config(**(PLAIN | change))


def test_a_decision_log_that_cannot_be_written_is_refused_before_anything_runs(tmp_path):
    (tmp_path / "file").write_text("in the way")
    for given, why in (
        ("", "names no directory"),
        (str(tmp_path / "file"), "File exists"),
        (str(tmp_path / "file" / "log"), "Not a directory"),
        ("/proc/nothing", "No such file or directory"),
    ):
        with pytest.raises(UsageError, match=why) as refused:
            build_config(**PLAIN, decision_log=given)
        assert "Errno" not in refused.value.message
    folder = tmp_path / "new" / "log"
    assert build_config(**PLAIN, decision_log=str(folder)).decision_log == str(folder)
    assert folder.stat().st_mode & 0o777 == 0o700
    assert list(folder.iterdir()) == []


def test_keys_are_read_from_a_file_and_only_their_hashes_kept(tmp_path):
    keys = tmp_path / "keys"
    keys.write_text("# clients\nalice=sk-alice-0001\n\nbob=sk-bob-000002\n")

    config = build_config(**(PLAIN | {"api_keys": keys}))

    assert [key.name for key in config.api_keys] == ["alice", "bob"]
    assert "sk-" not in repr(config)
    keys.write_text("alice=short\n")
    with pytest.raises(UsageError, match="keys:1"):
        build_config(**(PLAIN | {"api_keys": keys}))


def test_an_unknown_policy_lists_the_known_ones(capsys):
    code = run_cli(
        ["route", "--listen", "127.0.0.1:0", "--engine", "http://127.0.0.1:1", "--policy", "best"]
    )

    assert code == 2
    assert "least_loaded" in capsys.readouterr().err


def test_a_busy_port_is_one_error_naming_port_and_owner():
    with socket.socket() as holder:
        holder.bind(("127.0.0.1", 0))
        holder.listen()
        port = holder.getsockname()[1]
        done = subprocess.run(
            [
                sys.executable,
                "-m",
                "dynctl",
                "route",
                "--listen",
                f"127.0.0.1:{port}",
                "--engine",
                "http://127.0.0.1:1",
            ],
            capture_output=True,
            text=True,
            timeout=60,
            check=False,
        )

    errors = [line for line in done.stderr.splitlines() if line.startswith("error:")]
    assert done.returncode == 1
    assert len(errors) == 1
    own = Path("/proc/self/comm").read_text().strip()
    assert f"port {port} on 127.0.0.1 is in use by {own} (pid {os.getpid()})" in errors[0]
    assert "Traceback" not in done.stderr


def test_a_router_process_serves_from_its_file_tells_its_health_and_drains(run, short_dir):
    async def main():
        engine = await FakeEngine(tokens=30, gap_s=0.02).start()
        config = {
            "listen": "127.0.0.1:0",
            "engines": [{"id": "e0", "url": engine.url}],
            "settings": {"engine_poll_s": 0.1, "probe_s": 0},
        }
        (short_dir / "r.json").write_text(json.dumps(config))
        process = await asyncio.create_subprocess_exec(
            *(sys.executable, "-sP", "-m", "dynctl.router"),
            *("--config", str(short_dir / "r.json"), "--admin-socket", str(short_dir / "r.sock")),
            stderr=asyncio.subprocess.PIPE,
        )
        admin = Upstream(Address(path=str(short_dir / "r.sock")))
        try:
            port = None
            while port is None:
                line = (await asyncio.wait_for(process.stderr.readline(), 60)).decode()
                assert line, "the router ended"
                port = (match := re.search(r"listening on 127\.0\.0\.1:(\d+)", line)) and int(
                    match[1]
                )
            while (await admin.fetch("GET", "/health")).status != 200:
                await asyncio.sleep(0.02)
            client = Client(port)
            engine.go.clear()
            stream = asyncio.create_task(client.complete(stream=True))
            while b"inflight 1" not in (await admin.fetch("GET", "/metrics")).body:
                await asyncio.sleep(0.01)
            decisions = json.loads((await admin.fetch("GET", "/decisions?limit=5")).body)
            assert decisions[0]["engine"] == "e0"
            assert (await admin.fetch("GET", "/decisions?limit=0")).status == 400
            process.send_signal(signal.SIGTERM)
            engine.go.set()
            answer = await stream

            assert events(answer.body)[-1] == b"[DONE]"
            rest = await asyncio.wait_for(process.stderr.read(), 60)
            assert await process.wait() == 0, rest
            assert b"Traceback" not in rest
            assert not (short_dir / "r.sock").exists()
            await client.upstream.close()
        finally:
            await admin.close()
            if process.returncode is None:
                process.kill()
                await process.wait()
            await engine.stop()

    run(main)


def test_a_bad_configuration_file_is_one_error_and_exit_2(tmp_path):
    (tmp_path / "r.json").write_text('{"listen": "127.0.0.1:0", "engines": [], "polcy": "kv"}')

    done = subprocess.run(
        [sys.executable, "-m", "dynctl.router", "--config", str(tmp_path / "r.json")],
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )

    assert done.returncode == 2
    assert "polcy" in done.stderr
    assert "Traceback" not in done.stderr
    assert MODEL not in done.stderr

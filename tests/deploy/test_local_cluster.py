"""`up` to `down` on this machine, by the command line, the way an operator does it."""

import contextlib
import http.client
import json
import os
import shutil
import signal
import socket
import subprocess
import sys
import threading
import urllib.error
import urllib.request
from pathlib import Path

import pytest

import dynctl

pytestmark = pytest.mark.timeout(600)

INVENTORY = """\
cluster: t
hosts:
  - {{name: here, address: local, cpu_slots: 3}}
ports: {{base: {base}, count: 16}}
deployments:
  - name: chat
    model: sim
    engine: {engine}
    pools:
      - {{role: prefill, replicas: 1}}
      - {{role: decode, replicas: 1}}
    router: {{listen: 127.0.0.1:{listen}}}
"""


class Cluster:
    def __init__(self, directory, first_port, engine="sim"):
        self.directory = directory
        self.base, self.listen = first_port, first_port + 16
        self.write(engine)

    def write(self, engine):
        (self.directory / "inventory.yaml").write_text(
            INVENTORY.format(base=self.base, listen=self.listen, engine=engine)
        )

    def change_policy(self):
        path = self.directory / "inventory.yaml"
        path.write_text(path.read_text().replace("router: {", "router: {policy: round_robin, "))
        self.run("plan")

    def run(self, *words, code=0, source=None):
        """Run dynctl, from another copy of its code if `source` is given."""
        done = subprocess.run(
            [sys.executable, "-m", "dynctl", *words],
            cwd=self.directory,
            env=os.environ | ({"PYTHONPATH": str(source)} if source else {}),
            capture_output=True,
            text=True,
            timeout=300,
            check=False,
        )
        assert done.returncode == code, f"{words}: {done.returncode}\n{done.stdout}\n{done.stderr}"
        return done

    def begin(self, *words):
        return subprocess.Popen(
            [sys.executable, "-m", "dynctl", *words],
            cwd=self.directory,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )

    def units(self):
        with self.begin(
            "status", "-o", "json"
        ) as asked:  # it may end with 6 on a machine that stalls
            status = json.loads(asked.communicate()[0])
        return {unit["id"]: unit for unit in status["hosts"]["here"]["units"]}

    def ask(self, text, max_tokens=8):
        body = json.dumps({"model": "sim", "prompt": text, "max_tokens": max_tokens}).encode()
        request = urllib.request.Request(
            f"http://127.0.0.1:{self.listen}/v1/completions",
            body,
            {"content-type": "application/json"},
        )
        with urllib.request.urlopen(request, timeout=60) as answer:
            return json.loads(answer.read())

    def gives(self, text, before):
        """Whether the answer is as it was: an engine that is ready again is heard of by the router a moment later."""
        with contextlib.suppress(urllib.error.HTTPError):
            return self.ask(text)["choices"] == before["choices"]

    def stream(self, max_tokens):
        """Begin a stream; gives the answer to be read."""
        body = json.dumps(
            {"model": "sim", "prompt": "long", "max_tokens": max_tokens, "stream": True}
        )
        client = http.client.HTTPConnection("127.0.0.1", self.listen, timeout=120)
        client.request("POST", "/v1/completions", body, {"content-type": "application/json"})
        return client, client.getresponse()

    def left_running(self):
        found = subprocess.run(
            ["pgrep", "-fa", str(self.directory)], capture_output=True, text=True, check=False
        )
        return [line for line in found.stdout.splitlines() if "pgrep" not in line]


@pytest.fixture
def cluster(tmp_path, free_ports):
    made = Cluster(tmp_path, free_ports(17))
    yield made
    subprocess.run(
        [sys.executable, "-m", "dynctl", "down", "--yes", "--now"],
        cwd=tmp_path,
        capture_output=True,
        timeout=300,
        check=False,
    )
    for line in made.left_running():
        with contextlib.suppress(ProcessLookupError):
            os.kill(int(line.split()[0]), signal.SIGKILL)


def test_up_serves_a_second_up_changes_nothing_and_down_leaves_nothing(cluster):
    cluster.run("up", "--yes")
    first = cluster.ask("one two three")
    before = cluster.units()

    again = cluster.run("up", "--yes")
    plan = cluster.run("plan", "--detailed-exitcode")

    logs = cluster.run("logs", "chat-dec*", "--tail", "3").stdout
    astray = cluster.run("logs", "chat-decode0", code=2).stderr

    assert {line.split("│")[0].strip() for line in logs.splitlines()} == {"chat-decode-0"}
    assert "did you mean 'chat-decode-0'?" in astray
    assert "no changes" in again.stderr
    assert "no changes" in plan.stderr
    assert first["choices"][0]["text"] == cluster.ask("one two three")["choices"][0]["text"]
    assert {u["pid"] for u in before.values()} == {u["pid"] for u in cluster.units().values()}
    cluster.run("down", "--yes")
    assert cluster.left_running() == []
    assert not (cluster.directory / ".dynctl" / "t" / "hosts").exists()
    with pytest.raises(urllib.error.URLError):
        cluster.ask("gone")


def test_a_cluster_written_in_python_comes_up_and_goes_down_by_it(cluster):
    (cluster.directory / "inventory.yaml").unlink()
    (cluster.directory / "cluster.py").write_text(
        "from dynctl.planner.code import LLM, Node, Pool\n"
        'cluster = "t"\n'
        f'ports = {{"base": {cluster.base}, "count": 16}}\n'
        'nodes = [Node("here", address="local", cpu_slots=3)]\n'
        f'chat = LLM("chat", "sim", "sim", router={{"listen": "127.0.0.1:{cluster.listen}"}})\n'
    )

    cluster.run("up", "-i", "cluster.py", "--yes")

    assert cluster.ask("hello")["choices"]
    assert "no changes" in cluster.run("up", "-i", "cluster.py", "--yes").stderr
    assert "ready" in cluster.run("status", "-i", "cluster.py").stdout
    cluster.run("down", "-i", "cluster.py", "--yes")
    assert cluster.left_running() == []


def test_a_killed_engine_comes_back_and_is_used_again(cluster, until):
    cluster.run("up", "--yes")
    before = cluster.units()["chat-decode-0"]
    answer = cluster.ask("tell me")
    os.kill(before["pid"], signal.SIGKILL)

    def after():
        status = subprocess.run(
            [sys.executable, "-m", "dynctl", "status", "-o", "json"],
            cwd=cluster.directory,
            capture_output=True,
            timeout=300,
            check=False,
        )
        units = json.loads(status.stdout)["hosts"]["here"]["units"]
        return next(unit for unit in units if unit["id"] == "chat-decode-0")

    def is_back():
        unit = after()
        return unit["incarnation"] != before["incarnation"] and unit["state"] == "ready"

    until(is_back, "the engine is ready again", 240)
    assert after()["num_restarts"] == 1
    until(lambda: cluster.gives("tell me", answer), "the engine gives the same text again")


def test_a_dead_agent_is_replaced_and_engines_never_notice(cluster, ended):
    cluster.run("up", "--yes")
    cluster.change_policy()  # its agent's generation is not the first then
    cluster.run("up", "--yes")
    before = cluster.units()
    agent = int((cluster.directory / ".dynctl/t/hosts/here/agent.pid").read_text())
    os.kill(agent, signal.SIGKILL)
    ended(agent)

    assert cluster.ask("still there?")["choices"]
    cluster.run("status", code=4)
    logs = cluster.run("logs", "agent", "chat-dec*", code=4)
    astray = cluster.run("logs", "chat-decode0", code=2).stderr
    again = cluster.run("up", "--yes").stderr

    assert {line.split("│")[0].strip() for line in logs.stdout.splitlines()} == {
        "agent",
        "chat-decode-0",
    }
    assert "chat-decode-0 starting -> ready" in logs.stdout
    assert "the agent does not answer" in logs.stderr
    assert "did you mean 'chat-decode-0'?" in astray
    assert "what still runs of it is taken over" in again
    assert {i: u["pid"] for i, u in cluster.units().items()} == {
        i: u["pid"] for i, u in before.items()
    }


def test_down_after_the_agent_died_still_leaves_nothing(cluster, ended):
    cluster.run("up", "--yes")
    agent = int((cluster.directory / ".dynctl/t/hosts/here/agent.pid").read_text())
    os.kill(agent, signal.SIGKILL)
    ended(agent)

    cluster.run("down", "--yes")

    assert cluster.left_running() == []


def test_down_now_ends_a_stream_with_an_error_event(cluster):
    cluster.run("up", "--yes")
    client, answer = cluster.stream(8000)
    answer.readline()

    cluster.run("down", "--yes", "--now")

    last = answer.read().decode().rstrip().rsplit("data: ", 1)[-1]
    client.close()
    assert "shutting down" in json.loads(last)["error"]["message"]
    assert cluster.left_running() == []


def test_a_busy_port_is_refused_beforehand_with_its_owner_and_nothing_changed(cluster):
    with socket.create_server(("127.0.0.1", cluster.listen)):
        done = cluster.run("up", "--yes", code=4)

    assert f"here: port {cluster.listen} on 127.0.0.1 is in use by pid {os.getpid()}" in done.stderr
    assert "nothing was changed" in done.stderr
    assert not (cluster.directory / ".dynctl/t/hosts").exists()


def test_an_engine_that_cannot_start_fails_the_gate_with_its_reason(cluster):
    cluster.write("{kind: sim, args: {no-such-flag: '1'}}")

    done = cluster.run("up", "--yes", code=6)

    assert "no-such-flag" in done.stderr
    assert "dynctl logs" in done.stderr


def test_a_drained_engine_stays_down_over_up_until_it_is_brought_back(cluster):
    cluster.run("up", "--yes")
    before = cluster.ask("one two three")
    client, answer = cluster.stream(60)
    answer.read(1)

    unasked = cluster.run("drain", "chat-decode-0", code=2).stderr
    done = cluster.run("drain", "chat-decode-0", "--yes").stderr
    rest = answer.read()
    client.close()

    assert "chat decode: no ready engine is left, new requests will be refused" in unasked
    assert "stopped" in done
    assert rest.endswith(b"data: [DONE]\n\n")
    units = cluster.units()
    assert (units["chat-decode-0"]["state"], units["chat-decode-0"]["is_held"]) == ("stopped", True)
    with pytest.raises(urllib.error.HTTPError) as refused:
        cluster.ask("one two three")
    refused.value.close()
    assert refused.value.code == 503
    again = cluster.run("up", "--yes").stderr
    assert "no changes" in again
    assert "dynctl drain --undo chat-decode-0 brings it back" in again
    assert "already drained: chat-decode-0" in cluster.run("drain", "chat-d*", "--yes").stderr

    cluster.run("drain", "--undo", "here")
    assert cluster.ask("one two three")["choices"] == before["choices"]


def test_a_changed_wish_restarts_only_what_it_concerns(cluster):
    cluster.run("up", "--yes")
    before = cluster.units()
    cluster.change_policy()

    done = cluster.run("up", "--yes")

    assert "~chat-router (changed; hands its port over)" in done.stderr
    after = cluster.units()
    assert after["chat-router"]["incarnation"] != before["chat-router"]["incarnation"]
    assert after["chat-decode-0"]["pid"] == before["chat-decode-0"]["pid"]


def test_up_waits_until_the_router_reaches_every_engine_that_is_ready(cluster, until):
    cluster.run("up", "--yes")
    reached, unreached = "reaches prefill 1/1, decode 1/1", "reaches prefill 0/1, decode 0/1"
    why = "chat-prefill-0 is out of its reach"

    def says(*texts):
        with cluster.begin("status") as status:
            said = " ".join(" ".join(status.communicate()).split())
        return all(text in said for text in texts)

    def is_waited_for():
        # An agent starts a relay anew that is silent for a minute: then once more.
        relay = cluster.units()["relay"]["pid"]
        os.kill(relay, signal.SIGSTOP)
        until(lambda: says(unreached, why), "the router does not reach the engines")
        with cluster.begin("up", "--yes") as up:
            is_told = any(why in line for line in up.stderr)
            assert not is_told or up.poll() is None
            with contextlib.suppress(ProcessLookupError):
                os.kill(relay, signal.SIGCONT)
            _, said = up.communicate()
        assert up.returncode == 0, said
        return is_told

    until(is_waited_for, "up waits for what its agent calls ready", 300)
    until(lambda: says(reached), "the router reaches all")
    assert cluster.ask("one two three")["choices"]


def test_new_code_takes_over_router_and_relay_while_a_stream_runs_through(cluster, tmp_path):
    code = tmp_path / "code"
    shutil.copytree(
        Path(dynctl.__file__).parent, code / "dynctl", ignore=shutil.ignore_patterns("__pycache__")
    )
    cluster.run("up", "--yes")
    before = cluster.units()
    client, answer = cluster.stream(1500)
    assert answer.status == 200
    answer.readline()
    changed = code / "dynctl/core/text.py"
    changed.write_text(changed.read_text() + "# another version\n")
    asked = []

    def keep_asking():
        while not is_over.wait(0.02):
            try:
                asked.append(cluster.ask("short", 1)["choices"][0]["finish_reason"])
            except OSError as error:
                asked.append(str(error))

    is_over = threading.Event()
    asker = threading.Thread(target=keep_asking)
    asker.start()
    done = cluster.run("up", "--yes", source=code)
    is_over.set()
    asker.join()

    assert "~relay (new code; hands its port over)" in done.stderr
    assert "~chat-router (changed; hands its port over)" in done.stderr
    assert "nothing that runs is stopped" in done.stderr
    after = cluster.units()
    is_same = {unit: after[unit]["pid"] == before[unit]["pid"] for unit in before}
    assert is_same == {
        "relay": False,
        "chat-router": False,
        "chat-prefill-0": True,
        "chat-decode-0": True,
    }
    assert len({unit["bundle"] for unit in after.values()}) == 2
    assert after["relay"]["bundle"] == after["chat-router"]["bundle"]
    assert set(asked) == {"length"}
    rest = answer.read().decode()
    assert rest.rstrip().endswith("data: [DONE]"), rest[-300:]
    client.close()
    assert "no changes" in cluster.run("up", "--yes", source=code).stderr
    cluster.run("down", "--yes")
    assert cluster.left_running() == []


def test_code_that_does_not_start_leaves_the_router_before_it_at_work(cluster, tmp_path):
    code = tmp_path / "code"
    shutil.copytree(
        Path(dynctl.__file__).parent, code / "dynctl", ignore=shutil.ignore_patterns("__pycache__")
    )
    cluster.run("up", "--yes")
    before = cluster.units()
    (code / "dynctl/router/__main__.py").write_text("raise SystemExit('broken build')\n")

    done = cluster.run("up", "--yes", source=code, code=6)

    assert "its successor did not start" in done.stderr
    assert "broken build" in done.stderr
    after = cluster.units()
    assert after["chat-router"]["pid"] == before["chat-router"]["pid"]
    assert cluster.ask("still there?")["choices"]
    # Going back is an ordinary `up`.
    cluster.run("up", "--yes")
    assert cluster.units()["chat-router"]["state"] == "ready"


def test_a_policy_that_does_not_exist_is_refused_in_inventory_and_plan(cluster):
    cluster.run("plan")
    plan = cluster.directory / "plan.yaml"
    plan.write_text(plan.read_text().replace("policy: kv", "policy: kx"))

    done = cluster.run("up", "--yes", code=4)

    assert "no routing policy is called 'kx'" in done.stderr
    assert cluster.left_running() == []


def test_a_second_operator_is_told_who_holds_the_lock(cluster):
    root = cluster.directory / ".dynctl/t/hosts/here"
    (root / "lock").mkdir(parents=True)
    holder = {
        "token": "x",
        "user": "ana",
        "machine": "laptop",
        "pid": "7",
        "operation": "dynctl up",
    }
    (root / "lock" / "holder.json").write_text(json.dumps(holder))

    done = cluster.run("up", "--yes", code=5)

    assert "locked by dynctl up of ana@laptop (pid 7)" in done.stderr


def test_down_stops_nothing_while_somebody_else_changes_the_cluster(cluster):
    cluster.run("up", "--yes")
    before = cluster.units()
    lock = cluster.directory / ".dynctl/t/hosts/here/lock"
    lock.mkdir()
    holder = {"token": "x", "user": "ana", "machine": "desk", "pid": "7", "operation": "dynctl up"}
    (lock / "holder.json").write_text(json.dumps(holder))

    done = cluster.run("down", "--yes", code=5)

    assert "locked by dynctl up of ana@desk (pid 7)" in done.stderr
    assert {u["pid"] for u in cluster.units().values()} == {u["pid"] for u in before.values()}
    cluster.run("down", "--yes", "--now")
    assert cluster.left_running() == []


def test_without_a_terminal_and_without_yes_nothing_happens(cluster):
    done = cluster.run("up", code=2)

    assert "rerun: dynctl up --yes" in done.stderr
    assert cluster.left_running() == []


def test_down_where_nothing_is_says_so(cluster):
    done = cluster.run("down", "--yes")

    assert "nothing of this cluster here" in done.stderr


def test_a_secret_reaches_the_engine_and_nothing_else(cluster, monkeypatch):
    monkeypatch.setenv("CANARY", "s3cret-canary")
    cluster.write("{kind: sim, env: {HF_TOKEN: '${env:CANARY}'}}")

    cluster.run("up", "--yes")

    pid = cluster.units()["chat-decode-0"]["pid"]
    environ = Path(f"/proc/{pid}/environ").read_text()
    assert "HF_TOKEN=s3cret-canary" in environ
    holders = subprocess.run(
        ["grep", "-rl", "s3cret-canary", str(cluster.directory)],
        capture_output=True,
        text=True,
        check=False,
    )
    names = {line.rsplit("/", 1)[-1] for line in holders.stdout.splitlines()}
    assert names == {"chat.HF_TOKEN"}
    secret = cluster.directory / ".dynctl/t/hosts/here/secrets/chat.HF_TOKEN"
    assert secret.stat().st_mode & 0o777 == 0o600
    assert "no changes" in cluster.run("up", "--yes").stderr

    monkeypatch.setenv("CANARY", "another")
    cluster.run("up", "--yes")
    assert cluster.units()["chat-decode-0"]["pid"] != pid


def test_up_ends_when_caches_were_heard_of_and_names_engines_whose_are_not(cluster):
    """The router asks each engine a question of its own before it is ready."""
    cluster.write("{kind: sim, args: {prefix-caching: 0}}")
    degraded = cluster.run("up", "--yes").stderr
    cluster.run("down", "--yes", "--now")
    cluster.write("sim")
    sound = cluster.run("up", "--yes").stderr
    [hits] = json.loads(cluster.run("explain", "hits", "-o", "json").stdout)["routers"]

    for engine in ("chat-prefill-0", "chat-decode-0"):
        assert f"degraded: {engine}: the engine's prefix cache is off (caching_off)" in degraded
    assert "degraded" not in sound
    assert hits["findings"] == []

    changed = cluster.run("policy", "prefix", "--shadow", "random", "-o", "json").stdout
    [row] = json.loads(changed)["routers"]
    assert row == {
        "router": "chat-router",
        "policy": "prefix",
        "stickiness": 1.0,
        "shadow": "random",
        "num_decisions": 0,
    }
    assert "there are: kv," in cluster.run("policy", "best", code=2).stderr
    refused = cluster.run("policy", "--deployment", "b", code=2).stderr
    assert "no deployment is called b" in refused
    assert "there are: chat" in refused
    ended = cluster.run("policy", "--no-shadow").stdout
    assert ended.splitlines()[1].split() == ["chat-router", "prefix", "1", "–", "–"]

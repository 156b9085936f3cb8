"""The spine on real hosts: from an inventory file to streamed tokens, faults, and down that leaves nothing."""

import concurrent.futures
import json
import os
import resource
import signal
import socket
import ssl
import time
from collections.abc import Iterator
from dataclasses import dataclass

import openai
import pytest
from hostlab import network
from hostlab.cluster import Cluster, fetch_wheels
from hostlab.gpus import gpu_uuid
from hostlab.lab import Lab, wait_until

from dynctl.sim.chain import Chain
from dynctl.sim.options import MODEL_DIR, SimOptions
from dynctl.sim.text import TextModel

pytestmark = [pytest.mark.lab, pytest.mark.root, pytest.mark.timeout(600)]

ENGINES = ("chat-prefill-0", "chat-decode-0", "chat-decode-1")
KEY = "lab-key-6b1f0c"
# Slow enough that a kill meets requests under way, fast enough for two cores.
SIM = {"decode-ms": "5", "prefill-base-ms": "2", "prefill-us-per-token": "50"}


@dataclass
class Spine:
    """The cluster and how clients reach it."""

    lab: Lab
    cluster: Cluster
    url: str

    def client(self, **more: object) -> openai.OpenAI:
        return openai.OpenAI(base_url=self.url, api_key=KEY, max_retries=0, timeout=60, **more)


def deployment(lab: Lab) -> dict[str, object]:
    listen = f"{lab['head'].address}:8000"
    return {
        "name": "chat",
        "model": "sim-model",
        "engine": {"kind": "sim", "args": SIM},
        "pools": [
            {"role": "prefill", "replicas": 1, "hosts": ["gpu-1"]},
            {"role": "decode", "replicas": 2, "hosts": ["gpu-1", "gpu-2"]},
        ],
        "router": {
            "listen": listen,
            "allow_insecure_listen": True,
            # Every request hands over, also where computing twice would be cheaper.
            "settings": {"conditional_prefill": 0},
        },
    }


@pytest.fixture(scope="module")
def operator(lab3: Lab) -> Lab:
    """The three hosts with an inventory and a plan, nothing started."""
    fetch_wheels(lab3, "head")
    (lab3.home / "key").write_text(KEY)
    lab3.write_inventory([deployment(lab3)], api_keys=[{"name": "lab", "key": "${file:key}"}])
    return lab3


@pytest.fixture(scope="module")
def planned(operator: Lab) -> Lab:
    done = operator.dynctl("plan")
    assert done.returncode == 0, done.stderr
    return operator


@pytest.fixture(scope="module")
def spine(planned: Lab) -> Iterator[Spine]:
    done = planned.dynctl("up", "--yes")
    assert done.returncode == 0, done.stderr
    url = f"http://{planned['head'].address}:8000/v1"
    assert url in done.stdout
    yield Spine(planned, Cluster(planned), url)
    planned.dynctl("down", "--yes", "--now")


def test_discover_finds_what_the_hosts_have(operator: Lab) -> None:
    hosts = {host["name"]: host for host in Cluster(operator).json("discover")["hosts"]}
    assert sorted(hosts) == ["gpu-1", "gpu-2", "head"]
    for name in ("gpu-1", "gpu-2"):
        host = hosts[name]
        assert [gpu["uuid"] for gpu in host["gpus"]] == [gpu_uuid(name, i) for i in range(8)]
        assert {gpu["name"] for gpu in host["gpus"]} == {"NVIDIA H100 80GB HBM3"}
        assert {gpu["state"] for gpu in host["gpus"]} == {"free"}
        assert [gpu["numa_node"] for gpu in host["gpus"]] == [0, 0, 0, 0, 1, 1, 1, 1]
        assert host["nvlink_islands"] == [list(range(8))]
        assert host["gpu_links"][0][1] == "NV18"
        rdma = {nic["name"]: nic for nic in host["nics"] if nic["kind"] == "infiniband"}
        assert sorted(rdma) == [f"mlx5_{i}" for i in range(8)]
        assert {nic["rate_gbit_s"] for nic in rdma.values()} == {400}
        assert [gpu["nearest_nics"] for gpu in host["gpus"]] == [[f"mlx5_{i}"] for i in range(8)]
    assert hosts["head"]["gpus"] == []
    for host in hosts.values():
        assert host["systemd"]["user"] is True
        assert host["python_version"].startswith("3.11")


def test_planning_twice_gives_the_same_bytes_and_the_router_a_host_without_gpus(
    planned: Lab,
) -> None:
    first = (planned.home / "plan.yaml").read_bytes()
    done = planned.dynctl("plan", "--detailed-exitcode")
    assert done.returncode == 0, done.stderr
    assert (planned.home / "plan.yaml").read_bytes() == first
    plan = Cluster(planned).json("plan")
    assert plan["deployments"][0]["router"]["host_name"] == "head"
    assert planned.left_on_hosts() == {}


def test_every_unit_is_ready_and_runs_as_ops_in_its_own_scope(spine: Spine) -> None:
    units = spine.cluster.units()
    assert {u["state"] for u in units.values()} == {"ready"}
    assert sorted(u for u in units if units[u]["kind"] == "engine") == sorted(ENGINES)
    assert units["chat-router"]["host"] == "head"
    groups = set()
    for name in ENGINES:
        host = spine.lab[units[name]["host"]]
        process = next(p for p in host.processes() if host.pid_inside(p.pid) == units[name]["pid"])
        assert process.uid == 5000
        group = host.run(["cat", f"/proc/{units[name]['pid']}/cgroup"]).stdout.splitlines()[-1]
        assert "user@5000.service" in group
        assert group.endswith(".scope")
        groups.add((host.name, group))
    assert len(groups) == len(ENGINES)


def test_a_second_up_changes_nothing_and_says_so_soon(spine: Spine) -> None:
    before = {name: unit["incarnation"] for name, unit in spine.cluster.units().items()}
    fastest_s, least_cpu_s = 99.0, 99.0
    # The best of some: other work on the machine may slow any one of them.
    for _ in range(6):
        started_s, used = time.monotonic(), resource.getrusage(resource.RUSAGE_CHILDREN)
        done = spine.lab.dynctl("up", "--yes")
        fastest_s = min(fastest_s, time.monotonic() - started_s)
        now = resource.getrusage(resource.RUSAGE_CHILDREN)
        cpu_s = now.ru_utime + now.ru_stime - used.ru_utime - used.ru_stime
        least_cpu_s = min(least_cpu_s, cpu_s)
        assert done.returncode == 0, done.stderr
        assert "no changes" in done.stdout + done.stderr
        if fastest_s < 2.0:
            break
    assert least_cpu_s < 1.5
    # Elapsed time says nothing on a machine whose cores are taken.
    if os.getloadavg()[0] < (os.cpu_count() or 1):
        assert fastest_s < 2.0
    assert {name: u["incarnation"] for name, u in spine.cluster.units().items()} == before


@pytest.mark.parametrize("is_stream", [False, True])
def test_the_openai_client_gets_exactly_the_models_tokens(spine: Spine, is_stream: bool) -> None:
    model = TextModel(MODEL_DIR)
    chain = Chain(model.words, eos_id=model.eos_id, eos_every=SimOptions().eos_every)
    prompt = f"Tell me about hosts, {'streamed' if is_stream else 'whole'}. " * 20
    ids = model.encode(prompt, add_special_tokens=True)
    wanted = "".join(model.piece(token) for token in chain.continuation(ids, 40))
    with spine.lab.inside(), spine.client() as client:
        answer = client.completions.create(
            model="sim-model", prompt=prompt, max_tokens=40, temperature=0, stream=is_stream
        )
        text = (
            "".join(c.choices[0].text for c in answer if c.choices)
            if is_stream
            else answer.choices[0].text
        )
    assert text == wanted


@pytest.mark.parametrize("is_stream", [False, True])
def test_the_openai_client_chats(spine: Spine, is_stream: bool) -> None:
    messages = [{"role": "user", "content": "Say something about racks."}]
    with spine.lab.inside(), spine.client() as client:
        assert [m.id for m in client.models.list()] == ["sim-model"]
        answer = client.chat.completions.create(
            model="sim-model", messages=messages, max_tokens=12, stream=is_stream
        )
        if is_stream:
            chunks = list(answer)
            text = "".join(c.choices[0].delta.content or "" for c in chunks if c.choices)
            assert [c.choices[0].finish_reason for c in chunks if c.choices][-1] == "length"
        else:
            text = answer.choices[0].message.content
            assert answer.usage.completion_tokens == 12
    assert text


def test_the_openai_client_sees_openai_errors(spine: Spine) -> None:
    with spine.lab.inside(), spine.client() as client:
        with pytest.raises(openai.NotFoundError) as unknown:
            client.completions.create(model="nobody", prompt="x", max_tokens=1)
        with pytest.raises(openai.BadRequestError) as too_long:
            client.completions.create(model="sim-model", prompt="word " * 30_000, max_tokens=1)
        stranger = openai.OpenAI(base_url=spine.url, api_key="wrong", max_retries=0)
        with pytest.raises(openai.AuthenticationError), stranger:
            stranger.models.list()
    assert unknown.value.code == "model_not_found"
    assert too_long.value.body["message"]


def test_prefill_hands_over_to_decode(spine: Spine) -> None:
    before = spine.cluster.metric("chat-prefill-0", "vllm:prompt_tokens_total")
    # Long enough that moving its KV is cheaper than computing it where it is decoded.
    with spine.lab.inside(), spine.client() as client:
        client.completions.create(model="sim-model", prompt="A fresh prompt. " * 400, max_tokens=4)
    newest = spine.cluster.decisions("chat", 2)
    legs = {d["leg"]: d for d in newest if d["request_id"] == newest[0]["request_id"]}
    assert sorted(legs) == ["decode", "prefill"], newest
    assert legs["prefill"]["engine"] == "chat-prefill-0"
    assert legs["decode"]["engine"].startswith("chat-decode-")
    assert spine.cluster.metric("chat-prefill-0", "vllm:prompt_tokens_total") > before
    pulled = sum(
        spine.cluster.metric(e, "vllm:prompt_tokens_by_source_total", source="external_kv_transfer")
        for e in ENGINES[1:]
    )
    assert pulled > 0


def test_bench_reports_and_top_shows_the_traffic_meanwhile(spine: Spine) -> None:
    args = ["--workload", "prefix:groups=2,len=256,suffix=32,osl=16", "--load", "concurrency:4"]
    args += ["--duration", "25s", "--warmup", "1s", "--api-key-env", "LAB_KEY", "--yes"]
    with spine.lab.start("bench", "run", *args, "-o", "json", env={"LAB_KEY": KEY}) as bench:
        seen = []

        def has_traffic() -> bool:
            top = spine.lab.dynctl("top", "--once", "-o", "json")
            assert top.returncode == 0, top.stderr
            seen.append(json.loads(top.stdout))
            chat = seen[-1]["deployments"][0]
            return None not in (chat["ttft"], chat["itl"], chat["reported_hit_ratio"])

        wait_until(has_traffic, "top shows the bench's traffic")
        out, err = bench.communicate(timeout=200)
    assert bench.returncode in {0, 6}, err  # 6: this machine was the limit, which is no fault
    chat = seen[-1]["deployments"][0]
    assert chat["name"] == "chat"
    assert chat["error_ratio"] == 0.0
    assert chat["output_tokens_s"] > 0
    assert chat["predicted_hit_ratio"] > 0
    assert {p["role"]: p["num_ready"] for p in seen[-1]["pools"]} == {"prefill": 1, "decode": 2}
    gpus = {host["name"]: len(host["gpus"]) for host in seen[-1]["hosts"]}
    assert gpus == {"gpu-1": 8, "gpu-2": 8, "head": 0}
    report = json.loads(out)
    assert report["requests"]["failed"] == 0, report["requests"]
    # One prefill engine holds every prefix, so nothing but what is new to it is computed.
    assert report["kv"]["cached_ratio"] == pytest.approx(report["kv"]["ideal_ratio"], abs=0.02)


def test_a_killed_engine_comes_back_and_is_used_again(spine: Spine) -> None:
    before = spine.cluster.units()["chat-decode-0"]
    os.kill(spine.cluster.pid_of("chat-decode-0"), signal.SIGKILL)

    def is_back() -> bool:
        unit = spine.cluster.units().get("chat-decode-0", {})
        return unit.get("state") == "ready" and unit["incarnation"] != before["incarnation"]

    wait_until(is_back, "chat-decode-0 is ready again")
    after = spine.cluster.units()["chat-decode-0"]
    assert after["num_restarts"] == before["num_restarts"] + 1
    with (
        spine.lab.inside(),
        spine.client() as client,
        concurrent.futures.ThreadPoolExecutor() as pool,
    ):

        def one(i: int) -> str:
            with network.inside(spine.lab.hub):
                prompt = f"Prompt number {i} after the kill. " * 20
                return (
                    client.completions.create(model="sim-model", prompt=prompt, max_tokens=8)
                    .choices[0]
                    .text
                )

        def is_used() -> bool:
            # The router hears of it a moment after the agent.
            assert all(pool.map(one, range(16)))
            return "chat-decode-0" in {d["engine"] for d in spine.cluster.decisions("chat", 32)}

        wait_until(is_used, "the router places requests there")


def test_engines_outlive_a_killed_agent_and_are_adopted_again(spine: Spine) -> None:
    before = spine.cluster.units()
    agents = spine.lab["gpu-2"].processes(r"-m dynctl\.agents( |$)")
    assert len(agents) == 1
    os.kill(agents[0].pid, signal.SIGKILL)

    def is_adopted() -> bool:
        again = spine.lab["gpu-2"].processes(r"-m dynctl\.agents( |$)")
        if not again or again[0].pid == agents[0].pid:
            return False
        units = Cluster(spine.lab).units() if spine.lab.dynctl("status").returncode == 0 else {}
        return units.get("chat-decode-1", {}).get("state") == "ready"

    wait_until(is_adopted, "a new agent runs and knows its engine")
    after = spine.cluster.units()["chat-decode-1"]
    assert (after["pid"], after["incarnation"]) == (
        before["chat-decode-1"]["pid"],
        before["chat-decode-1"]["incarnation"],
    )


def test_a_rebooted_host_brings_its_engines_back_without_an_operator(spine: Spine) -> None:
    before = spine.cluster.units()["chat-decode-1"]
    spine.lab["gpu-2"].reboot()

    def is_back() -> bool:
        done = spine.lab.dynctl("status")
        if done.returncode != 0:
            return False
        unit = spine.cluster.units()["chat-decode-1"]
        return unit["state"] == "ready" and unit["incarnation"] != before["incarnation"]

    wait_until(is_back, "gpu-2's engine is ready after the reboot")
    with spine.lab.inside(), spine.client() as client:
        answer = client.completions.create(
            model="sim-model", prompt="After the reboot.", max_tokens=4
        )
    assert answer.choices[0].text


def test_an_outsider_finds_only_sshd_the_relay_and_the_entrance(spine: Spine) -> None:
    relay = 18800
    side_channels = {18800 + i for i in range(1, 200)}
    assert spine.lab.open_ports("head") == [22, 8000]
    for name in ("gpu-1", "gpu-2"):
        ports = set(spine.lab.open_ports(name))
        assert {22, relay} <= ports
        assert ports - {22, relay} <= side_channels
    context = ssl.create_default_context()
    context.check_hostname = False
    context.verify_mode = ssl.CERT_NONE
    with network.inside(spine.lab.outsider):
        assert refuses_without_a_certificate(context, (spine.lab["gpu-1"].address, relay))


def refuses_without_a_certificate(context: ssl.SSLContext, address: tuple[str, int]) -> bool:
    """Whether a TLS server ends the connection instead of answering."""
    try:
        with (
            socket.create_connection(address, timeout=10) as raw,
            context.wrap_socket(raw) as tls,
        ):
            tls.sendall(b"GET /v1/engines HTTP/1.1\r\nHost: x\r\n\r\n")
            return tls.recv(1) == b""
    except (ssl.SSLError, ConnectionError):
        return True


def test_hosts_send_nothing_beyond_their_network(spine: Spine) -> None:
    # No route leads out, so a packet would have failed visibly; nobody may even have tried.
    for host in spine.lab.hosts.values():
        text = host.run(["cat", "/proc/net/snmp"]).stdout.splitlines()
        names, values = (line.split()[1:] for line in text if line.startswith("Ip:"))
        assert dict(zip(names, values, strict=True))["OutNoRoutes"] == "0"


def test_down_leaves_nothing_behind(spine: Spine) -> None:
    with spine.lab.inside(), spine.client() as client:
        client.completions.create(model="sim-model", prompt="Last words.", max_tokens=2)
    done = spine.lab.dynctl("down", "--yes")
    assert done.returncode == 0, done.stderr
    assert spine.lab.left_on_hosts() == {}
    for host in spine.lab.hosts.values():
        units = ["systemctl", "--user", "list-units", "--all", "dynctl*"]
        files = ["find", "/home/ops", "/tmp", "/run/user/5000", "-iname", "*dynctl*"]
        # systemd forgets a scope a moment after its last process.
        wait_until(
            lambda h=host, argv=units: "0 loaded units" in h.run(argv, user="ops").stdout,
            f"no unit of ours is on {host.name}",
        )
        wait_until(
            lambda h=host, argv=files: h.run(argv, check=False).stdout == "",
            f"no file of ours is on {host.name}",
        )
    assert spine.lab.dynctl("status").returncode == 4
    again = spine.lab.dynctl("down", "--yes")
    assert again.returncode == 0, again.stderr

"""plan.yaml is read strictly, and an edited plan is checked and estimated again."""

import re
from dataclasses import replace

import pytest
import yaml
from hypothesis import given
from hypothesis import strategies as st

from dynctl.core.hardware import GpuState, Topology
from dynctl.core.inventory import PoolWish
from dynctl.core.plan import ENGINE_DEFAULT, Parallelism, Plan, Role, Sourced
from dynctl.errors import ExitCode, InventoryError, PlanError
from dynctl.planner.check import check_plan
from dynctl.planner.digest import digest_of
from dynctl.planner.faults import PlanFaultsError
from dynctl.planner.search import make_plan
from dynctl.planner.text import from_yaml, located, to_yaml


@pytest.fixture
def ground(build):
    pools = (PoolWish(Role.PREFILL, 1, Parallelism(2)), PoolWish(Role.DECODE, 2, Parallelism(2)))
    hosts = [build.host("a", 8), build.host("b", 8), build.host("c")]
    return build.cluster(hosts, build.wish("llama-70b", pools=pools))


@pytest.fixture
def text(ground):
    return to_yaml(make_plan(*ground))


def problems(text):
    with pytest.raises(InventoryError) as caught:
        from_yaml(text, "plan.yaml")
    assert caught.value.exit_code is ExitCode.USAGE
    return caught.value.message


@pytest.mark.parametrize(
    ("old", "new", "said"),
    [
        ("- role: prefill", "- role: prefil", "did you mean 'prefill'?"),
        ("relay_port: 18800", "relay_port: soon", "relay_port has to be a whole number from 1 to 65535"),
        ("relay_port: 18800", "relay_port: 99999", "from 1 to 65535"),
        ("    data_address:", "    adress:", "the key 'adress' is unknown"),
        ("cluster: lab", "cluster: [lab]", "cluster has to be text"),
        ("schema: 1", "schema: 2", "reads plans of schema 1"),
        ("    router:\n", "    router: 7\n    rooter:\n", "keys and values belong here"),
        ("cluster: lab", "cluster: lab\ncluster: lab", "is here twice"),
        ("tp: 2", "tp: yes", "true for YAML 1.1"),
    ],
)  # fmt: skip
def test_mistakes_are_shown_where_they_stand(text, old, new, said):
    message = problems(text.replace(old, new, 1))

    assert said in message
    assert re.search(r"plan\.yaml:\d+:\d+:", message)


def test_all_mistakes_come_at_once(text):
    message = problems(
        text.replace("role: decode", "role: x", 1).replace("policy: kv", "polcy: kv", 1)
    )

    assert message.count("plan.yaml:") >= 3


def test_other_yaml_readers_see_the_same_values(text):
    plan = from_yaml(text)

    content = yaml.safe_load(text)

    assert content["digest"] == plan.digest
    assert content["deployments"][0]["pools"][0]["replicas"][0]["gpus"][0]["uuid"] == "GPU-a-0"


@given(st.text(max_size=60), st.text(max_size=60))
def test_any_text_survives(name, verdict):
    plan = Plan(cluster=name, hosts=(), deployments=(), warnings=(verdict,))

    assert from_yaml(to_yaml(plan)) == plan


def test_an_edit_that_fits_is_estimated_again_and_changes_the_digest(ground, text):
    before = from_yaml(text)
    lines = text.split("\n")
    at = max(i for i, line in enumerate(lines) if "- id: chat-decode-1" in line)
    edited = from_yaml("\n".join(lines[:at]) + "\n")

    after = check_plan(edited, *ground)

    assert edited.digest == before.digest != digest_of(edited) == after.digest
    assert len(list(after.replicas())) == 2
    assert after.deployments[0].verdict.startswith("prefill/decode: 1 prefill and 1 decode")
    assert after.deployments[0].estimate != before.deployments[0].estimate


def refusal(plan, ground):
    with pytest.raises(PlanError) as caught:
        check_plan(plan, *ground)
    assert caught.value.exit_code is ExitCode.REFUSED
    return caught.value.message


@pytest.mark.parametrize(
    ("old", "new", "said"),
    [
        ("GPU-a-0", "GPU-a-1", "GPU GPU-a-1 is used 2 times"),
        ("GPU-a-0", "GPU-x-9", "a has no GPU GPU-x-9"),
        ("cluster: lab", "cluster: prod", "the plan is for cluster prod"),
        ("machine-a", "machine-q", "host a is another machine now"),
        ("id: chat-decode-1", "id: chat-decode-0", "replica id chat-decode-0 is used 2 times"),
        ("side_channel_port: 18801", "side_channel_port: 18800", "port 18800 of"),
        ("tp: 2", "tp: 4", "2 GPUs for parallelism of 4"),
        ("- name: chat", "- name: chap", "deployment chap is not in the inventory"),
        ("model: /models/llama-70b", "model: /models/other", "the inventory asks for /models/llama-70b"),
        ("            host: b", "            host: d", "host d is used but not listed"),
        ("policy: kv", "policy: kx", "no routing policy is called 'kx'"),
        ("id: chat-decode-1", "id: chat-router", "chat-router is what another unit is called"),
        ("id: chat-decode-1", "id: relay", "relay is what another unit is called"),
        ("max_num_seqs: {value: 256", "max_num_seqs: {value: 9000", "tokens a step are fewer than its 9000 sequences"),
        ("max_model_len_tokens: {value: ", "max_model_len_tokens: {value: 9900", "tokens does not fit: a prefill engine with tp 2 has room for"),
        ('listen: "127.0.0.1:8000"', "listen: here", "'here' is no HOST:PORT"),
        ('listen: "127.0.0.1:8000"', 'listen: "0.0.0.0:8000"', "0.0.0.0:8000 is open to others without api_keys and TLS"),
    ],
)  # fmt: skip
def test_an_edit_that_does_not_fit_is_refused_at_its_line(ground, text, old, new, said):
    edited = text.replace(old, new, 1)
    with pytest.raises(PlanFaultsError) as caught:
        check_plan(from_yaml(edited), *ground, ("kv", "random"))
    error = located(caught.value, edited, "plan.yaml")
    lines, told = edited.splitlines(), error.message.split("\n\n")[1:]

    assert error.exit_code is ExitCode.REFUSED
    assert said in caught.value.message
    where = re.match(r"plan\.yaml:(\d+):(\d+): ", next(t for t in told if said in t))
    line = lines[int(where[1]) - 1]
    place, written = line[: int(where[2]) - 1], line[int(where[2]) - 1 :]
    assert not place or place[-1] in " {"
    assert written.strip() == written != ""


def test_each_fault_of_a_plan_stands_at_the_value_to_be_changed(ground, text):
    edited = text.replace("            host: b", "            host: bb", 1)
    edited = edited.replace('uuid: "GPU-a-1"', 'uuid: "GPU-a-0"', 1)
    with pytest.raises(PlanFaultsError) as caught:
        check_plan(from_yaml(edited), *ground)
    message = located(caught.value, edited, "plan.yaml").message

    def at(value, which):
        """Where a value stands for the first, second … time."""
        spots = [
            (n, line.index(value) + 1)
            for n, line in enumerate(edited.splitlines(), 1)
            if value in line
        ]
        return "plan.yaml:{}:{}: ".format(*spots[which])

    assert message.startswith("the plan does not fit the cluster: 2 problems in plan.yaml\n\n")
    assert at("bb", -1) + "host bb is used but not listed under hosts" in message
    assert at('"GPU-a-0"', 1) + "GPU GPU-a-0 is used 2 times" in message


def test_a_layout_without_memory_for_it_is_refused(ground, text):
    edited = text.replace("tp: 2", "tp: 1")
    edited = re.sub(r"\n +- \{index: [1357], uuid: [^}]+\}", "", edited)

    assert "leaves room for 0 KV tokens" in refusal(from_yaml(edited), ground)


def test_a_changed_cluster_is_refused(ground, text):
    topology, inventory, models = ground
    host = topology.hosts[0]
    busy = replace(host, gpus=tuple(replace(g, state=GpuState.BUSY) for g in host.gpus))
    plan = from_yaml(text)

    assert "GPU 0 of a is busy" in refusal(plan, (replace_host(topology, busy), inventory, models))
    assert "host a is not among" in refusal(plan, (Topology(topology.hosts[1:]), inventory, models))


def replace_host(topology, host):
    return Topology(tuple(host if h.name == host.name else h for h in topology.hosts))


def test_a_flag_that_was_not_read_when_the_plan_was_made_starts_no_engine_anew(ground, text):
    topology, inventory, models = ground
    (wish,) = inventory.deployments
    flagged = replace(wish, engine=replace(wish.engine, args=(("block_size", "32"),)))
    after = check_plan(
        from_yaml(text), topology, replace(inventory, deployments=(flagged,)), models
    )
    assert after.deployments[0].block_size_tokens == Sourced(16, ENGINE_DEFAULT)

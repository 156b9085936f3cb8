"""--why scores six facts and shows every layout; --what-if changes the facts; Python says the same as YAML."""

import json
import re
from dataclasses import replace

import pytest

from dynctl.cli.main import run
from dynctl.core.hardware import GpuState, Topology
from dynctl.core.inventory import Limits, PoolWish
from dynctl.core.links import LinkKind, LinkMeasurement, LinkPoint
from dynctl.core.plan import Parallelism, Role
from dynctl.core.workload import Slo, Workload
from dynctl.errors import PlanError, UsageError
from dynctl.planner.check import EDITED, check_plan
from dynctl.planner.choosing import Trail
from dynctl.planner.code import LLM, Node, Pool, document
from dynctl.planner.search import make_plan
from dynctl.planner.text import to_yaml
from dynctl.planner.trace import Call, Trace, look_at
from dynctl.planner.whatif import Case, apply_changes
from dynctl.planner.why import six_facts, tell

SPLIT = {"workload": Workload(4096, 256, 4.0), "slo": Slo(3000, 40)}
WHOLE = Limits(max_num_batched_tokens=8192)
"""Prompts in one step: prefill apart from decode is worth it at lower rates then."""


def planned(ground, trails=None):
    return make_plan(*ground, trails)


def split_ground(b, num=4, **change):
    hosts = [b.host(f"gpu-{i}", 8, nics=True, **change) for i in range(1, num + 1)]
    return b.cluster(hosts, b.wish("llama-70b", **SPLIT))


def facts(ground, trace=None):
    trails = {}
    planned(ground, trails)
    topology, inventory, models = ground
    found = six_facts(topology, inventory.deployments[0], models["chat"], trails["chat"], trace)
    return {fact.name: fact.speaks_for for fact in found}


def test_each_fact_is_flipped_by_what_it_is_about(build):
    b = build
    calm = Trace(tuple(Call(float(i * 60), 100, 10) for i in range(1500)), 16)
    wild = Trace(tuple(Call((i // 100) * 6000.0 + i % 100, 100, 10) for i in range(1500)), 16)
    easy = Workload(512, 64, 0.5)
    small = facts(b.cluster([b.host("a", 1)], b.wish(workload=easy)), look_at(calm))
    large = facts(split_ground(b), look_at(wild))

    assert list(small.values()) == [False] * 6
    assert list(large.values()) == [True] * 6


def test_facts_that_need_a_trace_are_not_known_without(build):
    found = facts(split_ground(build))

    assert found["uneven load"] is None
    assert found["day and night swings"] is None


def test_the_story_names_the_chosen_layout_and_why_not_the_others(build):
    ground = split_ground(build)
    trails = {}
    plan = planned(ground, trails)
    topology, inventory, models = ground

    (story,) = tell(plan, topology, inventory, models, trails, {})

    chosen = [each for each in story.considered if each.outcome == "chosen"]
    assert len(chosen) == 1
    assert all(each.outcome for each in story.considered)
    assert any(row.is_chosen for row in story.ratio)
    assert any("moving pays from" in line for line in story.transfer)


def test_longer_prompts_raise_the_share_of_prefill(build):
    def share(isl):
        wish = build.wish(
            "llama-70b", workload=Workload(isl, 256, 3.0), slo=Slo(8000, 40), limits=WHOLE
        )
        hosts = [build.host(f"gpu-{i}", 8, nics=True) for i in range(1, 9)]
        plan = planned(build.cluster(hosts, wish))
        gpus = {
            pool.role.value: len(pool.replicas) * pool.parallelism.num_gpus
            for pool in plan.deployments[0].pools
        }
        return gpus["prefill"] / sum(gpus.values())

    assert share(16384) > share(4096)


def test_measured_links_are_used_and_unmeasured_ones_widen_the_gain(build):
    ground = split_ground(build)
    topology, inventory, models = ground
    names = [host.name for host in topology.hosts]

    def link(a, b, bytes_s):
        point = LinkPoint(1 << 20, 8, 100, bytes_s, bytes_s, bytes_s, bytes_s)
        return LinkMeasurement(a, b, LinkKind.NIXL_VRAM, 0.0, points=(point,))

    def with_links(bytes_s):
        links = tuple(link(a, b, bytes_s) for a in names for b in names if a != b)
        trails: dict = {}
        plan = make_plan(Topology(topology.hosts, links=links), inventory, models, trails)
        return plan.deployments[0], trails["chat"]

    before, _ = make_plan(*ground).deployments[0], None
    fast, fast_trail = with_links(9e10)

    assert any("were not measured" in reason for reason in before.reasons)
    assert any("measured: nixl-vram" in reason for reason in fast.reasons)
    assert not any("were not measured" in reason for reason in fast.reasons)
    assert "15%" in fast_trail.gain.source


def test_a_slow_measured_pair_is_avoided(build):
    hosts = [build.host(f"gpu-{i}", 4, nics=True) for i in range(1, 5)]
    wish = build.wish(
        "llama-70b", workload=Workload(4096, 256, 2.0), slo=Slo(4000, 40), limits=WHOLE
    )
    topology, inventory, models = build.cluster(hosts, wish)

    def link(a, b, bytes_s):
        point = LinkPoint(1 << 20, 8, 100, bytes_s, bytes_s, bytes_s, bytes_s)
        return LinkMeasurement(a, b, LinkKind.NIXL_VRAM, 0.0, points=(point,))

    names = [host.name for host in hosts]
    links = tuple(
        link(a, b, 1e7 if "gpu-1" in (a, b) else 9e10) for a in names for b in names if a != b
    )
    plan = make_plan(Topology(topology.hosts, links=links), inventory, models)

    used = {r.host_name for _, _, r in plan.replicas()}
    assert len(used) > 1
    assert "gpu-1" not in used


def test_prefill_goes_to_the_kind_that_computes_and_decode_to_the_one_that_reads(build):
    from dynctl.core.inventory import PoolWish
    from dynctl.core.plan import Parallelism, Role

    pools = (PoolWish(Role.PREFILL, 1, Parallelism(4)), PoolWish(Role.DECODE, 1, Parallelism(4)))
    hosts = [build.host("a", 8, "a100", "NV12"), build.host("h", 8, "h100")]
    plan = planned(build.cluster(hosts, build.wish("llama-70b", pools=pools)))

    where = {pool.role: pool.replicas[0].host_name for pool in plan.deployments[0].pools}
    assert where == {Role.PREFILL: "h", Role.DECODE: "a"}


def test_two_pipeline_stages_of_two_give_two_engines_of_four(build):
    from dynctl.core.inventory import PoolWish
    from dynctl.core.plan import Parallelism, Role

    pools = (PoolWish(Role.AGGREGATED, 2, Parallelism(2, 2)),)
    plan = planned(build.cluster([build.host("a", 8)], build.wish("llama-70b", pools=pools)))

    assert [len(r.gpus) for _, _, r in plan.replicas()] == [4, 4]


def test_pipeline_stages_lie_on_bridged_pairs(build):
    from dynctl.core.inventory import PoolWish
    from dynctl.core.plan import Parallelism, Role

    crossed = "X SYS NV4 SYS\nSYS X SYS NV4\nNV4 SYS X SYS\nSYS NV4 SYS X"
    pools = (PoolWish(Role.AGGREGATED, 1, Parallelism(2, 2)),)
    wish = build.wish("qwen3-32b-fp8", pools=pools)
    plan = planned(build.cluster([build.host("a", 4, "a6000", crossed)], wish))

    ((_, _, replica),) = plan.replicas()
    assert [gpu.index for gpu in replica.gpus] == [0, 2, 1, 3]


def test_layouts_over_hosts_are_shown_and_never_chosen(build):
    hosts = [build.host(f"a-{i}", 4, "a100-40", "NV4", nics=True) for i in (1, 2)]

    with pytest.raises(PlanError) as caught:
        planned(build.cluster(hosts, build.wish("llama-70b", workload=Workload(16384, 1024, 1.0))))

    assert "tp4 pp2 over a-1, a-2" in caught.value.hint
    assert "if asked for (pools: with tp: 4, pp: 2, nodes: 2)" in caught.value.hint


def test_a_moe_model_mentions_expert_parallel_layouts_and_never_gets_one(build, monkeypatch):
    monkeypatch.setattr("dynctl.planner.spanning.WORTH", 0.0)
    wish = build.wish("deepseek-v3", workload=Workload(2048, 256, 1.0), slo=Slo(8000, 400))
    host = build.host("h", 8, "h200", nics=True)
    plan = planned(build.cluster([host], wish))

    (told,) = [r for r in plan.deployments[0].reasons if r.startswith("only if asked for")]
    assert "req/s per GPU" in told
    tp, dp, ep = (int(re.search(rf"{name}: (\d+)", told)[1]) for name in ("tp", "dp", "ep"))
    asked = replace(wish, pools=(PoolWish(Role.AGGREGATED, 1, Parallelism(tp, 1, dp, ep)),))
    (pool,) = planned(build.cluster([host], asked)).deployments[0].pools
    assert pool.parallelism == Parallelism(tp, 1, dp, tp * dp)
    for _, pool, _ in plan.replicas():
        assert (pool.parallelism.dp, pool.parallelism.ep) == (1, 1)


def case(ground):
    return Case(*ground)


def test_what_if_adds_and_takes_gpus_of_the_cluster_s_own_make(build):
    start = case(build.cluster([build.host("a", 8, nics=True), build.host("b", 8)], build.wish()))

    more = apply_changes("+10 h100", start)
    fewer = apply_changes("-3 h100", start)
    gone = apply_changes("-a", start)

    assert [len(h.gpus) for h in more.topology.hosts] == [8, 8, 8, 2]
    assert more.topology.hosts[2].nics == start.topology.hosts[0].nics
    assert sum(g.state is GpuState.FREE for h in fewer.topology.hosts for g in h.gpus) == 13
    assert [h.name for h in gone.topology.hosts] == ["b"]
    uuids = [g.uuid for h in more.topology.hosts for g in h.gpus]
    assert len(set(uuids)) == len(uuids)


def test_what_if_takes_a_kind_the_cluster_has_not_from_the_table(build):
    after = apply_changes("+8 h200", case(build.cluster([build.host("a", 8)], build.wish())))

    assert after.topology.hosts[1].gpus[0].name == "h200-sxm"
    make_plan(after.topology, after.inventory, after.models)


def test_what_if_changes_workload_goals_and_kv(build):
    start = case(build.cluster([build.host("a", 8)], build.wish(**SPLIT)))
    after = apply_changes("rate x1.5, isl 8192, osl x2, itl 30, prefix 0.5, kv fp8", start)
    (wish,) = after.inventory.deployments

    assert wish.workload == replace(
        SPLIT["workload"], isl_tokens=8192, osl_tokens=512, rate_rps=6.0, shared_prefix_ratio=0.5
    )
    assert wish.slo.itl_ms == 30
    assert after.models["chat"].kv_bytes_per_token * 2 == start.models["chat"].kv_bytes_per_token
    assert apply_changes("kv fp8", after).models["chat"] == after.models["chat"]


@pytest.mark.parametrize(
    "text", ["", " , ", "more gpus", "+2 zx81", "-99 h100", "-nobody", "rate fast", "kv fp3"]
)
def test_what_if_refuses_what_it_does_not_understand(build, text):
    with pytest.raises(UsageError, match="--what-if"):
        apply_changes(text, case(build.cluster([build.host("a", 8)], build.wish())))


def test_more_rate_never_needs_fewer_gpus(build):
    start = case(split_ground(build))

    def gpus(text):
        made = apply_changes(text, start)
        plan = make_plan(made.topology, made.inventory, made.models)
        return sum(len(r.gpus) for _, _, r in plan.replicas())

    counts = [gpus(f"rate x{factor}") for factor in (0.25, 0.5, 1, 1.5)]
    assert counts == sorted(counts)


def test_plans_on_simulated_gpus_are_refused_before_they_are_started(build):
    host = build.host("a", 2)
    host = replace(host, gpus=tuple(replace(gpu, is_simulated=True) for gpu in host.gpus))
    ground = build.cluster([host], build.wish())
    plan = planned(ground)

    with pytest.raises(PlanError, match="the GPUs of a are simulated"):
        check_plan(plan, *ground)


def test_an_edited_plan_says_so_and_loses_the_reasons_of_the_search(build):
    ground = split_ground(build)
    plan = planned(ground)
    (made,) = plan.deployments
    edited = replace(
        plan,
        deployments=(replace(made, router=replace(made.router, listen="127.0.0.1:9000")),),
    )

    told = check_plan(edited, *ground)

    assert EDITED in told.warnings
    assert not any(reason.startswith("gain of") for reason in told.deployments[0].reasons)
    assert EDITED not in check_plan(plan, *ground).warnings


YAML = """\
cluster: here
hosts:
  - name: box
    address: local
    cpu_slots: 3
    labels: {rack: r1}
deployments:
  - name: chat
    model: m
    engine: {kind: sim, args: {decode-ms: 12}}
    pools:
      - {role: prefill, replicas: 1}
      - {role: decode, replicas: 2}
    workload: {rate_rps: 3}
    slo: {ttft_ms: 400}
"""
PYTHON = """\
from dynctl.planner.code import LLM, Node, Pool

cluster = "here"
nodes = [Node("box", address="local", cpu_slots=3, labels={"rack": "r1"})]
chat = LLM(
    "chat",
    "m",
    {"kind": "sim", "args": {"decode-ms": 12}},
    pools=[Pool("prefill"), Pool("decode", 2)],
    workload={"rate_rps": 3},
    slo={"ttft_ms": 400},
)
"""


def test_python_and_yaml_give_byte_equal_plans(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "inventory.yaml").write_text(YAML)
    (tmp_path / "cluster.py").write_text(PYTHON)

    assert run(["plan", "--out", "one.yaml"]) == 0
    assert run(["plan", "--python-topology", "cluster.py", "--out", "two.yaml"]) == 0

    assert "next: dynctl up two.yaml -i cluster.py" in capsys.readouterr().err
    assert run(["plan", "-i", "cluster.py", "--out", "three.yaml"]) == 0
    assert (tmp_path / "one.yaml").read_bytes() == (tmp_path / "two.yaml").read_bytes()
    assert (tmp_path / "one.yaml").read_bytes() == (tmp_path / "three.yaml").read_bytes()
    assert sorted(path.name for path in tmp_path.iterdir() if path.suffix == ".yaml") == [
        "inventory.yaml",
        "one.yaml",
        "three.yaml",
        "two.yaml",
    ]


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("x = 1", "names no cluster"),
        ("cluster = 'a'", "has no Node"),
        ("raise ValueError('no')", "ValueError: no"),
        ("cluster = 'a'\nfrom dynctl.planner.code import Node\nn = Node('-')", "problem"),
    ],
)
def test_a_python_file_that_defines_no_cluster_is_refused(
    tmp_path, monkeypatch, capsys, text, said
):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "cluster.py").write_text(text)

    assert run(["plan", "--python-topology", "cluster.py"]) == 2

    assert said in capsys.readouterr().err


def test_a_document_leaves_defaults_out():
    names = {"cluster": "c", "a": Node("n"), "b": [LLM("l", "m", "sim", pools=[Pool("decode")])]}

    assert document(names, "f.py") == {
        "cluster": "c",
        "hosts": [{"name": "n"}],
        "deployments": [
            {"name": "l", "model": "m", "engine": "sim", "pools": [{"role": "decode"}]}
        ],
    }


def test_the_command_tells_why_what_if_and_simulates(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "inventory.yaml").write_text(YAML)
    calls = [
        {"timestamp": i * 200, "input_length": 600, "output_length": 8, "hash_ids": [1, i + 2]}
        for i in range(40)
    ]
    (tmp_path / "trace.jsonl").write_text("\n".join(map(json.dumps, calls)))

    assert run(["plan", "--why", "--simulate", "--trace", "trace.jsonl", "-o", "json"]) == 0
    told = json.loads(capsys.readouterr().out)
    assert run(["plan", "--what-if", "rate x2", "-o", "json"]) == 0
    compared = json.loads(capsys.readouterr().out)
    assert run(["plan", "--why", "--simulate", "--trace", "chat=trace.jsonl"]) == 0
    text = capsys.readouterr().out

    assert len(told["why"][0]["facts"]) == 6
    assert told["traces"]["chat"]["reuse_ceiling"] > 0.7
    assert told["simulations"]["chat"]["num_calls"] == 40
    assert compared["before"]["plan"]["deployments"][0]["name"] == "chat"
    assert "KV routing: pays" in text
    assert "hit rate" in text
    assert run(["plan", "--what-if", "rate 1000"]) == 0
    assert "chat then: overloaded at 1000 req/s" in capsys.readouterr().out
    assert run(["plan", "--trace", "nobody=trace.jsonl"]) == 2
    assert run(["plan", "--trace", "missing.jsonl"]) == 2


def test_the_same_plan_comes_with_and_without_a_trail(build):
    ground = split_ground(build)
    trails: dict[str, Trail] = {}

    assert to_yaml(make_plan(*ground, trails)) == to_yaml(make_plan(*ground))
    assert trails["chat"].chosen is not None

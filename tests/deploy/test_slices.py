from dataclasses import replace

import msgspec
import pytest

from dynctl.agents.protocol import Peer, spec_digest
from dynctl.core.inventory import EngineSpec, RouterWish
from dynctl.core.plan import (
    ENGINE_DEFAULT,
    Member,
    Parallelism,
    PlannedGpu,
    Pool,
    Replica,
    Role,
    Sourced,
)
from dynctl.deploy.preflight import _ports
from dynctl.deploy.slices import listens_openly, make_slices, routed_by_text, tls_names
from dynctl.router.config import ApiKeyHash, parse_config


def test_every_engine_and_router_of_the_plan_is_in_exactly_one_slice(plan, inventory, ground):
    slices = make_slices(plan, inventory, ground)

    assert [e.id for e in slices["a"].engines] == ["chat-prefill-0", "chat-decode-0"]
    assert [e.id for e in slices["b"].engines] == ["chat-decode-1"]
    assert [r.id for r in slices["a"].routers] == ["chat-router"]
    assert slices["b"].routers == ()


def spread(plan):
    """The plan with engines of another size in each way there is."""
    (chat,) = plan.deployments
    prefill, decode = chat.pools
    prefill = replace(prefill, parallelism=Parallelism(2, 3, 4, 8))
    return replace(plan, deployments=(replace(chat, pools=(prefill, decode)),))


def test_engines_get_the_sizes_of_their_pool(plan, inventory, ground):
    first, second = make_slices(spread(plan), inventory, ground)["a"].engines

    assert (first.tp, first.pp, first.dp, first.ep) == (2, 3, 4, 8)
    assert (second.tp, second.pp, second.dp, second.ep) == (1, 1, 1, 1)


def test_each_rank_of_an_engine_needs_its_own_port(plan, inventory, ground):
    made = make_slices(spread(plan), inventory, ground)["a"]

    ports = [port for _, port in _ports(made, {"chat-prefill-0"})]
    assert ports[-4:] == [18801, 18802, 18803, 18804]
    assert sum("NIXL" in text for text in listens_openly(made)) == 4 + 1


def test_router_configuration_is_one_the_router_accepts_and_names_every_relay(
    plan, inventory, ground
):
    wish = replace(inventory.deployments[0], router=RouterWish(route_key_field="user"))
    inventory = replace(inventory, deployments=(wish,))
    ground = replace(ground, api_keys=(ApiKeyHash("k", "00", "low", "nightly"),))
    unit = make_slices(plan, inventory, ground)["a"].routers[0]

    config = parse_config(msgspec.json.encode(unit.config))

    assert config.route_key_field == "user"
    assert config.api_keys == ground.api_keys

    assert [(r.host_name, r.address, r.port) for r in config.relays] == [
        ("a", "127.0.0.1", 18800),
        ("b", "10.0.0.2", 18800),
    ]
    assert config.served_names == ("sim",)
    assert config.tokenizer == "/r/a/bundles/bundle1/dynctl/sim/model"


def test_a_relay_used_only_from_its_own_host_stays_on_loopback(plan, inventory, ground):
    slices = make_slices(plan, inventory, ground)

    assert slices["a"].relay.listen_host == "127.0.0.1"
    assert slices["b"].relay.listen_host == "10.0.0.2"


def test_router_and_relays_hash_blocks_with_the_same_seed(plan, inventory, ground):
    slices = make_slices(plan, inventory, ground)

    seeds = {e.block_hash_seed for s in slices.values() for e in s.engines}
    assert seeds == {slices["a"].routers[0].config["block_hash_seed"]}


def over_two(plan, **fields):
    """The plan with one engine over both hosts."""
    (chat,) = plan.deployments
    replica = Replica(
        "chat-aggregated-0",
        Role.AGGREGATED,
        "b",
        others=(Member("a"),),
        rendezvous_port=18805,
    )
    pool = Pool(Role.AGGREGATED, Parallelism(pp=2), (replace(replica, **fields),))
    return replace(plan, deployments=(replace(chat, pools=(pool,)),))


def test_an_engine_over_two_hosts_has_a_part_on_each_that_knows_where_the_others_are(
    plan, inventory, ground
):
    slices = make_slices(over_two(plan), inventory, ground)
    (leader,), (member,) = slices["b"].engines, slices["a"].engines

    assert (leader.id, member.id) == ("chat-aggregated-0", "chat-aggregated-0.1")
    assert (leader.data_address, member.data_address) == ("10.0.0.2", "10.0.0.1")
    assert [(e.gang.rank, e.gang.nodes, e.gang.id) for e in (leader, member)] == [
        (0, 2, "chat-aggregated-0"),
        (1, 2, "chat-aggregated-0"),
    ]
    for engine in (leader, member):
        assert (engine.gang.master_address, engine.gang.master_port) == ("10.0.0.2", 18805)
    assert leader.gang.peers == (Peer("chat-aggregated-0.1", "a", "10.0.0.1", 18800),)
    assert member.gang.peers == (Peer("chat-aggregated-0", "b", "10.0.0.2", 18800),)
    assert leader.gang.digest == member.gang.digest


def test_hosts_of_one_engine_reach_each_others_relays_and_have_certificates_for_that(
    plan, inventory, ground
):
    slices = make_slices(over_two(plan), inventory, ground)

    # The router is on a, and asks b's relay alone.
    assert slices["a"].relay.listen_host == "10.0.0.1"
    assert slices["b"].relay.listen_host == "10.0.0.2"
    assert [r["host_name"] for r in slices["a"].routers[0].config["relays"]] == ["b"]
    assert tls_names(slices["a"]) == ["host", "router", "member"]
    assert tls_names(slices["b"]) == ["host", "member"]


def test_where_parts_of_an_engine_meet_must_be_free_and_is_told(plan, inventory, ground):
    slices = make_slices(over_two(plan), inventory, ground)

    assert ("10.0.0.2", 18805) in _ports(slices["b"], {"chat-aggregated-0"})
    assert ("10.0.0.2", 18805) not in _ports(slices["a"], {"chat-aggregated-0.1"})
    assert any(text.startswith("10.0.0.2:18805 (") for text in listens_openly(slices["b"]))
    # What vLLM opens besides cannot be chosen.
    (member,) = slices["a"].engines
    real = replace(slices["a"], engines=(replace(member, kind="vllm"),))
    assert any(text.startswith("10.0.0.1, ports as the kernel") for text in listens_openly(real))


@pytest.mark.parametrize(
    "change",
    [{"rendezvous_port": 18806}, {"others": (Member("a", (PlannedGpu("GPU-1", 0),)),)}],
)
def test_what_changes_for_one_part_of_an_engine_changes_it_for_all(plan, inventory, ground, change):
    before = make_slices(over_two(plan), inventory, ground)
    after = make_slices(over_two(plan, **change), inventory, ground)

    for name in "ab":
        (was,), (now,) = before[name].engines, after[name].engines
        assert was.gang.digest != now.gang.digest
        assert spec_digest(was) != spec_digest(now)


def test_engines_inside_one_host_have_no_gang(plan, inventory, ground):
    for one in make_slices(plan, inventory, ground).values():
        assert all(engine.gang is None for engine in one.engines)
        assert "member" not in tls_names(one)


def test_equal_plans_give_equal_bytes(plan, inventory, ground):
    one, two = (msgspec.json.encode(make_slices(plan, inventory, ground)) for _ in range(2))

    assert one == two


def test_unauthenticated_ports_beyond_loopback_are_listed_for_the_operator(plan, inventory, ground):
    slices = make_slices(plan, inventory, ground)

    assert listens_openly(slices["b"]) == [
        "10.0.0.2:18801 (NIXL side channel of chat-decode-1, unauthenticated)"
    ]


@pytest.mark.parametrize(("served", "expected"), [(None, "sim"), ("gpt", "gpt")])
def test_served_name_is_the_written_one_or_the_models_last_part(
    plan, inventory, ground, served, expected
):
    import dataclasses

    wish = dataclasses.replace(inventory.deployments[0], served_name=served)
    changed = dataclasses.replace(inventory, deployments=(wish,))

    assert make_slices(plan, changed, ground)["a"].engines[0].name == expected


def test_engines_are_started_with_the_plans_limits_but_not_with_their_own_defaults(
    plan, inventory, ground
):
    prefill, decode = plan.deployments[0].pools
    chat = replace(
        plan.deployments[0],
        pools=(
            replace(prefill, max_num_batched_tokens=Sourced(8192, "default: vLLM's own")),
            replace(decode, max_num_batched_tokens=Sourced(512, "modelled: holds slo.itl_ms 50")),
        ),
        max_num_seqs=Sourced(64, "declared in the inventory"),
        gpu_memory_utilization=Sourced(0.85, "edited"),
        block_size_tokens=Sourced(16, ENGINE_DEFAULT),
    )
    slices = make_slices(replace(plan, deployments=(chat,)), inventory, ground)
    engines = {e.id: e for slice_ in slices.values() for e in slice_.engines}

    assert engines["chat-prefill-0"].max_num_batched_tokens == 8192
    assert engines["chat-decode-1"].max_num_batched_tokens == 512
    assert engines["chat-decode-1"].max_num_seqs == 64
    assert engines["chat-decode-1"].gpu_memory_utilization == 0.85
    assert engines["chat-decode-1"].block_size_tokens is None


def test_paths_from_the_home_directory_are_those_of_each_host(plan, inventory, ground):
    spec = EngineSpec("vllm", python="~/vllm/bin/python")
    wish = replace(inventory.deployments[0], model="~/models/m", engine=spec)
    chat = replace(plan.deployments[0], model="~/models/m", engine_kind="vllm")
    places = {name: replace(place, home=f"/home/{name}") for name, place in ground.places.items()}
    slices = make_slices(
        replace(plan, deployments=(chat,)),
        replace(inventory, deployments=(wish,)),
        replace(ground, places=places),
    )

    assert {(e.model, e.python) for e in slices["a"].engines} == {
        ("/home/a/models/m", "/home/a/vllm/bin/python")
    }
    assert slices["b"].engines[0].model == "/home/b/models/m"
    assert slices["a"].routers[0].config["tokenizer"] == "/home/a/models/m"


def test_adopted_servers_without_a_tokenizer_are_named(plan, inventory):
    (wish,) = inventory.deployments
    external = replace(wish, engine=EngineSpec(kind="external", urls=("http://x:1",)))
    told = replace(external, tokenizer="/models/m")

    assert routed_by_text(replace(inventory, deployments=(external,)), plan) == [("chat", "a")]
    assert routed_by_text(replace(inventory, deployments=(told,)), plan) == []
    assert routed_by_text(inventory, plan) == []


@pytest.mark.parametrize("moved", "ab")
def test_a_relay_that_moves_changes_all_parts_of_an_engine(plan, inventory, ground, moved):
    plan = over_two(plan)
    hosts = (replace(h, relay_port=h.relay_port + (h.name == moved) * 50) for h in plan.hosts)
    before = make_slices(plan, inventory, ground)
    after = make_slices(replace(plan, hosts=tuple(hosts)), inventory, ground)

    for name in "ab":
        (was,), (now,) = before[name].engines, after[name].engines
        assert was.gang.digest != now.gang.digest

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dynctl.core.inventory import ApiKey, HostEntry, Inventory, SimulatedGpus
from dynctl.core.plan import Parallelism, Role
from dynctl.errors import InventoryError
from dynctl.inventory.document import MAX_BYTES, parse
from dynctl.inventory.load import load_inventory, local_inventory


def hosts_of(loaded):
    return {entry.name: entry for entry in loaded.inventory.hosts}


def test_the_smallest_inventory_takes_every_default_of_the_nouns(load):
    inventory = load("cluster: prod\nhosts: [gpu-01]\n").inventory

    host = HostEntry(name="gpu-01", address="gpu-01")
    assert inventory == Inventory(cluster="prod", hosts=(host,), path="inventory.yaml")


def test_short_forms_ranges_and_defaults_make_entries(load):
    text = """
cluster: prod
defaults: {user: ops, port: 2222, labels: {site: a}, groups: [all]}
hosts:
  - gpu-[08-11]
  - ada@login:22
  - name: big-[1,3]
    address: 10.0.0.[1-2]
    data_address: 10.1.0.[1-2]
    labels: {rack: 7, site: b}
    groups: [h100]
  - name: here
    address: local
    simulated_gpus: {count: 2, memory: 1GiB}
groups: {fast: ["big-*", gpu-08], range: ["gpu-[09-10]"]}
"""
    hosts = hosts_of(load(text))

    assert list(hosts) == [
        "gpu-08",
        "gpu-09",
        "gpu-10",
        "gpu-11",
        "login",
        "big-1",
        "big-3",
        "here",
    ]
    assert hosts["gpu-08"] == HostEntry(
        "gpu-08", "gpu-08", "ops", 2222, labels=(("site", "a"),), groups=("all", "fast")
    )
    assert hosts["gpu-09"].groups == ("all", "range")
    assert (hosts["login"].user, hosts["login"].port) == ("ada", 22)
    assert (hosts["big-3"].address, hosts["big-3"].data_address) == ("10.0.0.2", "10.1.0.2")
    assert hosts["big-3"].labels == (("site", "b"), ("rack", "7"))
    assert hosts["big-3"].groups == ("all", "h100", "fast")
    assert hosts["here"].is_local
    assert hosts["here"].simulated_gpus == SimulatedGpus(2, "Simulated GPU", 1024**3)


@pytest.mark.parametrize(
    "form", ["from_ssh_config: 'gpu-*'", "- {from_ssh_config: 'gpu-*', user: ops}"]
)
def test_hosts_come_from_the_ssh_configuration_and_its_includes(load, tmp_path, form):
    ssh = tmp_path / "home" / ".ssh"
    (ssh / "conf.d").mkdir(parents=True)
    (ssh / "config").write_text("Include conf.d/*\nHost gpu-01 gpu-02 gw\n Port 22\nHost gpu-*\n")
    (ssh / "conf.d" / "more").write_text("Host=gpu-09\n")

    hosts = hosts_of(load(f"cluster: c\nhosts:\n  {form}\n"))

    assert list(hosts) == ["gpu-09", "gpu-01", "gpu-02"]


def test_no_alias_that_fits_is_an_error_naming_those_there_are(load, tmp_path):
    (tmp_path / "home" / ".ssh").mkdir(parents=True)
    (tmp_path / "home" / ".ssh" / "config").write_text("Host web-1\n")

    with pytest.raises(InventoryError, match=r"fits 'gpu-\*'; it has web-1"):
        load("cluster: c\nhosts: {from_ssh_config: 'gpu-*'}\n")


def test_a_deployment_maps_to_the_nouns(load):
    text = """
cluster: prod
hosts: [gpu-01, cpu-01]
deployments:
  - name: chat
    model: /models/m
    engine:
      kind: vllm
      python: /opt/vllm/bin/python
      args: {enforce-eager: true, max-log-len: 100, speculative-config: {method: ngram, n: 2}, dtype: auto, f: 0.50}
      env: {OMP_NUM_THREADS: 8, HF_TOKEN: "${env:HF_TOKEN}", DIR: "${DIR:-/x}"}
    pools:
      - {role: prefill, replicas: 2, tp: 4, hosts: [gpu-01]}
      - {role: decode}
    slo: {ttft_ms: 500, tpot_ms: 40}
    limits: {max_num_seqs: 64}
    router: {host: cpu-01, listen: "0.0.0.0:80", allow_insecure_listen: true, route_key_field: user}
api_keys:
  - {name: a, key: "${cmd:pass show a}"}
  - {name: b, key: "${env:B}", priority: low, route_key: nightly}
"""
    inventory = load(text).inventory
    (wish,) = inventory.deployments

    assert dict(wish.engine.args) == {
        "enforce-eager": "",
        "max-log-len": "100",
        "speculative-config": '{"method":"ngram","n":2}',
        "dtype": "auto",
        "f": "0.50",
    }
    assert dict(wish.engine.env) == {
        "OMP_NUM_THREADS": "8",
        "HF_TOKEN": "${env:HF_TOKEN}",
        "DIR": "/x",
    }
    assert [(p.role, p.replicas, p.parallelism) for p in wish.pools] == [
        (Role.PREFILL, 2, Parallelism(tp=4)),
        (Role.DECODE, 1, Parallelism()),
    ]
    assert (wish.slo.ttft_ms, wish.slo.itl_ms) == (500.0, 40.0)
    assert wish.limits.max_num_seqs == 64
    assert wish.router.host == "cpu-01"
    assert wish.router.route_key_field == "user"
    assert inventory.api_keys == (
        ApiKey("a", "${cmd:pass show a}"),
        ApiKey("b", "${env:B}", "low", "nightly"),
    )


def test_what_can_be_no_route_key_is_told_with_its_place(load):
    text = """
cluster: c
hosts: [a]
deployments: [{name: d, model: m, engine: sim, router: {route_key_field: metadata.}}]
api_keys: [{name: a, key: "${env:A}", route_key: "%s"}]
"""

    with pytest.raises(InventoryError) as raised:
        load(text % ("x" * 65))

    assert "no body has a field 'metadata.'" in str(raised.value)
    assert "inventory.yaml:5:" in str(raised.value)
    assert ": a route key has 1 to 64 printable characters" in str(raised.value)


def test_several_deployments_with_their_own_entrances(load):
    text = """
cluster: c
hosts: [a, b]
deployments:
  - {name: x, model: m, engine: sim}
  - {name: y, model: m, engine: sim, router: {listen: "127.0.0.1:8001"}}
  - {name: z, model: m, engine: sim, router: {host: b}}
"""
    assert [wish.name for wish in load(text).inventory.deployments] == ["x", "y", "z"]


def test_values_take_the_environment_and_files(load, tmp_path):
    (tmp_path / "user").write_text("ada\n")
    text = """
cluster: ${NAME}-$${x}-${NONE:-default}
defaults: {user: "${file:user}", port: "${PORT}"}
hosts: ["gpu-${N}"]
"""
    with pytest.raises(InventoryError, match=r"'prod-\$\{x\}-default' is no name for a cluster"):
        load(text, NAME="prod", PORT="2222", N="7")
    loaded = load(text.replace("-$${x}", ""), NAME="prod", PORT="2222", N="7")

    host = loaded.inventory.hosts[0]
    assert loaded.inventory.cluster == "prod-default"
    assert (host.name, host.user, host.port) == ("gpu-7", "ada", 2222)


def test_an_api_key_is_never_read_while_loading(load):
    """S9: the reference is kept; the key itself is read where it is used."""
    inventory = load(
        "cluster: c\nhosts: [a]\napi_keys: [{name: k, key: '${env:NOT_SET}'}]\n"
    ).inventory

    assert inventory.api_keys == (ApiKey("k", "${env:NOT_SET}"),)


def test_merge_keys_and_anchors_work(load):
    text = """
cluster: c
hosts:
  - &base {name: a, user: ops, port: 1}
  - {<<: *base, name: b, port: 2}
"""
    hosts = hosts_of(load(text))

    assert (hosts["b"].user, hosts["b"].port) == ("ops", 2)


def test_reserved_words_in_quotes_are_text(load):
    hosts = hosts_of(load("cluster: 'no'\nhosts: ['on', \"1.10\", '22']\n"))

    assert list(hosts) == ["on", "1.10", "22"]


def test_files_that_are_too_large_missing_or_no_text_are_one_sentence(tmp_path):
    large = tmp_path / "large.yaml"
    large.write_bytes(b"#" * (MAX_BYTES + 1))
    latin = tmp_path / "latin.yaml"
    latin.write_bytes(b"cluster: c\nhosts: [\xe9]\n")

    with pytest.raises(InventoryError, match="larger than 1048576 bytes"):
        load_inventory(large)
    with pytest.raises(InventoryError, match=r"none\.yaml: No such file"):
        load_inventory(tmp_path / "none.yaml")
    with pytest.raises(InventoryError, match=r"latin\.yaml:2:9: this is no UTF-8"):
        load_inventory(latin)


def test_ten_thousand_mistakes_are_told_in_bounded_text(load):
    text = "cluster: c\nhosts: [a]\n" + "".join(f"x{i}: 1\n" for i in range(5000))

    with pytest.raises(InventoryError) as caught:
        load(text)
    assert caught.value.message.startswith("5000 problems")
    assert len(caught.value.message) < 20_000


def test_a_thousand_hosts_load_quickly_enough_to_be_unnoticed(load):
    hosts = "".join(
        f"  - {{name: gpu-{i:04d}, user: ops, labels: {{rack: {i}}}}}\n" for i in range(1000)
    )

    assert len(load(f"cluster: c\nhosts:\n{hosts}").inventory.hosts) == 1000


@settings(max_examples=300, deadline=None)
@given(st.text(alphabet=st.sampled_from("ab: -[]{},&*!|>'\"#%@`\n\t0~$"), max_size=60))
def test_no_text_whatsoever_breaks_the_reader(text):
    root, problems = parse(text)

    assert isinstance(root.entries, dict)
    assert all(problem.spot.line >= 1 and problem.spot.column >= 1 for problem in problems)


def test_the_local_inventory_is_one_host_with_prefill_and_decode_simulated():
    inventory = local_inventory()

    assert [host.address for host in inventory.hosts] == ["local"]
    (wish,) = inventory.deployments
    assert wish.engine.kind == "sim"
    assert [(pool.role, pool.replicas) for pool in wish.pools] == [
        (Role.PREFILL, 1),
        (Role.DECODE, 2),
    ]


@pytest.mark.parametrize(
    ("listen", "is_open"),
    [
        ("127.0.0.1:80", False),
        ("127.8.9.10:80", False),
        ("localhost:80", False),
        ("[::1]:80", False),
        ("127.example.com:80", True),
        ("127.0.0.1.evil.org:80", True),
        ("localhost.evil.org:80", True),
        ("127.0.0.999:80", True),
        ("[::]:80", True),
        ("10.0.0.1:80", True),
    ],
)
def test_only_true_loopback_is_an_entrance_without_keys_and_tls(load, listen, is_open):
    text = f"""
cluster: prod
hosts: [a]
deployments:
  - {{name: x, model: m, engine: sim, router: {{listen: "{listen}"}}}}
"""
    if is_open:
        with pytest.raises(InventoryError, match="is open to others without api_keys and TLS"):
            load(text)
    else:
        assert load(text).inventory.deployments[0].router.listen == listen

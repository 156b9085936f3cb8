from pathlib import Path

import pytest

from dynctl.core.inventory import Inventory
from dynctl.errors import InventoryError
from dynctl.inventory.duplicates import refuse_duplicates, same_machines
from dynctl.inventory.examples.catalog import example_names, example_text
from dynctl.inventory.show import rows, to_yaml

TEXT = """\
cluster: c
defaults: {user: ops, labels: {site: a}}
hosts:
  - gpu-[1-2]
  - ada@login:23
  - {name: big, port: 24}
groups: {g: [big]}
deployments:
  - name: chat
    model: ${MODEL}
    engine:
      kind: sim
      args: {api-key: hush, seed: 1}
      env: {HF_TOKEN: hush, PLAIN: seen, FROM: "${SECRET}", REF: "${env:X}"}
api_keys:
  - {name: k, key: "${env:HUSH}"}
"""


def shown(load):
    return {row.path: (row.value, row.source) for row in rows(load(TEXT, MODEL="m", SECRET="hush"))}


def test_every_value_is_shown_with_where_it_came_from(load):
    found = shown(load)

    assert found["cluster"] == ("c", "inventory.yaml:1")
    assert found["ssh.parallel"] == (32, "default")
    assert found["hosts.gpu-2.name"] == ("gpu-2", "inventory.yaml:4")
    assert found["hosts.gpu-2.user"] == ("ops", "inventory.yaml:2")
    assert found["hosts.gpu-2.labels.site"] == ("a", "inventory.yaml:2")
    assert found["hosts.login.user"] == ("ada", "inventory.yaml:5")
    assert found["hosts.login.port"] == (23, "inventory.yaml:5")
    assert found["hosts.big.groups"] == ("g", "inventory.yaml:7")
    assert found["hosts.big.port"] == (24, "inventory.yaml:6")
    assert found["deployments.chat.model"] == ("m", "inventory.yaml:10 from $MODEL")
    assert found["deployments.chat.engine.args.seed"] == ("1", "inventory.yaml:13")
    assert found["deployments.chat.limits.max_num_seqs"] == (None, "default")


def test_secrets_are_hidden_and_references_shown(load):
    """S9"""
    found = shown(load)

    assert found["api_keys.k.key"][0] == "${env:HUSH}"
    assert found["deployments.chat.engine.env.REF"][0] == "${env:X}"
    assert found["deployments.chat.engine.env.PLAIN"][0] == "seen"
    assert "hush" not in repr(found)
    assert "hush" not in to_yaml(load(TEXT, MODEL="m", SECRET="hush"))


@pytest.mark.parametrize("name", example_names())
def test_what_is_printed_as_yaml_loads_to_the_same_inventory(load, name):
    first = load(example_text(name))
    second = load(to_yaml(first))

    assert second.inventory == first.inventory


def test_awkward_values_survive_printing_as_yaml(load):
    text = """
cluster: "no"
hosts: [a]
deployments:
  - {name: x, model: "$$HOME $${x} 0777", revision: "1.10", engine: {kind: sim, env: {A: "$$5", B: "22:22"}}}
"""
    first = load(text)

    assert load(to_yaml(first)).inventory == first.inventory


def test_a_line_with_a_secret_is_in_no_message(load):
    with pytest.raises(InventoryError) as caught:
        load("cluster: c\nhosts: [a]\napi_keys: [{name: a b, key: sk-hush, x: 1}]\n")

    assert "hush" not in caught.value.message
    assert "3:" in caught.value.message


def test_hosts_that_are_one_machine_are_refused_and_clones_are_not():
    """D29: cloned images share a machine id, so the host key counts as well."""
    same = {
        "a": ("m1", "k1"),
        "b": ("m1", "k1"),
        "c": ("m1", "k2"),
        "d": ("", None),
        "e": ("", None),
    }

    assert same_machines(same) == (("a", "b"),)
    with pytest.raises(InventoryError, match=r"a and b \(machine id m1\)"):
        refuse_duplicates(Inventory("c", (), path="inventory.yaml"), same)
    refuse_duplicates(Inventory("c", ()), {"a": ("m1", "k1"), "c": ("m1", "k2")})


def test_paths_are_shown_without_their_directories(load):
    assert all("/" not in row.source for row in rows(load("cluster: c\nhosts: [a]\n")))
    assert Path("inventory.yaml").exists()

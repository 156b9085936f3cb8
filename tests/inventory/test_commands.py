"""`dynctl init` and `dynctl config`, as typed."""

import json
import re

import pytest
import yaml

from dynctl.cli.main import run
from dynctl.inventory.examples.catalog import example_names


@pytest.fixture(autouse=True)
def here(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.delenv("DYNCTL_INVENTORY", raising=False)
    return tmp_path


@pytest.mark.parametrize("name", example_names())
def test_each_example_is_written_with_a_schema_beside_it_and_is_valid(name, here, capsys):
    assert run(["init", "site", "--example", name]) == 0
    text = (here / "site" / "inventory.yaml").read_text()
    schema = text.splitlines()[0].removeprefix("# yaml-language-server: $schema=")
    assert json.loads((here / "site" / schema).read_text())["title"] == "InventoryFile"
    capsys.readouterr()

    assert run(["config", "validate", "-i", "site/inventory.yaml"]) == 0
    assert capsys.readouterr().out.startswith("site/inventory.yaml is valid: ")


def test_init_never_overwrites(here, capsys):
    (here / "inventory.yaml").write_text("mine")

    assert run(["init"]) == 2
    assert "exists already" in capsys.readouterr().err
    assert (here / "inventory.yaml").read_text() == "mine"
    assert not (here / ".dynctl").exists()


def test_an_unknown_example_names_the_near_one(capsys):
    assert run(["init", "--example", "locl"]) == 2
    assert "did you mean 'local'?" in capsys.readouterr().err


def test_problems_are_told_on_stderr_with_exit_2_and_as_json_on_stdout(here, capsys):
    (here / "inventory.yaml").write_text("cluster: c\nhosts: [a]\nhost: 1\n")

    assert run(["config", "validate"]) == 2
    told = capsys.readouterr()
    assert told.out == ""
    assert "inventory.yaml:3:1: unknown key 'host'" in told.err
    assert run(["config", "validate", "-o", "json"]) == 2
    document = json.loads(capsys.readouterr().out)
    assert document["is_valid"] is False
    assert document["problems"] == [
        {"line": 3, "column": 1, "text": "unknown key 'host'", "hint": "did you mean 'hosts'?"}
    ]


def test_a_missing_inventory_says_what_writes_one(capsys):
    assert run(["config", "validate"]) == 2
    assert "dynctl init" in capsys.readouterr().err


def test_show_prints_values_with_their_origin_in_three_forms(here, capsys):
    assert run(["init"]) == 0
    capsys.readouterr()

    assert run(["config", "show"]) == 0
    assert "hosts.local.cpu_slots" in capsys.readouterr().out
    assert run(["config", "show", "-o", "json"]) == 0
    values = {v["path"]: v for v in json.loads(capsys.readouterr().out)["values"]}
    assert values["ssh.parallel"] == {"path": "ssh.parallel", "value": 32, "source": "default"}
    assert run(["config", "show", "-o", "yaml"]) == 0
    assert yaml.safe_load(capsys.readouterr().out)["hosts"][0]["name"] == "local"


@pytest.mark.parametrize("command", [["validate"], ["show"]])
def test_json_says_its_schema_as_that_of_every_command(here, capsys, command):
    run(["init", "--example", "local"])
    capsys.readouterr()

    assert run(["config", *command, "-o", "json"]) == 0
    assert json.loads(capsys.readouterr().out)["schema"] == "dynctl.config/1"


def test_the_schema_is_printed(capsys):
    assert run(["config", "schema"]) == 0
    assert "draft-07" in json.loads(capsys.readouterr().out)["$schema"]


def test_a_cluster_written_in_python_is_checked_and_shown_as_well(here, capsys):
    (here / "cluster.py").write_text(
        "from dynctl.planner.code import LLM, Node\n"
        'cluster = "t"\n'
        'nodes = [Node("here", address="local", cpu_slots=3)]\n'
        'chat = LLM("chat", "sim", "sim")\n'
    )
    before = sorted(path.name for path in here.iterdir())

    assert run(["config", "validate", "-i", "cluster.py"]) == 0
    assert "cluster.py is valid: 1 host" in capsys.readouterr().out
    assert run(["config", "show", "-i", "cluster.py"]) == 0
    assert re.search(r"hosts\.here\.cpu_slots +3 +cluster\.py\n", capsys.readouterr().out)
    assert sorted(path.name for path in here.iterdir()) == before

"""What `dynctl up` is given beside an inventory."""

import os
from dataclasses import replace
from types import SimpleNamespace

import pytest

from dynctl.agents.protocol import AgentStatus
from dynctl.cli import up
from dynctl.cli.main import run
from dynctl.core.deployment import EngineState, UnitStatus
from dynctl.core.inventory import HostEntry, Inventory
from dynctl.core.plan import Plan, PlannedDeployment, RouterPlan
from dynctl.errors import PlanError


@pytest.mark.parametrize("name", ["inventory.yaml", "cluster.py"])
def test_an_inventory_given_as_the_plan_is_recognised(tmp_path, monkeypatch, capsys, name):
    monkeypatch.chdir(tmp_path)
    (tmp_path / name).write_text("cluster: c\nhosts: [local]\n")

    assert run(["up", name, "--yes"]) == 2

    said = capsys.readouterr().err
    assert f"error: {name} is no plan" in said
    assert f"dynctl up -i {name}" in said


def test_only_of_what_serves_the_address_is_shown(capsys):
    chat = PlannedDeployment("chat", "sim", "sim", (), RouterPlan("a", "127.0.0.1:8000", "kv"))
    mail = replace(chat, name="mail", router=RouterPlan("a", "127.0.0.1:8001", "kv"))
    facts = ("1", "c", "a", 1, 1, "d1", "b1", "boot", 1, 0.0)
    held = UnitStatus("chat-0", "engine", EngineState.STOPPED, deployment="chat", is_held=True)
    ready = UnitStatus("mail-0", "engine", EngineState.READY, deployment="mail")

    up._show_addresses(
        Inventory("c", (HostEntry("a", "a"),), path="inventory.yaml"),
        Plan("c", (), (chat, mail)),
        {"a": AgentStatus(*facts, units=(held, ready))},
    )

    assert capsys.readouterr().out == "mail  http://127.0.0.1:8001/v1  on a\n"


def test_an_inventory_changed_after_it_was_planned_is_told(tmp_path, capsys):
    inventory, path = tmp_path / "inventory.yaml", tmp_path / "plan.yaml"
    inventory.write_text("")
    path.write_text("")
    plan = Plan("c", (), (), digest="d1")

    def tell(made):
        def make(_):
            if isinstance(made, Exception):
                raise made
            return made

        found = SimpleNamespace(plan=make, inventory=SimpleNamespace(path=str(inventory)))
        os.utime(path, (1, 1))
        assert up._is_older(path, inventory)
        up._tell_outdated(found, plan, None, path)
        return capsys.readouterr().err

    assert tell(plan) == ""
    assert "would be planned otherwise now: dynctl plan" in tell(replace(plan, digest="d2"))
    assert "cannot be planned now: too few GPUs" in tell(PlanError("too few GPUs"))
    assert not up._is_older(inventory, path)
    assert not up._is_older(path, tmp_path / "none")

"""What `dynctl up` is given beside an inventory."""

import pytest

from dynctl.cli.main import run


@pytest.mark.parametrize("name", ["inventory.yaml", "cluster.py"])
def test_an_inventory_given_as_the_plan_is_recognised(tmp_path, monkeypatch, capsys, name):
    monkeypatch.chdir(tmp_path)
    (tmp_path / name).write_text("cluster: c\nhosts: [local]\n")

    assert run(["up", name, "--yes"]) == 2

    said = capsys.readouterr().err
    assert f"error: {name} is no plan" in said
    assert f"dynctl up -i {name}" in said

"""What the operator's own machine refuses ends in one line and a next step, never in a traceback."""

import errno

import pytest

from dynctl.cli import main
from dynctl.errors import InventoryError
from dynctl.planner.text import from_yaml


@pytest.mark.parametrize(
    ("number", "said", "hint"),
    [
        (errno.ENOSPC, "No space left on device", "free some space"),
        (errno.EACCES, "Permission denied", "where you may write"),
    ],
)
def test_a_file_that_cannot_be_written_is_named(monkeypatch, capsys, number, said, hint):
    def fails(_):
        raise OSError(number, said, "plan.yaml")

    monkeypatch.setattr(main, "build_app", fails)

    assert main.run(["plan"]) == 1

    first, second = capsys.readouterr().err.splitlines()
    assert first == f"error: plan.yaml: {said}"
    assert hint in second


def test_what_cannot_be_read_is_named_in_the_systems_words_alone(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "inventory.yaml").write_text("cluster: c\nhosts: [local]\n")
    (tmp_path / "plan.yaml").mkdir()
    socket = tmp_path / "s"

    assert main.run(["up", "--yes", "plan.yaml"]) == 2
    assert main.run(["policy", "--admin-socket", str(socket)]) == 4

    said = capsys.readouterr().err
    assert "error: plan.yaml cannot be read: Is a directory\nhint: make a new one" in said
    assert f"error: no router answers on {socket}: cannot connect: No such file" in said
    assert "Errno" not in said


def test_a_file_that_is_none_of_ours_says_what_makes_one(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "inventory.yaml").write_text("- x\n")

    assert main.run(["config", "validate"]) == 2
    assert "hint: dynctl init writes one" in capsys.readouterr().err

    with pytest.raises(InventoryError, match="'cluster' is missing") as caught:
        from_yaml("", "plan.yaml")
    assert caught.value.hint == "correct it, or make a new one: dynctl plan"

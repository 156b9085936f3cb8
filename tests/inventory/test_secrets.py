import sys
from pathlib import Path

import pytest

from dynctl.core.inventory import Inventory
from dynctl.errors import DynctlError
from dynctl.inventory.interpolate import UnresolvedError, interpolate, is_secret_reference
from dynctl.inventory.secrets import reveal


@pytest.fixture
def inventory(tmp_path):
    return Inventory("c", (), path=str(tmp_path / "inventory.yaml"))


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("plain", "plain"),
        ("${A}", "1"),
        ("<${A}${env:A}>", "<11>"),
        ("${B:-x}${A:-x}", "x1"),
        ("${EMPTY:-x}${EMPTY-x}", "x"),
        ("$$ $${A} $A", "$ ${A} $A"),
        ("${B:-}", ""),
    ],
)
def test_references_are_replaced(text, expected, tmp_path):
    assert interpolate(text, {"A": "1", "EMPTY": ""}, tmp_path).text == expected


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("${B}", "B is not set"),
        ("${env:B}", "B is not set"),
        ("${B:?give me B}", "give me B"),
        ("${EMPTY:?}", "EMPTY is not set"),
        ("${A B}", "no reference"),
        ("${", "without a closing"),
        ("${cmd:id}", "only for secrets"),
        ("${file:none}", "No such file"),
    ],
)
def test_what_cannot_be_replaced_is_an_error_and_never_empty(text, says, tmp_path):
    with pytest.raises(UnresolvedError, match=says):
        interpolate(text, {"EMPTY": ""}, tmp_path)


@pytest.mark.parametrize(
    ("text", "is_one"),
    [
        ("${env:A}", True),
        ("${file:/a b}", True),
        ("${cmd:pass show x}", True),
        ("${A}", False),
        ("x${env:A}", False),
        ("${env:}", False),
        ("sk-123", False),
        ("$$", False),
    ],
)
def test_only_whole_references_may_stand_for_a_key(text, is_one):
    assert is_secret_reference(text) is is_one


def test_a_secret_is_read_from_the_environment_a_file_or_a_program(
    inventory, tmp_path, monkeypatch
):
    monkeypatch.setenv("KEY", "from-env")
    (tmp_path / "key").write_text("from-file\n")
    program = f'{sys.executable} -c \'print("from-" + "program")\''

    assert reveal("${env:KEY}", inventory, "x").reveal() == "from-env"
    assert reveal("${file:key}", inventory, "x").reveal() == "from-file"
    assert reveal(f"${{cmd:{program}}}", inventory, "x").reveal() == "from-program"
    assert reveal("Bearer ${env:KEY} $$", inventory, "x").reveal() == "Bearer from-env $"


def test_a_program_is_run_without_a_shell(inventory, tmp_path):
    reveal("${cmd:echo hi; touch canary $(touch canary) > canary}", inventory, "x")

    assert not (tmp_path / "canary").exists()


@pytest.mark.parametrize(
    ("reference", "says"),
    [
        ("${env:NOT_SET_ANYWHERE}", "NOT_SET_ANYWHERE is not set"),
        ("${file:none}", "No such file"),
        ("${cmd:false}", "false ended with status 1"),
        ("${cmd:no-such-program}", "No such file"),
        ("${cmd:'}", "is no command"),
        ("${cmd:true}", "is empty"),
    ],
)
def test_a_secret_that_cannot_be_read_names_the_client_and_the_cause(inventory, reference, says):
    with pytest.raises(DynctlError, match=says) as caught:
        reveal(reference, inventory, "API key team-a")
    assert caught.value.message.startswith("API key team-a: ")


def test_a_secret_never_shows_when_printed(inventory, monkeypatch):
    monkeypatch.setenv("KEY", "hush")

    assert "hush" not in f"{reveal('${env:KEY}', inventory, 'x')!r}"


def test_relative_files_start_from_the_inventory(inventory, tmp_path, monkeypatch):
    monkeypatch.chdir(Path("/"))
    (tmp_path / "key").write_text("k")

    assert reveal("${file:key}", inventory, "x").reveal() == "k"

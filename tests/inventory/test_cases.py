"""Malformed inventories and the whole text a person sees. `UPDATE_CASES=1` rewrites the texts; review the diff."""

import os
from pathlib import Path

import pytest

from dynctl.errors import ExitCode, InventoryError
from dynctl.inventory.load import read_inventory

CASES = sorted(path for path in (Path(__file__).parent / "cases").iterdir() if path.is_dir())
ENVIRONMENT = {"A": "secret", "BASE": "nothing"}


@pytest.mark.parametrize("case", CASES, ids=lambda path: path.name)
def test_a_malformed_inventory_is_told_with_every_problem_at_its_place(case, monkeypatch):
    monkeypatch.chdir(case)

    with pytest.raises(InventoryError) as caught:
        read_inventory(Path("inventory.yaml"), ENVIRONMENT)

    assert caught.value.exit_code is ExitCode.USAGE
    text = caught.value.message + "\n"
    expected = case / "expected.txt"
    if os.environ.get("UPDATE_CASES"):
        expected.write_text(text)
    assert text == expected.read_text()

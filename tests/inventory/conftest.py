"""Loading an inventory from text."""

from pathlib import Path

import pytest

from dynctl.inventory.load import read_inventory


@pytest.fixture
def load(tmp_path, monkeypatch):
    """Write a text as inventory.yaml in an empty directory and load it with a given environment."""
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    monkeypatch.chdir(tmp_path)

    def write(text: str, **environment: str):
        Path("inventory.yaml").write_text(text)
        return read_inventory(Path("inventory.yaml"), environment)

    return write

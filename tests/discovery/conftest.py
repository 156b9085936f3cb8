"""Builders for probe outputs and facts."""

from pathlib import Path

import pytest
import yaml

from dynctl.core.command import Command, Completed

CASES = Path(__file__).parent / "cases"


def case_names(probe):
    return sorted(p.name for p in (CASES / probe).iterdir() if p.is_dir())


def load_case(probe, name):
    folder = CASES / probe / name
    text = (folder / "stdout.txt").read_bytes()
    sidecar = yaml.safe_load((folder / "expected.yaml").read_text())
    return text, sidecar["expected"]


@pytest.fixture
def completed():
    def make(stdout, exit_status=0, stderr=b""):
        out = stdout.encode() if isinstance(stdout, str) else stdout
        return Completed(Command(("sh", "-s")), exit_status, out, stderr)

    return make


@pytest.fixture
def case():
    return load_case

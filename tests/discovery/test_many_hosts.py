"""Many hosts at once over real SSH handshakes: the ill ones are named with their cause, the others are complete."""

import asyncio
import importlib.util
import sys
from pathlib import Path

import pytest

SOURCE = Path(__file__).parents[2] / "benchmarks" / "discover_hosts.py"
HANG_GUARD_S = 300.0
"""Only catches hangs; the bound itself is the benchmark's."""


@pytest.fixture(scope="module")
def bench():
    spec = importlib.util.spec_from_file_location("discover_hosts", SOURCE)
    module = importlib.util.module_from_spec(spec)
    sys.modules["discover_hosts"] = module
    spec.loader.exec_module(module)
    return module


@pytest.mark.timeout(600)
def test_twelve_hosts_of_which_four_are_ill(bench, monkeypatch, tmp_path):
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.delenv("SSH_AUTH_SOCK", raising=False)
    names = bench.names_of(12, is_well=False)

    async def main():
        async with bench.farm(names) as where:
            return await bench.describe(where)

    topology, took_s = asyncio.run(main())

    assert bench.problems(topology, names, took_s, 0, HANG_GUARD_S) == []
    causes = {failure.name: failure.cause for failure in topology.failures}
    assert set(causes) == {"unreachable", "dropping"}
    assert "no answer" in causes["unreachable"]
    assert "connection was lost" in causes["dropping"]

"""Commands run on a cluster whose agents are given."""

from contextlib import asynccontextmanager

import pytest

from dynctl.cli.main import run
from dynctl.deploy import reach
from dynctl.remote import fleet


@pytest.fixture
def cluster(monkeypatch, capsys, tmp_path):
    """Run a command on hosts that are given; return its exit code, data and talk."""

    def run_on(found, *words):
        @asynccontextmanager
        async def reached(*_):
            yield found

        @asynccontextmanager
        async def opened(*_):
            yield None

        monkeypatch.setattr(reach, "reach_agents", reached)
        monkeypatch.setattr(fleet, "open_fleet", opened)
        path = tmp_path / "inventory.yaml"
        path.write_text("cluster: c\nhosts: [local]\n")
        code = run([*words, "-i", str(path)])
        out, err = capsys.readouterr()
        return code, out, err

    return run_on

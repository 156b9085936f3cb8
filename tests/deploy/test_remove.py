"""Nobody changes a cluster while it is taken down, also where only some of its hosts are."""

import asyncio
import json
import sys
from pathlib import Path

import pytest

from dynctl.core.inventory import HostEntry, Inventory
from dynctl.deploy import remove
from dynctl.deploy.onhost import lock as onhost_lock
from dynctl.errors import ConnectError, ExitCode
from dynctl.remote.fleet import Fleet
from dynctl.remote.local import LocalRemote

UP = {"token": "x", "user": "ana", "machine": "desk", "pid": "7", "operation": "dynctl up"}


class Hosts:
    """Directories on this machine that stand for hosts; what is done there is noted and not done."""

    def __init__(self, base, *names):
        self.base = base
        entries = tuple(HostEntry(name, "local", root=str(base / name)) for name in names)
        self.inventory = Inventory("c", entries, path=str(base / "inventory.yaml"))
        self.remotes = {name: LocalRemote(name) for name in names}
        self.stopped = []
        self.locks = {}
        """Who held which host's lock when a host was shut down."""

    def root(self, name):
        return self.base / name / "c"

    def put(self, name):
        root = self.root(name)
        root.mkdir(parents=True)
        (root / ".dynctl-root").write_text("")
        launch = {"bundle_path": f"{root}/bundles/b1", "python": sys.executable, "scope": "none"}
        (root / "launch.json").write_text(json.dumps(launch))

    async def shut_down(self, inventory, remote, seat, bundle, *, now):
        name = remote.name
        if name == max(self.remotes):
            await asyncio.sleep(0.5)  # the others would be done by then
        roots = [self.root(other) for other in self.remotes]
        self.locks[name] = [holder_of(root) for root in roots]
        self.stopped.append(name)

    def down(self, *hosts, heeds_lock=True):
        fleet = Fleet(self.inventory.hosts, self.remotes)
        said = []
        done = remove.take_down(
            *(self.inventory, fleet, lambda *words: said.append(words)),
            hosts=hosts or None,
            heeds_lock=heeds_lock,
        )
        return asyncio.run(done)


def holder_of(root: Path):
    return onhost_lock.look(root / "lock").get("held_by", {}).get("operation")


@pytest.fixture
def hosts(tmp_path, monkeypatch):
    async def stop_agent(*_):
        pass

    made = Hosts(tmp_path, "a", "b", "c")
    monkeypatch.setattr(remove, "_shut_down", made.shut_down)
    monkeypatch.setattr(remove, "stop_agent", stop_agent)
    return made


@pytest.mark.parametrize("is_there", [True, False])
def test_some_hosts_are_not_cleared_while_another_has_the_lock(hosts, is_there):
    for name in "abc" if is_there else "bc":
        hosts.put(name)
    onhost_lock.take(hosts.root("a") / "lock", UP)
    result = hosts.down("b")

    assert list(result) == ["a"]
    assert result["a"].exit_code is ExitCode.LOCKED
    assert "dynctl up of ana@desk" in result["a"].message
    assert hosts.stopped == []
    assert holder_of(hosts.root("a")) == "dynctl up"
    assert holder_of(hosts.root("b")) is None
    # Who does not heed it goes on.
    assert hosts.down("b", heeds_lock=False) == {"b": None}
    assert not hosts.root("b").exists()


def test_the_lock_is_held_where_up_has_it_while_some_hosts_are_cleared(hosts):
    for name in "abc":
        hosts.put(name)
    assert hosts.down("b") == {"b": None}

    assert hosts.locks == {"b": ["dynctl down", None, None]}
    assert not hosts.root("b").exists()
    assert hosts.root("a").exists()
    assert holder_of(hosts.root("a")) is None


def test_the_lock_goes_last_when_all_is_cleared(hosts):
    for name in "abc":
        hosts.put(name)
    assert hosts.down() == {"a": None, "b": None, "c": None}

    assert hosts.stopped[-1] == "c"
    assert hosts.locks["c"][0] == "dynctl down"
    assert not any(hosts.root(name).exists() for name in "abc")


def test_a_host_that_cannot_be_reached_does_not_keep_others_from_being_cleared(hosts):
    for name in "abc":
        hosts.put(name)
    hosts.remotes["a"] = gone = ConnectError("a: no route")

    assert hosts.down() == {"a": gone, "b": None, "c": None}
    assert hosts.locks["c"][1] == "dynctl down"
    assert hosts.root("a").exists()

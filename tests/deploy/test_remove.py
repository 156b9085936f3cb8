"""Nobody changes hosts while they are taken down; other hosts are left alone."""

import asyncio
import json
import sys
from pathlib import Path

import pytest

from dynctl.core.inventory import HostEntry, Inventory
from dynctl.deploy import remove
from dynctl.deploy.lock import hold_locks
from dynctl.deploy.observe import Seat
from dynctl.deploy.onhost import lock as onhost_lock
from dynctl.deploy.places import Place
from dynctl.errors import ConnectError, DynctlError, ExitCode
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
        """Take some hosts down, as the command does: the fleet has no others."""
        entries = self.inventory.entries(hosts or tuple(self.remotes))
        fleet = Fleet(entries, {entry.name: self.remotes[entry.name] for entry in entries})
        done = remove.take_down(self.inventory, fleet, lambda *_: None, heeds_lock=heeds_lock)
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
def test_nothing_is_cleared_while_another_changes_one_of_the_hosts(hosts, is_there):
    for name in "abc" if is_there else "ac":
        hosts.put(name)
    onhost_lock.take(hosts.root("b") / "lock", UP)

    with pytest.raises(
        DynctlError, match="b: the cluster is locked by dynctl up of ana@desk"
    ) as held:
        hosts.down()

    assert held.value.exit_code is ExitCode.LOCKED
    assert hosts.stopped == []
    assert [holder_of(hosts.root(name)) for name in "abc"] == [None, "dynctl up", None]
    # Who does not heed it goes on.
    assert hosts.down("b", heeds_lock=False) == {"b": None}
    assert not hosts.root("b").exists()


def test_hosts_that_are_not_named_are_left_alone_whoever_changes_them(hosts):
    for name in "abc":
        hosts.put(name)
    onhost_lock.take(hosts.root("a") / "lock", UP)
    hosts.remotes["c"] = None  # nothing may be asked of it

    assert hosts.down("b") == {"b": None}

    assert hosts.stopped == ["b"]
    assert not hosts.root("b").exists()
    assert holder_of(hosts.root("a")) == "dynctl up"


def test_all_hosts_are_locked_while_any_is_cleared(hosts):
    for name in "abc":
        hosts.put(name)
    assert hosts.down() == {"a": None, "b": None, "c": None}

    # The last one has been waited for: the others are gone by then, with their locks.
    assert hosts.locks["c"] == [None, None, "dynctl down"]
    assert hosts.locks["a"][2] == hosts.locks["b"][2] == "dynctl down"
    assert not any(hosts.root(name).exists() for name in "abc")


def test_a_host_that_cannot_be_reached_does_not_keep_others_from_being_cleared(hosts):
    for name in "abc":
        hosts.put(name)
    hosts.remotes["a"] = gone = ConnectError("a: no route")

    assert hosts.down() == {"a": gone, "b": None, "c": None}
    assert hosts.locks["c"][2] == "dynctl down"
    assert hosts.root("a").exists()


def seats(hosts, *names):
    return {
        name: Seat(
            hosts.inventory.host(name),
            Place(name, str(hosts.root(name))),
            sys.executable,
            "none",
        )
        for name in names
    }


def hold(hosts, *names):
    return hold_locks(
        Fleet(hosts.inventory.hosts, hosts.remotes), seats(hosts, *names), "dynctl up"
    )


def test_up_holds_the_lock_of_every_host_it_changes_and_counts_on_the_first(hosts):
    async def main():
        async with hold(hosts, "b", "a") as held:
            with pytest.raises(DynctlError, match="a: the cluster is locked by dynctl up"):
                async with hold(hosts, "a", "b", "c"):
                    pass
            assert holder_of(hosts.root("c")) is None
            return held, [holder_of(hosts.root(name)) for name in "ab"]

    assert asyncio.run(main()) == ({"a": 1, "b": 1}, ["dynctl up", "dynctl up"])
    assert [holder_of(hosts.root(name)) for name in "abc"] == [None, None, None]


def test_who_gets_only_some_of_the_locks_gives_them_back(hosts):
    onhost_lock.take(hosts.root("c") / "lock", UP | {"operation": "dynctl down"})

    async def main():
        async with hold(hosts, "a", "b", "c"):
            pass

    with pytest.raises(DynctlError, match="c: the cluster is locked by dynctl down"):
        asyncio.run(main())
    assert [holder_of(hosts.root(name)) for name in "abc"] == [None, None, "dynctl down"]


def test_a_host_that_cannot_be_locked_is_told_by_its_error(hosts):
    hosts.remotes["b"] = gone = ConnectError("b: no route")

    async def main():
        async with hold(hosts, "a", "b") as held:
            return held

    assert asyncio.run(main()) == {"a": 1, "b": gone}

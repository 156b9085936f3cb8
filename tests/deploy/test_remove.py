"""Nobody changes hosts while they are taken down; other hosts are left alone."""

import asyncio
import json
import sys
from pathlib import Path
from types import SimpleNamespace

import msgspec
import pytest

from dynctl.agents.protocol import HostSlice
from dynctl.agents.supervisor import Supervisor
from dynctl.core.inventory import HostEntry, Inventory
from dynctl.deploy import lock, remove, up
from dynctl.deploy.lock import hold_locks
from dynctl.deploy.observe import Seat, call
from dynctl.deploy.onhost import lock as onhost_lock
from dynctl.deploy.places import Place
from dynctl.errors import CommandError, ConnectError, DynctlError, ExitCode, UnknownOutcomeError
from dynctl.remote.fleet import Fleet
from dynctl.remote.local import LocalRemote

UP = {"token": "x", "user": "ana", "machine": "desk", "pid": "7", "operation": "dynctl up"}


class Hosts:
    """Directories on this machine that stand for hosts; what is done there is noted and not done."""

    def __init__(self, base, eventually, *names):
        self.base, self.eventually = base, eventually
        self.awaited = ""
        """Hosts that must be gone before the last one is shut down."""
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
            others = [self.root(other) for other in self.awaited]
            await self.eventually(lambda: not any(map(Path.exists, others)), "the others are gone")
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
def hosts(tmp_path, monkeypatch, eventually):
    async def stop_agent(*_):
        pass

    made = Hosts(tmp_path, eventually, "a", "b", "c")
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
    hosts.awaited = "ab"
    assert hosts.down() == {"a": None, "b": None, "c": None}

    # The others are gone by then, with their locks.
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


def test_up_holds_the_lock_of_every_host_it_changes_and_counts_on_from_the_highest(hosts):
    for name, number in {"a": 2, "b": 5}.items():
        hosts.put(name)
        (hosts.root(name) / "fence").write_text(str(number))

    async def main():
        async with hold(hosts, "b", "a") as held:
            with pytest.raises(DynctlError, match="a: the cluster is locked by dynctl up"):
                async with hold(hosts, "a", "b", "c"):
                    pass
            assert holder_of(hosts.root("c")) is None
            return held, [holder_of(hosts.root(name)) for name in "ab"]

    assert asyncio.run(main()) == ({"a": 6, "b": 6}, ["dynctl up", "dynctl up"])
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


def answer_lock(hosts, monkeypatch, name, action, instead):
    """Do something else when one host is asked to do something with its lock."""

    async def call_or_not(remote, python, program, wish, timeout_s):
        if (remote.name, wish["action"]) == (name, action):
            instead()
        return await call(remote, python, program, wish, timeout_s)

    monkeypatch.setattr(lock, "call", call_or_not)


def no_answer():
    raise UnknownOutcomeError("b: not done within 60 s")


def test_a_host_whose_lock_could_not_be_asked_is_not_cleared_unless_locks_are_overridden(
    hosts, monkeypatch
):
    for name in "abc":
        hosts.put(name)
    onhost_lock.take(hosts.root("b") / "lock", UP)
    answer_lock(hosts, monkeypatch, "b", "take", no_answer)

    results = hosts.down()

    assert isinstance(results.pop("b"), UnknownOutcomeError)
    assert results == {"a": None, "c": None}
    assert sorted(hosts.stopped) == ["a", "c"]
    assert holder_of(hosts.root("b")) == "dynctl up"
    assert hosts.down("b", heeds_lock=False) == {"b": None}


def test_the_first_lock_is_renewed_while_the_others_are_still_asked_for(hosts, monkeypatch):
    monkeypatch.setattr(lock, "RENEW_S", 0.01)

    async def main():
        renewed = asyncio.Event()

        async def call_slowly(remote, python, program, wish, timeout_s):
            if (remote.name, wish["action"]) == ("b", "take"):
                await asyncio.wait_for(renewed.wait(), 60)
            answer = await call(remote, python, program, wish, timeout_s)
            if (remote.name, wish["action"], answer) == ("a", "renew", {"ok": True}):
                renewed.set()
            return answer

        monkeypatch.setattr(lock, "call", call_slowly)
        async with hold(hosts, "a", "b") as held:
            return dict(held)

    assert asyncio.run(main()) == {"a": 1, "b": 1}


def test_who_lost_a_lock_while_others_were_taken_changes_nothing(hosts, monkeypatch):
    hosts.put("b")
    (hosts.root("b") / "fence").write_text("5")
    other = hosts.root("a") / "lock" / "holder.json"
    answer_lock(hosts, monkeypatch, "a", "raise", lambda: other.write_text(json.dumps(UP)))

    async def main():
        async with hold(hosts, "a", "b"):
            raise AssertionError("it went on")

    with pytest.raises(DynctlError, match="a: the lock was lost") as lost:
        asyncio.run(main())
    assert lost.value.exit_code is ExitCode.LOCKED
    assert json.loads(other.read_text()) == UP
    assert holder_of(hosts.root("b")) is None


class Ups:
    """`up` on hosts whose agents check and keep what they are sent, as real ones do, and start nothing."""

    def __init__(self, hosts):
        self.hosts = hosts
        self.sent = []

    async def apply(self, work, steps, fence):
        for name in work.goals.hosts:
            path = self.hosts.root(name) / "slice.json"
            agent = SimpleNamespace(
                _is_ending=False,
                slice=msgspec.json.decode(path.read_bytes(), type=HostSlice)
                if path.exists()
                else None,
            )
            wanted = HostSlice("c", name, len(self.sent), fence)
            Supervisor._check_order(agent, wanted)
            path.write_bytes(msgspec.json.encode(wanted))
        self.sent.append(fence)

    def run(self, *names):
        hosts = self.hosts
        fleet = Fleet(hosts.inventory.hosts, hosts.remotes)
        goals = SimpleNamespace(hosts=dict.fromkeys(names))
        work = SimpleNamespace(fleet=fleet, seats=seats(hosts, *names), goals=goals)
        asyncio.run(up.change(up.Comparison(work, ())))
        return self.sent[-1]


@pytest.fixture
def ups(hosts, monkeypatch):
    made = Ups(hosts)
    monkeypatch.setattr(up, "apply", made.apply)
    return made


def test_no_agent_takes_a_lawful_operator_for_one_that_was_overtaken(hosts, ups):
    assert [ups.run("a"), ups.run("a"), ups.run("a", "b")] == [1, 2, 3]
    hosts.down("a")
    assert ups.run("a", "b") == 4  # a counts from the beginning, b does not
    assert ups.run("b") == 5  # a left the plan


def test_an_agent_that_was_sent_the_number_of_another_host_is_sent_a_higher_one(hosts, ups):
    hosts.put("b")
    (hosts.root("b") / "fence").write_text("2")
    wanted = HostSlice("c", "b", 0, 6)
    (hosts.root("b") / "slice.json").write_bytes(msgspec.json.encode(wanted))

    assert ups.run("a", "b") == 7


def test_up_changes_nothing_where_one_lock_could_not_be_asked(hosts, ups, monkeypatch):
    answer_lock(hosts, monkeypatch, "b", "take", no_answer)

    with pytest.raises(UnknownOutcomeError, match="b: not done"):
        ups.run("a", "b", "c")

    assert ups.sent == []
    assert [holder_of(hosts.root(name)) for name in "ac"] == [None, None]


def test_a_file_that_cannot_be_read_is_not_taken_for_a_missing_one(hosts, monkeypatch):
    hosts.put("a")
    denied = CommandError("a: cannot read launch.json: Permission denied")

    async def get(self, path, max_bytes):
        raise denied

    monkeypatch.setattr(type(hosts.remotes["a"]), "get", get)

    assert hosts.down()["a"] is denied
    assert hosts.root("a").exists()

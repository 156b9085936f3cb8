import asyncio
import subprocess
import sys

import pytest

from dynctl.core.command import Command
from dynctl.core.inventory import HostEntry, SshSettings
from dynctl.errors import CommandError, ConnectError, UnknownOutcomeError
from dynctl.remote.fake import FakeRemote
from dynctl.remote.fleet import Fleet, open_fleet

ENTRIES = [HostEntry(name, name) for name in ("a", "b", "c")]


def fleet(**remotes):
    given = {name: FakeRemote(name) for name in ("a", "b", "c")} | remotes
    return Fleet(ENTRIES, given)


def test_every_host_gives_a_result_or_its_error_in_inventory_order():
    async def work(entry, remote):
        if entry.name == "b":
            raise CommandError("b: broken")
        return entry.name.upper()

    dead = ConnectError("c: no answer")
    results = asyncio.run(fleet(c=dead).map(work))

    assert list(results) == ["a", "b", "c"]
    assert results["a"] == "A"
    assert results["b"].message == "b: broken"
    assert results["c"] is dead


def test_only_the_wanted_hosts_are_worked_on():
    async def work(entry, remote):
        return entry.name

    assert asyncio.run(fleet().map(work, hosts=["c", "a"])) == {"a": "a", "c": "c"}


def test_a_host_over_the_time_limit_is_of_unknown_outcome():
    async def work(entry, remote):
        if entry.name == "a":
            await asyncio.sleep(60)
        return 1

    results = asyncio.run(fleet().map(work, timeout_s=0.1))

    assert isinstance(results["a"], UnknownOutcomeError)
    assert results["b"] == 1


def test_a_mistake_in_the_work_itself_is_not_taken_for_a_sick_host():
    async def work(entry, remote):
        return 1 / 0

    with pytest.raises(ZeroDivisionError):
        asyncio.run(fleet().map(work))


def test_not_more_hosts_than_allowed_are_at_work_at_a_time():
    running, most = 0, 0

    async def work(entry, remote):
        nonlocal running, most
        running += 1
        most = max(most, running)
        await asyncio.sleep(0.01)
        running -= 1

    entries = [HostEntry(f"h{i}", "x") for i in range(20)]
    many = Fleet(entries, {e.name: FakeRemote(e.name) for e in entries}, parallel=4)
    asyncio.run(many.map(work))

    assert most == 4


def test_work_on_one_host_does_not_wait_for_the_connection_to_another():
    async def main():
        fleet = Fleet(ENTRIES[:2], {"a": FakeRemote("a")})
        done = asyncio.Event()

        async def work(entry, remote):
            if entry.name == "a":
                done.set()
            return entry.name

        running = asyncio.create_task(fleet.map(work))
        await done.wait()
        assert not running.done()
        fleet.settle("b", ConnectError("b: no answer"))
        return await running

    results = asyncio.run(main())

    assert results["a"] == "a"
    assert results["b"].message == "b: no answer"


def test_a_mistake_while_connecting_is_raised_to_whoever_waits(sshd, home):
    async def fail(keys):
        return 1 / 0

    async def main():
        async with sshd.running(), open_fleet([home.entry(sshd)], home.settings(), fail) as opened:
            await opened.map(lambda _, remote: remote.run(Command(("true",))))

    with pytest.raises(ZeroDivisionError):
        asyncio.run(main())


def test_leaving_before_a_silent_host_has_answered_does_not_wait_for_it(home):
    async def main():
        server = await asyncio.start_server(lambda *_: None, "127.0.0.1", 0)
        async with server:
            port = server.sockets[0].getsockname()[1]
            entries = [HostEntry("silent", "127.0.0.1", port=port), HostEntry("here", "local")]
            async with open_fleet(entries, home.settings(connect_timeout_s=600)) as opened:
                return (await opened.reach("here")).name

    assert asyncio.run(main()) == "here"


def test_cancelling_the_whole_cancels_every_host(eventually):
    begun, seen = [], []

    async def work(entry, remote):
        begun.append(entry.name)
        try:
            await asyncio.sleep(60)
        except asyncio.CancelledError:
            seen.append(entry.name)
            raise

    async def main():
        running = asyncio.create_task(fleet().map(work))
        await eventually(lambda: len(begun) == 3, "work begins on every host")
        running.cancel()
        with pytest.raises(asyncio.CancelledError):
            await running

    asyncio.run(main())
    assert sorted(seen) == ["a", "b", "c"]


def test_local_hosts_need_no_ssh(home):
    async def main():
        entry = HostEntry("here", "local")
        async with open_fleet([entry], SshSettings()) as opened:
            remote = await opened.reach("here")
            done = await remote.run(Command(("echo", "hi")))
            return done.stdout, remote.home

    assert asyncio.run(main()) == (b"hi\n", str(home.path))


def test_sick_hosts_do_not_hide_the_healthy_ones(sshd, home):
    async def main():
        async with sshd.running():
            home.known(sshd)
            entries = [
                home.entry(sshd, "good"),
                HostEntry("gone", "no-such-host.invalid"),
                HostEntry("here", "local"),
            ]
            async with open_fleet(entries, home.settings()) as opened:
                with pytest.raises(ConnectError, match="cannot resolve"):
                    await opened.reach("gone")
                results = await opened.map(lambda e, r: r.run(Command(("echo", e.name))))
                return {n: getattr(r, "stdout", None) for n, r in results.items()}

    assert asyncio.run(main()) == {"good": b"good\n", "gone": None, "here": b"here\n"}


def test_a_dead_jump_host_is_tried_once_for_all_hosts_behind_it(home):
    count = 0

    async def drop(reader, writer):
        nonlocal count
        count += 1
        await reader.read()
        writer.close()

    async def main():
        server = await asyncio.start_server(drop, "127.0.0.1", 0)
        async with server:
            jump = f"ops@127.0.0.1:{server.sockets[0].getsockname()[1]}"
            entries = [HostEntry(f"h{i}", "10.0.0.1", jump=jump) for i in range(10)]
            settings = home.settings(connect_timeout_s=0.5)
            async with open_fleet(entries, settings) as opened:
                answers = await opened.map(lambda _, remote: remote.run(Command(("true",))))
                return list(answers.values())

    errors = asyncio.run(main())

    assert len(errors) == 10
    assert all("jump host 127.0.0.1" in error.message for error in errors)
    assert count == 1


def test_a_fake_host_answers_as_scripted_and_remembers():
    async def main():
        fake = FakeRemote(
            answers={
                ("uname", "-m"): b"x86_64\n",
                "ls": CommandError("no"),
                "cat": lambda c: c.stdin,
            }
        )
        first = await fake.run(Command(("uname", "-m")))
        echoed = await fake.run(Command(("cat",), stdin=b"x"))
        with pytest.raises(CommandError):
            await fake.run(Command(("ls",)))
        missing = await fake.run(Command(("nope",)))
        await fake.put("~/f", b"1", 0o640)
        async with fake.lines(Command(("uname", "-m"))) as lines:
            got = [line async for line in lines]
        return first.stdout, echoed.stdout, missing.exit_status, await fake.get("~/f", 9), got, fake

    out, echoed, status, content, got, fake = asyncio.run(main())

    assert (out, echoed, status, content, got) == (b"x86_64\n", b"x", 127, b"1", [b"x86_64"])
    assert fake.modes == {"/home/ops/f": 0o640}
    assert [c.argv[0] for c in fake.commands] == ["uname", "cat", "ls", "nope", "uname"]


def test_runs_on_this_machine_alone_never_load_the_ssh_library():
    """Loading it costs half a second of CPU."""
    script = (
        "import asyncio, sys\n"
        "from dynctl.core.inventory import HostEntry, SshSettings\n"
        "from dynctl.remote.fleet import open_fleet\n"
        "async def main():\n"
        "    async with open_fleet([HostEntry('here', 'local')], SshSettings()) as fleet:\n"
        "        remote = await fleet.reach('here')\n"
        "        print(remote.name, 'asyncssh' in sys.modules)\n"
        "asyncio.run(main())\n"
    )
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, check=True)

    assert done.stdout == b"here False\n"

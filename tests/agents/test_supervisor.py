"""Supervision of real processes, with short limits, in this process."""

import asyncio
import os
import signal
import stat
from dataclasses import replace
from functools import partial
from pathlib import Path

import pytest

from dynctl.agents.host import processes
from dynctl.agents.host.logs import LogLimits
from dynctl.agents.host.processes import members, tagged
from dynctl.agents.protocol import RelayWish, spec_digest
from dynctl.agents.supervisor import StaleError
from dynctl.core.deployment import EngineState as S
from dynctl.core.plan import PlannedGpu
from dynctl.errors import DynctlError

pytestmark = pytest.mark.usefixtures("no_process_left")


def test_engine_becomes_ready_with_what_it_told(supervised, engine, tools):
    async def body(supervisor):
        await supervisor.apply(tools.host_slice(engine(block_hash_seed="s")))
        await tools.until(supervisor, lambda: tools.state(supervisor) is S.READY)

        (entry,) = supervisor.relay_table
        assert entry.info.state is S.READY
        assert entry.info.block_size_tokens == 16
        assert entry.info.kv_capacity_tokens == 1600
        assert entry.info.max_model_len_tokens == 4096
        assert entry.block_hash_seed == "s"
        assert entry.info.incarnation == supervisor.units["e0"].run.incarnation
        assert stat.S_IMODE(Path(entry.socket).parent.stat().st_mode) == 0o700
        assert await supervisor.shutdown(now=True) == []
        assert supervisor.relay_table == ()

    supervised(body)


def test_killed_engine_comes_back_as_a_new_incarnation(supervised, engine, tools):
    async def body(supervisor):
        await supervisor.apply(tools.host_slice(engine()))
        await tools.until(supervisor, lambda: tools.state(supervisor) is S.READY)
        first = supervisor.units["e0"].run

        os.kill(first.identity.pid, signal.SIGKILL)
        await tools.until(supervisor, lambda: tools.state(supervisor) is not S.READY)
        await tools.until(supervisor, lambda: tools.state(supervisor) is S.READY)

        second = supervisor.units["e0"].run
        assert second.incarnation != first.incarnation
        assert second.at.socket != first.at.socket
        assert not Path(first.at.socket).parent.exists()
        (status,) = supervisor.status.units
        assert status.num_restarts == 1
        assert "SIGKILL" in status.last_error
        await supervisor.shutdown(now=True)

    supervised(body)


@pytest.mark.parametrize("asked", ["restart", "stop", "stop_now", "change"])
def test_what_is_asked_of_an_engine_that_has_just_died_happens(
    supervised, engine, tools, monkeypatch, asked
):
    async def body(supervisor):
        wish = tools.host_slice(engine())
        await supervisor.apply(wish)
        await tools.until(supervisor, lambda: tools.state(supervisor, "e0") is S.READY)
        unit = supervisor.units["e0"]
        first, died = unit.run, []
        end_group = processes.end_group
        requests = {
            "restart": unit.restart,
            "stop": unit.stop,
            "stop_now": partial(unit.stop, now=True),
            "change": partial(unit.change, unit.program),
        }

        async def end_as_it_is_asked(identity, limit_s):
            if not died:
                died.append(identity)
                await asyncio.sleep(0)  # the chore is under way
                requests[asked]()
                await asyncio.sleep(0.05)
            return await end_group(identity, limit_s)

        monkeypatch.setattr(processes, "end_group", end_as_it_is_asked)
        os.kill(first.identity.pid, signal.SIGKILL)

        if asked in ("stop", "stop_now"):
            await tools.until(supervisor, lambda: unit.life.state is S.STOPPED)
            assert unit.run is None
        else:
            await tools.until(
                supervisor,
                lambda: unit.life.state is S.READY and unit.run.incarnation != first.incarnation,
            )
        assert died == [first.identity]
        await supervisor.shutdown(now=True)

    supervised(body)


def test_crash_loop_ends_in_failed_with_reason_and_last_lines(supervised, engine, tools):
    async def body(supervisor):
        wish = engine(flags={"say": "RuntimeError: CUDA error: out of luck", "die": "3"})
        await supervisor.apply(tools.host_slice(wish))
        await tools.until(supervisor, lambda: tools.state(supervisor) is S.FAILED)

        (status,) = supervisor.status.units
        assert "gave up after 5 starts" in status.last_error
        assert "(cuda)" in status.last_error
        assert "out of luck" in status.last_error
        lines = supervisor.units["e0"].log.last_lines(200)
        assert sum("out of luck" in line for line in lines) == 5

    supervised(body)


def test_config_error_fails_at_the_first_start(supervised, engine, tools):
    async def body(supervisor):
        wish = engine(flags={"say": "vllm serve: error: unrecognized arguments: --x", "die": "2"})
        await supervisor.apply(tools.host_slice(wish))
        await tools.until(supervisor, lambda: tools.state(supervisor) is S.FAILED)

        (status,) = supervisor.status.units
        assert "unrecognized arguments" in status.last_error
        assert status.num_restarts == 0

    supervised(body)


def test_wish_that_can_never_start_says_so_without_a_process(supervised, engine, tools):
    async def body(supervisor):
        await supervisor.apply(tools.host_slice(engine(ep=2)))
        await tools.until(supervisor, lambda: tools.state(supervisor) is S.FAILED)

        (status,) = supervisor.status.units
        assert "EP 2" in status.last_error
        assert status.pid is None

    supervised(body)


def test_missing_interpreter_is_named(supervised, engine, tools):
    async def body(supervisor):
        await supervisor.apply(tools.host_slice(engine(python="/opt/none/bin/python")))
        await tools.until(supervisor, lambda: tools.state(supervisor) is S.FAILED)

        (status,) = supervisor.status.units
        assert "/opt/none/bin/python" in status.last_error

    supervised(body)


def test_old_engine_version_is_refused_unless_allowed(supervised, engine, tools):
    async def body(supervisor):
        wish = engine(allow_old_version=False, flags={"version": "0.32.0+cpu"})
        await supervisor.apply(tools.host_slice(wish))
        await tools.until(supervisor, lambda: tools.state(supervisor) is S.FAILED)

        (status,) = supervisor.status.units
        assert "0.32.0+cpu is older than 0.33.0" in status.last_error
        assert "allow_old_version" in status.last_error

    supervised(body)


def test_engine_that_serves_another_model_never_becomes_ready(supervised, engine, tools):
    async def body(supervisor):
        await supervisor.apply(tools.host_slice(engine(flags={"serves": "other"})))
        await tools.until(supervisor, lambda: tools.state(supervisor) is S.FAILED)

        assert "no such model" in supervisor.status.units[0].last_error

    supervised(body)


def test_what_an_engine_lacks_is_told_while_it_starts(supervised, engine, tools, tmp_path):
    hang = tmp_path / "hang"
    hang.touch()

    async def body(supervisor):
        flags = {"hang-file": str(hang), "say": "weights are there"}
        await supervisor.apply(tools.host_slice(engine(flags=flags)))
        wanted = "/health says 200; asked for a first token; its last line: weights are there"
        await tools.until(supervisor, lambda: supervisor.status.units[0].seen == wanted)
        hang.unlink()
        await tools.until(supervisor, lambda: tools.state(supervisor) is S.READY)
        assert supervisor.status.units[0].seen == ""
        await supervisor.shutdown(now=True)

    supervised(body)


def test_start_that_takes_too_long_is_ended_and_counted(supervised, engine, tools):
    async def body(supervisor):
        flags = {"sleep-first": "600", "say": "loading weights"}
        for limit_s in (1.0, 10.0, 50.0):  # until it got as far as to its first line
            # Another specification each time: it is started anew.
            wish = engine(start_deadline_s=limit_s, max_num_seqs=int(limit_s), flags=flags)
            await supervisor.apply(tools.host_slice(wish))
            await tools.until(supervisor, lambda: tools.state(supervisor) is S.BACKOFF)
            (status,) = supervisor.status.units
            assert f"not ready within {limit_s:.3g}" in status.last_error
            if "loading weights" in status.last_error:
                break
        assert "loading weights" in status.last_error
        await supervisor.shutdown(now=True)

    supervised(body)


def test_child_that_ignores_sigterm_is_killed_with_its_grandchildren(
    supervised, engine, tools, runs
):
    async def body(supervisor):
        wish = engine(flags={"ignore-term": "", "grandchild": ""})
        await supervisor.apply(tools.host_slice(wish))
        await tools.until(supervisor, lambda: tools.state(supervisor) is S.READY)
        identity = supervisor.units["e0"].run.identity
        pids = members(identity)
        assert len(pids) >= 2

        assert await supervisor.shutdown(now=True) == []

        assert members(identity) == []
        assert not any(runs(pid) for pid in pids)

    supervised(body)


def test_what_a_dead_leader_left_behind_is_ended_before_the_next_start(
    supervised, engine, tools, runs
):
    async def body(supervisor):
        await supervisor.apply(tools.host_slice(engine(flags={"grandchild": ""})))
        await tools.until(supervisor, lambda: tools.state(supervisor) is S.READY)
        first = supervisor.units["e0"].run.identity
        (orphan,) = set(members(first)) - {first.pid}

        os.kill(first.pid, signal.SIGKILL)
        await tools.until(supervisor, lambda: tools.state(supervisor) is S.STARTING)

        assert not runs(orphan)
        await supervisor.shutdown(now=True)

    supervised(body)


def test_busy_engine_leaves_the_table_first_and_ends_only_when_idle(
    supervised, engine, tools, root_path
):
    busy = root_path / "busy"

    async def body(supervisor):
        busy.touch()
        await supervisor.apply(tools.host_slice(engine(flags={"busy-file": str(busy)})))
        await tools.until(supervisor, lambda: tools.state(supervisor) is S.READY)

        supervisor.units["e0"].stop()
        assert supervisor.relay_table[0].info.state is S.DRAINING
        await asyncio.sleep(0.5)
        assert supervisor.units["e0"].run is not None
        busy.unlink()

        await tools.until(supervisor, lambda: tools.state(supervisor) is S.STOPPED)

    supervised(body)


def test_smaller_slice_stops_what_was_removed_and_leaves_the_rest_alone(supervised, engine, tools):
    async def body(supervisor):
        await supervisor.apply(tools.host_slice(engine("e0"), engine("e1")))
        await tools.until(
            supervisor,
            lambda: (
                (tools.state(supervisor, "e0"), tools.state(supervisor, "e1")) == (S.READY,) * 2
            ),
        )
        kept = supervisor.units["e0"].run

        await supervisor.apply(tools.host_slice(engine("e0"), generation=2))
        await tools.until(supervisor, lambda: set(supervisor.units) == {"e0"})

        assert supervisor.units["e0"].run == kept
        await supervisor.shutdown(now=True)

    supervised(body)


def test_changed_wish_restarts_that_engine_and_equal_wish_nothing(supervised, engine, tools):
    async def body(supervisor):
        await supervisor.apply(tools.host_slice(engine()))
        await tools.until(supervisor, lambda: tools.state(supervisor) is S.READY)
        first = supervisor.units["e0"].run

        await supervisor.apply(tools.host_slice(engine(), generation=2))
        await asyncio.sleep(0.2)
        assert supervisor.units["e0"].run == first

        await supervisor.apply(tools.host_slice(engine(max_num_seqs=3), generation=3))
        await tools.until(
            supervisor,
            lambda: (
                tools.state(supervisor) is S.READY
                and supervisor.units["e0"].run.incarnation != first.incarnation
            ),
        )
        assert supervisor.relay_table[0].info.max_num_seqs == 3
        await supervisor.shutdown(now=True)

    supervised(body)


def test_another_start_deadline_is_taken_on_and_what_runs_goes_on(supervised, engine, tools):
    def deadlines(supervisor):
        unit = supervisor.units["e0"]
        return supervisor.status.units[0].start_deadline_s, unit.program.deadline_s

    async def first(supervisor):
        await supervisor.apply(tools.host_slice(engine()))
        await tools.until(supervisor, lambda: tools.state(supervisor) is S.READY)
        run = supervisor.units["e0"].run
        wish = engine(start_deadline_s=4321.0)
        assert spec_digest(wish) == spec_digest(engine())
        assert spec_digest(wish) != spec_digest(engine("e1", start_deadline_s=4321.0))

        await supervisor.apply(tools.host_slice(wish, generation=2))

        assert tools.state(supervisor) is S.READY
        assert supervisor.units["e0"].run == run
        assert deadlines(supervisor) == (4321.0, 4321.0)

    async def second(supervisor):
        assert tools.state(supervisor) is S.READY
        assert deadlines(supervisor) == (4321.0, 4321.0)
        await supervisor.shutdown(now=True)

    supervised(first)
    supervised(second)


def test_a_start_under_way_gets_the_new_deadline(supervised, engine, tools, tmp_path):
    (hang := tmp_path / "hang").touch()

    async def body(supervisor):
        flags = {"hang-file": str(hang)}
        await supervisor.apply(tools.host_slice(engine(start_deadline_s=3600, flags=flags)))
        await tools.until(supervisor, lambda: supervisor.units["e0"].run is not None)
        run = supervisor.units["e0"].run

        shorter = engine(start_deadline_s=0.5, flags=flags)
        await supervisor.apply(tools.host_slice(shorter, generation=2))
        assert supervisor.units["e0"].run == run
        await tools.until(
            supervisor, lambda: "within 500 ms" in supervisor.status.units[0].last_error
        )

        longer = engine(start_deadline_s=3600, flags=flags)
        await supervisor.apply(tools.host_slice(longer, generation=3))
        hang.unlink()
        await tools.until(supervisor, lambda: tools.state(supervisor) is S.READY)
        await supervisor.shutdown(now=True)

    supervised(body)


def test_engines_that_swap_gpus_wait_for_each_other(supervised, engine, tools):
    """A lease ends only when its holder is gone, so at no time do two engines share a GPU."""

    async def body(supervisor):
        a, b = (PlannedGpu(f"GPU-{i}", i) for i in range(2))
        await supervisor.apply(tools.host_slice(engine("e0", gpus=(a,)), engine("e1", gpus=(b,))))
        both = lambda: {tools.state(supervisor, e) for e in ("e0", "e1")} == {S.READY}  # noqa: E731
        await tools.until(supervisor, both)

        wanted = tools.host_slice(engine("e0", gpus=(b,)), engine("e1", gpus=(a,)), generation=2)
        await supervisor.apply(wanted)
        await tools.until(
            supervisor, lambda: both() and supervisor.host.leases == {"GPU-1": "e0", "GPU-0": "e1"}
        )
        await supervisor.shutdown(now=True)
        assert supervisor.host.leases == {}

    supervised(body)


def test_contradictory_slices_change_nothing(supervised, engine, tools):
    gpu = (PlannedGpu("GPU-1", 0),)

    async def body(supervisor):
        for wanted, message in (
            (tools.host_slice(engine("e0", gpus=gpu), engine("e1", gpus=gpu)), "leased to e0"),
            (tools.host_slice(engine("e0"), engine("e0")), "unit e0 twice"),
            (tools.host_slice(engine("../e")), "cannot name"),
            (tools.host_slice(engine("relay")), "cannot name"),
            (tools.host_slice(engine(kind="trt")), "'trt' is none of the engines"),
        ):
            with pytest.raises(DynctlError, match=message):
                await supervisor.apply(wanted)
        assert supervisor.units == {}
        assert supervisor.slice is None

    supervised(body)


def test_older_operator_or_generation_is_refused(supervised, tools):
    async def body(supervisor):
        await supervisor.apply(tools.host_slice(generation=5, fence=7))

        with pytest.raises(StaleError, match="operator number 6"):
            await supervisor.apply(tools.host_slice(generation=9, fence=6))
        with pytest.raises(StaleError, match="generation 4"):
            await supervisor.apply(tools.host_slice(generation=4, fence=8))
        with pytest.raises(StaleError, match="cluster lab"):
            await supervisor.apply(replace(tools.host_slice(generation=9, fence=9), cluster="x"))
        assert supervisor.status.generation == 5

    supervised(body)


def test_drained_unit_stays_down_until_restarted_also_over_agent_restarts(
    supervised, engine, tools
):
    async def first(supervisor):
        await supervisor.apply(tools.host_slice(engine()))
        await tools.until(supervisor, lambda: tools.state(supervisor) is S.READY)
        supervisor.hold("e0")
        await tools.until(supervisor, lambda: tools.state(supervisor) is S.STOPPED)
        await supervisor.apply(tools.host_slice(engine(), generation=2))
        assert tools.state(supervisor) is S.STOPPED

    async def second(supervisor):
        await asyncio.sleep(0.1)
        (status,) = supervisor.status.units
        assert status.state is S.STOPPED
        assert status.is_held
        assert status.last_error == "drained by request; dynctl drain --undo e0 brings it back"

        supervisor.restart("e0")
        await tools.until(supervisor, lambda: tools.state(supervisor) is S.READY)
        await supervisor.shutdown(now=True)

    supervised(first)
    supervised(second)


def test_a_drained_unit_whose_wish_changes_stays_down_and_comes_back_as_wished(
    supervised, engine, tools
):
    async def body(supervisor):
        await supervisor.apply(tools.host_slice(engine()))
        await tools.until(supervisor, lambda: tools.state(supervisor) is S.READY)
        supervisor.hold("e0")
        changed = engine(flags={"say": "changed"})
        await supervisor.apply(tools.host_slice(changed, generation=2))
        await tools.until(supervisor, lambda: tools.state(supervisor) is S.STOPPED)
        (status,) = supervisor.status.units
        assert (status.is_held, status.spec_digest) == (True, spec_digest(changed))

        supervisor.restart("e0")
        await tools.until(supervisor, lambda: tools.state(supervisor) is S.READY)
        (status,) = supervisor.status.units
        assert (status.is_held, status.spec_digest) == (False, spec_digest(changed))
        assert "changed" in supervisor.units["e0"].log.last_lines(5)
        await supervisor.shutdown(now=True)

    supervised(body)


def test_next_supervisor_adopts_and_another_boot_does_not(supervised, engine, tools, monkeypatch):
    seen = []

    async def first(supervisor):
        await supervisor.apply(tools.host_slice(engine("e0", gpus=(PlannedGpu("G", 0),))))
        await tools.until(supervisor, lambda: tools.state(supervisor) is S.READY)
        seen.append(supervisor.units["e0"].run)

    async def second(supervisor):
        assert supervisor.units["e0"].run == seen[0]
        assert tools.state(supervisor) is S.READY
        assert supervisor.host.leases == {"G": "e0"}
        assert supervisor.status.generation == 1
        # Adopted ones are watched as well.
        os.kill(seen[0].identity.pid, signal.SIGKILL)
        await tools.until(supervisor, lambda: tools.state(supervisor) is S.BACKOFF)
        await tools.until(supervisor, lambda: tools.state(supervisor) is S.READY)
        seen.append(supervisor.units["e0"].run)

    async def after_reboot(supervisor):
        await tools.until(supervisor, lambda: tools.state(supervisor) is S.READY)
        assert supervisor.units["e0"].run.incarnation != seen[1].incarnation
        await supervisor.shutdown(now=True)

    supervised(first)
    supervised(second)
    os.kill(seen[1].identity.pid, signal.SIGKILL)  # the reboot
    monkeypatch.setattr("dynctl.agents.host.processes.boot_identity", lambda: "another/1")
    supervised(after_reboot)


def test_pid_used_again_is_neither_adopted_nor_killed(supervised, engine, tools, root_path, ended):
    """The record says a PID of ours; the process that has it now started at another time."""

    async def first(supervisor):
        await supervisor.apply(tools.host_slice(engine()))
        await tools.until(supervisor, lambda: tools.state(supervisor) is S.READY)

    supervised(first)
    (pid,) = tagged(str(root_path))
    os.kill(pid, signal.SIGKILL)
    ended(pid)
    units = root_path / "state" / "units.json"
    units.write_text(units.read_text().replace(f'"pid":{pid}', f'"pid":{os.getpid()}'))

    async def second(supervisor):
        await tools.until(supervisor, lambda: tools.state(supervisor) is S.READY)
        assert supervisor.units["e0"].run.identity.pid != os.getpid()
        await supervisor.shutdown(now=True)

    supervised(second)


def test_process_nobody_remembers_is_ended(supervised, engine, tools, root_path):
    """The agent died between a start and writing it down."""

    async def first(supervisor):
        await supervisor.apply(tools.host_slice(engine()))
        await tools.until(supervisor, lambda: tools.state(supervisor) is S.READY)

    supervised(first)
    (root_path / "state" / "units.json").unlink()
    (root_path / "slice.json").unlink()

    async def second(supervisor):
        assert supervisor.units == {}
        assert tagged(str(root_path)) == {}

    supervised(second)


def test_log_flood_stays_bounded_and_does_not_stop_the_engine(
    supervised, engine, tools, eventually
):
    limits = LogLimits(max_bytes=1_000_000)

    async def body(supervisor):
        await supervisor.apply(tools.host_slice(engine(flags={"flood": "1"})))
        # It answers once it has written it all.
        await tools.until(supervisor, lambda: tools.state(supervisor) is S.READY)
        unit = supervisor.units["e0"]
        older = unit.log.path.with_name("e0.log.1")

        def is_bounded():
            kept_bytes = sum(path.stat().st_size for path in older.parent.iterdir())
            return older.exists() and kept_bytes <= 2 * 1_000_000 + 200_000

        await eventually(is_bounded, "the log is cut")
        assert unit.life.num_restarts == 0
        await supervisor.shutdown(now=True)

    supervised(body, replace(tools.QUICK, log=limits))


def test_unwritable_state_degrades_the_agent_but_not_its_engines(
    supervised, engine, tools, monkeypatch
):
    async def body(supervisor):
        def full(*_):
            raise OSError(28, "No space left on device")

        monkeypatch.setattr(supervisor.root, "save_memory", full)
        monkeypatch.setattr(supervisor.root, "save_slice", full)
        await supervisor.apply(tools.host_slice(engine()))
        await tools.until(supervisor, lambda: tools.state(supervisor) is S.READY)

        assert any(
            "slice.json: cannot be written: No space" in d for d in supervisor.status.degraded
        )
        monkeypatch.undo()
        await tools.until(supervisor, lambda: not supervisor.status.degraded)
        assert supervisor.root.load_slice() == supervisor.slice
        assert [r.id for r in supervisor.root.load_memory().units] == list(supervisor.units)
        await supervisor.shutdown(now=True)

    supervised(body)


def test_busy_port_is_refused_and_its_owner_named(supervised, engine, tools):
    async def body(supervisor):
        server = await asyncio.start_server(lambda r, w: None, "127.0.0.1", 0)
        port = server.sockets[0].getsockname()[1]
        wish = engine(kv_transfer=True, side_channel_port=port)
        await supervisor.apply(tools.host_slice(wish, relay=None))
        await tools.until(supervisor, lambda: tools.state(supervisor) is S.FAILED)
        server.close()
        await server.wait_closed()

        (status,) = supervisor.status.units
        assert f"port {port} is held by" in status.last_error
        assert f"pid {os.getpid()}" in status.last_error

    supervised(body)


def test_two_units_may_not_want_the_same_port(supervised, engine, tools):
    async def body(supervisor):
        wish = engine(kv_transfer=True, side_channel_port=18999)
        with pytest.raises(DynctlError, match="port 18999 twice"):
            await supervisor.apply(tools.host_slice(wish, relay=RelayWish("127.0.0.1", 18999)))

    supervised(body)


def test_secrets_reach_the_environment_but_neither_argv_nor_state_nor_log(
    supervised, engine, tools, root_path
):
    secret = "sk-canary-1234"
    (root_path / "secrets").mkdir(mode=0o700)
    (root_path / "secrets" / "hf").write_text(secret + "\n")

    async def body(supervisor):
        await supervisor.apply(tools.host_slice(engine(env=(("HF_TOKEN", "${file:hf}"),))))
        await tools.until(supervisor, lambda: tools.state(supervisor) is S.READY)
        pid = supervisor.units["e0"].run.identity.pid
        assert f"HF_TOKEN={secret}".encode() in Path(f"/proc/{pid}/environ").read_bytes()
        assert secret.encode() not in Path(f"/proc/{pid}/cmdline").read_bytes()
        await supervisor.shutdown(now=True)

    supervised(body)
    for path in root_path.rglob("*"):
        if path.is_file() and path.parent.name != "secrets":
            assert secret not in path.read_text(errors="replace"), path


def test_missing_or_escaping_secret_is_refused(supervised, engine, tools):
    async def body(supervisor):
        for name, message in (("nope", "No such file"), ("../slice.json", "no name of a secret")):
            await supervisor.apply(tools.host_slice(engine(env=(("X", f"${{file:{name}}}"),))))
            await tools.until(supervisor, lambda: tools.state(supervisor) is S.FAILED)
            assert message in supervisor.status.units[0].last_error

    supervised(body)


def test_agent_environment_does_not_leak_into_engines(supervised, engine, tools, monkeypatch):
    monkeypatch.setenv("OPERATOR_TOKEN", "canary")
    monkeypatch.setenv("PYTHONPATH", "/bundle")

    async def body(supervisor):
        await supervisor.apply(tools.host_slice(engine()))
        await tools.until(supervisor, lambda: tools.state(supervisor) is S.READY)
        pid = supervisor.units["e0"].run.identity.pid
        env = Path(f"/proc/{pid}/environ").read_bytes()
        assert b"canary" not in env
        assert b"PYTHONPATH" not in env
        await supervisor.shutdown(now=True)

    supervised(body)

"""What a router says it sees of its engines: until when something keeps requests from them, and what."""

from dataclasses import replace

import msgspec
from router_bench import until
from router_relays import relayed
from router_sims import Sim

from dynctl.core.deployment import EngineState
from dynctl.router import admin
from dynctl.router.findings import Finding
from dynctl.router.merging import add_answers
from dynctl.router.seen import Seen, SeenEngine, join


def seen(bench):
    status, body = admin.answer(bench.desk, "GET", "/engines", b"")
    assert status == 200
    return msgspec.json.decode(body, type=Seen)


def lacks(bench):
    return {engine.id: engine.lack for engine in seen(bench).engines}


def test_an_engine_is_seen_as_its_relays_table_has_it(run, tls, short_dir):
    async def main():
        sims = Sim("p0", short_dir, "prefill"), Sim("d0", short_dir, "decode")
        async with relayed(tls, *sims) as bench:
            host = bench.host
            await until(lambda: lacks(bench) == {"p0": "", "d0": ""})
            assert seen(bench).silent == {}
            assert {(e.id, e.incarnation, e.role) for e in seen(bench).engines} == {
                ("p0", "i1", "prefill"),
                ("d0", "i1", "decode"),
            }
            # What its agent has started and the relay does not say yet is not there.
            host.remove("p0")
            await until(lambda: lacks(bench) == {"d0": ""})
            host.name("p0", "i2", EngineState.STARTING)
            await until(lambda: lacks(bench) == {"p0": "starting", "d0": ""})
            host.name("p0", "i2")
            await until(lambda: lacks(bench) == {"p0": "", "d0": ""})
            for _ in range(5):
                bench.desk.workers.get("p0").failed(bench.desk.now_s())
            assert lacks(bench) == {"p0": "failing", "d0": ""}

    run(main)


def test_a_relay_that_does_not_answer_is_named_with_what_is_out_of_reach(run, tls, short_dir):
    async def main():
        async with relayed(tls, Sim("e0", short_dir)) as bench:
            await bench.host.stop_relay()
            await until(lambda: lacks(bench) == {"e0": "unreachable"})
            (name,) = seen(bench).silent
            assert name == "host-a"
            why = seen(bench).silent[name]
            assert "connect" in why.lower()
            (finding,) = bench.desk.findings()
            assert seen(bench).findings == (finding,)
            assert (finding.engine, finding.cause) == ("", "relay_silent")
            assert finding.text.startswith("1 of 1 relays do not answer")
            assert finding.text.endswith(f": host-a ({why})")

            await bench.host.start_relay()
            await until(lambda: lacks(bench) == {"e0": ""})
            assert seen(bench).silent == {}
            assert bench.desk.findings() == []

    run(main)


def test_who_joins_later_is_waited_for_by_its_first_events_too(run, tls, short_dir):
    async def main():
        async with relayed(tls, Sim("e0", short_dir), Sim("e1", short_dir)) as bench:
            desk = bench.desk
            await until(lambda: not desk.awaits())
            bench.host.remove("e1")
            await until(lambda: desk.workers.get("e1") is None)
            # Nobody tells what its new start has cached.
            silent = {"kv_events": "tcp://127.0.0.1:9", "kv_replay": None}
            bench.host.name("e1", "i2", entry=silent)
            await until(lambda: desk.workers.get("e1") is not None)
            assert desk.awaits() == ""
            assert lacks(bench)["e1"] == "first_events"
            desk.set_policy("least_loaded")
            assert lacks(bench)["e1"] == ""

    run(main)


A = SeenEngine("a", "i1", "prefill")
B = SeenEngine("b", "i1", "decode")


def test_of_several_processes_the_one_that_sees_least_counts():
    starting = replace(A, lack="starting")
    first, second = Seen((A, B), {}), Seen((starting,), {"h": "timed out"})

    assert join([first, first]) == first
    one, two = (Finding("a", cause, "text", "hint") for cause in ("seed", "salt"))
    told = [replace(first, findings=findings) for findings in ((one,), (two, one))]
    assert join(told).findings == (one, two)
    assert join([first, second]) == join([second, first]) == Seen((starting,), {"h": "timed out"})
    told = [msgspec.json.encode(one) for one in (first, second)]
    status, body = add_answers("/engines", b"", (200, told[0]), told[1:])
    assert (status, msgspec.json.decode(body, type=Seen)) == (200, join([first, second]))

"""Several processes on one port: one view of load, the same answers, one set of figures."""

import asyncio
import itertools
import json
import os
import random
import signal
import sys
from contextlib import suppress
from pathlib import Path
from types import SimpleNamespace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from router_bench import Client, routed, until
from router_fakes import FakeEngine

from dynctl.core.deployment import EngineInfo, EngineState
from dynctl.core.exposition import parse
from dynctl.errors import RouterError, UsageError
from dynctl.http1.upstream import Address, Upstream, UpstreamError
from dynctl.router import afterwards, desk
from dynctl.router.config import Settings, parse_config
from dynctl.router.hits import HitBook, Outlook
from dynctl.router.merging import add_answers, add_decisions, add_expositions
from dynctl.router.metrics import Metrics
from dynctl.router.processes import parse_place
from dynctl.router.prompt import Hashers
from dynctl.router.shared_books import SharedBooks, clear_share, make_books
from dynctl.router.worker_table import WorkerTable


def table_of(*ids, incarnation="1"):
    table = WorkerTable(Settings())
    for engine_id in ids:
        table.put(
            EngineInfo(
                id=engine_id,
                incarnation=incarnation,
                state=EngineState.READY,
                role="aggregated",
                deployment="",
                kind="external",
                model="m",
            )
        )
    return table


def levels(table):
    return {
        worker.id: (worker.active_requests, worker.active_tokens, worker.pending_prefill_tokens)
        for worker in table.all()
    }


class Peers:
    """Books of several processes, here in one."""

    def __init__(self, number, *ids):
        self.memory = make_books(number)
        # Every process may know the engines in another order.
        self.tables = [table_of(*random.Random(n).sample(ids, len(ids))) for n in range(number)]
        self.books = [SharedBooks(self.memory, n, number, t) for n, t in enumerate(self.tables)]
        self.now_s = 100.0

    def exchange(self, rounds=2):
        for _ in range(rounds):
            for books in self.books:
                self.now_s += 1.0
                books.exchange(self.now_s)

    def close(self):
        for books in self.books:
            books.close()
        os.close(self.memory)


steps = st.lists(
    st.tuples(st.integers(0, 2), st.sampled_from("abc"), st.integers(0, 400), st.booleans()),
    max_size=40,
)


@given(steps)
@settings(max_examples=150, deadline=None)
def test_every_process_sees_the_load_of_all_and_nothing_is_left_at_the_end(steps):
    peers = Peers(3, "a", "b", "c")
    bookings, expected = [], dict.fromkeys("abc", (0, 0, 0))
    for process, engine, tokens, is_exchanged in steps:
        if tokens % 3 == 0 and bookings:
            engine, tokens, booking = bookings.pop(tokens % len(bookings))
            booking.release()
            sign = -1
        else:
            worker = peers.tables[process].get(engine)
            booking = worker.book(tokens, tokens, 10, peers.now_s)
            bookings.append((engine, tokens, booking))
            sign = 1
        requests, held, prefill = expected[engine]
        expected[engine] = (
            requests + sign,
            held + sign * (tokens + 10),
            prefill + sign * tokens,
        )
        if is_exchanged:
            peers.exchange()
            assert [levels(table) for table in peers.tables] == [expected] * 3
    for _, _, booking in bookings:
        booking.release()
    peers.exchange()
    sent = [[table.get(name).num_sent for name in "abc"] for table in peers.tables]
    assert sent[0] == sent[1] == sent[2]
    for table in peers.tables:
        assert set(levels(table).values()) == {(0, 0, 0)}
        assert all(worker.pending_prefills == 0 for worker in table.all())
    peers.close()


def test_a_queue_another_process_made_is_waited_for_and_forgotten_when_it_is_done():
    peers = Peers(2, "a", "b")
    mine, other = peers.tables
    booking = other.get("a").book(20_000, 20_000, 10, peers.now_s)
    peers.exchange()
    # Seen a second ago: 20,000 tokens take two.
    wait_s = mine.get("a").free_at_s - peers.now_s
    assert 0.9 < wait_s < 1.1
    assert mine.get("b").free_at_s <= peers.now_s
    assert mine.get("a").load().active_requests == 1
    booking.prefill_ended(peers.now_s)
    peers.exchange()
    assert mine.get("a").free_at_s <= peers.now_s
    booking.release()
    peers.close()


def test_exchanges_are_spared_when_one_was_just_made():
    peers = Peers(2, "a")
    first, second = peers.books
    booking = peers.tables[0].get("a").book(5, 5, 5, 100.0)
    first.exchange(100.0)
    second.exchange(100.0)
    assert peers.tables[1].get("a").active_requests == 1
    booking.release()
    first.exchange(100.001)
    second.exchange(100.001)
    assert peers.tables[1].get("a").active_requests == 1
    first.exchange(100.003)
    second.exchange(100.003)
    assert peers.tables[1].get("a").active_requests == 0
    peers.close()


def test_what_ends_is_told_once_also_when_nothing_begins_afterwards():
    peers = Peers(2, "a")
    mine, other = peers.books
    booking = peers.tables[0].get("a").book(5, 5, 5, 100.0)
    mine.exchange(100.0)

    class Loop:
        """Hands out the time and the last timer."""

        now_s, due = 100.0, None

        def time(self):
            return self.now_s

        def call_later(self, delay_s, callback, *args):
            assert self.due is None
            self.due = (self.now_s + delay_s, callback, args)
            return SimpleNamespace(cancel=lambda: None)

        def run(self):
            self.now_s, callback, args = self.due
            self.due = None
            callback(*args)

    loop = Loop()
    booking.release()
    mine.exchange_soon(loop)
    mine.exchange_soon(loop)
    loop.now_s = 100.0015
    loop.run()
    other.exchange(200.0)
    assert peers.tables[1].get("a").active_requests == 0
    assert loop.due is None
    # An exchange between an end and its timer has told it; one just before the end leaves it to a timer.
    loop.now_s += 1.0
    peers.tables[0].get("a").book(5, 5, 5, 200.0).release()
    mine.exchange_soon(loop)
    mine.exchange(loop.now_s + 0.0019)
    loop.run()
    assert loop.due is None
    loop.now_s += 1.0
    booking = peers.tables[0].get("a").book(5, 5, 5, 200.0)
    mine.exchange_soon(loop)
    mine.exchange(loop.now_s + 0.0019)
    booking.release()
    mine.exchange_soon(loop)
    loop.run()
    assert loop.due is not None
    loop.run()
    other.exchange(300.0)
    assert peers.tables[1].get("a").active_requests == 0
    peers.close()


def test_what_a_dead_process_had_booked_is_no_load_any_more():
    peers = Peers(2, "a")
    peers.tables[1].get("a").book(100, 100, 5, 100.0)
    peers.exchange()
    assert levels(peers.tables[0])["a"] == (1, 105, 100)
    clear_share(peers.memory, 1)
    peers.books[0].exchange(peers.now_s + 1)
    assert levels(peers.tables[0])["a"] == (0, 0, 0)
    peers.close()


def test_a_restarted_engine_begins_with_what_is_booked_on_it_now():
    peers = Peers(2, "a")
    old = peers.tables[1].get("a").book(100, 100, 5, 100.0)
    peers.exchange()
    for table in peers.tables:
        table.put(EngineInfo("a", "2", EngineState.READY, "aggregated", "", "external", "m"))
    peers.exchange()
    assert {levels(table)["a"] for table in peers.tables} == {(0, 0, 0)}
    old.release()
    peers.tables[1].get("a").book(7, 7, 1, peers.now_s)
    peers.exchange()
    assert {levels(table)["a"] for table in peers.tables} == {(1, 8, 7)}
    peers.close()


def test_a_new_engine_in_an_old_ones_row_is_not_taken_for_it():
    peers = Peers(2, "a")
    peers.tables[1].get("a").book(100, 100, 5, 100.0)
    peers.exchange()
    assert levels(peers.tables[0])["a"] == (1, 105, 100)
    peers.tables[1].remove("a")
    for table in peers.tables:
        table.put(EngineInfo("b", "1", EngineState.READY, "aggregated", "", "external", "m"))
    peers.tables[1].get("b").book(7, 7, 1, peers.now_s)
    peers.exchange()
    assert levels(peers.tables[0]) == {"a": (0, 0, 0), "b": (1, 8, 7)}
    peers.close()


@pytest.mark.source
@pytest.mark.parametrize("limit", [0, 3])
def test_other_processes_see_an_end_soon_and_where_places_are_limited_at_once(
    run, monkeypatch, limit
):
    monkeypatch.setattr(afterwards, "_KEEP_S", 3600.0)
    monkeypatch.setattr(desk, "_TICK_S", 3600.0)

    async def main():
        engine = FakeEngine("e0")
        async with routed(engine, settings={"max_concurrent_requests": limit}) as bench:
            own, memory = bench.router.desk, make_books(2)
            own.books = SharedBooks(memory, 0, 2, own.workers)
            table = table_of("e0")
            other, now_s = SharedBooks(memory, 1, 2, table), itertools.count(100.0)

            def seen():
                other.exchange(next(now_s))
                return table.get("e0").active_requests

            try:
                engine.go.clear()
                first = asyncio.create_task(bench.client.complete())
                await until(lambda: engine.num_running == 1)
                await until(lambda: own.books.exchange(own.now_s()) or seen() == 1)
                assert other.others_under_way() == (limit > 0)
                engine.go.set()
                assert (await first).status == 200
                assert len(own.flights) == (limit == 0)
                assert other.others_under_way() == 0
                # The next decision, here a look at the figures, keeps the books; a timer tells the others.
                own.afterwards.keep()
                await until(lambda: seen() == 0)
                bench.assert_books_balance()
            finally:
                other.close()
                own.books.close()
                own.books = None
                os.close(memory)

    run(main)


@pytest.mark.source
@pytest.mark.parametrize("prompt", ["hello", "hello " * 200])
def test_a_decision_sees_what_other_processes_have_booked(run, monkeypatch, prompt):
    monkeypatch.setattr(desk, "_TICK_S", 3600.0)

    async def main():
        async with routed(FakeEngine("e0"), FakeEngine("e1")) as bench:
            own, memory = bench.router.desk, make_books(2)
            own.books = SharedBooks(memory, 0, 2, own.workers)
            table = table_of("e0", "e1")
            other = SharedBooks(memory, 1, 2, table)
            try:
                bookings = [table.get("e0").book(900, 900, 10, 100.0) for _ in range(5)]
                other.exchange(100.0)
                assert (await bench.client.complete(prompt=prompt)).status == 200
                (decision,) = bench.desk.ring.newest(9)
                seen = {load.engine: load.active_requests for load in decision.loads}
                assert seen == {"e0": 5, "e1": 0}
                assert decision.engine == "e1"
                for booking in bookings:
                    booking.release()
            finally:
                other.close()
                own.books.close()
                own.books = None
                os.close(memory)

    run(main)


def test_figures_of_all_processes_are_added():
    one, two = Metrics(), Metrics()
    one.requests.add("chat", "200")
    two.requests.add("chat", "200", by=4)
    two.requests.add("chat", "503")
    one.ttft.observe(0.003)
    two.ttft.observe(0.5)
    gauges = [
        [
            "# HELP dynctl_router_inflight x",
            "# TYPE dynctl_router_inflight gauge",
            f"dynctl_router_inflight {n}",
            "# HELP dynctl_router_index_blocks x",
            "# TYPE dynctl_router_index_blocks gauge",
            "dynctl_router_index_blocks 70",
        ]
        for n in (2, 3)
    ]
    text = add_expositions([one.exposition(gauges[0]), two.exposition(gauges[1])]).decode()
    assert 'dynctl_router_requests_total{endpoint="chat",code="200"} 5\n' in text
    assert 'dynctl_router_requests_total{endpoint="chat",code="503"} 1\n' in text
    assert "dynctl_router_ttft_seconds_sum 0.503\n" in text
    assert 'dynctl_router_ttft_seconds_bucket{le="+Inf"} 2\n' in text
    assert "dynctl_router_inflight 5\n" in text
    assert "dynctl_router_index_blocks 70\n" in text
    assert text.count("# TYPE dynctl_router_ttft_seconds histogram") == 1
    name = "dynctl_router_requests_total"
    assert {s.value for s in parse(text, {name})[name]} == {0, 1, 5}


def test_hits_of_all_processes_are_added_and_findings_are_told_once():
    books = [HitBook(), HitBook(), HitBook()]
    for number, book in enumerate(books[:2]):
        blocks = Hashers("s").of(16).prompt(range(number * 1000, number * 1000 + 161))
        book.completed(Outlook(None, blocks, 10, 16, 160, 160, 161), 161, 80 * number)
        book.probed(64, 64 * number)
    texts = [json.dumps(book.to_json()).encode() for book in books]
    total = json.loads(add_answers("/hits", b"", (200, texts[0]), texts[1:])[1])
    assert (total["requests"], total["prompt_tokens"]) == (2, 322)
    assert total["predicted_ratio"] == pytest.approx(320 / 322, abs=1e-5)
    assert total["reported_ratio"] == pytest.approx(80 / 322, abs=1e-5)
    assert total["lost_routing_ratio"] == pytest.approx(240 / 322, abs=1e-5)
    assert total["probe_ratio"] == 0.5

    one, two = ({"engine": "e", "cause": c, "text": "t", "hint": "h"} for c in ("seed", "topic"))
    own = (200, json.dumps([one]).encode())
    found = add_answers("/findings", b"", own, [json.dumps([two, one]).encode(), b"[]"])
    assert json.loads(found[1]) == [one, two]


def test_decisions_of_all_processes_come_newest_first():
    one, two = ([{"unix_s": t, "n": t} for t in times] for times in ((5, 1), (4, 3, 2)))
    texts = [json.dumps(part).encode() for part in (one, two)]
    assert [d["n"] for d in json.loads(add_decisions(texts, 4))] == [5, 4, 3, 2]
    assert add_answers("/policy", b"", (200, b"own"), [b"x"]) == (200, b"own")


@pytest.mark.parametrize("text", ["", "1", "0/2", "2/2", "a/b", "-1/2"])
def test_a_place_that_makes_no_sense_is_refused(text):
    with pytest.raises(RouterError):
        parse_place(text, 0, "")


@pytest.mark.parametrize("number", [0, 65, -1])
def test_a_number_of_workers_that_makes_no_sense_is_refused(number):
    config = {"listen": "127.0.0.1:0", "engines": [{"id": "e", "url": "http://127.0.0.1:1"}]}
    with pytest.raises(UsageError):
        parse_config(json.dumps({**config, "workers": number}).encode())


REQUESTS = "dynctl_router_requests_total"


def children_of(pid):
    with suppress(OSError):
        return list(map(int, Path(f"/proc/{pid}/task/{pid}/children").read_text().split()))
    return []


async def policies_of(pool):
    """The policies a process serves and follows; nothing while it does not answer."""
    with suppress(UpstreamError):
        policy = json.loads((await pool.fetch("GET", "/policy")).body)
        shadow = json.loads((await pool.fetch("GET", "/shadow")).body)
        return policy["policy"], shadow and shadow["shadow"]["policy"]
    return None


async def load_of(engine, pool):
    """Requests that one process has in its books for an engine, its own and the others'."""
    name = "dynctl_router_engine_inflight"
    samples = parse((await pool.fetch("GET", "/metrics")).body.decode(), {name})[name]
    return sum(s.value for s in samples if s.labels["engine"] == engine)


def test_processes_share_a_port_replace_each_other_and_drain_together(run, short_dir):
    async def main():
        engine = await FakeEngine(tokens=40, gap_s=0.02).start()
        config = {
            "listen": "127.0.0.1:0",
            "engines": [{"id": "e0", "url": engine.url}],
            "workers": 2,
            "settings": {"engine_poll_s": 0.1, "probe_s": 0},
        }
        (short_dir / "r.json").write_text(json.dumps(config))
        admin = short_dir / "r.sock"
        process = await asyncio.create_subprocess_exec(
            *(sys.executable, "-m", "dynctl.router", "--config", str(short_dir / "r.json")),
            *("--admin-socket", str(admin)),
            stderr=asyncio.subprocess.PIPE,
        )
        pool = None
        try:
            line = b""
            while b"listening on" not in line:
                line = await process.stderr.readline()
                assert line, "ended before it listened"
            drinker = asyncio.create_task(process.stderr.read())
            port = int(line.split(b"listening on ")[1].split(b",")[0].rpartition(b":")[2])
            pool = Upstream(Address(path=str(admin)))

            async def count():
                text = (await pool.fetch("GET", "/metrics")).body.decode()
                samples = parse(text, {REQUESTS}).get(REQUESTS, ())
                return sum(s.value for s in samples if s.labels["code"] == "200")

            await until(lambda: len(children_of(process.pid)) == 1)
            clients, num_served = [], 0

            async def serves(one):
                with suppress(Exception):
                    return (await one.complete()).status == 200
                return False

            async def takers():
                body = (await pool.fetch("GET", "/decisions?limit=1000")).body
                return {decision["request_id"][:12] for decision in json.loads(body)}

            async with asyncio.timeout(60):
                # Which of them gets a connection is the kernel's choice; the second one has to come up first.
                while len(await takers()) < 2:
                    clients.append(Client(port))
                    num_served += await serves(clients[-1])
                # Whichever served them: the figures are of all.
                while await count() != num_served:
                    await asyncio.sleep(0.02)

            assert (await pool.fetch("POST", "/policy?name=prefix&stickiness=0.5")).status == 200
            assert (await pool.fetch("POST", "/shadow?policy=random")).status == 200
            [child] = children_of(process.pid)
            flags = Path(f"/proc/{child}/cmdline").read_text().split("\0")
            folder = flags[flags.index("--folder") + 1]
            first, second = (Upstream(Address(path=f"{folder}/{n}.sock")) for n in range(2))
            os.kill(child, signal.SIGKILL)
            async with asyncio.timeout(60):
                while children_of(process.pid) in ([], [child]):
                    await asyncio.sleep(0.05)
            fresh = Client(port)
            async with asyncio.timeout(60):
                while not await serves(fresh):
                    await asyncio.sleep(0.1)
            # The new one serves by what was changed since it was configured.
            async with asyncio.timeout(60):
                while await policies_of(second) != ("prefix", "random"):
                    await asyncio.sleep(0.05)
            told = json.loads((await second.fetch("GET", "/policy")).body)
            assert told == {"policy": "prefix", "stickiness": 0.5}

            engine.go.clear()
            streams = [asyncio.create_task(Client(port).complete(stream=True)) for _ in range(8)]
            await until(lambda: engine.num_running == 8)
            # Whichever of them took a stream, each knows the load of all.
            async with asyncio.timeout(60):
                while [await load_of("e0", one) for one in (first, second)] != [8, 8]:
                    await asyncio.sleep(0.02)
            await first.close()
            await second.close()
            process.send_signal(signal.SIGTERM)
            engine.go.set()
            answers = await asyncio.gather(*streams)
            assert all(answer.body.endswith(b"data: [DONE]\n\n") for answer in answers)
            assert await asyncio.wait_for(process.wait(), 60) == 0
            text = (await drinker).decode()
            assert "ended with -9 and is started again" in text
            assert "Traceback" not in text
            for client in (*clients, fresh):
                await client.upstream.close()
        finally:
            if process.returncode is None:
                process.kill()
                await process.wait()
            if pool is not None:
                await pool.close()
            await engine.stop()

    run(main)

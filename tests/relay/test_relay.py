import asyncio
import itertools
import re
from pathlib import Path
from types import SimpleNamespace

import msgspec
import pytest

from dynctl.agents.protocol import MemberInfo
from dynctl.agents.relay import kv_source
from dynctl.agents.relay.metrics import RelayMetrics
from dynctl.core.deployment import EngineInfo, EngineState
from dynctl.core.kv import BlockRemoved, BlockStored, EngineBlockHash
from dynctl.http1.server import Exchange, serve
from dynctl.http1.upstream import Address, Upstream, UpstreamError
from dynctl.kv.events import EventBatch
from dynctl.kv.hashing import BlockHasher
from dynctl.kv.wire import Delta, FrameReader, Heartbeat, Snapshot


def echo(exchange: Exchange) -> None:
    request = exchange.request
    fields = b" ".join(name + b"=" + value for name, value in request.headers)
    if request.request_id:
        fields += b" id=" + request.request_id
    exchange.respond(
        200, b"%b %b %b %b" % (request.method.encode(), request.target, request.body, fields)
    )


def infos(body: bytes) -> list[list[EngineInfo]]:
    return [msgspec.json.decode(line, type=list[EngineInfo]) for line in body.splitlines()]


def hashes(num_blocks: int, seed: str = "s") -> list[int]:
    """The hashes of `blocks(0, num_blocks)`, computed from the tokens alone."""
    return BlockHasher(seed.encode(), 4).prompt(range(num_blocks * 4)).hashes()


class Index:
    """What a router would know after reading frames."""

    def __init__(self) -> None:
        self._reader = FrameReader()
        self._num_read = 0
        self.known: dict[int, set[int]] = {}
        self.slower: dict[int, set[int]] = {}
        """The same of other media than the device."""
        self.frames: list = []

    @property
    def last(self):
        return self.frames[-1] if self.frames else None

    def read(self, sink) -> None:
        data = bytes(sink.body[self._num_read :])
        self._num_read += len(data)
        for frame in self._reader.feed(data):
            self.frames.append(frame)
            match frame:
                case Snapshot():
                    of_medium = self.slower if frame.medium else self.known
                    of_medium[frame.rank] = set(frame.hashes)
                case Delta():
                    have = (
                        self.slower.setdefault(frame.rank, set())
                        if frame.medium
                        else self.known[frame.rank]
                    )
                    if frame.cleared:
                        have.clear()
                    have -= set(frame.removed)
                    have |= set(frame.stored)


def test_a_request_reaches_the_engine_and_is_stamped(run, bench, entry_of):
    async def main():
        async with bench() as b:
            path = await b.engine("e", echo)
            await b.settle(entry_of("m-0", "i1", path))
            answer = await b.pool.fetch(
                "POST",
                "/v1/engine/m-0/v1/completions",
                [
                    (b"x-request-id", b"r1"),
                    (b"x-dynctl-incarnation", b"i1"),
                    (b"connection", b"x-hop"),
                    (b"x-hop", b"1"),
                ],
                b'{"prompt":"p"}',
            )
            assert answer.status == 200
            assert dict(answer.headers)[b"x-dynctl-incarnation"] == b"i1"
            assert answer.body.startswith(b'POST /v1/completions {"prompt":"p"} ')
            assert answer.body.count(b"r1") == answer.body.count(b"id=r1") == 1
            assert b"x-hop" not in answer.body
            assert b"incarnation" not in answer.body

    run(main)


@pytest.mark.parametrize(
    ("method", "target", "status"),
    [
        ("GET", "/v1/engine/m-0/v1/models", 200),
        ("GET", "/v1/engine/m-0/health", 200),
        ("GET", "/v1/engine/m-0/metrics", 200),
        ("GET", "/v1/engine/m-0/version", 200),
        ("GET", "/v1/engine/m-0/kv_event_sources", 200),
        ("POST", "/v1/engine/m-0/tokenize", 200),
        ("POST", "/v1/engine/m-0/v1/chat/completions", 200),
        ("GET", "/v1/engine/m-0/v1/completions", 405),
        ("POST", "/v1/engine/m-0/invocations", 404),
        ("POST", "/v1/engine/m-0/reset_prefix_cache", 404),
        ("POST", "/v1/engine/m-0/v1/responses", 404),
        ("GET", "/v1/engine/m-0/", 404),
        ("GET", "/v1/engine/m-0", 404),
        ("GET", "/v1/engine/m-0/health/", 404),
        ("GET", "/v1/engine/m-0/%2e%2e/health", 400),
        ("GET", "/v1/engine/m-0/v1%2fmodels", 400),
        ("GET", "/v1/engine/nobody/health", 404),
        ("GET", "/health", 404),
        ("GET", "/", 404),
        ("POST", "/v1/engines", 405),
        ("GET", "/v1/kv/m-0", 404),
    ],
)
def test_only_the_allow_list_is_reachable(run, bench, entry_of, method, target, status):
    async def main():
        async with bench() as b:
            seen = []
            path = await b.engine("e", lambda exchange: (seen.append(exchange), echo(exchange)))
            await b.settle(entry_of("m-0", "i1", path))
            answer = await b.pool.fetch(method, target, (), b"{}" if method == "POST" else b"")
            assert answer.status == status
            assert len(seen) == (1 if status == 200 else 0)
            if status != 200 and status != 400:
                assert b"x-dynctl-relay-error" in dict(answer.headers)
                assert b"x-dynctl-incarnation" not in dict(answer.headers)

    run(main)


def test_another_incarnation_is_409(run, bench, entry_of):
    async def main():
        async with bench() as b:
            path = await b.engine("e", echo)
            await b.settle(entry_of("m-0", "i2", path))
            stale = [(b"x-dynctl-incarnation", b"i1")]
            for target in ("/v1/engine/m-0/health", "/v1/kv/m-0"):
                answer = await b.pool.fetch("GET", target, stale)
                assert answer.status == 409
                assert dict(answer.headers)[b"x-dynctl-relay-error"] == b"incarnation"

    run(main)


def test_a_head_that_was_let_through_is_looked_at_anew_once_the_table_has_changed(
    run, bench, entry_of
):
    async def main():
        async with bench() as b:
            stamp = (b"x-dynctl-incarnation", b"i1")

            async def ask(number):
                headers = [stamp, (b"x-request-id", b"r%d" % number)]
                target = "/v1/engine/m-0/v1/completions"
                return await b.pool.fetch("POST", target, headers, b"x" * number)

            path = await b.engine("e", echo)
            await b.settle(entry_of("m-0", "i1", path))
            for number in (1, 200, 3):
                answer = await ask(number)
                assert answer.status == 200
                assert answer.body.endswith(b" id=r%d" % number)
                assert b" %b " % (b"x" * number) in answer.body
                assert dict(answer.headers)[b"content-length"] == b"%d" % len(answer.body)
                assert dict(answer.headers)[b"x-dynctl-incarnation"] == b"i1"
            await b.settle(entry_of("m-0", "i2", path))
            assert (await ask(4)).status == 409
            stamp = (b"x-dynctl-incarnation", b"i2")
            assert dict((await ask(5)).headers)[b"x-dynctl-incarnation"] == b"i2"
            await b.settle()
            assert (await ask(6)).status == 404

    run(main)


def test_answers_of_one_head_carry_each_their_own_fields(run, bench, entry_of):
    async def main():
        async with bench() as b:
            fields = iter(([(b"a", b"1")], [(b"a", b"1")], [(b"b", b"2")], []))

            def answer(exchange: Exchange) -> None:
                exchange.respond(200, b"x" * len(exchange.request.body), headers=next(fields))

            path = await b.engine("e", answer)
            await b.settle(entry_of("m-0", "i1", path))
            for body, expected in (
                (b"1", {b"a": b"1"}),
                (b"22", {b"a": b"1"}),
                (b"3", {b"b": b"2"}),
                (b"4", {}),
            ):
                found = await b.pool.fetch("POST", "/v1/engine/m-0/tokenize", (), body)
                own = {name: value for name, value in found.headers if name in (b"a", b"b")}
                assert (own, len(found.body)) == (expected, len(body))

    run(main)


def test_an_engine_that_does_not_run_is_503_and_one_that_does_not_listen_502(run, bench, entry_of):
    async def main():
        async with bench() as b:
            await b.settle(
                entry_of("waits", "", "", state=EngineState.BACKOFF),
                entry_of("deaf", "i1", b.folder / "nothing"),
            )
            answer = await b.pool.fetch("GET", "/v1/engine/waits/health")
            assert answer.status == 503
            answer = await b.pool.fetch("GET", "/v1/engine/deaf/health")
            assert (answer.status, dict(answer.headers)[b"x-dynctl-relay-error"]) == (
                502,
                b"connect",
            )

    run(main)


def test_an_adopted_engine_is_reached_by_its_url(run, bench, entry_of):
    async def main():
        async with bench() as b:
            server = await serve(echo, host="127.0.0.1", port=0)
            url = f"http://127.0.0.1:{server.port}"
            await b.settle(entry_of("m-0", "i1", "", url=url))
            answer = await b.pool.fetch("GET", "/v1/engine/m-0/health")
            assert answer.body.startswith(b"GET /health")
            await server.close(0)

    run(main)


@pytest.mark.parametrize(
    ("name", "outcome"),
    [("router", 200), ("other", 403), ("relay", "refused by TLS"), (None, "refused by TLS")],
)
def test_only_routers_of_the_cluster_are_served(run, bench, entry_of, name, outcome):
    async def main():
        async with bench() as b:
            path = await b.engine("e", echo)
            await b.settle(entry_of("m-0", "i1", path))
            try:
                got = (await b.client(name).fetch("GET", "/v1/engine/m-0/health")).status
            except UpstreamError:
                got = "refused by TLS"
            assert got == outcome

    run(main)


def test_a_stream_passes_untouched(run, bench, entry_of):
    async def main():
        pieces = [b"data: %d\n\n" % n for n in range(200)] + [b"data: [DONE]\n\n"]

        def stream(exchange: Exchange) -> None:
            exchange.start(200, [(b"content-type", b"text/event-stream")])
            for piece in pieces:
                exchange.write(piece)
            exchange.finish()

        async with bench() as b:
            await b.settle(entry_of("m-0", "i1", await b.engine("e", stream)))
            for _ in range(3):
                answer = await b.pool.fetch("POST", "/v1/engine/m-0/v1/completions", (), b"{}")
                assert answer.body == b"".join(pieces)
                assert dict(answer.headers)[b"content-type"] == b"text/event-stream"
            assert b.pool.num_connections == 1

    run(main)


def test_a_router_that_leaves_cancels_the_engine(run, bench, entry_of):
    async def main():
        gone = asyncio.Event()

        def hold(exchange: Exchange) -> None:
            exchange.on_gone = gone.set
            exchange.start(200, [])
            exchange.write(b"first")

        async with bench() as b:
            await b.settle(entry_of("m-0", "i1", await b.engine("e", hold)))
            sink, call = b.open_stream("/v1/engine/m-0/health")
            await b.until(lambda: sink.body == b"first")
            call.cancel()
            await asyncio.wait_for(gone.wait(), 60)

    run(main)


def test_an_engine_that_breaks_a_stream_never_looks_complete(run, bench, entry_of):
    async def main():
        streams = []

        def breaks(exchange: Exchange) -> None:
            streams.append(exchange)
            exchange.start(200, [])
            exchange.write(b"first")

        async with bench() as b:
            await b.settle(entry_of("m-0", "i1", await b.engine("e", breaks)))
            sink, _ = b.open_stream("/v1/engine/m-0/health")
            await b.until(lambda: sink.body == b"first")
            streams[0].abort()
            await asyncio.wait_for(sink.over.wait(), 60)
            assert sink.error is not None

    run(main)


def test_a_router_that_reads_slowly_slows_the_engine_and_loses_nothing(run, bench, entry_of):
    async def main():
        piece = b"z" * 65536
        total = 400
        written = [0]

        def flood(exchange: Exchange) -> None:
            state = {"paused": False}

            def go_on() -> None:
                state["paused"] = False
                while not state["paused"] and written[0] < total:
                    written[0] += 1
                    exchange.write(piece)
                if written[0] == total and not exchange.is_finished and not state["paused"]:
                    exchange.finish()

            exchange.on_pause = lambda: state.update(paused=True)
            exchange.on_resume = go_on
            exchange.start(200, [])
            go_on()

        async with bench() as b:
            await b.settle(entry_of("m-0", "i1", await b.engine("e", flood)))
            sink, call = b.open_stream("/v1/engine/m-0/health")
            await b.until(lambda: sink.body)
            call.pause()
            await asyncio.sleep(0.3)
            assert written[0] < total
            call.resume()
            await asyncio.wait_for(sink.over.wait(), 60)
            assert sink.error is None
            assert len(sink.body) == total * len(piece)

    run(main)


def test_watchers_see_every_change_and_a_beat(run, bench, entry_of):
    async def main():
        async with bench() as b:
            sinks = [b.open_stream("/v1/engines")[0] for _ in range(2)]
            await b.until(lambda: all(sink.body for sink in sinks))
            await b.settle(entry_of("m-0", "i1", b.folder / "e", state=EngineState.STARTING))
            await b.settle(entry_of("m-0", "i1", b.folder / "e"))
            await b.settle()
            # Two lines more than there were changes: beats.
            await b.until(lambda: all(sink.body.count(b"\n") >= 6 for sink in sinks))
            for sink in sinks:
                states = [tuple(info.state for info in line) for line in infos(bytes(sink.body))]
                changes = [state for state, _ in itertools.groupby(states)]
                assert changes == [(), ("starting",), ("ready",), ()]

    run(main)


def member(rank, **fields):
    return MemberInfo(
        "m-0" if not rank else f"m-0.{rank}", rank, "d", EngineState.STARTING, **fields
    )


def test_members_of_gangs_are_told_to_hosts_and_only_rank_0_to_routers(run, bench, entry_of):
    async def main():
        async with bench() as b:
            asked = b.client("member")
            members, _ = b.open_stream("/v1/members", asked)
            engines, _ = b.open_stream("/v1/engines")
            first, second = member(0, incarnation="i1"), member(1, is_waiting=True)
            await b.settle(entry_of("m-0", "i1", b.folder / "e", member=first))
            b.agent.set(
                entry_of("m-0", "i1", b.folder / "e", member=first),
                entry_of("m-0.1", "", "", member=second),
            )

            def told(sink, kind):
                lines = bytes(sink.body).splitlines()
                return msgspec.json.decode(lines[-1], type=list[kind]) if lines else None

            await b.until(lambda: told(members, MemberInfo) == [first, second])
            await b.until(lambda: told(engines, EngineInfo))
            assert [info.id for info in told(engines, EngineInfo)] == ["m-0"]
            for path in ("/v1/engines", "/v1/engine/m-0/health", "/v1/kv/m-0"):
                assert (await asked.fetch("GET", path)).status == 403
            assert (await b.pool.fetch("GET", "/v1/engine/m-0.1/health")).status == 404

    run(main)


def test_the_last_table_stays_when_the_agent_goes_and_a_new_agent_is_followed(run, bench, entry_of):
    async def main():
        async with bench() as b:
            path = await b.engine("e", echo)
            entry = entry_of("m-0", "i1", path)
            await b.settle(entry)
            await b.agent.stop()
            await asyncio.sleep(0.3)
            answer = await b.pool.fetch("GET", "/v1/engine/m-0/health")
            assert answer.status == 200
            await b.agent.start()
            await b.settle(entry, entry_of("m-1", "j1", path))

    run(main)


@pytest.mark.parametrize("line", [b"{}\n", b"nonsense\n", b'[{"info":{}}]\n', b"\xff\n"])
def test_a_table_nobody_understands_changes_nothing(run, bench, entry_of, line):
    async def main():
        async with bench() as b:
            path = await b.engine("e", echo)
            await b.settle(entry_of("m-0", "i1", path))
            b.agent.say(line)
            await asyncio.sleep(0.05)
            assert (await b.pool.fetch("GET", "/v1/engine/m-0/health")).status == 200
            # The stream is asked anew, so later tables are seen.
            await b.settle(entry_of("m-0", "i2", path))

    run(main)


def test_a_new_incarnation_ends_calls_to_the_old_one(run, bench, entry_of):
    async def main():
        def hold(exchange: Exchange) -> None:
            exchange.start(200, [])
            exchange.write(b"first")

        async with bench() as b:
            path = await b.engine("e", hold)
            await b.settle(entry_of("m-0", "i1", path))
            sink, _ = b.open_stream("/v1/engine/m-0/health")
            await b.until(lambda: sink.body)
            await b.settle(entry_of("m-0", "i2", path))
            await asyncio.wait_for(sink.over.wait(), 60)
            assert sink.error is not None

    run(main)


def test_draining_lets_a_stream_end(run, bench, entry_of):
    async def main():
        streams = []

        def hold(exchange: Exchange) -> None:
            streams.append(exchange)
            exchange.start(200, [])
            exchange.write(b"first")

        async with bench() as b:
            path = await b.engine("e", hold)
            await b.settle(entry_of("m-0", "i1", path))
            sink, _ = b.open_stream("/v1/engine/m-0/health")
            await b.until(lambda: sink.body)
            await b.settle(entry_of("m-0", "i1", path, state=EngineState.DRAINING))
            streams[0].write(b" last")
            streams[0].finish()
            await asyncio.wait_for(sink.over.wait(), 60)
            assert (sink.error, bytes(sink.body)) == (None, b"first last")

    run(main)


# KV streams


def kv_entry(entry_of, b, incarnation="i1", engine_id="m-0", topic="kv", name="k", **more):
    ipc = f"ipc://{b.folder}/{name}"
    return entry_of(
        engine_id, incarnation, b.folder / "e", kv_events=f"{ipc}.e", kv_replay=f"{ipc}.r", topic=topic,
        block_hash_seed="s", **more,
    )  # fmt: skip


def test_routers_get_a_snapshot_then_deltas_in_our_hashes(run, bench, entry_of, blocks):
    async def main():
        async with bench() as b:
            publisher = b.publisher("k")
            b.publish(publisher, blocks(0, 3))
            await b.settle(kv_entry(entry_of, b))
            sinks = [b.open_stream("/v1/kv/m-0")[0]]
            index = Index()

            def knows(num_blocks: int, sink, index: Index) -> bool:
                index.read(sink)
                return index.known.get(0) == set(hashes(num_blocks))

            await b.until(lambda: knows(3, sinks[0], index))
            # A prefix cached before the relay came is known, and later blocks extend it.
            b.publish(publisher, blocks(3, 5, parent=2))
            await b.until(lambda: knows(8, sinks[0], index))
            late, _ = b.open_stream("/v1/kv/m-0")
            late_index = Index()
            await b.until(lambda: knows(8, late, late_index))
            assert isinstance(late_index.frames[0], Snapshot)
            assert late_index.frames[0].block_size == 4
            assert {frame.incarnation for frame in index.frames} == {"i1"}
            assert late.headers[b"x-dynctl-incarnation"] == b"i1"

    run(main)


def test_k5_a_quiet_stream_beats_with_the_sequence_of_its_last_frame(run, bench, entry_of, blocks):
    async def main():
        async with bench() as b:
            publisher = b.publisher("k")
            await b.settle(kv_entry(entry_of, b))
            sink, _ = b.open_stream("/v1/kv/m-0")
            index = Index()
            await b.until(lambda: sink.headers)
            seq = b.publish(publisher, blocks(0, 1))
            await b.until(lambda: index.read(sink) or index.known.get(0) == set(hashes(1)))
            again = b.publish(publisher, blocks(0, 1))  # no change, so no frame
            source = b.relay._engines["m-0"].source
            await b.until(lambda: source._ranks[0]._reader.last_seq == again)

            def has_beat() -> bool:
                index.read(sink)
                last = index.last
                return isinstance(last, Heartbeat) and last.seq == seq and not last.is_stale

            await b.until(has_beat)
            assert sum(isinstance(frame, Delta) for frame in index.frames) == 1

    run(main)


def test_k8_the_stream_ends_with_the_incarnation_and_a_new_one_starts_empty(
    run, bench, entry_of, blocks
):
    async def main():
        async with bench() as b:
            publisher = b.publisher("k")
            b.publish(publisher, blocks(0, 2))
            await b.settle(kv_entry(entry_of, b))
            sink, _ = b.open_stream("/v1/kv/m-0")
            index = Index()
            await b.until(lambda: index.read(sink) or index.known.get(0) == set(hashes(2)))
            await b.settle(kv_entry(entry_of, b, incarnation=""))
            await asyncio.wait_for(sink.over.wait(), 60)
            assert sink.error is None
            publisher.close()
            again = b.publisher("k")
            await b.settle(kv_entry(entry_of, b, incarnation="i2"))
            sink, _ = b.open_stream("/v1/kv/m-0")
            index = Index()
            b.publish(again, blocks(0, 1))
            await b.until(lambda: index.read(sink) or index.known.get(0) == set(hashes(1)))
            assert {frame.incarnation for frame in index.frames} == {"i2"}

    run(main)


def test_k16_ranks_are_kept_apart(run, bench, entry_of, blocks):
    async def main():
        async with bench() as b:
            first, second = b.publisher("inproc"), b.publisher("inproc", rank=1)
            await b.settle(kv_entry(entry_of, b, name="inproc", ranks=2))
            sink, _ = b.open_stream("/v1/kv/m-0")
            index = Index()
            await b.until(lambda: sink.headers)
            b.publish(first, blocks(0, 2), rank=0)
            b.publish(second, blocks(7, 1), rank=0)  # not its own
            b.publish(second, blocks(0, 5), rank=1)
            wanted = {0: set(hashes(2)), 1: set(hashes(5))}
            await b.until(lambda: index.read(sink) or index.known == wanted)
            beats = {}

            def have_both_beaten() -> bool:
                index.read(sink)
                beats.update({one.rank: one for one in index.frames if isinstance(one, Heartbeat)})
                return [beats[rank].health.num_other_ranks for rank in sorted(beats)] == [0, 1]

            await b.until(have_both_beaten)

            # A rank whose events begin anew takes nothing from the other.
            second.close()
            again = b.publisher("inproc", rank=1)
            b.publish(again, blocks(0, 1), rank=1)
            wanted = {0: set(hashes(2)), 1: set(hashes(1))}
            await b.until(lambda: index.read(sink) or index.known == wanted)

    run(main)


def test_slower_media_are_told_to_routers_that_ask_for_them_only(run, bench, entry_of, blocks):
    async def main():
        async with bench() as b:
            publisher = b.publisher("k")
            offloaded = tuple(blocks(0, 2).block_hashes)
            b.publish(publisher, blocks(0, 3))
            b.publish(publisher, BlockStored(offloaded, None, (), 0, medium="CPU"))
            await b.settle(kv_entry(entry_of, b))
            older, newer = (b.open_stream(f"/v1/kv/m-0{query}")[0] for query in ("", "?media=all"))
            of_older, of_newer = Index(), Index()
            device, slow = {0: set(hashes(3))}, {0: set(hashes(2))}
            await b.until(lambda: of_newer.read(newer) or of_newer.slower == slow)
            assert of_newer.known == device
            # What comes later is told as a change, and one who joins later gets it whole.
            b.publish(publisher, BlockRemoved(offloaded[1:], "CPU"))
            slow = {0: set(hashes(1))}
            await b.until(lambda: of_newer.read(newer) or of_newer.slower == slow)
            late, of_late = b.open_stream("/v1/kv/m-0?media=all")[0], Index()
            await b.until(
                lambda: of_late.read(late) or (of_late.known, of_late.slower) == (device, slow)
            )
            b.publish(publisher, blocks(3, 1, parent=2))
            await b.until(lambda: of_older.read(older) or of_older.known == {0: set(hashes(4))})
            assert of_older.slower == {}

    run(main)


def test_a_block_size_learnt_from_events_of_the_prefix_reaches_routers(
    run, bench, entry_of, blocks
):
    async def main():
        async with bench() as b:
            publisher = b.publisher("k")
            await b.settle(kv_entry(entry_of, b, block_size=0))
            sink, _ = b.open_stream("/v1/kv/m-0")
            index = Index()
            await b.until(lambda: sink.headers)
            # Models that mix attention kinds tell of each group of layers: sliding windows have their own blocks.
            b.publish(publisher, BlockStored((70,), None, tuple(range(8)), 8, group_idx=1))
            b.publish(publisher, blocks(0, 2))
            await b.until(lambda: index.read(sink) or index.known.get(0) == set(hashes(2)))
            sizes = [frame.block_size for frame in index.frames if isinstance(frame, Snapshot)]
            assert sizes[-1] == 4

    run(main)


@pytest.mark.parametrize("block_size", [0, 4])
def test_chunks_of_slower_media_are_cut_at_the_block_size_of_the_device(
    run, bench, entry_of, blocks, block_size
):
    async def main():
        async with bench() as b:
            publisher = b.publisher("k")
            await b.settle(kv_entry(entry_of, b, block_size=block_size))
            sink, _ = b.open_stream("/v1/kv/m-0?media=all")
            index = Index()
            await b.until(lambda: sink.headers)
            b.publish(publisher, blocks(0, 1))
            for handle, parent in ((77, None), (78, 77)):
                first = 8 * (handle - 77)
                tokens = tuple(range(first, first + 8))
                b.publish(publisher, BlockStored((handle,), parent, tokens, 8, medium="cpu"))
            slow = {0: set(hashes(4))}
            await b.until(lambda: index.read(sink) or index.slower == slow)
            assert index.known == {0: set(hashes(1))}

    run(main)


def test_a_router_that_falls_behind_is_cut_and_resyncs_by_snapshot(
    run, bench, entry_of, blocks, monkeypatch
):
    monkeypatch.setattr(kv_source, "MAX_BEHIND_BYTES", 100_000)

    async def main():
        async with bench() as b:
            publisher = b.publisher("k")
            await b.settle(kv_entry(entry_of, b))
            slow_pool = b.client("router")
            slow, call = b.open_stream("/v1/kv/m-0", slow_pool)
            fast, _ = b.open_stream("/v1/kv/m-0")
            index = Index()
            await b.until(lambda: slow.headers and fast.headers)
            call.pause()
            source = b.relay._engines["m-0"].source
            first = 0
            while not b.relay.metrics.kv_cut:
                # 20,000 blocks are 160 kB of hashes; the kernel's buffers hold some MB before ours.
                b.publish(publisher, blocks(first, 20_000))
                first += 20_000
                await b.until(lambda: source._ranks[0].seq == publisher._next_seq - 1)
                assert first < 4_000_000
            call.resume()
            await asyncio.wait_for(slow.over.wait(), 60)
            assert slow.error is not None
            await b.until(lambda: index.read(fast) or len(index.known[0]) == first)
            again, _ = b.open_stream("/v1/kv/m-0", slow_pool)
            resynced = Index()
            await b.until(lambda: resynced.read(again) or resynced.known.get(0) == index.known[0])
            assert source.num_subscribers == 2

    run(main)


def test_a_source_that_sends_rubbish_is_shown_empty_and_stale(run, bench, entry_of, blocks):
    async def main():
        async with bench() as b:
            publisher = b.publisher("k")
            b.publish(publisher, blocks(0, 2))
            await b.settle(kv_entry(entry_of, b))
            sink, _ = b.open_stream("/v1/kv/m-0")
            index = Index()
            await b.until(lambda: index.read(sink) or index.known.get(0) == set(hashes(2)))

            def is_given_up() -> bool:
                # Again and again: the subscription may reach the publisher after the first blocks came by replay.
                for number in range(30):
                    seq = (2 + number).to_bytes(8, "big")
                    publisher._pub.send_multipart([b"kv", seq, b"\xc1"])
                index.read(sink)
                last = index.last
                return isinstance(last, Heartbeat) and last.is_stale and index.known[0] == set()

            await b.until(is_given_up)

    run(main)


def test_steps_that_follow_each_other_quickly_are_told_as_one_and_the_first_at_once(
    run, bench, entry_of, blocks
):
    async def main():
        async with bench() as b:
            b.publisher("k")
            await b.settle(kv_entry(entry_of, b))
            sink, _ = b.open_stream("/v1/kv/m-0")
            index = Index()
            await b.until(lambda: sink.headers)
            source = b.relay._engines["m-0"].source
            steps = [blocks(0, number + 1) for number in range(30)]
            steps.append(BlockRemoved((EngineBlockHash(29),), "GPU"))
            source._told_s = asyncio.get_running_loop().time() + 3600.0  # its time is not over
            for seq, event in enumerate(steps):
                source._ranks[0].on_batch(seq, EventBatch(0.0, (event,)))
                source._ranks[0].on_end_of_read()
            assert source._telling is not None
            source.tell()  # now it is
            wanted = set(hashes(29))
            await b.until(lambda: index.read(sink) or index.known.get(0) == wanted)
            deltas = [frame for frame in index.frames if isinstance(frame, Delta)]
            assert len(deltas) == 1
            assert (len(deltas[0].stored), list(deltas[0].removed)) == (29, [])
            assert deltas[0].seq == 30

            source._told_s = 0.0  # a pause
            source._ranks[0].on_batch(31, EventBatch(0.0, (blocks(29, 1, parent=28),)))
            source._ranks[0].on_end_of_read()
            assert source._telling is None
            await b.until(lambda: index.read(sink) or len(index.known[0]) == 30)

    run(main)


def test_many_blocks_are_not_kept_back(run, bench, entry_of, blocks, monkeypatch):
    monkeypatch.setattr(kv_source, "MERGE_S", 3600.0)

    async def main():
        async with bench() as b:
            publisher = b.publisher("k")
            await b.settle(kv_entry(entry_of, b))
            sink, _ = b.open_stream("/v1/kv/m-0")
            index = Index()
            await b.until(lambda: sink.headers)
            b.relay._engines["m-0"].source._told_s = asyncio.get_running_loop().time()
            b.publish(publisher, blocks(0, 5000))
            await b.until(lambda: index.read(sink) or len(index.known.get(0, ())) == 5000)

    run(main)


def test_the_relay_says_what_it_passed_on(run, bench, entry_of, blocks, monkeypatch):
    monkeypatch.setattr(kv_source, "time", SimpleNamespace(time=lambda: 1001.5))

    async def main():
        async with bench() as b:
            publisher = b.publisher("k")
            path = await b.engine("e", echo)
            await b.settle(kv_entry(entry_of, b), entry_of("m-1", "i1", path))
            await b.pool.fetch("POST", "/v1/engine/m-1/v1/completions", [], b'{"prompt":"p"}')
            sink, _ = b.open_stream("/v1/kv/m-0")
            index = Index()
            await b.until(lambda: sink.headers)
            publisher.publish(EventBatch(1000.0, (blocks(0, 7),)))
            await b.until(lambda: index.read(sink) or index.known.get(0) == set(hashes(7)))
            # After connecting it looks whether it is still the same engine.
            reader = b.relay._engines["m-0"].source._ranks[0]._reader
            await b.until(lambda: reader.health.was_connected and not reader.is_stale)

            admin = await serve(b.relay.handle_admin, path=b.folder / "admin")
            client = Upstream(Address(path=str(b.folder / "admin")))
            try:
                assert (await client.fetch("GET", "/health")).status == 200
                text = (await client.fetch("GET", "/metrics")).body.decode()
            finally:
                await client.close()
                await admin.close(0)
            wanted = {
                'dynctl_relay_requests_total{code="200"} 1',
                "dynctl_relay_request_bytes_total 14",
                "dynctl_relay_kv_batches_total 1",
                'dynctl_relay_kv_frames_total{kind="delta"} 1',
                'dynctl_relay_kv_blocks_total{change="stored"} 7',
                'dynctl_relay_kv_lag_seconds_bucket{le="0.5"} 0',
                'dynctl_relay_kv_lag_seconds_bucket{le="2"} 1',
                "dynctl_relay_engines 2",
                'dynctl_relay_kv_routers{engine="m-0"} 1',
                'dynctl_relay_kv_trust{engine="m-0"} 1',
            }
            assert wanted <= set(text.splitlines())
            sent = next(
                line for line in text.splitlines() if line.startswith("dynctl_relay_kv_sent")
            )
            # A frame may have been sent after the last one that was read.
            assert int(sent.split()[-1]) >= len(sink.body) > 0
            assert b.relay.metrics.kv_cut == 0

    run(main)


def test_every_metric_of_the_relay_is_in_the_documentation_and_the_other_way_round():
    text = RelayMetrics().exposition({})
    exported = set(re.findall(r"# TYPE (\w+) ", text.decode()))
    exported |= {"dynctl_relay_engines", "dynctl_relay_kv_routers", "dynctl_relay_kv_trust"}
    documented = set(re.findall(r"`(dynctl_relay_\w+)`", Path("docs/metrics.md").read_text()))
    assert exported == documented


def last_beat(index: Index, sink) -> Heartbeat | None:
    index.read(sink)
    beats = [frame for frame in index.frames if isinstance(frame, Heartbeat)]
    return beats[-1] if beats else None


def test_heartbeats_say_what_is_odd_about_an_engines_events(run, bench, entry_of, blocks):
    async def main():
        async with bench() as b:
            publisher = b.publisher("k")  # under the topic "kv"
            b.publish(publisher, msgspec.structs.replace(blocks(0, 2), lora_name="tuned"))
            await b.settle(
                kv_entry(entry_of, b),
                entry_of("m-1", "i1", b.folder / "f", kv_events=f"ipc://{b.folder}/nobody"),
                kv_entry(entry_of, b, engine_id="m-2", topic="another"),
            )
            sinks = [b.open_stream(f"/v1/kv/m-{n}")[0] for n in range(3)]
            indices = [Index() for _ in sinks]

            def are_told() -> bool:
                beats = [last_beat(i, s) for i, s in zip(indices, sinks, strict=True)]
                if None in beats:
                    return False
                plain, away, elsewhere = (beat.health for beat in beats)
                return (
                    (plain.was_connected, plain.num_keyed, plain.other_topic) == (True, 1, "")
                    and not away.was_connected
                    and elsewhere.was_connected
                    and elsewhere.other_topic == "kv"
                )

            await b.until(are_told)

    run(main)

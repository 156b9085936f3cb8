"""What a router believes an engine has cached, through the real sockets, equals what the engine has."""

import asyncio

import pytest
import zmq

from dynctl.kv.hashing import BlockHasher, namespace
from dynctl.kv.reader import KvEventReader
from dynctl.kv.tracker import BlockTracker


class Follower:
    def __init__(self, hasher):
        self.tracker, self.known, self.num_resets = BlockTracker(hasher), set(), 0

    def on_batch(self, seq, batch):
        delta = self.tracker.apply(batch.events, 0)
        if delta.cleared:
            self.known.clear()
        self.known -= set(delta.removed)
        self.known |= set(delta.stored)

    def on_end_of_read(self):
        pass

    def on_reset(self):
        self.num_resets += 1
        self.tracker.reset()
        self.known.clear()

    def on_trust(self, trust):
        pass

    def on_failed(self, reason):
        raise AssertionError(reason)


@pytest.mark.parametrize("fault", [None, "lose-events,ratio=0.4"])
def test_relayed_hashes_predict_the_engines_own_hits(start_engine, fault):
    """Small cache with evictions, shared prefixes, salts; with losses the replay repairs. Predicted = reported."""
    name = "plain" if fault is None else "lossy"
    flags = ["--num-blocks", "40", "--max-model-len", "512", *(["--fault", fault] if fault else [])]
    engine = start_engine(name, *flags)
    hasher = BlockHasher(b"seed", 16)

    async def main():
        context = zmq.Context()
        follower = Follower(hasher)
        reader = KvEventReader(
            engine.kv_events, engine.kv_replay, f"kv@{name}", follower, context=context
        )
        reader.start()
        pairs = []
        for i in range(30):
            prompt = [*range(100, 100 + 16 * (i % 5 + 1)), *range(1000 + i % 7, 1000 + i % 7 + 60)]
            salt = "tenant" if i % 4 == 3 else None
            await caught_up(engine, reader)
            blocks = hasher.prompt(prompt, namespace(keys=(salt,)) if salt else b"")
            predicted = 0
            while (
                predicted < (len(prompt) - 1) // 16
                and blocks.hash_at(predicted + 1) in follower.known
            ):
                predicted += 1
            usage = (await asyncio.to_thread(engine.complete, prompt, 20, cache_salt=salt)).json()[
                "usage"
            ]
            pairs.append((predicted * 16, usage["prompt_tokens_details"]["cached_tokens"]))
        await caught_up(engine, reader)
        reader.close()
        context.destroy(linger=0)
        assert all(predicted == reported for predicted, reported in pairs), pairs
        assert sum(reported for _, reported in pairs) > 0
        assert len(follower.known) == engine.state()["num_cached_blocks"]
        assert follower.num_resets == 0
        if fault:
            assert reader.counts.num_replays > 1

    asyncio.run(main())


async def caught_up(engine, reader):
    """Wait until the reader has what the engine has; lost batches are asked for as an audit would."""
    async with asyncio.timeout(60):
        while True:
            await asyncio.sleep(0.02)
            if not reader.is_stale:
                reader._obey(reader._sequence.audit(reader._now()))
                while reader.is_stale:
                    await asyncio.sleep(0.005)
                return


def test_a_reset_is_announced_with_the_next_step(start_engine):
    engine = start_engine("reset")
    hasher = BlockHasher(b"", 16)

    async def main():
        context = zmq.Context()
        follower = Follower(hasher)
        reader = KvEventReader(
            engine.kv_events, engine.kv_replay, "kv@reset", follower, context=context
        )
        reader.start()
        await asyncio.to_thread(engine.complete, list(range(64)), 1)
        await caught_up(engine, reader)
        assert len(follower.known) == 4
        assert engine.control.post("/reset_prefix_cache").json() == {"cleared": True}
        await caught_up(engine, reader)
        assert len(follower.known) == 4
        await asyncio.to_thread(engine.complete, list(range(100, 116)), 1)
        await caught_up(engine, reader)
        assert follower.known == set(hasher.prompt(range(100, 116)).hashes())
        reader.close()
        context.destroy(linger=0)

    asyncio.run(main())

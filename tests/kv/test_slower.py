"""Blocks in media slower than the device: what they are called, when they can be found, and what is forgotten."""

import random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dynctl.core.kv import HOST, STORAGE, AllBlocksCleared, BlockRemoved, BlockStored
from dynctl.kv import slower
from dynctl.kv.events import EventBatch, EventError, decode, encode
from dynctl.kv.hashing import BlockHasher, namespace
from dynctl.kv.tracker import BlockTracker

HASHER = BlockHasher(b"seed", 2)


def named(*handles, medium="CPU"):
    """What vLLM's offloading connector says of blocks unless it is told to describe them."""
    return BlockStored(tuple(handles), None, (), 0, medium=medium)


def told(tracker, events):
    """Apply events; return what is told of slower media as sets by medium."""
    tracker.apply(events, 0)
    return {d.medium: (set(d.stored), set(d.removed), d.cleared) for d in tracker.take_slower()}


def hashes(tokens, depth, space=b""):
    return set(HASHER.prompt(tokens, space).hashes()[:depth])


def test_blocks_named_by_their_handles_are_those_of_the_device(stored):
    tracker = BlockTracker(HASHER)
    first = told(tracker, [stored([1, 2, 3]), named(1), named(2, 3)])

    assert first == {HOST: (hashes(range(6), 3), set(), False)}


def test_what_the_device_evicts_stays_and_what_the_host_evicts_goes_with_all_below(stored, removed):
    tracker = BlockTracker(HASHER)
    told(tracker, [stored([1, 2, 3]), named(1, 2, 3)])

    assert told(tracker, [removed(3, 2, 1)]) == {}
    assert set(tracker.snapshot(HOST)) == hashes(range(6), 3)
    gone = told(tracker, [BlockRemoved((2,), "CPU")])
    assert gone == {HOST: (set(), hashes(range(6), 3) - hashes(range(6), 1), False)}


def test_a_block_whose_parent_is_not_there_is_found_once_it_is(stored):
    tracker = BlockTracker(HASHER)

    assert told(tracker, [stored([1, 2]), named(2)]) == {}
    assert told(tracker, [named(1)]) == {HOST: (hashes(range(4), 2), set(), False)}


def test_blocks_that_describe_themselves_need_no_device(stored):
    tracker = BlockTracker(HASHER)
    first = told(tracker, [stored([1, 2], medium="CPU")])
    below = told(tracker, [stored([3], parent=2, first_token=4, medium="STORAGE")])

    assert first == {HOST: (hashes(range(4), 2), set(), False)}
    # Its parent isn't in the same medium: a load from there would not begin with it.
    assert below == {}
    assert tracker.slower_media == (HOST, STORAGE)


def test_the_device_knows_salts_that_the_description_leaves_out(stored):
    tracker = BlockTracker(HASHER)
    salted = stored([1, 2], extra_keys=(["tenant"], None))
    first = told(tracker, [salted, stored([1, 2], medium="CPU")])

    assert first == {HOST: (hashes(range(4), 2, namespace(keys=("tenant",))), set(), False)}


def test_chunks_of_several_blocks_are_found_block_by_block():
    """LMCache has handles of its own, one for 256 tokens or what is left of a prompt."""
    tracker = BlockTracker(HASHER)
    chunk = BlockStored((77,), None, tuple(range(8)), 8, medium="cpu")
    rest = BlockStored((78,), 77, (8, 9, 10), 3, medium="cpu")

    assert told(tracker, [chunk, rest]) == {HOST: (hashes(range(10), 5), set(), False)}
    assert told(tracker, [BlockRemoved((77,), "cpu")]) == {
        HOST: (set(), hashes(range(10), 5), False)
    }


def test_blocks_two_chunks_begin_with_are_there_until_both_are_gone(stored):
    """vLLM names the blocks of a chunk one by one, and takes each chunk's away when it is evicted."""
    tracker = BlockTracker(HASHER)
    one = stored([1, 2], medium="CPU")
    other = BlockStored((1, 3), None, (0, 1, 9, 9), 2, medium="CPU")
    told(tracker, [one, other, other])

    assert told(tracker, [BlockRemoved((1, 2), "CPU")]) == {
        HOST: (set(), hashes(range(4), 2) - hashes(range(4), 1), False)
    }
    assert set(tracker.snapshot(HOST)) == hashes([0, 1, 9, 9], 2)
    told(tracker, [BlockRemoved((1, 3), "CPU")])
    assert tracker.snapshot(HOST) == []


def test_a_handle_nobody_knows_is_counted_and_left_out(stored, removed):
    tracker = BlockTracker(HASHER)
    orphan = stored([5], parent=4, first_token=8, medium="CPU")

    assert told(tracker, [stored([1]), removed(1), named(1), orphan]) == {}
    assert tracker._slower[HOST].num_unnamed == 2


def test_a_cleared_engine_is_held_to_have_lost_its_slower_media_too(stored):
    tracker = BlockTracker(HASHER)
    told(tracker, [stored([1]), named(1)])

    assert told(tracker, [AllBlocksCleared()]) == {HOST: (set(), set(), True)}
    assert tracker.snapshot(HOST) == []


def test_what_is_never_removed_is_bounded_and_what_many_prompts_begin_with_stays(monkeypatch):
    monkeypatch.setattr(slower, "MAX_BLOCKS", 640)
    tracker = BlockTracker(HASHER)
    tracker.apply([BlockStored((1,), None, (7, 7), 2, medium="cpu")], 0)
    for i in range(2, 3000):
        tracker.apply([BlockStored((i,), 1, (i, i), 2, medium="cpu")], 0)

    assert 600 <= len(tracker._slower[HOST]) <= 640
    found = set(tracker.snapshot(HOST))
    assert hashes([7, 7], 1) <= found
    assert hashes([7, 7, 2999, 2999], 2) <= found
    assert not hashes([7, 7, 2, 2], 2) & found - hashes([7, 7], 1)


@pytest.mark.parametrize("tokens", [(), (1, 2, 3)])
def test_only_slower_media_may_name_blocks_without_their_tokens(tokens):
    event = BlockStored((1,), None, tokens, 0 if not tokens else 2)

    with pytest.raises(EventError):
        decode(encode(EventBatch(0.0, (event,))))
    placeholder = BlockStored((1, 2), None, (), 0, medium="CPU")
    assert decode(encode(EventBatch(0.0, (placeholder,)))).events == (placeholder,)


@st.composite
def histories(draw):
    seed = draw(st.integers(0, 2**32))
    return random.Random(seed), draw(st.integers(1, 60))


@settings(max_examples=200, deadline=None)
@given(histories())
def test_told_is_what_a_load_would_find_without_a_gap(history):
    """Random trees, moved between device and host in any order: deltas, snapshot and a plain reference agree."""
    rng, num_steps = history
    tracker, known = BlockTracker(HASHER), set()
    device, host, prefixes = set(), set(), {None: ()}

    def block_of(handle):
        return HASHER.prompt(prefixes[handle]).hash_at(len(prefixes[handle]) // 2)

    def above(handle):
        return (
            hash(("engine", prefixes[handle][:-2])) & (2**64 - 1) if prefixes[handle][2:] else None
        )

    for _ in range(num_steps):
        kind, batch = rng.random(), []
        if kind < 0.4:
            parent = rng.choice([None, *sorted(device)])
            ids = (rng.randrange(3), rng.randrange(3))
            whole = prefixes[parent] + ids
            handle = hash(("engine", whole)) & (2**64 - 1)
            prefixes[handle] = whole
            device.add(handle)
            batch.append(BlockStored((handle,), parent, ids, 2))
        elif kind < 0.7 and device:
            handle = rng.choice(sorted(device))
            host.add(handle)
            batch.append(named(handle))
        elif kind < 0.8 and device:
            handle = rng.choice(sorted(device))
            device.discard(handle)
            batch.append(BlockRemoved((handle,)))
        elif kind < 0.97 and host:
            handle = rng.choice(sorted(host))
            host.discard(handle)
            batch.append(BlockRemoved((handle,), "CPU"))
        elif kind >= 0.97:
            device.clear()
            host.clear()
            batch.append(AllBlocksCleared())
        tracker.apply(batch, 0)
        for delta in tracker.take_slower():
            if delta.cleared:
                known.clear()
            assert known.issuperset(delta.removed)
            assert known.isdisjoint(delta.stored)
            known = (known - set(delta.removed)) | set(delta.stored)

        def is_reachable(handle):
            return handle is None or (handle in host and is_reachable(above(handle)))

        assert known == {block_of(handle) for handle in host if is_reachable(handle)}
        if tracker.slower_media:
            assert sorted(tracker.snapshot(HOST)) == sorted(known)

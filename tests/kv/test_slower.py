"""Blocks in media slower than the device: what they are called, when they can be found, and what is forgotten."""

import random
from array import array

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dynctl.core.kv import HOST, NO_GROUP, STORAGE, AllBlocksCleared, BlockRemoved, BlockStored
from dynctl.kv import slower
from dynctl.kv.events import EventBatch, EventError, decode, encode
from dynctl.kv.hashing import BlockHasher, namespace
from dynctl.kv.slower import SlowerBlocks
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


def whole(stored, *handles):
    """Blocks on the device whose group is not the first."""
    return stored(handles, group_idx=1, spec_kind="full_attention")


def test_what_is_told_before_the_devices_group_is_known_does_not_outlive_that_it_is_another(stored):
    tracker = BlockTracker(HASHER)
    first = told(tracker, [stored([1, 2], medium="CPU")])
    settled = told(tracker, [whole(stored, 1, 2), BlockRemoved((1, 2), "CPU", 0)])

    assert first == {HOST: (hashes(range(4), 2), set(), False)}
    assert settled == {HOST: (set(), set(), True)}
    assert tracker.snapshot(HOST) == []
    # From here on the group the device has named is followed, and it alone.
    assert told(tracker, [stored([1], medium="CPU")]) == {}
    ours = stored([1, 2], medium="CPU", group_idx=1)
    assert told(tracker, [ours]) == {HOST: (hashes(range(4), 2), set(), False)}
    gone = told(tracker, [BlockRemoved((2,), "CPU", 1)])
    assert gone == {HOST: (set(), hashes(range(4), 2) - hashes(range(4), 1), False)}


@pytest.mark.parametrize("group", [0, NO_GROUP])
def test_what_is_told_before_the_devices_group_is_known_stays_where_it_is_the_first(stored, group):
    tracker = BlockTracker(HASHER)
    told(tracker, [stored([1, 2], medium="CPU", group_idx=group)])

    assert told(tracker, [stored([1, 2])]) == {}
    assert set(tracker.snapshot(HOST)) == hashes(range(4), 2)
    told(tracker, [BlockRemoved((1, 2), "CPU", group)])
    assert tracker.snapshot(HOST) == []


def test_a_connector_that_names_no_group_speaks_of_the_devices(stored):
    def wire(event):
        return decode(encode(EventBatch(0.0, (event,)))).events[0]

    tracker = BlockTracker(HASHER)
    windows = stored([1, 2], medium="CPU", group_idx=NO_GROUP, spec_kind="sliding_window")
    assert told(tracker, [windows, whole(stored, 1, 2), windows]) == {}
    named_both = wire(BlockStored((1, 2), None, (), 0, medium="CPU", group_idx=NO_GROUP))
    assert told(tracker, [named_both]) == {HOST: (hashes(range(4), 2), set(), False)}
    gone = told(tracker, [wire(BlockRemoved((1, 2), "CPU", NO_GROUP))])
    assert gone == {HOST: (set(), hashes(range(4), 2), False)}
    assert tracker.counts.num_other_group == 2


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


def chunk(handle, num_tokens, parent=None, first_token=0):
    tokens = tuple(range(first_token, first_token + num_tokens))
    return BlockStored((handle,), parent, tokens, num_tokens, medium="cpu")


def test_blocks_that_hang_below_themselves_are_left_out_and_hold_nothing_up(stored, monkeypatch):
    monkeypatch.setattr(slower, "MAX_BLOCKS", 64)
    tracker = BlockTracker(HASHER)
    tracker.apply([stored([7, 8, 9])], 0)
    loops = [((7,), 7), ((7, 8), 8), ((9, 8, 7), 7)]
    for handles, parent in loops:
        tokens = tuple(range(2 * len(handles)))
        assert told(tracker, [BlockStored(handles, parent, tokens, 2, medium="CPU")]) == {}
    held = tracker._slower[HOST]
    # 7 below itself; 8 below 7, which hangs below 8; 8 below 9 below 7, and what is behind it.
    assert held.num_unnamed == 1 + 1 + 2
    assert tracker.snapshot(HOST) == []

    for first in range(100, 300):
        tracker.apply([chunk(first, 2, first_token=first)], 0)
    assert len(held) == len(tracker.snapshot(HOST)) == 64


def test_an_event_whose_end_is_unknown_holds_what_others_told_of_no_longer(stored):
    tracker = BlockTracker(HASHER)
    half = named(1, 9)
    told(tracker, [stored([1]), named(1), half, half, half])

    assert tracker._slower[HOST].num_unnamed == 3
    assert told(tracker, [BlockRemoved((1,), "CPU")]) == {HOST: (set(), hashes(range(2), 1), False)}


def test_a_block_in_chunks_of_several_lengths_is_there_until_all_are_gone():
    tracker = BlockTracker(HASHER)
    assert told(tracker, [chunk(32, 4), chunk(64, 8)]) == {
        HOST: (hashes(range(8), 4), set(), False)
    }

    assert told(tracker, [BlockRemoved((32,), "cpu")]) == {}
    assert sorted(tracker.snapshot(HOST)) == sorted(hashes(range(8), 4))
    assert told(tracker, [chunk(32, 4), BlockRemoved((64,), "cpu")]) == {
        HOST: (set(), hashes(range(8), 4) - hashes(range(4), 2), False)
    }
    assert set(tracker.snapshot(HOST)) == hashes(range(4), 2)
    assert told(tracker, [BlockRemoved((32,), "cpu")]) == {
        HOST: (set(), hashes(range(4), 2), False)
    }


def test_long_chunks_count_for_all_their_blocks(monkeypatch):
    monkeypatch.setattr(slower, "MAX_BLOCKS", 640)
    tracker = BlockTracker(HASHER)
    for i in range(20):
        tracker.apply([chunk(i, 256, first_token=1000 * i)], 0)

    assert len(tracker.snapshot(HOST)) == 4 * 128
    newest = range(19_000, 19_256)
    assert hashes(newest, 128) <= set(tracker.snapshot(HOST))


def test_events_whose_end_is_unknown_are_bounded_too(stored, monkeypatch):
    monkeypatch.setattr(slower, "MAX_BLOCKS", 64)
    tracker = BlockTracker(HASHER)
    for i in range(200):
        tracker.apply([stored([i], first_token=2 * i), named(i, 10_000)], 0)

    assert len(tracker.snapshot(HOST)) == len(tracker._slower[HOST]) == 64


class Watched(dict):
    """Counts the keys that were looked at one after the other."""

    num_seen = 0

    def __iter__(self):
        for key in super().__iter__():
            self.num_seen += 1
            yield key


def test_room_is_made_oldest_first_however_many_prompts_begin_alike(monkeypatch):
    number = 4096
    monkeypatch.setattr(slower, "MAX_BLOCKS", number)
    held = SlowerBlocks(HASHER, {})
    held.store(chunk(1, 2))
    rng = random.Random(1)
    handles = [rng.getrandbits(64) for _ in range(number + 200)]
    for i, handle in enumerate(handles):
        if i == 2:
            held._children[1] = Watched(held._children[1])
        held.store(chunk(handle, 2, 1, 2 * i))

    num_gone = 1 + len(handles) - len(held)
    # Copying the children of the first once for each that goes looked at all of them so often.
    assert held._children[1].num_seen <= 2 * num_gone
    assert number - number // 64 <= len(held) <= number
    assert set(held._chunks) == {1, *handles[-len(held) + 1 :]}


@settings(max_examples=100, deadline=None)
@given(st.integers(0, 2**32))
def test_whatever_parents_events_name_every_walk_ends_and_the_bound_holds(seed):
    rng = random.Random(seed)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(slower, "MAX_BLOCKS", 8)
        tracker = BlockTracker(HASHER)
        tracker.apply([BlockStored(tuple(range(12)), None, tuple(range(24)), 2)], 0)
        known = set()
        for _ in range(60):
            handles = tuple(rng.choices(range(12), k=rng.randint(1, 3)))
            parent = rng.choice([None, *range(12)])
            tokens = rng.choice([(), tuple(range(2 * len(handles)))])
            event = BlockStored(handles, parent, tokens, 2, medium="CPU")
            tracker.apply([rng.choice([event, event, BlockRemoved(handles, "CPU")])], 0)
            for delta in tracker.take_slower():
                assert known.issuperset(delta.removed)
                assert known.isdisjoint(delta.stored)
                known = (known - set(delta.removed)) | set(delta.stored)
            if tracker.slower_media:
                assert set(tracker.snapshot(HOST)) == known
                assert len(tracker._slower[HOST]) <= 8


@pytest.mark.parametrize("tokens", [(), (1, 2, 3)])
def test_only_slower_media_may_name_blocks_without_their_tokens(tokens):
    event = BlockStored((1,), None, tokens, 0 if not tokens else 2)

    with pytest.raises(EventError):
        decode(encode(EventBatch(0.0, (event,))))
    placeholder = BlockStored((1, 2), None, array("I"), 0, medium="CPU")
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

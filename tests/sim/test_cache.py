import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import Bundle, RuleBasedStateMachine, consumes, invariant, rule

from dynctl.core.kv import AllBlocksCleared, BlockRemoved, BlockStored
from dynctl.sim.cache import ROOT_HASH, FullBlock, PagedCache, block_hash

SIZE = 2


def full(block_id, name, token=0):
    return FullBlock(block_id, name, 100 + name, (token, token))


def test_a_prefix_is_found_up_to_the_first_unknown_block():
    cache = PagedCache(8, SIZE)
    ids = cache.take([], 3)
    cache.commit([full(ids[0], 11), full(ids[1], 12), full(ids[2], 13)], None)

    assert cache.find([11, 12, 99, 13]) == ids[:2]
    assert cache.find([99, 11]) == []
    assert cache.state_of(ids[1]) == 112


def test_released_contents_stay_until_the_room_is_needed_oldest_and_tail_first():
    cache = PagedCache(5, SIZE)
    first, second = cache.take([], 2), cache.take([], 2)
    cache.commit([full(first[0], 1), full(first[1], 2)], None)
    cache.commit([full(second[0], 3), full(second[1], 4)], None)
    cache.release(first)
    cache.release(second)
    cache.take_events()
    assert cache.find([1, 2]) == first
    cache.take([], 1)

    assert cache.take_events() == (BlockRemoved((2,), "GPU"),)
    assert cache.find([1, 2]) == first[:1]
    assert cache.find([3, 4]) == second


def test_a_hit_protects_blocks_from_eviction():
    cache = PagedCache(4, SIZE)
    ids = cache.take([], 2)
    cache.commit([full(ids[0], 1), full(ids[1], 2)], None)
    cache.release(ids)
    again = cache.take(cache.find([1, 2]), 1)

    assert again[:2] == ids
    assert not cache.can_take([], 1)
    assert cache.usage_ratio == 1


def test_events_carry_runs_of_new_blocks_with_their_parent():
    cache = PagedCache(9, SIZE)
    ids = cache.take([], 4)
    cache.commit([full(ids[0], 1, 7)], None)
    cache.commit([full(ids[1], 1), full(ids[2], 2, 8), full(ids[3], 3, 9)], None)
    events = cache.take_events()

    assert events[0] == BlockStored(
        (1,), None, (7, 7), SIZE, None, (None,), "GPU", 0, "full_attention"
    )
    assert events[1] == BlockStored(
        (2, 3), 1, (8, 8, 9, 9), SIZE, None, (None, None), "GPU", 0, "full_attention"
    )


def test_clearing_waits_until_nothing_is_in_use():
    cache = PagedCache(4, SIZE)
    ids = cache.take([], 1)
    cache.commit([full(ids[0], 1)], None)
    assert not cache.clear()
    cache.release(ids)
    cache.take_events()

    assert cache.clear()
    assert cache.take_events() == (AllBlocksCleared(),)
    assert (cache.find([1]), cache.num_cached) == ([], 0)


def test_hashes_cover_parent_tokens_and_keys():
    names = {
        block_hash(ROOT_HASH, [1, 2], None),
        block_hash(ROOT_HASH, [2, 1], None),
        block_hash(1, [1, 2], None),
        block_hash(ROOT_HASH, [1, 2], ["salt"]),
    }
    assert len(names) == 4
    assert all(0 <= name < 2**64 for name in names)


@pytest.mark.parametrize(("num_blocks", "block_size"), [(1, 16), (4, 0)])
def test_senseless_sizes_are_refused(num_blocks, block_size):
    with pytest.raises(ValueError, match="cache of"):
        PagedCache(num_blocks, block_size)


class CacheMachine(RuleBasedStateMachine):
    """Random use of the cache: never more blocks than there are, users counted, events tell what can be found."""

    users = Bundle("users")

    def __init__(self):
        super().__init__()
        self.cache = PagedCache(10, SIZE)
        self.in_use = {}
        self.told = {}
        self.next_name = 1

    @rule(target=users, depth=st.integers(1, 4), fresh=st.booleans())
    def begin(self, depth, fresh):
        names = (
            list(range(1, depth + 1))
            if not fresh
            else [1, *range(50 + self.next_name, 50 + self.next_name + depth - 1)]
        )
        self.next_name += 1
        found = self.cache.find(names)
        if not self.cache.can_take(found, depth - len(found)):
            return ()
        ids = self.cache.take(found, depth - len(found))
        self.cache.commit(
            [full(i, n) for i, n in zip(ids, names, strict=True)][len(found) :],
            names[len(found) - 1] if found else None,
        )
        for block_id in ids:
            self.in_use[block_id] = self.in_use.get(block_id, 0) + 1
        return tuple(ids)

    @rule(ids=consumes(users))
    def end(self, ids):
        self.cache.release(list(ids))
        for block_id in ids:
            self.in_use[block_id] -= 1

    @rule()
    def clear(self):
        assert self.cache.clear() == (sum(self.in_use.values()) == 0)

    @invariant()
    def counts_agree(self):
        num_used = sum(1 for users in self.in_use.values() if users)
        assert self.cache.num_free == 9 - num_used
        assert 0 <= self.cache.usage_ratio <= 1
        assert 0 not in self.in_use

    @invariant()
    def events_tell_what_can_be_found(self):
        for event in self.cache.take_events():
            match event:
                case BlockStored():
                    assert event.parent_block_hash is None or event.parent_block_hash in self.told
                    self.told.update(dict.fromkeys(event.block_hashes))
                case BlockRemoved():
                    for name in event.block_hashes:
                        del self.told[name]
                case AllBlocksCleared():
                    self.told.clear()
        assert set(self.told) == set(self.cache._by_hash)


CacheMachine.TestCase.settings = settings(max_examples=80, stateful_step_count=40, deadline=None)
TestCacheMachine = CacheMachine.TestCase

import random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from msgspec import structs

from dynctl.core.kv import AllBlocksCleared, BlockRemoved, BlockStored
from dynctl.kv.events import decode
from dynctl.kv.hashing import BlockHasher, namespace
from dynctl.kv.orphans import MAX_ORPHANS, ORPHAN_AGE_S, Orphan, Orphans
from dynctl.kv.runs import MAX_GROWN_BLOCKS
from dynctl.kv.tracker import BlockTracker

HASHER = BlockHasher(b"seed", 2)


def follow(known, delta):
    """Apply a delta as a router does."""
    if delta.cleared:
        known.clear()
    known.difference_update(delta.removed)
    known.update(delta.stored)


def test_stored_blocks_have_the_hashes_of_the_prompt_they_came_from(stored):
    delta = BlockTracker(HASHER).apply(
        [stored([11, 12]), stored([13], parent=12, first_token=4)], 0
    )

    assert delta.stored == HASHER.prompt(range(6)).hashes()


def test_captured_events_hash_like_the_tokens_they_carry(capture, payload_of):
    hasher = BlockHasher(b"", 128)
    tracker, tokens_of = BlockTracker(hasher), {}
    for line in capture:
        for event in decode(payload_of(line)).events:
            delta = tracker.apply([event], 0)
            if not isinstance(event, BlockStored):
                continue
            if event.parent_block_hash is not None and event.parent_block_hash not in tokens_of:
                continue  # the capture begins after its parent
            ids = list(tokens_of.get(event.parent_block_hash, ()))
            salt = (event.extra_keys or [None])[0]
            space = namespace(keys=tuple(salt)) if salt and not ids else b""
            for i, handle in enumerate(event.block_hashes):
                tokens_of[handle] = ids + list(event.token_ids[: (i + 1) * 128])
            if space or not ids:
                whole = hasher.prompt(tokens_of[event.block_hashes[-1]], space).hashes()
                assert delta.stored in (whole, [])


def test_k13_lora_and_salt_separate_equal_tokens_and_are_inherited(stored):
    plain = stored([1, 2])
    salted = stored([3, 4], extra_keys=(["tenant"], None))
    lora = stored([5, 6], lora_name="sql", extra_keys=(["sql", "tenant"], ["sql"]))
    hashes = [BlockTracker(HASHER).apply([event], 0).stored for event in (plain, salted, lora)]
    prompt = range(4)

    assert hashes[0] == HASHER.prompt(prompt).hashes()
    assert hashes[1] == HASHER.prompt(prompt, namespace(keys=("tenant",))).hashes()
    assert hashes[2] == HASHER.prompt(prompt, namespace("sql", ("tenant",))).hashes()


def test_k3_applying_events_twice_changes_nothing(stored, removed):
    tracker = BlockTracker(HASHER)
    events = [stored([1, 2]), stored([3], parent=2, first_token=9), removed(3)]
    tracker.apply(events[:2], 0)
    before = tracker.snapshot()

    assert tracker.apply(events[:2], 0).is_empty
    assert tracker.snapshot() == before
    tracker.apply(events[2:], 0)
    assert tracker.apply(events[2:], 0).is_empty
    assert tracker.counts.num_unknown_removed == 1


def test_a_batch_is_reported_as_its_net_change(stored, removed):
    tracker = BlockTracker(HASHER)
    tracker.apply([stored([1])], 0)

    assert tracker.apply([removed(1), stored([1])], 0).is_empty
    assert tracker.apply([stored([2], first_token=8), removed(2)], 0).is_empty
    delta = tracker.apply([AllBlocksCleared(), stored([2], first_token=8)], 0)
    assert (delta.cleared, len(delta.stored), delta.removed) == (True, 1, [])


def test_k11_a_child_waits_for_its_parent_then_joins(stored, removed):
    tracker = BlockTracker(HASHER)
    assert tracker.apply([stored([3, 4], parent=2, first_token=4), removed(4)], 0).is_empty
    delta = tracker.apply([stored([1, 2])], 1)

    assert delta.stored == HASHER.prompt(range(8)).hashes()[:3]
    assert len(tracker.orphans) == 0


def test_k11_a_child_without_parent_is_dropped_after_a_while(stored):
    tracker = BlockTracker(HASHER)
    tracker.apply([stored([3], parent=2)], 0)
    tracker.apply([], ORPHAN_AGE_S + 1)

    assert (len(tracker.orphans), tracker.orphans.num_dropped) == (0, 1)
    assert tracker.apply([stored([2], first_token=9)], 9).stored == HASHER.prompt([9, 10]).hashes()


def test_k11_waiting_children_are_bounded(stored):
    tracker = BlockTracker(HASHER)
    tracker.apply([stored([-i], parent=i) for i in range(1, 3 * MAX_ORPHANS)], 0)

    assert len(tracker.orphans) <= MAX_ORPHANS


class Asked(list):
    """Counts how often it is looked through."""

    times = 0

    def index(self, *args):
        self.times += 1
        return super().index(*args)


class AskedTuple(tuple):
    __slots__ = ()
    times = 0

    def __contains__(self, value):
        AskedTuple.times += 1
        return super().__contains__(value)


def test_a_prompt_evicted_from_its_beginning_is_found_block_by_block(stored, removed):
    tracker = BlockTracker(HASHER)
    handles = range(1, MAX_GROWN_BLOCKS + 1)
    tracker.apply([stored(handles)], 0)
    run = tracker._runs[1]
    run.handles = Asked(run.handles)
    tracker.apply([removed(*handles)], 0)

    assert len(tracker) == 0
    assert run.handles.times <= 2


@pytest.mark.parametrize("number", [512, 513, 1024, 2000])
@pytest.mark.parametrize("is_keyed", [False, True])
@pytest.mark.parametrize("is_late", [False, True])
def test_a_long_event_goes_into_runs_of_the_usual_length(
    stored, removed, number, is_keyed, is_late
):
    handles = list(range(1, number + 1))
    keys = tuple(["salt"] if is_keyed and i == 0 else None for i in range(number))
    event = stored(handles, parent=9999 if is_late else None, first_token=2, extra_keys=keys)
    tracker = BlockTracker(HASHER)
    if is_late:
        assert tracker.apply([event], 0).stored == []
        told = tracker.apply([stored([9999])], 0).stored[1:]
    else:
        told = tracker.apply([event], 0).stored

    prompt = [0, 1, *event.token_ids] if is_late else event.token_ids
    if not (is_keyed and is_late):
        space = namespace(keys=("salt",)) if is_keyed else b""
        assert told == HASHER.prompt(prompt, space).hashes()[is_late:]
    assert len(told) == number
    assert all(len(tracker._runs[handle].blocks) <= MAX_GROWN_BLOCKS for handle in handles)
    random.Random(1).shuffle(handles)
    assert sorted(tracker.apply([removed(*handles)], 0).removed) == sorted(told)
    assert len(tracker) == is_late


def test_k11_removals_nobody_knows_do_not_look_through_what_waits(stored, removed):
    tracker = BlockTracker(HASHER)
    for i in range(100):
        event = stored([1000 + i, 2000 + i], parent=i)
        tracker.note([structs.replace(event, block_hashes=AskedTuple(event.block_hashes))], 0)
    AskedTuple.times = 0
    tracker.note([removed(*range(3000, 4000))], 0)

    assert tracker.counts.num_unknown_removed == 1000
    assert AskedTuple.times == 0


class PlainOrphans:
    """What `Orphans` promises, with nothing to find anything by."""

    def __init__(self):
        self.waiting = []

    def keep(self, parent, orphan):
        self.waiting.append((parent, orphan))

    def adopt(self, parents):
        adopted = [o for parent in parents for p, o in self.waiting if p == parent]
        self.waiting = [(p, o) for p, o in self.waiting if p not in parents]
        return adopted

    def remove(self, handle):
        named = [o for _, o in self.waiting if handle in o.event.block_hashes]
        for orphan in named:
            orphan.removed.add(handle)
        return bool(named)


small = st.integers(0, 6)
orphan_steps = st.one_of(
    st.tuples(st.just("keep"), small, st.lists(small, max_size=4)),
    st.tuples(st.just("adopt"), st.lists(small, unique=True, max_size=3)),
    st.tuples(st.just("remove"), small),
)


@given(st.lists(orphan_steps, max_size=40))
def test_k11_what_waits_is_found_as_if_all_were_looked_through(history):
    orphans, plain = Orphans(), PlainOrphans()
    for kind, *args in history:
        if kind == "keep":
            event = BlockStored(tuple(args[1]), args[0], (), 1)
            for each in (orphans, plain):
                each.keep(args[0], Orphan(event, 0.0, set()))
        elif kind == "adopt":
            found, expected = orphans.adopt(*args), plain.adopt(*args)
            assert [(o.event, o.removed) for o in found] == [(o.event, o.removed) for o in expected]
        else:
            assert orphans.remove(*args) == plain.remove(*args)
        assert len(orphans) == len(plain.waiting)
    orphans.adopt(range(7))
    assert len(orphans) == len(orphans._naming) == 0


def test_other_layer_groups_are_left_out(stored):
    tracker = BlockTracker(HASHER)
    events = [stored([1], group_idx=1), stored([1], group_idx=1, medium="CPU")]
    delta = tracker.apply([*events, BlockRemoved((1,), None, 1)], 0)

    assert delta.is_empty
    assert not tracker.take_slower()
    assert tracker.counts.num_other_group == 3


@pytest.mark.parametrize(
    ("first", "second"),
    [
        ("sliding_window", "full_attention"),
        ("mamba", "mla_attention"),
        ("sliding_window_mla", "sink_full_attention"),
        ("chunked_local_attention", "full_attention"),
    ],
)
def test_p40_only_the_group_that_keeps_a_whole_prefix_is_followed_wherever_it_stands(
    stored, first, second
):
    tracker = BlockTracker(HASHER)
    windows = [stored([i], parent=i - 1 or None, spec_kind=first) for i in (1, 2)]
    whole = [stored([i], parent=i - 1 or None, group_idx=1, spec_kind=second) for i in (1, 2)]
    again = stored([3], parent=2, group_idx=2, spec_kind=second, first_token=4)

    delta = tracker.apply([windows[0], whole[0], windows[1], again], 0)
    assert delta.stored == HASHER.prompt(range(2)).hashes()
    # The window has moved on: its own block is gone, that of the whole prefix is not.
    assert tracker.apply([BlockRemoved((1,), None, 0), BlockRemoved((1,), None, 2)], 1).is_empty
    assert tracker.counts.num_other_group == 5
    assert tracker.counts.num_unknown_removed == 0
    assert tracker.apply([BlockRemoved((1,), None, 1)], 2).removed == delta.stored


def test_p40_a_model_whose_layers_all_keep_a_part_holds_nothing_to_be_found(stored):
    tracker = BlockTracker(HASHER)
    events = [stored([1], spec_kind="sliding_window"), stored([2], spec_kind="mamba", group_idx=1)]

    assert tracker.apply(events, 0).is_empty
    assert tracker.counts.num_other_group == 2


def test_p40_a_kind_the_engine_does_not_know_counts_as_before(stored):
    tracker = BlockTracker(HASHER)
    events = [stored([1], spec_kind="unknown", group_idx=1), stored([1], spec_kind="unknown")]

    assert tracker.apply(events, 0).stored == HASHER.prompt(range(2)).hashes()
    assert tracker.counts.num_other_group == 1


def test_k11_a_handle_given_to_another_prefix_moves(stored):
    tracker = BlockTracker(HASHER)
    tracker.apply([stored([1])], 0)
    delta = tracker.apply([stored([1], first_token=40)], 0)

    assert delta.removed == HASHER.prompt([0, 1]).hashes()
    assert delta.stored == HASHER.prompt([40, 41]).hashes()


def test_reset_forgets_everything(stored):
    tracker = BlockTracker(HASHER)
    tracker.apply([stored([1]), stored([5], parent=4)], 0)

    assert tracker.reset().cleared
    assert (len(tracker), len(tracker.orphans), tracker.snapshot()) == (0, 0, [])


@settings(max_examples=150)
@given(st.integers(0, 2**32), st.integers(1, 60))
def test_deltas_add_up_to_a_reference_dictionary(seed, num_steps):
    """Random trees of prefixes, removals, doubles and clears: a follower of deltas equals snapshot and reference.

    Only blocks whose whole prefix is held are published.
    """
    rnd = random.Random(seed)
    tracker, known, reference = BlockTracker(HASHER), set(), {}
    prefixes = {None: ()}
    for _ in range(num_steps):
        batch = []
        for _ in range(rnd.randrange(1, 4)):
            kind = rnd.random()
            if kind < 0.6:
                parent = rnd.choice([None, *reference])
                ids = tuple(rnd.randrange(3) for _ in range(2 * rnd.randrange(1, 4)))
                whole = prefixes[parent] + ids
                handles = []
                for end in range(len(prefixes[parent]) + 2, len(whole) + 1, 2):
                    handle = hash(("engine", whole[:end])) & (2**64 - 1)
                    prefixes[handle] = whole[:end]
                    reference[handle] = HASHER.prompt(whole[:end]).hash_at(end // 2)
                    handles.append(handle)
                batch.append(BlockStored(tuple(handles), parent, ids, 2))
            elif kind < 0.95:
                handle = rnd.choice([*reference, 12345])
                reference.pop(handle, None)
                batch.append(BlockRemoved((handle,)))
            else:
                reference.clear()
                batch.append(AllBlocksCleared())
        follow(known, tracker.apply(batch, 0))

        reachable = {
            block
            for handle, block in reference.items()
            if all(
                hash(("engine", prefixes[handle][:end])) & (2**64 - 1) in reference
                for end in range(2, len(prefixes[handle]), 2)
            )
        }
        assert known == reachable
        assert sorted(tracker.snapshot()) == sorted(known)


def test_a_long_prompt_evicted_from_its_beginning_is_walked_once(stored, removed):
    length = 20_000
    tracker, known = BlockTracker(HASHER), set()
    handles = list(range(1, length + 1))
    follow(known, tracker.apply([stored(handles)], 0))
    assert len(known) == length
    # One walk is 20,000 steps; one at every eviction would be 200 million.
    for handle in handles[:-1]:
        follow(known, tracker.apply([removed(handle)], 0))
        assert not known
    assert len(tracker) == 1


@st.composite
def forests_and_steps(draw):
    """Blocks that hang below each other, and steps that store chains of them or remove some."""
    number = draw(st.integers(2, 24))
    parents = [
        None,
        *(draw(st.sampled_from([None, *range(max(0, h - 3), h)])) for h in range(1, number)),
    ]
    blocks = st.integers(0, number - 1)
    steps = draw(
        st.lists(st.tuples(st.booleans(), blocks, st.lists(blocks, max_size=6)), max_size=40)
    )
    return parents, steps


@given(forests_and_steps())
@settings(max_examples=300, deadline=None)
def test_published_is_what_a_prompt_would_ask_for_and_find_without_a_gap(case):
    parents, steps = case

    def path_to(block):
        return [*path_to(parents[block]), block] if block is not None else []

    tracker, held, published = BlockTracker(BlockHasher(b"s", 2)), set(), set()
    for is_store, block, others in steps:
        if is_store:
            # A chain that ends in `block`, as far up as is not held.
            chain = [one for one in path_to(block) if one not in held]
            start = len(path_to(block)) - len(chain)
            chain = path_to(block)[start:]
            parent = parents[chain[0]] if chain else None
            if not chain or (parent is not None and parent not in held):
                continue
            tokens = tuple(token for one in chain for token in (one, one + 100))
            handles = tuple(one + 1 for one in chain)
            event = BlockStored(handles, None if parent is None else parent + 1, tokens, 2)
            held.update(chain)
        else:
            event = BlockRemoved(tuple(one + 1 for one in others))
            held.difference_update(others)
        delta = tracker.apply([event], 0.0)
        assert published.issuperset(delta.removed)
        published = (published - set(delta.removed)) | set(delta.stored)
        wanted = set()
        for one in held:
            path = path_to(one)
            if held.issuperset(path):
                tokens = [token for block in path for token in (block, block + 100)]
                wanted.add(BlockHasher(b"s", 2).prompt(tokens).hash_at(len(path)))
        assert published == wanted == set(tracker.snapshot())


@settings(max_examples=200, deadline=None)
@given(st.integers(0, 2**32))
def test_whatever_parents_events_name_every_walk_ends_and_deltas_add_up(seed):
    rnd = random.Random(seed)
    tracker, known = BlockTracker(HASHER), set()
    for step in range(60):
        handles = tuple(rnd.choices(range(8), k=rnd.randint(1, 3)))
        tokens = [1000 * step + token for token in range(2 * len(handles))]
        parent = rnd.choice([None, *range(8)])
        event = BlockStored(handles, parent, tokens, 2)
        follow(known, tracker.apply([rnd.choice([event, event, BlockRemoved(handles)])], 0))
        assert set(tracker.snapshot()) == known

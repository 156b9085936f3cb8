"""Tracker and index together equal a naive model after any history of an engine's events (Q9)."""

import random
import tracemalloc

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from dynctl.core.kv import HOST, AllBlocksCleared, BlockRemoved, BlockStored
from dynctl.kv.hashing import BlockHasher
from dynctl.kv.tracker import BlockTracker
from dynctl.router.prefix_index import PrefixIndex, Source

HASHER = BlockHasher(b"s", 2)
SOURCES = [(engine, rank) for engine in ("a", "b", "c") for rank in (0, 1)]
TOKENS = st.lists(st.integers(0, 2), min_size=2, max_size=24)


def handle(prefix):
    return hash(("engine", tuple(prefix))) & (2**64 - 1)


class Engine:
    """One rank's cache as the engine has it: whole prefixes by handle, in any shape eviction may leave."""

    def __init__(self, name, rank):
        self.source_of = lambda start: Source(name, f"i{start}", rank)
        self.start = 0
        self.held = {}
        self.in_host = set()
        """Handles of what it could load."""
        self.tracker = BlockTracker(HASHER)

    @property
    def source(self):
        return self.source_of(self.start)

    def depth(self, tokens, held=None):
        depth, held = 0, self.held if held is None else held
        while 2 * (depth + 1) <= len(tokens) and handle(tokens[: 2 * (depth + 1)]) in held:
            depth += 1
        return depth


class IndexMachine(RuleBasedStateMachine):
    """Any events, restarts, gaps and snapshots; every query asks all engines."""

    def __init__(self):
        super().__init__()
        self.index = PrefixIndex()
        self.now_s = 0.0
        self.engines = {key: Engine(*key) for key in SOURCES}
        for engine in self.engines.values():
            self.index.begin(engine.source)
        self.queries = [[0] * 24]

    def follow(self, engine, delta):
        if delta.cleared:
            self.index.clear(engine.source)
        self.index.remove(engine.source, delta.removed)
        self.index.store(engine.source, delta.stored)
        for slower in engine.tracker.take_slower():
            source = engine.source._replace(medium=slower.medium)
            if slower.cleared or not self.index.holds(source):
                self.index.begin(source)
            self.index.remove(source, slower.removed)
            self.index.store(source, slower.stored)

    @rule(key=st.sampled_from(SOURCES), tokens=TOKENS)
    def computes(self, key, tokens):
        """An engine stores what it lacks of a prompt, parents first."""
        engine = self.engines[key]
        self.queries = [tokens, *self.queries[:4]]
        events = []
        for end in range(2, len(tokens) // 2 * 2 + 1, 2):
            own, parent = handle(tokens[:end]), handle(tokens[: end - 2]) if end > 2 else None
            if own not in engine.held:
                engine.held[own] = tokens[:end]
                events.append(BlockStored((own,), parent, tuple(tokens[end - 2 : end]), 2))
        self.follow(engine, engine.tracker.apply(events, self.now_s))

    @rule(key=st.sampled_from(SOURCES), tokens=TOKENS)
    def stores_in_one_event(self, key, tokens):
        """The same in a single event, twice: duplicates change nothing."""
        engine = self.engines[key]
        self.queries = [tokens, *self.queries[:4]]
        ends = range(2, len(tokens) // 2 * 2 + 1, 2)
        for end in ends:
            engine.held[handle(tokens[:end])] = tokens[:end]
        handles = tuple(handle(tokens[:end]) for end in ends)
        event = BlockStored(handles, None, tuple(tokens[: ends[-1]]), 2)
        self.follow(engine, engine.tracker.apply([event, event], self.now_s))

    @rule(key=st.sampled_from(SOURCES), seed=st.integers(0, 99))
    def evicts_any_blocks(self, key, seed):
        """Also in the middle of a prefix, and ones it does not have."""
        engine = self.engines[key]
        rng = random.Random(seed)
        handles = sorted(engine.held)
        gone = [*rng.sample(handles, min(len(handles), rng.randrange(1, 4))), 7]
        for block in gone:
            engine.held.pop(block, None)
        self.follow(engine, engine.tracker.apply([BlockRemoved(tuple(gone))], self.now_s))

    @rule(key=st.sampled_from(SOURCES), seed=st.integers(0, 99))
    def host_takes_and_evicts(self, key, seed):
        """Blocks the device has are written to the host, some of those there are dropped."""
        engine, rng = self.engines[key], random.Random(seed)
        taken = rng.sample(sorted(engine.held), len(engine.held) // 2)
        gone = rng.sample(sorted(engine.in_host), len(engine.in_host) // 3)
        engine.in_host = (engine.in_host - set(gone)) | set(taken)
        events = [
            BlockRemoved(tuple(gone), "CPU"),
            *(BlockStored((one,), None, (), 0, medium="CPU") for one in taken),
        ]
        self.follow(engine, engine.tracker.apply(events, self.now_s))

    @rule(key=st.sampled_from(SOURCES))
    def clears(self, key):
        engine = self.engines[key]
        engine.held.clear()
        engine.in_host.clear()
        self.follow(engine, engine.tracker.apply([AllBlocksCleared()], self.now_s))

    @rule(key=st.sampled_from(SOURCES))
    def restarts(self, key):
        """A new incarnation of the rank begins empty; late updates of the old one are refused."""
        engine = self.engines[key]
        old = engine.source
        engine.start += 1
        engine.held.clear()
        engine.in_host.clear()
        engine.tracker = BlockTracker(HASHER)
        self.index.begin(engine.source)
        assert not self.index.store(old, [1])
        assert not self.index.remove(old, [1])

    @rule(key=st.sampled_from(SOURCES))
    def snapshot_after_a_gap(self, key):
        """The index begins anew with what the tracker has."""
        engine = self.engines[key]
        self.index.begin(engine.source)
        self.index.store(engine.source, engine.tracker.snapshot())

    @rule(name=st.sampled_from("abc"))
    def is_removed_and_comes_back(self, name):
        self.index.drop(name)
        for tokens in self.queries:
            assert name not in self.index.match(HASHER.prompt(tokens))
        for (other, _), engine in self.engines.items():
            if other == name:
                self.index.begin(engine.source)
                self.index.store(engine.source, engine.tracker.snapshot())
                for medium in engine.tracker.slower_media:
                    self.index.begin(engine.source._replace(medium=medium))
                    blocks = engine.tracker.snapshot(medium)
                    self.index.store(engine.source._replace(medium=medium), blocks)

    @rule(num=st.integers(1, 70))
    def sweeps(self, num):
        for _ in range(num):
            self.now_s += 0.1
            self.index.sweep(self.now_s)

    @invariant()
    def matches_are_what_a_request_would_find(self):
        for tokens in self.queries:
            expected = {}
            for (name, _), engine in self.engines.items():
                depth = engine.depth(tokens)
                if depth:
                    expected[name] = max(depth, expected.get(name, 0))
            assert self.index.match(HASHER.prompt(tokens)) == expected

    @invariant()
    def hosts_hold_what_could_be_loaded_without_a_gap(self):
        slower = self.index.slower.get(HOST, 0)
        for tokens in self.queries:
            expected, found = {}, {}
            for (name, _), engine in self.engines.items():
                depth = engine.depth(tokens, engine.in_host)
                if depth:
                    expected[name] = max(depth, expected.get(name, 0))
            for depth, bits, _ in self.index.tiers(HASHER.prompt(tokens), len(tokens) // 2):
                for name in self.index.engines_of(bits & slower):
                    found[name] = max(depth, found.get(name, 0))
            assert found == expected

    @invariant()
    def counts_are_exact(self):
        for name in "abc":
            own = [e for (other, _), e in self.engines.items() if other == name]
            assert self.index.num_blocks(name) == sum(len(e.tracker.snapshot()) for e in own)


TestIndex = IndexMachine.TestCase
TestIndex.settings = settings(max_examples=60, stateful_step_count=40, deadline=None)


@pytest.mark.parametrize("budget", [2**21, 2**21 * 10 // 7, 2**22 - 1, 2**22])
def test_k17_the_budget_bounds_the_memory_and_what_is_confirmed_is_kept(budget):
    index = PrefixIndex(max_bytes=budget)
    source = Source("a", "i1")
    index.begin(source)
    hot = HASHER.prompt(range(64))
    worst = 0
    tracemalloc.start()
    try:
        index.store(source, hot.hashes())
        for start in range(0, 200 * 512, 2 * 512):
            index.store(source, in_turn(range(start, start + 2 * 512)))
            assert index.match(hot) == {"a": 32}
            if start % 4096 == 0:
                index.remove(source, in_turn(range(start - 2 * 512, start)))
            worst = max(worst, tracemalloc.get_traced_memory()[0])
    finally:
        tracemalloc.stop()

    # What an empty index has, it has at any budget.
    assert budget // 3 < worst < budget + 2**17


def in_turn(numbers):
    """Blocks that are spread over the shards evenly: all are at their fullest at once."""
    return [((i // 512 + 1) * 0x9E3779B97F4A7C15 << 9 | i % 512) % 2**64 for i in numbers]


def test_k17_matches_alone_do_not_make_a_generation_larger():
    index = PrefixIndex(max_bytes=2**21)
    source = Source("a", "i1")
    index.begin(source)
    half = index._half
    of_one_shard = [i << 9 for i in range(1, 3 * half)]
    index.store(source, of_one_shard)
    # Both generations have some: each block found in the old one is to move.
    for block in of_one_shard:
        index._held(block)
        assert max(len(index._young[0]), len(index._old[0])) <= half


def test_k18_swept_slots_are_used_again():
    index = PrefixIndex()
    prompt = HASHER.prompt(range(200))
    for round_number in range(50):
        source = Source("a", f"i{round_number}")
        index.begin(source)
        index.store(source, prompt.hashes())
        while index.sweep(0.0):
            pass
        assert index.match(prompt) == {"a": 100}

    assert len(index) == 100
    assert index._next_bit <= 4


def test_a_prompt_just_sent_counts_as_held_until_its_time_is_over():
    index = PrefixIndex()
    index.begin(Source("a", "i1"))
    index.begin(Source("b", "i1"))
    sent = HASHER.prompt([*range(400), 7, 7])
    same_start = HASHER.prompt([*range(400), 9, 9, 9, 9])
    assert index.match(same_start) == {}

    index.expect("a", sent, sent.num_blocks, 0)

    assert 175 <= index.match(same_start)["a"] <= 200
    assert "b" not in index.match(same_start)
    index.remove(Source("a", "i1"), sent.hashes())
    assert index.match(same_start) == {}
    index.expect("b", sent, sent.num_blocks, 0)
    for tick in range(200):
        index.sweep(tick * 0.1)
    assert index.match(same_start) == {}


def test_what_was_expected_of_a_dropped_engine_is_gone_with_it():
    index = PrefixIndex()
    index.begin(Source("a", "i1"))
    prompt = HASHER.prompt(range(100))
    index.expect("a", prompt, 50, 0)
    index.begin(Source("a", "i2"))

    assert index.match(prompt) == {}
    while index.sweep(0.0):
        pass
    index.begin(Source("b", "i1"))
    assert index.match(prompt) == {}

"""The index equals a naive dictionary after any history of events."""

from hypothesis import given, settings
from hypothesis import strategies as st

from dynctl.router.prefix_index import ENTRY_BYTES, PrefixIndex, Source

ENGINES = ("a", "b", "c")
BLOCKS = st.lists(st.integers(1, 12).map(lambda n: n * 0x9E3779B97F4A7C15 % 2**64), max_size=6)
SOURCES = st.builds(
    Source, st.sampled_from(ENGINES), st.sampled_from(("i1", "i2")), st.integers(0, 1)
)
EVENTS = st.one_of(
    st.tuples(st.just("begin"), SOURCES, st.just([])),
    st.tuples(st.just("store"), SOURCES, BLOCKS),
    st.tuples(st.just("store"), SOURCES, BLOCKS),
    st.tuples(st.just("remove"), SOURCES, BLOCKS),
    st.tuples(st.just("clear"), SOURCES, st.just([])),
    st.tuples(st.just("drop"), SOURCES, st.just([])),
    st.tuples(st.just("sweep"), SOURCES, st.just([])),
)


class Naive:
    """Sets per source; a rank has one incarnation at a time."""

    def __init__(self):
        self.held = {}

    def apply(self, kind, source, blocks):
        if kind == "begin":
            for other in [
                s for s in self.held if (s.engine_id, s.rank) == (source.engine_id, source.rank)
            ]:
                del self.held[other]
            self.held[source] = set()
        elif kind == "drop":
            for other in [s for s in self.held if s.engine_id == source.engine_id]:
                del self.held[other]
        elif source in self.held:
            if kind == "store":
                self.held[source] |= set(blocks)
            elif kind == "remove":
                self.held[source] -= set(blocks)
            elif kind == "clear":
                self.held[source] = set()

    def match(self, hashes):
        depths = {}
        for source, held in self.held.items():
            depth = 0
            while depth < len(hashes) and hashes[depth] in held:
                depth += 1
            if depth:
                depths[source.engine_id] = max(depth, depths.get(source.engine_id, 0))
        return depths


def apply(index, kind, source, blocks):
    if kind == "drop":
        index.drop(source.engine_id)
    elif kind == "sweep":
        for _ in range(30):
            index.sweep()
    elif kind in {"store", "remove"}:
        getattr(index, kind)(source, blocks)
    else:
        getattr(index, kind)(source)


@given(st.lists(EVENTS, max_size=40), st.lists(BLOCKS, min_size=1, max_size=5))
@settings(max_examples=300, deadline=None)
def test_the_index_equals_a_naive_dictionary_after_any_history(events, queries):
    index, naive = PrefixIndex(), Naive()
    for event in events:
        apply(index, *event)
        naive.apply(*event)
        for hashes in queries:
            assert index.match(hashes) == naive.match(hashes)
    for engine in ENGINES:
        expected = sum(len(held) for s, held in naive.held.items() if s.engine_id == engine)
        assert index.num_blocks(engine) == expected


@given(st.lists(EVENTS, max_size=40), BLOCKS)
@settings(max_examples=100, deadline=None)
def test_a_match_is_never_deeper_than_the_truth_when_the_budget_evicts(events, query):
    index, naive = PrefixIndex(max_bytes=ENTRY_BYTES * 64 * 2), Naive()
    for event in events:
        apply(index, *event)
        naive.apply(*event)

    truth = naive.match(query)
    assert all(depth <= truth.get(engine, 0) for engine, depth in index.match(query).items())


def test_the_budget_bounds_the_number_of_entries():
    index = PrefixIndex(max_bytes=ENTRY_BYTES * 6400)
    source = Source("a", "i1")
    index.begin(source)
    for start in range(0, 100_000, 1000):
        index.store(source, [(start + i) * 0x9E3779B97F4A7C15 % 2**64 for i in range(1000)])

    assert len(index) <= 6400 + 64
    newest = [99_999 * 0x9E3779B97F4A7C15 % 2**64]
    assert index.match(newest) == {"a": 1}


def test_swept_slots_are_used_again():
    index = PrefixIndex()
    for round_number in range(50):
        source = Source("a", f"i{round_number}")
        index.begin(source)
        index.store(source, range(100))
        while index.sweep():
            pass
        assert index.match(range(100)) == {"a": 100}

    assert len(index) == 100
    assert index._next_bit <= 4

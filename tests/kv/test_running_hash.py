import pytest
import xxhash
from hypothesis import given
from hypothesis import strategies as st

from dynctl.kv.running_hash import RunningHash, feed_blocks

seeds = st.integers(0, 2**64 - 1)
pieces = st.lists(st.binary(max_size=100), max_size=6)


@given(seeds, pieces)
def test_it_is_xxhash64_however_it_is_fed(seed, fed):
    state, reference = RunningHash(b"", seed), xxhash.xxh64(b"", seed)

    for piece in fed:
        state.update(piece)
        reference.update(memoryview(piece))
        assert state.intdigest() == reference.intdigest()
    assert RunningHash(b"".join(fed), seed).intdigest() == reference.intdigest()


@given(seeds, st.binary(max_size=100), st.binary(max_size=100))
def test_a_copy_goes_its_own_way(seed, first, second):
    state = RunningHash(first, seed)
    copy = state.copy()

    copy.update(second)

    assert state.intdigest() == xxhash.xxh64_intdigest(first, seed)
    assert copy.intdigest() == xxhash.xxh64_intdigest(first + second, seed)


@given(seeds, st.binary(max_size=70), st.binary(max_size=300), st.integers(1, 80))
def test_each_block_has_the_hash_of_all_before_its_end(seed, prefix, words, stride):
    state = RunningHash(prefix, seed)
    ends = range(stride, len(words) + 1, stride)

    hashes = feed_blocks(state, memoryview(words), stride)

    assert hashes == [xxhash.xxh64_intdigest(prefix + words[:end], seed) for end in ends]
    whole = len(words) // stride * stride
    assert state.intdigest() == xxhash.xxh64_intdigest(prefix + words[:whole], seed)


@pytest.mark.parametrize("stride", [0, -1])
def test_blocks_without_bytes_are_refused(stride):
    with pytest.raises(ValueError, match="bytes"):
        feed_blocks(RunningHash(b"", 0), b"1234", stride)

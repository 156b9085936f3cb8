import pytest
from hypothesis import given
from hypothesis import strategies as st

from dynctl.kv.hashing import BlockHasher, namespace, pack_tokens

tokens = st.lists(st.integers(0, 2**32 - 2), max_size=120)


@given(tokens, st.integers(1, 9), st.binary(max_size=8))
def test_each_depth_hashes_alike_by_bisection_in_one_pass_and_by_extension(ids, block_size, space):
    hasher = BlockHasher(b"seed", block_size)
    prompt = hasher.prompt(ids, space)
    state, extended, data = hasher.start(space), [], pack_tokens(ids)
    for i in range(prompt.num_blocks):
        state = hasher.extend(state, data[i * block_size * 4 : (i + 1) * block_size * 4])
        extended.append(state.intdigest())

    assert prompt.num_blocks == len(ids) // block_size
    assert prompt.hashes() == extended
    assert [prompt.hash_at(depth) for depth in range(prompt.num_blocks, 0, -1)] == extended[::-1]


def test_hash_depends_on_seed_namespace_and_every_earlier_token():
    ids = list(range(64))
    base = BlockHasher(b"a", 16).prompt(ids).hash_at(4)
    others = {
        BlockHasher(b"b", 16).prompt(ids).hash_at(4),
        BlockHasher(b"a", 16).prompt(ids, namespace(keys=("tenant",))).hash_at(4),
        BlockHasher(b"a", 16).prompt(ids, namespace("tenant")).hash_at(4),
        BlockHasher(b"a", 16).prompt([1, *ids[1:]]).hash_at(4),
        BlockHasher(b"a", 16).prompt([1, 0, *ids[2:]]).hash_at(4),
        BlockHasher(b"a", 16).prompt(ids).hash_at(3),
    }

    assert base not in others
    assert len(others) == 6


def test_engines_with_other_block_sizes_share_hashes_at_common_depths():
    ids = list(range(64))

    assert BlockHasher(b"a", 16).prompt(ids).hash_at(2) == BlockHasher(b"a", 32).prompt(
        ids
    ).hash_at(1)


def test_extending_leaves_the_parent_untouched():
    hasher = BlockHasher(b"a", 1)
    parent = hasher.extend(hasher.start(), b"abcd")
    before = parent.intdigest()
    hasher.extend(parent, b"efgh")

    assert parent.intdigest() == before


def test_keys_inside_a_prefix_separate_it():
    hasher = BlockHasher(b"a", 1)
    parent = hasher.extend(hasher.start(), b"abcd")

    plain = hasher.extend(parent, b"efgh").intdigest()
    assert hasher.extend(parent, b"efgh", ("image",)).intdigest() != plain


def test_hash_is_the_same_in_every_process():
    """Router and relay compare these numbers across hosts, so the value itself is part of the contract."""
    assert BlockHasher(b"seed", 4).prompt([1, 2, 3, 4]).hash_at(1) == 0x280CC32306BB024A


@pytest.mark.parametrize("ids", [[-1], [2**32]])
def test_ids_no_vocabulary_has_are_refused(ids):
    with pytest.raises(OverflowError):
        BlockHasher(b"", 1).prompt(ids)


def test_namespace_is_empty_without_lora_and_salt():
    assert namespace() == b""
    assert namespace("x") != namespace(keys=("x",))

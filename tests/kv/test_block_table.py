import gc
import random
import tracemalloc

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dynctl.kv import block_table
from dynctl.kv.block_table import BlockTable, add, most_blocks, remove

# Few of them, at both ends: they meet again and again, in one place or beside it.
blocks = st.integers(0, 40) | st.integers(2**64 - 40, 2**64 - 1)
values = st.sampled_from(["one", "two"])
steps = st.one_of(
    st.tuples(st.just("put"), blocks, values),
    st.tuples(st.just("del"), blocks),
    st.tuples(st.just("pop"), blocks),
    st.tuples(st.just("add"), st.lists(blocks, max_size=12), values, st.integers(0, 20)),
    st.tuples(st.just("remove"), st.lists(blocks, max_size=12), values),
    st.tuples(st.just("clear")),
)


def do_add(shards, wanted, value, most):
    left = []
    for block in wanted:
        shard = shards[block % len(shards)]
        if len(shard) >= most or block in shard:
            left.append(block)
        else:
            shard[block] = value
    return left


def do_remove(shards, wanted, value):
    return [b for b in wanted if shards[b % len(shards)].get(b) is not value or not shards[b % len(shards)].pop(b)]  # fmt: skip


@given(st.sampled_from([1, 4]), st.lists(steps, max_size=60))
def test_tables_hold_what_dictionaries_would(num_shards, history):
    tables = [BlockTable() for _ in range(num_shards)]
    expected = [{} for _ in range(num_shards)]
    for kind, *args in history:
        if kind == "add":
            assert add(tables, *args) == do_add(expected, *args)
        elif kind == "remove":
            assert remove(tables, *args) == do_remove(expected, *args)
        elif kind == "clear":
            tables[0].clear()
            expected[0].clear()
        else:
            at = args[0] % num_shards
            table, held = tables[at], expected[at]
            if kind == "put":
                table[args[0]] = held[args[0]] = args[1]
            elif kind == "pop":
                assert table.pop(args[0], "none") == held.pop(args[0], "none")
            elif args[0] in held:
                del table[args[0]], held[args[0]]
        for table, held in zip(tables, expected, strict=True):
            assert (len(table), bool(table)) == (len(held), bool(held))
            assert sorted(table.items()) == sorted(held.items())
            assert sorted(table.values()) == sorted(held.values())
            assert all(table[block] is value and block in table for block, value in held.items())


def test_a_table_that_grows_and_empties_loses_nothing():
    draw = random.Random(1)
    table, held = BlockTable(), {}
    for _ in range(30_000):
        block = draw.getrandbits(64)
        table[block] = held[block] = block
        if draw.random() < 0.4:
            gone = draw.choice((block, next(iter(held))))
            assert table.pop(gone) == held.pop(gone)

    assert dict(table.items()) == held
    for block in held:
        assert table.pop(block, None) == block
    assert len(table) == 0


def test_a_value_lives_as_long_as_its_last_block():
    class Value:
        pass

    seen = []
    value = Value()
    Value.__del__ = lambda _: seen.append("gone")
    table = BlockTable()
    add([table], [1, 2, 3], value, 9)
    table[4] = value
    remove([table], [1], value)
    del value
    assert seen == []

    table.pop(2)
    del table[3]
    assert seen == []
    table[4] = None
    assert seen == ["gone"]


def test_what_is_missing_is_a_key_error():
    for table in (BlockTable(), BlockTable()):
        for _ in range(2):
            assert table.get(5) is None
            assert table.get(5, "none") == "none"
            assert table.pop(5, None) is None
            with pytest.raises(KeyError):
                table[5]
            with pytest.raises(KeyError):
                del table[5]
            with pytest.raises(KeyError):
                table.pop(5)
            table[6] = "six"


@pytest.mark.timeout(60)
def test_blocks_chosen_for_one_place_are_not_all_there():
    """With this multiplier, as it once was and anyone can read, they would be looked through for minutes."""
    back = pow(0x9E3779B97F4A7C15, -1, 2**64)
    chosen = [i * back % 2**64 for i in range(1, 1_000_000)]
    table = BlockTable()

    for at in range(0, len(chosen), 1000):  # C is not stopped within
        assert add([table], chosen[at : at + 1000], "one", 2**40) == []
    assert len(table) == len(chosen)


@pytest.mark.skipif(
    block_table.__file__.endswith(".py"), reason="dictionaries see it by themselves"
)
@pytest.mark.parametrize("of", ["items", "values"])
def test_finalizers_do_not_run_while_a_table_is_listed(of):
    table, seen = BlockTable(), []
    for block in range(3000):
        table[block] = "one"
    before = gc.get_threshold()
    gc.callbacks.append(lambda phase, _: seen.append(phase))
    gc.set_threshold(1)
    try:
        gc.disable()
        gc.enable()
        listed = getattr(table, of)()
        num_passes = len(seen)
    finally:
        gc.set_threshold(*before)
        gc.callbacks.pop()

    assert len(listed) == 3000
    assert num_passes <= 2
    assert gc.isenabled()


def numbered(i):
    return i * 0x9E3779B97F4A7C15 % 2**64 | 1 << 63


LOOP_BYTES = 128
"""Of numbers on their way."""


def most_bytes(num_blocks):
    """The most memory a table has that is filled up to so many blocks, each of which is then exchanged for another, thrice."""
    # An allocator makes 48 of the 36 bytes of a number.
    more_bytes = 12 if block_table.__file__.endswith(".py") else 0
    table, worst = BlockTable(), 0
    tracemalloc.start()
    try:
        for i in range(4 * num_blocks):
            if i >= num_blocks:
                del table[numbered(i - num_blocks)]
            table[numbered(i)] = "one"
            worst = max(worst, tracemalloc.get_traced_memory()[0] + more_bytes * len(table))
    finally:
        tracemalloc.stop()
    return worst


@pytest.mark.parametrize("power", range(9, 19))
def test_a_table_of_as_many_blocks_as_a_budget_allows_keeps_to_it_and_uses_it(power):
    for size in (2**power - 1, 2**power, 2**power + 1, 2**power * 10 // 7, 2**power * 7 // 4):
        used = most_bytes(most_blocks(size))
        assert used <= size + LOOP_BYTES
        # In powers of two.
        assert 2 * used >= size


def test_a_budget_for_no_place_allows_no_block():
    assert most_blocks(0) == most_blocks(100) == 0


def test_a_table_is_made_of_nothing():
    for wrong in (lambda: BlockTable(1), lambda: BlockTable(a=1)):
        with pytest.raises(TypeError):
            wrong()

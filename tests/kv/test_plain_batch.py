import importlib.util
import tracemalloc
from types import SimpleNamespace

import msgspec
import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from dynctl.kv import events, plain_batch
from dynctl.kv.events import EventError, decode

pack = msgspec.msgpack.encode
compiled = pytest.mark.skipif(
    plain_batch.__file__.endswith(".py"), reason="from sources nothing is read in one step"
)


def slow_decode():
    """`events.decode` as it is where nothing is read in one step."""
    spec = importlib.util.spec_from_file_location("events_alone", events.__file__)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    module.plain_batch = SimpleNamespace(read=lambda _: None)
    return module


SLOW = slow_decode()


def agrees(payload):
    """Whether a batch was read in one step; what was read means what the other way says."""
    read = plain_batch.read(payload)
    if read is None:
        return False
    batch = SLOW.decode(payload)
    assert repr(read) == repr((batch.ts, batch.events, batch.dp_rank))  # a time may be no number
    assert batch.num_unknown == 0
    return True


NAMES = ["block_hashes", "parent_block_hash", "token_ids", "block_size", "lora_id", "medium", "lora_name", "extra_keys", "group_idx", "kv_cache_spec_kind"]  # fmt: skip
BORDERS = [0, 31, 32, 127, 128, 255, 256, 65_535, 65_536, 2**31 - 1, 2**31, 2**32 - 1]
hashes = st.integers(0, 2**64 - 1) | st.integers(-(2**63), -1) | st.binary(max_size=40)
names = st.none() | st.sampled_from(["GPU", "CPU", "STORAGE", "a" * 40, "größer"])
groups = st.none() | st.integers(-2, 300)
keys = st.none() | st.lists(st.none() | st.sampled_from(["salt", 7]) | st.lists(st.text(max_size=3), max_size=2), max_size=3)  # fmt: skip


@st.composite
def stored(draw):
    number, size = draw(st.integers(0, 20)), draw(st.sampled_from([1, 2, 16]))
    ids = st.sampled_from(BORDERS) | st.integers(0, 2**32 - 1)
    return [
        draw(st.lists(hashes, min_size=number, max_size=number)),
        draw(st.none() | hashes),
        draw(st.lists(ids, min_size=number * size, max_size=number * size)),
        size,
        draw(groups),
        draw(names),
        draw(names),
        draw(st.none() | st.just([None] * number) | st.lists(keys, min_size=number, max_size=number)),
        draw(groups),
        draw(names),
    ]  # fmt: skip


@st.composite
def any_event(draw):
    """An event in either form, as many fields as its author knew."""
    kind = draw(st.sampled_from(["BlockStored", "BlockRemoved", "AllBlocksCleared"]))
    known, fields = [], []
    if kind == "BlockStored":
        known, fields = NAMES, draw(stored())
    elif kind == "BlockRemoved":
        known = ["block_hashes", "medium", "group_idx"]
        fields = [draw(st.lists(hashes, max_size=20)), draw(names), draw(groups)]
    number = draw(st.integers(min(len(fields), 4 if kind == "BlockStored" else 1), len(fields)))
    if draw(st.booleans()):
        return [kind, *fields[:number]]
    return {"type": kind, **dict(zip(known[:number], fields, strict=False))}


batches = st.tuples(
    st.floats(), st.lists(any_event(), max_size=4), st.none() | st.integers(0, 70)
).map(list)


@given(batches | batches.map(lambda parts: parts[:2]))
def test_what_engines_may_write_means_the_same_in_one_step(parts):
    agrees(pack(parts))


@st.composite
def damaged(draw):
    payload = bytearray(pack(draw(batches)))
    for _ in range(draw(st.integers(1, 3))):
        at = draw(st.integers(0, len(payload)))
        length = draw(st.sampled_from([0, 0, 1, 1, 2, 9]))
        payload[at : at + length] = draw(
            st.binary(max_size=3) | st.sampled_from([b"\xc0", b"\x90", b"\x80", b"\xdd\xff\xff\xff\xff", b"\xdb\0\0\0\xff"])
        )  # fmt: skip
    return bytes(payload)


ARRAY = b"\xdd"  # of so many parts as the next four bytes say
EVENT = {"type": "BlockStored", "block_hashes": [1], "parent_block_hash": None, "token_ids": [5, 6], "block_size": 2}  # fmt: skip


@given(st.binary(max_size=60) | damaged())
@example(b"")
@example(pack([1.5, [EVENT]]) + b"\0")
@example(pack([1.5, [EVENT | {"block_size": 0}]]))
@example(pack([1.5, [EVENT | {"block_size": 2**64 - 1}]]))
@example(pack([1.5, [EVENT | {"token_ids": [5, 2**32]}]]))
@example(pack([1.5, [EVENT | {"token_ids": [5, -1]}]]))
@example(pack([1.5, [EVENT | {"extra_keys": [None, None]}]]))
@example(pack([1.5, [EVENT | {"extra_keys": [[[[[[[[]]]]]]]]}]]))
@example(pack([1.5, [EVENT | {"medium": 7}]]))
@example(pack([1.5, [EVENT], -1]))
@example(b"\x92\xcb\0\0\0\0\0\0\0\0\xdd\xff\xff\xff\xff")
@example(pack([1.5, [EVENT]]).replace(b"\x91\x01", b"\xdd\xff\xff\xff\xff"))
def test_whatever_comes_means_the_same_or_is_left_alone(payload):
    agrees(payload)


def test_captured_batches_mean_the_same(capture, payload_of):
    for line in capture:
        agrees(payload_of(line))


@compiled
def test_captured_batches_are_read_in_one_step(capture, payload_of):
    assert all(agrees(payload_of(line)) for line in capture)


@compiled
@pytest.mark.parametrize("extra", [{}, {"extra_keys": [["adapter"]], "lora_name": "adapter"}, {"medium": "CPU"}, {"token_ids": BORDERS[:2]}])  # fmt: skip
@pytest.mark.parametrize("number", [1, 15, 16, 65_536])
def test_usual_batches_of_any_length_are_read_in_one_step_in_both_forms(extra, number):
    event = EVENT | extra
    positional = ["BlockStored", *(event.get(name) for name in NAMES)]

    assert agrees(pack([1.5, [event] * number, 0]))
    assert agrees(pack([1.5, [positional] * number]))


@compiled
@pytest.mark.parametrize("number", [15, 16, 65_535, 65_536])
def test_blocks_and_tokens_of_any_number_are_read_in_one_step(number):
    event = EVENT | {"block_hashes": [2**64 - 1] * number, "token_ids": [70_000] * number, "block_size": 1}  # fmt: skip

    assert agrees(
        pack([1.5, [event, {"type": "BlockRemoved", "block_hashes": [-100] * number}], 0])
    )


def test_a_batch_that_is_read_in_one_step_or_not_is_decoded():
    """Between two events of the usual kind one that nobody knows."""
    batch = decode(pack([1.5, [EVENT, {"type": "BlockMoved"}, EVENT], 3]))

    assert (len(batch.events), batch.num_unknown, batch.dp_rank) == (2, 1, 3)
    with pytest.raises(EventError):
        decode(pack([1.5, [EVENT | {"block_size": 3}], 3]))


@compiled
@pytest.mark.parametrize(
    "parts", [[ARRAY], [b"\x91\x99\xabBlockStored", ARRAY], [b"\x91\x93\xacBlockRemoved", ARRAY]]
)
def test_what_a_batch_says_it_holds_takes_no_memory_before_it_is_there(parts):
    head, num_bytes = b"\x92\xcb" + bytes(8), 2**20
    payload = head
    for part in parts:
        payload += part
    payload += (num_bytes - 100).to_bytes(4, "big") + b"\xc1" * num_bytes
    tracemalloc.start()
    try:
        assert plain_batch.read(payload) is None
        _, peak_bytes = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()

    assert peak_bytes < num_bytes

from array import array

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from dynctl.core.kv import NO_GROUP, AllBlocksCleared, BlockRemoved, BlockStored
from dynctl.kv.events import MAX_PAYLOAD_BYTES, EventBatch, EventError, decode, encode

pack = msgspec.msgpack.encode
STORED = {
    "type": "BlockStored", "block_hashes": [2**64 - 1], "parent_block_hash": None, "token_ids": [5, 6],
    "block_size": 2, "lora_id": None, "medium": "GPU", "lora_name": None, "extra_keys": None,
}  # fmt: skip


def test_captured_batches_decode_and_encode_to_the_same_bytes(capture, payload_of):
    for line in capture:
        payload = payload_of(line)
        batch = decode(payload)

        assert len(payload) == line["frames"][2]
        assert encode(batch) == payload
        assert batch.num_unknown == 0
        assert [type(event).__name__ for event in batch.events] == [
            e["type"] for e in line["batch"][1]
        ]


def test_k14_positional_events_of_older_releases_decode_like_named_ones():
    named = [
        1.5,
        [
            STORED,
            {"type": "BlockRemoved", "block_hashes": [7], "medium": "GPU"},
            {"type": "AllBlocksCleared"},
        ],
    ]
    positional = [
        1.5,
        [
            ["BlockStored", [2**64 - 1], None, [5, 6], 2, None, "GPU", None, None],
            ["BlockRemoved", [7], "GPU"],
            ["AllBlocksCleared"],
        ],
        None,
    ]

    assert decode(pack(positional)) == decode(pack(named))


def test_p40_the_kind_of_layers_is_read_in_both_forms():
    of_group = {"group_idx": 1, "kv_cache_spec_kind": "sliding_window"}
    positional = ["BlockStored", [2**64 - 1], None, [5, 6], 2, None, "GPU", None, None, 1]
    for event in (STORED | of_group, [*positional, "sliding_window"]):
        (read,) = decode(pack([1.5, [event], None])).events
        assert (read.group_idx, read.spec_kind) == (1, "sliding_window")


@pytest.mark.parametrize(
    ("medium", "absent"), [(None, 0), ("GPU", 0), ("CPU", NO_GROUP), ("STORAGE", NO_GROUP)]
)
def test_p40_no_group_is_the_first_on_the_device_and_none_elsewhere(medium, absent):
    taken = {"type": "BlockRemoved", "block_hashes": [7], "medium": medium}
    for event in (STORED | {"medium": medium}, taken):
        groups = ({}, {"group_idx": None}, {"group_idx": 0}, {"group_idx": 2})
        batch = decode(pack([1.5, [event | group for group in groups], None]))
        assert [read.group_idx for read in batch.events] == [absent, absent, 0, 2]
        assert decode(encode(batch)) == batch


def test_k14_the_oldest_positional_form_lacks_medium_and_lora_name():
    batch = decode(pack([0.0, [["BlockStored", [1], 9, [5, 6], 2, None], ["BlockRemoved", [1]]]]))

    assert batch.events == (BlockStored((1,), 9, array("I", [5, 6]), 2), BlockRemoved((1,)))


@pytest.mark.parametrize("ts", [1.5, 7])
@pytest.mark.parametrize("number", [0, 1, 15, 16, 65_536])
def test_batches_of_any_length_and_form_decode(ts, number):
    named = {"type": "BlockRemoved", "block_hashes": [7], "medium": None}
    positional = ["BlockRemoved", [7]]
    mixed = [named, positional]

    for events in ([named] * number, [positional] * number, (mixed * number)[:number]):
        batch = decode(pack([ts, events, 0]))
        assert (batch.ts, batch.num_unknown) == (ts, 0)
        assert batch.events == (BlockRemoved((7,)),) * number


def test_a_batch_that_is_a_map_decodes():
    batch = decode(pack({"ts": 2.0, "events": [STORED], "data_parallel_rank": 3, "more": 1}))

    assert (batch.ts, batch.dp_rank, len(batch.events)) == (2.0, 3, 1)


def test_k14_unknown_kinds_are_left_out_and_counted_unknown_fields_ignored():
    batch = decode(
        pack(
            [0.0, [{"type": "BlockMoved", "x": 1}, ["Strange", 2], STORED | {"ownership": "x"}], 0]
        )
    )

    assert batch.num_unknown == 2
    assert len(batch.events) == 1


def test_hashes_in_bytes_equal_their_low_64_bits():
    digest = bytes(range(32))
    batch = decode(
        pack([0.0, [STORED | {"block_hashes": [digest], "parent_block_hash": digest}], 0])
    )

    assert batch.events[0].block_hashes == (int.from_bytes(digest[-8:], "big"),)
    assert batch.events[0].parent_block_hash == int.from_bytes(digest[-8:], "big")


@pytest.mark.parametrize(
    "payload",
    [
        b"",
        b"\xc1",
        pack("text"),
        pack([1.0]),
        pack([0.0, [STORED | {"token_ids": [1]}], 0]),
        pack([0.0, [STORED | {"token_ids": [-1, 5]}], 0]),
        pack([0.0, [STORED | {"token_ids": [1, 2**32]}], 0]),
        pack([0.0, [STORED | {"block_size": 0}], 0]),
        pack([0.0, [STORED | {"extra_keys": [None, None]}], 0]),
        pack([0.0, [{"no": "type"}], 0]),
        pack([0.0, [7], 0]),
        b"\x91" * 100_000,
        b"\0" * (MAX_PAYLOAD_BYTES + 1),
    ],
    ids=lambda payload: repr(payload[:24]),
)  # fmt: skip
def test_malformed_batches_are_named_errors(payload):
    with pytest.raises(EventError):
        decode(payload)


@given(st.binary(max_size=300))
def test_k15_garbage_is_a_batch_or_a_named_error(payload):
    try:
        batch = decode(payload)
    except EventError:
        return
    assert isinstance(batch, EventBatch)


numbers = st.integers(0, 2**64 - 1)


@given(
    st.lists(
        st.builds(lambda h: BlockRemoved(tuple(h)), st.lists(numbers)) | st.just(AllBlocksCleared())
    ),
    st.integers(0, 9),
)
def test_what_is_encoded_decodes_to_the_same(events, rank):
    batch = EventBatch(1.0, tuple(events), rank)

    assert decode(encode(batch)) == batch

import importlib.util
from array import array

import msgspec
import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from dynctl.kv import token_ids

pack = msgspec.msgpack.encode


def source():
    """The module as it is written in Python, whatever `token_ids` is."""
    path = importlib.util.find_spec("dynctl.kv").submodule_search_locations[0] + "/token_ids.py"
    spec = importlib.util.spec_from_file_location("token_ids_source", path)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def outcome(read, packed):
    try:
        ids = read(packed)
    except ValueError:
        return None
    assert (type(ids), ids.typecode) == (array, "I")
    return ids.tolist()


SOURCE = source()
BORDERS = [0, 127, 128, 255, 256, 65_535, 65_536, 2**31 - 1, 2**31, 2**32 - 1]


@given(st.lists(st.sampled_from(BORDERS) | st.integers(0, 2**32 - 1)))
@example(BORDERS)
@example([7] * 15)
@example([7] * 16)
@example([7] * 65_535)
@example([7] * 65_536)
def test_ids_are_read_as_they_were_packed(ids):
    assert token_ids.read(pack(ids)) == array("I", ids)
    assert token_ids.read(msgspec.Raw(pack(ids))) == array("I", ids)


ELEMENTS = st.one_of(
    st.sampled_from([0xCC, 0xCD, 0xCE, 0xCF, 0xD0, 0xD1, 0xD2, 0xD3]).flatmap(
        lambda head: st.binary(min_size=1 << (head & 3), max_size=1 << (head & 3)).map(
            lambda tail: bytes([head]) + tail
        )
    ),
    st.integers(0, 127).map(lambda number: bytes([number])),
    st.sampled_from(BORDERS).map(lambda number: b"\xcf" + number.to_bytes(8, "big")),
    st.sampled_from(BORDERS).map(lambda number: b"\xd3" + number.to_bytes(8, "big")),
)
HEADS = st.sampled_from([lambda n: bytes([0x90 | n]), lambda n: b"\xdc" + n.to_bytes(2, "big"), lambda n: b"\xdd" + n.to_bytes(4, "big")])  # fmt: skip


@given(st.lists(ELEMENTS, max_size=15), HEADS)
def test_integers_in_any_form_are_read_alike(elements, head):
    packed = head(len(elements)) + b"".join(elements)

    assert outcome(token_ids.read, packed) == outcome(SOURCE.read, packed)


@given(
    st.binary(max_size=40)
    | st.lists(ELEMENTS, max_size=8).map(lambda some: b"\x94" + b"".join(some))
)
@example(b"")
@example(b"\xdd\xff\xff\xff\xff\x01")
@example(b"\xdc\x00")
@example(b"\x92\x01")
@example(b"\x91\x01\x02")
@example(b"\x91\xcd\x01")
@example(pack([-1]))
@example(pack([2**32]))
@example(pack([1.0]))
@example(pack([None]))
@example(pack("text"))
def test_whatever_comes_is_read_alike_or_refused(packed):
    assert outcome(token_ids.read, packed) == outcome(SOURCE.read, packed)


@pytest.mark.parametrize("packed", [b"", b"\x92\x01", b"\x91\x01\x02", pack([-1]), pack([2**32]), pack([1.5])])  # fmt: skip
def test_what_is_no_array_of_ids_is_a_value_error(packed):
    with pytest.raises(ValueError):  # noqa: PT011 - only its kind is promised
        token_ids.read(packed)

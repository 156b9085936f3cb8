import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from dynctl.kv.wire import (
    MAX_FRAME_BYTES,
    MAX_HASHES_PER_FRAME,
    Delta,
    FrameReader,
    Heartbeat,
    Snapshot,
    WireError,
    encode,
)

DEEP = b"\x96\xa1i\1\0\xc2\x90" + b"\x91" * 60_000 + b"\xc0"
"""A heartbeat's header that says more, nested more deeply than anybody reads."""

hashes = st.lists(st.integers(0, 2**64 - 1), max_size=20)
seqs = st.integers(-1, 2**60)
frames = st.one_of(
    st.builds(
        Snapshot,
        *(st.text(max_size=9), seqs, st.integers(1, 256), hashes, st.integers(0, 9)),
        st.integers(0, 2),
    ),
    st.builds(
        Delta,
        *(st.text(max_size=9), seqs, hashes, hashes, st.booleans(), st.integers(0, 9)),
        st.integers(0, 2),
    ),
    st.builds(Heartbeat, st.text(max_size=9), seqs, st.integers(0, 9), st.booleans()),
)


@given(st.lists(frames, max_size=5), st.integers(1, 50))
def test_frames_survive_any_split(sent, piece):
    data = b"".join(map(encode, sent))
    reader = FrameReader()
    got = [frame for i in range(0, len(data), piece) for frame in reader.feed(data[i : i + piece])]

    assert got == sent


def follow(frames):
    known = set()
    for frame in frames:
        match frame:
            case Snapshot(hashes=all_hashes):
                known = set(all_hashes)
            case Delta(stored=stored, removed=removed, cleared=cleared):
                if cleared:
                    known.clear()
                known -= set(removed)
                known |= set(stored)
    return known


@pytest.mark.parametrize("frame", [Snapshot("i", 4, 16, [7], 1), Delta("i", 4, [7], [8], True, 1)])
def test_a_frame_of_before_media_is_the_devices(frame):
    """Headers were shorter by their last element."""
    data = encode(frame)
    header_bytes = int.from_bytes(data[5:7], "big")
    header = msgspec.msgpack.decode(data[7 : 7 + header_bytes])
    older = msgspec.msgpack.encode(header[:-1])
    rest = data[4:5] + len(older).to_bytes(2, "big") + older + data[7 + header_bytes :]

    assert header[-1] == frame.medium == 0
    assert FrameReader().feed(len(rest).to_bytes(4, "big") + rest) == [frame]


def test_a_header_may_have_more_elements_than_are_known():
    data = encode(Delta("i", 4, [7], []))
    header_bytes = int.from_bytes(data[5:7], "big")
    newer = msgspec.msgpack.encode([*msgspec.msgpack.decode(data[7 : 7 + header_bytes]), "more"])
    rest = data[4:5] + len(newer).to_bytes(2, "big") + newer + data[7 + header_bytes :]

    assert FrameReader().feed(len(rest).to_bytes(4, "big") + rest) == [Delta("i", 4, [7], [])]


def test_a_large_snapshot_is_split_and_means_the_same():
    everything = list(range(2 * MAX_HASHES_PER_FRAME + 7))
    frames = FrameReader().feed(encode(Snapshot("i", 4, 16, everything, medium=1)))

    assert len(frames) == 3
    assert {frame.medium for frame in frames} == {1}
    assert {frame.seq for frame in frames} == {4}
    assert follow(frames) == set(everything)


def test_a_large_delta_is_split_and_means_the_same():
    size = MAX_HASHES_PER_FRAME
    stored, removed = list(range(size)), list(range(size, 2 * size))
    delta = Delta("i", 4, stored, removed, cleared=True)
    before = Snapshot("i", 3, 16, [*removed, 2**63])
    frames = FrameReader().feed(encode(before) + encode(delta))

    assert len(frames) > 2
    assert follow(frames) == set(stored)


@pytest.mark.parametrize(
    "data",
    [
        (MAX_FRAME_BYTES + 1).to_bytes(4, "big"),
        b"\0\0\0\0",
        b"\0\0\0\x03X\0\0",
        b"\0\0\0\x04H\0\x01\xc1",
        encode(Snapshot("i", 1, 16, [1, 2]))[:-3] + b"\0" * 3 + b"",
        b"\0\0\0\x05S\xff\xff\x00\x00",
        encode(Heartbeat("@", 1)).replace(b"@", b"\xff"),
        (len(DEEP) + 3).to_bytes(4, "big") + b"H" + len(DEEP).to_bytes(2, "big") + DEEP,
    ],
    ids=lambda data: repr(data[:24]),
)  # fmt: skip
def test_malformed_frames_are_named_errors(data):
    if data.startswith(b"\0\0\0") and data[4:5] == b"S" and len(data) > 12:
        length = len(data) - 4 - 3
        data = length.to_bytes(4, "big") + data[4:-3]  # a body that is no whole number of words
    with pytest.raises(WireError):
        FrameReader().feed(data)


def test_a_delta_whose_counts_do_not_fit_its_body_is_refused():
    data = bytearray(encode(Delta("i", 1, [1, 2], [3])))
    short = data[:-8]
    short[:4] = (len(short) - 4).to_bytes(4, "big")
    with pytest.raises(WireError):
        FrameReader().feed(bytes(short))

import pytest

from dynctl.http1.sse import MAX_EVENT_BYTES, EventSplitter, EventTooLongError, event_data


def test_several_events_in_one_read_come_apart():
    splitter = EventSplitter()
    assert splitter.feed(b"data: a\n\ndata: b\n\nda") == [b"data: a\n\n", b"data: b\n\n"]
    assert splitter.has_rest
    assert splitter.feed(b"ta: c\n\n") == [b"data: ac\n\n".replace(b"ac", b"c")]
    assert not splitter.has_rest


@pytest.mark.parametrize("size", [100, 100_000, 5_000_000])
@pytest.mark.parametrize("end", [b"", b"\n\n", b"\r\n\r\n"])
def test_an_event_beyond_its_limit_is_refused(size, end):
    splitter = EventSplitter()
    raw = b"data: " + b"x" * (MAX_EVENT_BYTES + 1) + end

    def feed_all() -> None:
        for start in range(0, len(raw), size):
            splitter.feed(raw[start : start + size])

    with pytest.raises(EventTooLongError):
        feed_all()


def test_many_small_events_beyond_the_limit_together_are_fine():
    raw = b"data: x\n\n" * 200_000
    assert len(EventSplitter().feed(raw)) == 200_000


@pytest.mark.parametrize(
    ("event", "data"),
    [
        (b"data: {}\n\n", b"{}"),
        (b"data:{}\n\n", b"{}"),
        (b"data:  {}\n\n", b" {}"),
        (b"data\n\n", b""),
        (b"data: a\ndata: b\n\n", b"a\nb"),
        (b"event: e\r\ndata: a\r\n\r\n", b"a"),
        (b"data: a\r\r", b"a"),
        (b": ping\n\n", None),
        (b"datax: a\n\n", None),
        (b"\n\n", None),
    ],
)
def test_event_data_reads_the_payload(event, data):
    assert event_data(event) == data

"""Metric definitions, on recorded times: no clock is involved."""

import pytest

from dynctl.bench.record import Record
from dynctl.bench.stream import Chunk


def record(**fields):
    return Record(**({"number": 0, "outcome": "ok", "scheduled_s": 10.0, "sent_s": 10.25} | fields))


def test_ttft_counts_from_the_scheduled_arrival_and_service_from_sending():
    answered = record(first_s=10.75, end_s=12.0)

    assert answered.ttft_ms == pytest.approx(750.0)
    assert answered.ttft_service_ms == pytest.approx(500.0)
    assert answered.send_lag_ms == pytest.approx(250.0)
    assert answered.e2e_ms == pytest.approx(2000.0)


def test_tpot_leaves_out_the_tokens_of_the_first_event():
    chunks = (Chunk(1.0, 3), Chunk(1.1, 5), Chunk(1.6, 9))

    assert record(chunks=chunks, output_tokens=9).tpot_ms == pytest.approx(600.0 / 6)


def test_tpot_takes_the_first_event_as_one_token_when_chunks_are_not_counted():
    chunks = (Chunk(1.0, None), Chunk(1.2, None), Chunk(1.4, None))

    assert record(chunks=chunks, output_tokens=5).tpot_ms == pytest.approx(400.0 / 4)


@pytest.mark.parametrize(
    ("chunks", "tokens"), [((), 0), ((Chunk(1.0, 1),), 1), ((Chunk(1.0, 4), Chunk(2.0, 4)), 4)]
)
def test_tpot_without_further_tokens_is_unknown(chunks, tokens):
    assert record(chunks=chunks, output_tokens=tokens).tpot_ms is None


def test_chunk_gaps_are_between_events_and_itl_is_per_token():
    chunks = (Chunk(1.0, 1), Chunk(1.3, 4), Chunk(1.4, 5))
    answered = record(chunks=chunks, output_tokens=5)

    assert answered.chunk_gaps_ms() == pytest.approx([300.0, 100.0])
    assert answered.itls_ms() == pytest.approx([100.0, 100.0, 100.0, 100.0])


def test_itl_is_empty_unless_every_chunk_is_counted():
    assert record(chunks=(Chunk(1.0, 1), Chunk(1.1, None), Chunk(1.2, 3))).itls_ms() == []


def test_tokens_between_counts_arrivals_inside_the_span():
    chunks = (Chunk(1.0, 2), Chunk(2.0, 5), Chunk(3.0, 6))
    answered = record(chunks=chunks, output_tokens=6)

    assert answered.tokens_between(1.5, 3.0) == 3.0
    assert answered.tokens_between(0.0, 9.0) == 6.0


def test_tokens_between_shares_the_total_over_uncounted_chunks():
    chunks = (Chunk(1.0, None), Chunk(2.0, None), Chunk(3.0, None), Chunk(4.0, None))

    assert record(chunks=chunks, output_tokens=8).tokens_between(1.5, 9.0) == pytest.approx(6.0)

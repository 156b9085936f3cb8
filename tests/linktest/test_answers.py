"""What hosts say is checked: a measurement or a named error, never anything else."""

import json

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dynctl.core.links import LinkKind
from dynctl.errors import ProbeError
from dynctl.linktest.answers import nixl_measurements, tcp_measurements

TRIP = {
    "message_bytes": 64, "num_messages": 900, "p50_s": 3e-5, "p95_s": 4e-5, "p99_s": 6e-5, "jitter_s": 1e-6,
}  # fmt: skip


def point(direction="out", bytes_s=1e9):
    return {
        "message_bytes": 1 << 20, "num_streams": 4, "num_messages": 50, "bytes_s": bytes_s,
        "p50_s": 4e-3, "p95_s": 5e-3, "p99_s": 6e-3, "busy_ratio": 0.3, "direction": direction,
    }  # fmt: skip


def end(address, rate=10**10):
    return {
        "address": address, "interface": "eth0", "route_interface": "eth0", "data_interface": "eth0",
        "rate_bits_s": rate, "mtu_bytes": 1500, "other_bytes_s": 12.5,
    }  # fmt: skip


TCP = {
    "round_trip": TRIP,
    "points": [point("out", 1e9), point("in", 2e9)],
    "here": {"end": end("10.0.0.1"), "retransmits": [5, 1000]},
    "there": {"end": end("10.0.0.2", 10**9), "retransmits": [0, 0]},
}
PULLED = {
    "round_trip": TRIP,
    "points": [point("in")],
    "transport": "rc_mlx5/mlx5_0:1",
    "end": end(""),
}
NIXL = {
    "in": {"kinds": {"nixl-dram": PULLED, "nixl-vram": {"error": "no CUDA"}}, "starved": 0.0},
    "out": {"kinds": {"nixl-dram": PULLED}, "starved": 0.6},
}


def test_a_tcp_answer_becomes_both_directions():
    out, back = tcp_measurements("a", "b", json.dumps(TCP).encode(), 7.0)

    assert (out.source_name, out.target_name, out.bytes_s) == ("a", "b", 1e9)
    assert (back.source_name, back.target_name, back.bytes_s) == ("b", "a", 2e9)
    assert (out.source.address, out.target.address) == ("10.0.0.1", "10.0.0.2")
    assert (back.source.address, back.target.address) == ("10.0.0.2", "10.0.0.1")
    assert (out.retransmit_ratio, back.retransmit_ratio) == (0.005, None)
    assert out.nominal_bytes_s == 10**9 / 8
    assert out.best.p50_bytes_s == pytest.approx(4 * (1 << 20) / 4e-3)
    assert out.measured_unix_s == 7.0


def test_a_nixl_answer_becomes_a_measurement_per_kind_and_direction():
    links = {
        (m.source_name, m.kind): m
        for m in nixl_measurements("a", "b", json.dumps(NIXL).encode(), 7.0)
    }

    assert set(links) == {
        ("b", LinkKind.NIXL_DRAM),
        ("b", LinkKind.NIXL_VRAM),
        ("a", LinkKind.NIXL_DRAM),
    }
    assert links["b", LinkKind.NIXL_VRAM].error == "no CUDA"
    assert links["b", LinkKind.NIXL_DRAM].transport == "rc_mlx5/mlx5_0:1"
    # What the puller lacked of processors counts for its direction alone.
    assert links["a", LinkKind.NIXL_DRAM].best.busy_ratio == 0.6
    assert links["b", LinkKind.NIXL_DRAM].best.busy_ratio == 0.3


@pytest.mark.parametrize(
    "line",
    [
        b"", b"\xff", b"null", b"[]", b"{}", b'{"port": 1}', b"Traceback", b'{"points": []}',
        json.dumps({**TCP, "points": []}).encode(),
        json.dumps({**TCP, "points": [point("out", -1)]}).encode(),
        json.dumps({**TCP, "points": [point("out", 1e300), point("in")]}).encode(),
        json.dumps({**TCP, "points": [{**point(), "p50_s": 0}]}).encode(),
        json.dumps({**TCP, "points": [point("sideways")]}).encode(),
        json.dumps({**TCP, "points": [point("out")] * 101}).encode(),
        json.dumps(TCP).replace("1000000000.0", "NaN").encode(),
        json.dumps(TCP).replace("eth0", "e" * 500).encode(),
    ],
)  # fmt: skip
def test_what_is_no_answer_is_a_named_error(line):
    with pytest.raises(ProbeError) as caught:
        tcp_measurements("gpu-1", "gpu-2", line, 0.0)

    assert caught.value.message.startswith("gpu-1: ")
    assert len(caught.value.message) < 500


@settings(max_examples=400, deadline=None)
@given(st.data())
def test_damaged_answers_give_measurements_or_a_named_error(data):
    whole, read = data.draw(st.sampled_from([(TCP, tcp_measurements), (NIXL, nixl_measurements)]))
    text = bytearray(json.dumps(whole).encode())
    for _ in range(data.draw(st.integers(1, 6))):
        at = data.draw(st.integers(0, len(text) - 1))
        cut = data.draw(st.integers(0, 8))
        text[at : at + cut] = data.draw(st.binary(max_size=6))
        text = text or bytearray(b"{}")
    try:
        links = read("a", "b", bytes(text), 1.0)
    except ProbeError:
        return
    assert all(m.error or m.points for m in links)


def test_hostile_texts_are_cleaned():
    hostile = json.loads(json.dumps(TCP).replace('"eth0"', '"\\u001b[31me\\nth0"'))

    out, _ = tcp_measurements("a", "b", json.dumps(hostile).encode(), 0.0)

    assert out.source.interface == "e th0"

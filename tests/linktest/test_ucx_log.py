"""What UCX chose, read from its log: our own captures, and other layouts rebuilt from public ones."""

from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dynctl.linktest.onhost.ucx_log import Way, version, way_of_reads

CAPTURES = Path(__file__).parent / "captures"
TCP = (CAPTURES / "ucx-1.23-tcp.txt").read_text()
CMA = (CAPTURES / "ucx-1.23-cma.txt").read_text()

# Layout of UCX 1.16 to 1.18: title in two columns; two sizes, GPU memory, an active-message table after it.
RDMA = """
[1722588785.1] [h:65:0] | perftest inter-node cfg#2 | remote memory read by ucp_get*(multi) into host memory from host |
[1722588785.1] [h:65:0] |                    0..inf | zero-copy          | rc_mlx5/mlx5_9:1/path0 |
[1722588785.1] [h:65:0] | perftest inter-node cfg#2 | remote memory read by ucp_get*(multi) into cuda/GPU0 from cuda/dev[0] |
[1722588785.1] [h:65:0] |                         0 | copy-out           | rc_mlx5/mlx5_1:1/path0 |
[1722588785.1] [h:65:0] |                     1..64 | software emulation | rc_mlx5/mlx5_1:1/path0 |
[1722588785.1] [h:65:0] |                 65..8192K | zero-copy          | rc_mlx5/mlx5_1:1/path0 |
[1722588785.1] [h:65:0] |                8193K..inf | zero-copy          | 50% on rc_mlx5/mlx5_1:1 and 50% on rc_mlx5/mlx5_2:1 |
[1722588785.1] [h:65:0] | perftest inter-node cfg#2 | active message by ucp_am_send* from host memory |
[1722588785.1] [h:65:0] |                    0..inf | short              | ud_mlx5/mlx5_1:1 |
"""  # fmt: skip


def reads(log, num_bytes=16 << 20, into_gpu=False, from_gpu=False):
    return way_of_reads(log, num_bytes, into_gpu=into_gpu, from_gpu=from_gpu)


def test_tcp_is_seen_as_software_emulation():
    assert reads(TCP).text() == "tcp/lo (software emulation)"
    assert version(TCP) == "1.23.0"


def test_one_machine_is_seen_as_memory_copies():
    assert reads(CMA) == Way("zero-copy", (("cma", "memory"),))


@pytest.mark.parametrize(
    ("num_bytes", "into_gpu", "from_gpu", "text"),
    [
        (16 << 20, True, True, "rc_mlx5/mlx5_1:1 + rc_mlx5/mlx5_2:1"),
        (1 << 20, True, True, "rc_mlx5/mlx5_1:1"),
        (64, True, True, "rc_mlx5/mlx5_1:1 (software emulation)"),
        (16 << 20, False, False, "rc_mlx5/mlx5_9:1"),
    ],
)
def test_the_row_of_the_size_and_the_memories_counts(num_bytes, into_gpu, from_gpu, text):
    assert reads(RDMA, num_bytes, into_gpu, from_gpu).text() == text


def test_gpu_memory_on_one_side_only_is_another_table():
    assert reads(RDMA, into_gpu=True, from_gpu=False).lanes == ()


def test_without_a_table_the_lanes_of_the_connection_are_told():
    log = (
        "[1] [h:1:0] ucp_worker.c:1997 UCX  INFO    init self cfg#0 rma(self/memory)\n"
        "[1] [h:1:0] ucp_worker.c:1997 UCX  INFO    init inter-node cfg#1 rma(rc_mlx5/mlx5_0:1) am(ud/mlx5_0:1)\n"
    )

    assert reads(log) == Way("", (("rc_mlx5", "mlx5_0:1"),))


@pytest.mark.parametrize(
    "log", ["", "UCX  INFO  Version", "| remote memory read by ucp_get* into", "garbage\n" * 50]
)
def test_what_the_log_does_not_tell_is_unknown(log):
    assert reads(log) == Way("", ())
    assert reads(log).text() == ""


@settings(max_examples=300, deadline=None)
@given(st.data())
def test_damaged_logs_give_a_way_and_never_an_error(data):
    lines = data.draw(st.sampled_from([TCP, CMA, RDMA])).splitlines()
    for _ in range(data.draw(st.integers(1, 12))):
        at = data.draw(st.integers(0, len(lines) - 1))
        action = data.draw(st.sampled_from(["drop", "double", "cut", "noise"]))
        if action == "drop":
            del lines[at]
        elif action == "double":
            lines.insert(at, lines[at])
        elif action == "cut":
            lines[at] = lines[at][data.draw(st.integers(0, 40)) :][: data.draw(st.integers(0, 120))]
        else:
            lines[at] += data.draw(st.text(max_size=20))
        lines = lines or [""]

    way = reads("\n".join(lines), data.draw(st.integers(0, 1 << 34)))

    assert isinstance(way.text(), str)

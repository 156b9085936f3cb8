"""Shapes in which people show a matrix or a tool's output: each is read for what it says, and nothing is invented."""

import pytest

from dynctl.agents.engines.vllm import net_devices
from dynctl.discovery.capture import Capture, read_captures
from dynctl.discovery.view import document
from dynctl.planner.placement import Group, near_nics


def read(text):
    topology, _ = read_captures([Capture("host.txt", text.encode())])
    (host,) = document(topology)["hosts"]
    return host


def codes(host):
    return {warning["code"] for warning in host["warnings"]}


def rows(host):
    return [" ".join(str(cell) for cell in row) for row in host["gpu_links"]]


def nearest(host):
    return [gpu["nearest_nics"] for gpu in host["gpus"]]


ONE_PAIR = {
    "boxes": """
┌──────┬──────┬──────┐
│      │ GPU0 │ GPU1 │
├──────┼──────┼──────┤
│ GPU0 │  X   │ NV4  │
│ GPU1 │ NV4  │  X   │
└──────┴──────┴──────┘
""",
    "Markdown": """
|      | GPU0 | GPU1 | CPU Affinity |
|------|------|------|--------------|
| GPU0 | X    | NV4  | 0-15         |
| GPU1 | NV4  | X    | 16-31        |
""",
    "HTML": """
<table><tr><th></th><th>GPU0</th><th>GPU1</th><th>CPU Affinity</th></tr>
<tr><td>GPU0</td><td> X </td><td>NV4</td><td>0-7</td></tr>
<tr><td>GPU1</td><td>NV4</td><td> X </td><td>8-15</td></tr></table>
""",
    "glued by a browser": """
GPU0GPU1CPU AffinityNUMA AffinityGPU NUMA ID
GPU0XNV40-310N/A
GPU1NV4X0-310N/A
""",
    "single spaces": """
GPU0 GPU1 CPU Affinity NUMA Affinity
GPU0 X NV4 0-7 0
GPU1 NV4 X 8-15 1
""",
    "a program's source": """
    String topology = "\\tGPU0\\tGPU1\\tCPU Affinity\\n"
        + "GPU0\\t X \\tNV4\\t0-7\\n"
        + "GPU1\\tNV4\\t X \\t0-7\\n";
""",
    "CPU as a device": """
        GPU0    GPU1    CPU
GPU0     X      NV4     PHB
GPU1    NV4      X      PHB
CPU     PHB    PHB       X
""",
}


@pytest.mark.parametrize("shape", ONE_PAIR)
def test_two_gpus_with_four_links_are_seen_in_every_shape(shape):
    host = read(ONE_PAIR[shape])

    assert rows(host) == ["X NV4", "NV4 X"]
    assert host["nvlink_islands"] == [[0, 1]]


def test_cells_that_ran_together_leave_affinities_unknown():
    host = read(ONE_PAIR["glued by a browser"])

    assert {(g["cpu_affinity"], g["numa_node"]) for g in host["gpus"]} == {(None, None)}


MESH = """
            GPU0GPU1mlx5_0\tmlx5_2\tCPU Affinity
GPU0\t X \tNV2\tPIX\tSYS\t0-19
GPU1\tNV2\t X \tSYS\tPIX\t20-39
mlx5_0\tPIX\tSYS\t X \tSYS
mlx5_2\tSYS\tPIX\tSYS\t X
"""


def test_a_device_that_ran_into_the_last_gpu_of_the_header_is_a_column():
    assert nearest(read(MESH)) == [["mlx5_0"], ["mlx5_2"]]


@pytest.mark.parametrize("name", ["rdmap16s27", "mana_0", "erdma_0", "hns_1", "ocrdma0"])
def test_devices_of_any_driver_have_rows(name):
    text = f"\tGPU0\t{name}\tCPU Affinity\tNUMA Affinity\nGPU0\t X \tPIX\t0-47\t0\n{name}\tPIX\t X \t\t\n"

    host = read(text)

    assert nearest(host) == [[name]]
    assert "topology-damaged" not in codes(host)


TWO_HOSTS = """
        GPU0    GPU1    CPU Affinity    NUMA Affinity
GPU0     X      NV2     0-23            N/A
GPU1    NV2      X      0-23            N/A

The other one:
        GPU0    GPU1    CPU Affinity    NUMA Affinity
GPU0     X      PHB     0-11            N/A
GPU1    PHB      X      0-11            N/A
"""


def test_matrices_of_two_machines_are_not_mixed():
    host = read(TWO_HOSTS)

    assert rows(host) == ["X None", "None X"]
    assert {"topology-damaged", "links-unknown"} <= codes(host)


def test_without_nvlink_the_same_machine_still_has_it():
    """`topo -mp` leaves NVLink out of what `topo -m` says."""
    host = read(TWO_HOSTS.replace("0-11", "0-23"))

    assert rows(host) == ["X NV2", "NV2 X"]


HALF = """
      GPU0  GPU1  GPU2  GPU3  CPU Affinity  NUMA Affinity
GPU0   X    NV18  NV18  NV18  0-31,64-95    0
GPU3  NV18  NV18  NV18   X    32-63,96-127  1
"""


def test_rows_that_are_missing_are_not_said_to_be_empty_or_without_nvlink():
    host = read(HALF)

    assert host["gpu_links"][1][2] is None
    assert {"topology-damaged", "links-unknown"} <= codes(host)
    assert not codes(host) & {"cpu-affinity-empty", "nvlink-partial"}


def test_an_empty_affinity_whose_place_is_lost_is_unknown():
    text = (
        "GPU0 GPU1 CPU Affinity NUMA Affinity GPU NUMA ID\nGPU0 X NV4 0-7 0 N/A\nGPU1 NV4 X 1 N/A\n"
    )

    host = read(text)

    assert [gpu["cpu_affinity"] for gpu in host["gpus"]] == ["0-7", None]
    assert [gpu["numa_node"] for gpu in host["gpus"]] == [0, None]
    assert "cpu-affinity-empty" not in codes(host)


P2P = " \tGPU0\tGPU1\t\n GPU0\tX\tOK\t\n GPU1\tOK\tX\t\n"


def test_a_peer_matrix_alone_tells_the_gpus():
    host = read(P2P)

    assert [gpu["index"] for gpu in host["gpus"]] == [0, 1]
    assert rows(host) == ["X None", "None X"]


def test_peer_matrices_are_told_apart_by_their_commands():
    host = read(
        f"$ nvidia-smi topo -p2p r\n{P2P}\n$ nvidia-smi topo -p2p n\n{P2P.replace('OK', 'NS')}"
    )

    assert {name: square[0][1] for name, square in host["p2p"].items()} == {
        "read": "OK",
        "nvlink": "NS",
    }


def test_peer_matrices_without_titles_that_differ_tell_nothing():
    host = read(P2P + "\n" + P2P.replace("OK", "NS"))

    assert host["p2p"]["status"][0][1] is None
    assert "p2p-off" not in codes(host)


TABLE = """
+-----------------------------------------------------------------------------+
| NVIDIA-SMI 450.80.02    Driver Version: 450.80.02    CUDA Version: 11.0     |
|-------------------------------+----------------------+----------------------+
|   0  A100-SXM4-40GB      On   | 00000000:07:00.0 Off |                   On |
| N/A   36C    P0    66W / 400W |     13MiB / 40537MiB |     N/A      Default |
|                               |                      |              Enabled |
+-------------------------------+----------------------+----------------------+
|   1  A100-SXM4-40GB      Off  | 00000000:0F:00.0 Off |                    0 |
| N/A   36C    P0    66W / 400W |    700MiB / 40537MiB |      0%      Default |
|                               |                      |             Disabled |
+-------------------------------+----------------------+----------------------+
|   2  ERR!               ERR!  | 00000000:B7:00.0 ERR |                 ERR! |
|ERR!  ERR! ERR!    ERR! / ERR! | Unknown Error        |     ERR!        ERR! |
+-------------------------------+----------------------+----------------------+
| MIG devices:                                                                |
|==================+======================+===========+=======================|
|  0    1   0   0  |      5MiB / 19968MiB | 42      0 |  3   0    2    0    0 |
+-----------------------------------------------------------------------------+
| Processes:                                                                  |
|  GPU   GI   CI        PID   Type   Process name                  GPU Memory |
|=============================================================================|
|    1   N/A  N/A      4711      C   python                            690MiB |
+-----------------------------------------------------------------------------+
"""


def test_a_table_tells_mig_processes_and_cards_that_answer_with_errors():
    host = read(TABLE)

    assert [gpu["state"] for gpu in host["gpus"]] == ["mig", "busy", "unknown"]
    assert [p["pid"] for p in host["gpus"][1]["processes"]] == [4711]
    assert host["gpus"][0]["mig_slices"] == ["19.5 GiB"]
    assert {"gpu-mig", "gpu-busy", "gpu-sensor"} <= codes(host)


def test_a_table_without_its_head_is_one_and_gpus_of_the_matrix_are_there_as_well():
    row = "|   1  NVIDIA L40S                    On  |   00000000:9D:00.0 Off |                    0 |\n"
    memory = "| N/A   31C    P0             73W /  350W |       0MiB /  46068MiB |      0%      Default |\n"

    host = read(row + memory + "\tGPU0\tGPU1\nGPU0\t X \tPIX\nGPU1\tPIX\t X \n")

    assert [gpu["name"] for gpu in host["gpus"]] == ["NVIDIA GPU", "NVIDIA L40S"]


A, B = "GPU-11111111-2222-3333-4444-55555555555a", "GPU-11111111-2222-3333-4444-55555555555b"


@pytest.mark.parametrize(
    ("text", "sizes"),
    [
        (f"memory.total [MiB], name, index, uuid, memory.used [MiB]\n81559 MiB, NVIDIA H100, 0, {A}, 4 MiB\n81559 MiB, NVIDIA H100, 1, {B}, 4 MiB\n", 81559),
        ("name, pci.bus_id, vbios_version, memory.total [MiB]\nNVIDIA H100, 00000000:01:00.0, 94, 81559 MiB\nNVIDIA H100, 00000000:41:00.0, 94, 81559 MiB\n", 81559),
        ("index, name, compute_cap, memory.total [MiB]\n0, NVIDIA H100, 9.0, 81559 MiB\n1, NVIDIA H100, 9.0, 81559 MiB\n", 81559),
        ("NVIDIA H100, 81559 MiB\nNVIDIA H100, 81559 MiB\n", None),
        ("0, NVIDIA H100, 81559 MiB, 535.104.05\n1, NVIDIA H100, 81559 MiB, 535.104.05\n", None),
        (f"{A}, NVIDIA H100\n{B}, NVIDIA H100\n", None),
        (f"200.00, 7979, 90.04.23.00.5F, 440.64, NVIDIA H100, {A}, 45, N/A, P2\n200.00, 7979, 90.04.23.00.5F, 440.64, NVIDIA H100, {B}, 45, N/A, P2\n", None),
        ("compute_cap, driver_version, name, index\n9.0, 570.86.15, NVIDIA H100, 0\n9.0, 570.86.15, NVIDIA H100, 1\n", None),
    ],
)  # fmt: skip
def test_a_query_is_read_in_any_order_with_units_and_without_identifiers(text, sizes):
    host = read(text)

    assert [(gpu["index"], gpu["name"]) for gpu in host["gpus"]] == [(0, "NVIDIA H100"), (1, "NVIDIA H100")]  # fmt: skip
    assert {gpu["memory_bytes"] for gpu in host["gpus"]} == {sizes and sizes * 2**20}
    assert "gpu-memory-unified" not in codes(host)


def test_a_query_taken_twice_is_of_the_same_gpus_and_the_last_one_counts():
    head = "timestamp, name, pci.bus_id, memory.total [MiB], memory.used [MiB]\n"
    first = "2024/05/01 12:00:00.1, Tesla V100, 00000000:06:00.0, 32768 MiB, 0 MiB\n"
    later = "2024/05/01 12:00:05.1, Tesla V100, 00000000:06:00.0, 32768 MiB, 30000 MiB\n"

    (gpu,) = read(head + first + later)["gpus"]

    assert (gpu["index"], gpu["state"]) == (0, "busy")


def test_memory_nobody_asked_for_leaves_the_state_unknown():
    (gpu,) = read(f"index, uuid, name\n0, {A}, NVIDIA L4\n")["gpus"]

    assert gpu["state"] == "unknown"


def test_a_message_that_is_not_known_is_no_empty_machine():
    host = read("NVIDIA-SMI has failed because you are not:\n\ta) running as an administrator\n")

    assert "probe-failed" in codes(host)
    assert not host["gpus_known"]


@pytest.mark.parametrize(
    ("text", "is_known"),
    [
        ("mlx5_0 port 1 ==> ens1 (Up)\n", False),
        ("gpu_uuid, pid, process_name, used_gpu_memory [MiB]\n", False),
        ("No devices were found\n", True),
        ("\tGPU0\tCPU Affinity\nGPU0\t X \t0-7\n", True),
    ],
)
def test_a_capture_of_other_things_does_not_say_that_there_are_no_gpus(text, is_known):
    assert read(text)["gpus_known"] is is_known


def test_ip_over_infiniband_that_is_down_says_nothing_of_the_port():
    host = read(
        "mlx5_0   port  1  ==>  ibp26s0    (Down)\nmlx5_1   port  1  ==>  ens1f0np0  (Down)\n"
    )

    assert [nic["state"] for nic in host["nics"]] == ["unknown", "down"]


def test_rdma_of_older_iproute_is_read():
    host = read("1/1: mlx5_0/1: state ACTIVE physical_state LINK_UP netdev p1p1\n")

    assert [(n["name"], n["state"], n["netdev"]) for n in host["nics"]] == [
        ("mlx5_0", "up", "p1p1")
    ]


def test_ports_of_one_device_are_named_as_ucx_names_them_and_a_matrix_adds_none():
    matrix = "\tGPU0\tNIC0\tCPU Affinity\tNUMA Affinity\nGPU0\t X \tPIX\t0-7\t0\nNIC0\tPIX\t X \nNIC0: mlx4_0\n"
    topology, _ = read_captures(
        [
            Capture("topo.txt", matrix.encode(), "a"),
            Capture("rdma.txt", b"link mlx4_0/1 state ACTIVE\nlink mlx4_0/2 state DOWN\n", "a"),
        ]
    )
    (host,) = topology.hosts
    group = Group(host, (0,))

    assert [(nic.name, nic.device, nic.port) for nic in host.nics] == [
        ("mlx4_0:1", "mlx4_0", 1),
        ("mlx4_0:2", "mlx4_0", 2),
    ]
    assert near_nics(group) == ("mlx4_0:1",)
    assert net_devices(near_nics(group)) == "mlx4_0:1"


def test_addresses_of_infiniband_do_not_make_it_ethernet():
    gid = "fe80:0000:0000:0000:946d:ae03:00aa:aaaa"
    host = read(f"DEV\tPORT\tINDEX\tGID\nmlx5_0\t1\t0\t{gid}\t\tv1\nn_gids_found=1\n")

    assert [nic["kind"] for nic in host["nics"]] == ["rdma"]


def test_numactl_tells_the_nodes():
    host = read(
        "available: 2 nodes (0-1)\nnode 0 cpus: 0 1 2 3 8\nnode 0 size: 512 MB\nnode 1 cpus:\n"
    )

    assert [(n["index"], n["cpus"], n["memory_bytes"]) for n in host["numa_nodes"]] == [
        (0, "0-3,8", 512 * 2**20),
        (1, "", None),
    ]


def test_cards_joined_by_bridges_use_twelve_links_by_design():
    links = "".join(
        f"\t Link {i}: {'26.562 GB/s' if i % 6 < 4 else '<inactive>'}\n" for i in range(18)
    )
    text = f"GPU 0: NVIDIA H100 NVL (UUID: {A})\n{links}"

    assert "nvlink-inactive" not in codes(read(text))
    assert "nvlink-inactive" in codes(read(text.replace("H100 NVL", "H100 80GB HBM3")))


RUN_TOGETHER = """
        GPU0    GPU1    NIC0    CPU Affinity    NUMA Affinity   GPU NUMA ID
GPU0     X      NV18    PIX     0-55,112-167 0N/A
GPU1    NV18     X      SYS     56-111,168-2231               N/A
"""


@pytest.mark.parametrize("text", [RUN_TOGETHER, RUN_TOGETHER.strip().partition("\n")[2]])
def test_affinities_that_ran_together_are_taken_apart_where_one_reading_fits(text):
    gpus = read(text)["gpus"]

    assert [(g["cpu_affinity"], g["numa_node"]) for g in gpus] == [
        ("0-55,112-167", 0),
        ("56-111,168-223", 1),
    ]


def test_affinities_that_can_be_taken_apart_in_two_ways_are_unknown():
    """`0-310` may be 0-31 and 0, or 0-3 and 10."""
    host = read(RUN_TOGETHER.replace("0-55,112-167 0N/A", "0-310        N/A"))

    assert (host["gpus"][0]["cpu_affinity"], host["gpus"][0]["numa_node"]) == (None, None)
    assert "topology-damaged" in codes(host)


def test_cpus_that_ran_into_a_count_of_links_are_unknown():
    """`NV424-47` is NV4 and 24-47, or NV42 and 4-47."""
    text = "\tGPU0\tGPU1\tCPU Affinity\tNUMA Affinity\nGPU0\t X \tNV424-47\t1\nGPU1\tNV4\t X \t0-23\t0\n"

    host = read(text)

    assert rows(host) == ["X NV4", "NV4 X"]
    assert [gpu["cpu_affinity"] for gpu in host["gpus"]] == [None, "0-23"]


def test_a_header_that_ran_into_the_legend_names_no_device():
    legend = "\n  NIC0:         NIC41   CPU Affinity\n  NIC1: MA ID\n  NIC2: mlx5_2\n"
    text = "\tGPU0\tNIC0\tNIC1\tNIC2\tCPU Affinity\nGPU0\t X \tPIX\tPXB\tSYS\t0-7\n" + legend

    assert read(text)["gpu_nic_links"]["nics"] == ["NIC0", "NIC1", "mlx5_2"]


def test_an_escape_that_became_a_replacement_character_is_no_part_of_the_header():
    text = "\ufffd[4mGPU0 NIC0 CPU Affinity NUMA Affinity GPU NUMA ID\ufffd[0m\nGPU0 X PIX 16-31 1 N/A\nNIC0 PIX X\n"

    (gpu,) = read(text)["gpus"]

    assert (gpu["numa_node"], gpu["nearest_nics"]) == (1, ["NIC0"])

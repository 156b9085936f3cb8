"""Every capture, read as `discover --from` reads it, gives exactly its facts: in the JSON document, warnings by meaning."""

import re
from pathlib import Path

import pytest
import yaml

from dynctl.discovery.capture import Capture, read_captures
from dynctl.discovery.view import document
from dynctl.planner.grouping import Near, group_score

CASES = Path(__file__).parent / "cases"
SHARED = Path(__file__).parents[3] / "shared" / "topology" / "samples"
KEPT_OUTSIDE = ("043", "044", "045", "080", "081", "082", "083", "086", "088", "089", "090", "095", "109")  # fmt: skip

MEANINGS = {
    r"not near any GPU|near no GPU": ["nic-near-no-gpu"],
    r"no NIC is listed|NIC affinity unknown": ["nic-affinity-unknown"],
    r"across the socket link \(SYS\)|reach the NIC across|no near NIC|on the other socket": [
        "nic-far"
    ],
    r"NUMA affinity is not per GPU|NUMA node of each GPU unknown \(0-1": ["numa-shared"],
    r"CPU affinity empty": ["cpu-affinity-empty"],
    r"NUMA split": ["numa-uneven"],
    r"not fully connected": ["nvlink-partial"],
    r"NV2 pairs|do not assume the DGX-1": ["nvlink-mixed"],
    r"NUMA node unknown|must come from CPU affinity": ["numa-unknown"],
    r"tp=4 crosses sockets|has no NVLink bridge": ["nvlink-partial"],
    r"restricted cpuset \(CPU 0": ["cpuset-restricted"],
    r"no NVLink(?! bridge)": ["no-nvlink"],
    r"output is cut \(6|rows are of different length": ["topology-damaged"],
    r"bonded|slaves of bond0": ["nic-bonded"],
    r"single GPU": ["gpu-single"],
    r"one is left over": ["gpu-odd-count"],
    r"flat virtual|group by NUMA": ["topology-flat"],
    r"P2P not supported": ["p2p-off"],
    r"GPU memory: pin|GPU or MIG memory nodes|are GPU memory nodes": ["gpu-memory-node"],
    r"low-power": ["gpu-low-power", "gpu-amd"],
    r"MIG enabled": ["gpu-mig"],
    r"list was cut": ["capture-cut"],
    r"library differ": ["gpu-driver-library-mismatch"],
    r"driver not loaded": ["gpu-driver-not-loaded"],
    r"driver cannot open": ["gpu-gpu-lost"],
    r"fan reading": ["gpu-sensor"],
    r"header says 8|only 1 record": ["gpu-output-cut"],
    r"unified memory": ["gpu-memory-unified"],
    r"Down/Polling|Down/Disabled|DOWN|\bDown\b": ["port-down"],
    r"two of eight compute": ["rdma-some-down"],
    r"ibstat failed on": ["rdma-device-failed"],
    r"no inter-node path": ["rdma-all-down"],
    r"share one system image": ["nic-management"],
    r"25 Gb Ethernet|not a compute port": ["nic-slower"],
    r"too slow": ["rdma-slow"],
    r"no subnet manager has": ["port-init"],
    r"active MTU": ["rdma-mtu"],
    r"is the management network": ["nic-other-network"],
    r"no n_gids_found": ["capture-cut"],
    r"degraded": ["rdma-below-card"],
    r"flapping": ["rdma-flapping"],
    r"memory only": ["numa-memory-only"],
    r"owner hidden": ["gpu-owners-hidden"],
}
"""What each sidecar's words mean, as codes of docs/findings.md."""
TOLD_OTHERWISE = r"split on whitespace|N/A under MIG"
"""Words about reading, or facts another assertion holds."""


def all_cases():
    for sidecar in sorted(CASES.glob("*/*/expected.yaml")):
        yield pytest.param(sidecar, sidecar.with_name("stdout.txt"), id=sidecar.parent.name)
    for number in KEPT_OUTSIDE:
        found = next(iter(SHARED.glob(f"{number}-*.yaml")), SHARED / f"{number}-absent.yaml")
        yield pytest.param(found, found.with_suffix(".txt"), id=f"outside-{number}")


def read(sidecar, text):
    if not sidecar.exists():
        pytest.skip("this capture may not be copied, and its folder is not beside the repository")
    expected = yaml.safe_load(sidecar.read_text())["expected"]
    topology, _ = read_captures([Capture(str(text), text.read_bytes())])
    (host,) = document(topology)["hosts"]
    return host, expected


@pytest.mark.parametrize(("sidecar", "text"), list(all_cases()))
def test_a_capture_gives_exactly_its_facts(sidecar, text):
    host, expected = read(sidecar, text)

    for key, check in CHECKS.items():
        if key in expected:
            check(host, expected)


@pytest.mark.parametrize(("sidecar", "text"), list(all_cases()))
def test_what_a_user_has_to_be_told_is_told(sidecar, text):
    host, expected = read(sidecar, text)
    codes = {warning["code"] for warning in host["warnings"]}
    said = " ".join(warning["text"] for warning in host["warnings"])

    for words in expected.get("warnings") or ():
        wanted = [
            code
            for meaning, found in MEANINGS.items()
            if re.search(meaning, words)
            for code in found
        ]
        assert wanted or re.search(TOLD_OTHERWISE, words), f"no meaning for {words!r}"
        assert set(wanted) <= codes, (words, sorted(codes))
        for device in re.findall(r"\bmlx5_(?:bond_)?\d+\b|\bGPU\d\b", words):
            assert device in said or "-" in words, (device, said)


def gpu_count(host, expected):
    assert len(host["gpus"]) == (expected["gpu_count"] or 0)
    assert host["gpus_known"] is (expected["gpu_count"] is not None)


def pair_links(host, expected):
    count, text = expected["gpu_count"], expected["pair_links"]
    label = text.removeprefix("all ") if isinstance(text, str) else None
    rows = [["X" if a == b else label for b in range(count)] for a in range(count)]
    assert host["gpu_links"] == (rows if label else [row.split() for row in text])


def islands(host, expected):
    assert host["nvlink_islands"] == expected.get("nvlink_islands", expected.get("islands"))


def groups(size):
    def check(host, expected):
        found = host["tp_groups"].get(str(size), [])
        wanted = expected[f"tp{size}"] or []
        assert len(found) == len(wanted)
        assert total(host, found) == total(host, wanted)
        if f"tp{size}_equally_good_groupings" not in expected:
            assert found == wanted

    return check


def total(host, chosen):
    """How good groups are: equal totals are the ties that sidecars list."""
    links = [["NV1" if cell == "XGMI" else cell for cell in row] for row in host["gpu_links"]]
    places = tuple(g["numa_affinity"] or g["cpu_affinity"] or g["numa_node"] for g in host["gpus"])
    nics = tuple(frozenset(gpu["nearest_nics"]) for gpu in host["gpus"])
    near = Near(places, nics if any(nics) else ())
    scores = [group_score(links, near, group)[:4] for group in chosen]
    return tuple(map(sum, zip(*scores, strict=True))) if scores else ()


def nic_nearest(host, expected):
    for gpu in host["gpus"]:
        wanted = expected["nic_nearest"][f"GPU{gpu['index']}"]
        assert set(gpu["nearest_nics"]) == set(wanted["nics"])


def numa_node(host, expected):
    for gpu in host["gpus"]:
        wanted = expected["numa_node"][f"GPU{gpu['index']}"]
        assert gpu["numa_node"] == wanted
        if "cpu_numa_node" in expected:
            assert gpu["cpu_numa_node"] == expected["cpu_numa_node"][f"GPU{gpu['index']}"]


def cpu_affinity(host, expected):
    for gpu in host["gpus"]:
        assert str(gpu["cpu_affinity"]) == str(expected["cpu_affinity"][f"GPU{gpu['index']}"])


def nics(host, expected):
    wanted = expected["nics"] or []
    names = list(wanted.values()) if isinstance(wanted, dict) else wanted
    assert host["gpu_nic_links"]["nics"] == names


def nvlinks(host, expected):
    for gpu in host["gpus"]:
        assert gpu["nvlinks_active"] == expected["nvlink_links_active"][f"GPU{gpu['index']}"]
        if "nvlink_GBps_per_link" in expected:
            assert set(gpu["nvlink_gbyte_s"]) == {expected["nvlink_GBps_per_link"]}


def named(host, name):
    return next(nic for nic in host["nics"] if nic["name"] == name)


def ports(host, expected):
    assert {n["name"] for n in host["nics"] if n["kind"] != "ethernet"} == set(expected["ports"])
    for name, wanted in expected["ports"].items():
        nic = named(host, name)
        state = wanted["state"].lower().removeprefix("port_")
        assert nic["state"] == {"active": "up", "down": "down", "init": "down"}[state]
        if "physical" in wanted:
            assert nic["physical"] == wanted["physical"].lower()
        if "link_layer" in wanted:
            assert (
                nic["kind"]
                == {"infiniband": "infiniband", "ethernet": "roce"}[wanted["link_layer"].lower()]
            )
        if "rate_gbps" in wanted:
            assert nic["rate_gbit_s"] == (wanted["rate_gbps"] if state == "active" else None)
        if "type" in wanted:
            assert nic["card"] == wanted["type"]
        if "width" in wanted and state == "active":
            assert f"{nic['lanes']}X" == wanted["width"]
        if "active_mtu" in wanted:
            assert nic["mtu_bytes"] == wanted["active_mtu"]
        if "link_downed" in wanted:
            assert nic["link_downed"] == wanted["link_downed"]


def active_ports(host, expected):
    up = [nic for nic in host["nics"] if nic["state"] == "up"]
    assert len(up) == expected["active_ports"]
    if "usable_compute_ports" in expected:
        assert sum(not nic["is_management"] for nic in up) == expected["usable_compute_ports"]


def netdevs(host, expected):
    for name, wanted in expected["map"].items():
        nic = named(host, name)
        assert (nic["netdev"], nic["state"] == "up") == (wanted["netdev"], wanted["up"])


def rdma_links(host, expected):
    for where, wanted in expected["links"].items():
        name, _, port = where.partition("/")
        nic = named(host, name)
        assert nic["port"] == int(port)
        assert nic["netdev"] == wanted["netdev"]
        assert nic["state"] == {"ACTIVE": "up", "DOWN": "down"}[wanted["state"]]
        assert nic["physical"] == wanted["physical"].lower().replace("_", "")


def gids(host, expected):
    assert sum(len(nic["gids"]) for nic in host["nics"]) == expected["gids"]
    for name, index in expected["best_roce_v2_gid_index"].items():
        (best,) = (g for g in named(host, name)["gids"] if g["version"] == "v2" and g["ipv4"])
        assert (best["index"], best["ipv4"]) == (index, expected["ipv4"][name])


def numa_nodes(host, expected):
    assert len(host["numa_nodes"]) == expected["numa_nodes"]
    with_cpus = {str(n["index"]): n["cpus"] for n in host["numa_nodes"] if n["cpus"]}
    assert list(map(int, with_cpus)) == expected["numa_nodes_with_cpus"]
    assert with_cpus == expected["cpus"]


def p2p(host, expected):
    (square,) = host["p2p"].values()
    others = {cell for a, row in enumerate(square) for b, cell in enumerate(row) if a != b}
    assert others == (
        {"OK"} if expected["p2p_ok_pairs"] == "all" else {expected["p2p_status_other_pairs"]}
    )


def mig(host, expected):
    assert {f"GPU{g['index']}": g["mig_slices"] for g in host["gpus"]} == expected["mig"]


def mig_mode(host, expected):
    (gpu,) = host["gpus"]
    assert (gpu["state"] == "mig") is (expected["mig_mode"] == "Enabled")
    assert len(gpu["mig_slices"]) == expected.get("mig_devices", 0)


def records_found(host, expected):
    assert len(host["gpus"]) == expected["records_found"]
    assert host["gpus"][0]["name"] == expected["gpu_model"]
    assert host["software"]["driver_version"] == expected["driver_version"]
    if "pci" in expected:
        assert host["gpus"][0]["pci_bus_id"] == expected["pci"]
    if "pcie" in expected:
        health, pcie = host["gpus"][0]["health"], expected["pcie"]
        assert health["pcie_generation"] == pcie["gen_current"]
        assert health["pcie_generation_max"] == pcie["gen_max"]
        assert f"{health['pcie_width']}x" == pcie["width_current"]


def fan(host, expected):
    (gpu,) = host["gpus"]
    assert gpu["health"]["bad_readings"] == ("fan",)
    assert gpu["health"]["temperature_celsius"] == expected["temperature_c"]
    assert gpu["memory_bytes"] == expected["memory_total_mib"] * 2**20
    assert gpu["health"]["compute_mode"].replace("_", " ") == expected["compute_mode"]


def processes(host, expected):
    found = host["unplaced_processes"]
    assert [p["pid"] for p in found] == [p["pid"] for p in expected["processes"]]
    assert all(p["memory_bytes"] is None and p["name"] == "hidden" for p in found)


CHECKS = {
    "gpu_count": gpu_count,
    "pair_links": pair_links,
    "nvlink_islands": islands,
    "islands": islands,
    "tp2": groups(2),
    "tp4": groups(4),
    "nic_nearest": nic_nearest,
    "nics": nics,
    "numa_node": numa_node,
    "cpu_affinity": cpu_affinity,
    "nvlink_links_active": nvlinks,
    "ports": ports,
    "active_ports": active_ports,
    "map": netdevs,
    "links": rdma_links,
    "gids": gids,
    "numa_nodes": numa_nodes,
    "p2p_ok_pairs": p2p,
    "mig": mig,
    "mig_mode": mig_mode,
    "records_found": records_found,
    "fan": fan,
    "processes": processes,
}

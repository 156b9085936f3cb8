"""Cases of the checks of RDMA ports, addresses and measured links. sysfs as Linux 6 writes it."""

from checkcases.build import b_host, eth, evidence, host, link, nic, planned, software, wish
from checkcases.world import Case, World, says

from dynctl.core.links import LinkBook, LinkEnd, RoundTrip
from dynctl.core.machine import Gid
from dynctl.store import to_json

GOOD = planned()
PORT = "/sys/class/infiniband/mlx5_0/ports/1"
V2 = Gid(3, "0000:0000:0000:0000:0000:ffff:0a00:0001", "v2", "10.0.0.1", "eth0")
V1 = Gid(0, "fe80:0000:0000:0000:0000:0000:0000:0001", "v1", None, "eth0")
LOCAL_V2 = Gid(1, "fe80:0000:0000:0000:0000:0000:0000:0001", "v2", None, "eth0")


def with_nic(**change):
    return planned(host(nics=(nic(**change), eth())))


def roce(*gids, **change):
    return planned(host(nics=(nic(kind="roce", gids=gids, **change), eth())))


def files(name, bad, good):
    return World(files={name: bad}), World(files={name: good})


def gid_tree(*rows):
    found = {}
    for index, gid, kind in rows:
        found[f"{PORT}/gids/{index}"] = f"{gid}\n"
        found[f"{PORT}/gid_attrs/types/{index}"] = f"{kind}\n"
    return World(files=found)


DOWN, UP = files(f"{PORT}/state", "1: DOWN\n", "4: ACTIVE\n")
INIT, _ = files(f"{PORT}/state", "2: INIT\n", "")
RATE100, RATE400 = files(f"{PORT}/rate", "100 Gb/sec (4X EDR)\n", "400 Gb/sec (4X NDR)\n")
LANE1, LANE4 = files(f"{PORT}/rate", "100 Gb/sec (1X NDR)\n", "400 Gb/sec (4X NDR)\n")
FLAPS, STEADY = files(f"{PORT}/counters/link_downed", "57\n", "1\n")
ROW = "\tGPU0\tGPU1\tNIC0\tCPU Affinity\tNUMA Affinity\nGPU0\t X \tPIX\t{}\t0-31\t0\nGPU1\tPIX\t X \tPIX\t0-31\t0"
FAR = World({"nvidia-smi": says(ROW.format("SYS"))})
NEAR = World({"nvidia-smi": says(ROW.format("PIX"))})
IP_ADDR = "2: eth0    inet {}/24 brd 10.0.0.255 scope global eth0\\       valid_lft forever"
MACHINE = {"ssh": 'case "$*" in *192.168.0.1*) echo {} ;; *) echo {} ;; esac\n'}


def ids(a, b):
    return World({"ssh": f'case "$*" in *192.168.0.1*) echo {a} ;; *) echo {b} ;; esac\n'})


def ping(text, status=0):
    return World({"ping": says(text, status)})


REMOTELY = 'for line; do :; done\nsh -c "$line"\n'
"""ssh that runs its last argument here."""


def bash(text, status):
    """The shell that opens connections for commands."""
    return World({"bash": f"echo '{text}' >&2\nexit {status}\n"})


def iperf(mbit, back=None):
    line = "[SUM]   0.00-5.00   sec  10.0 GBytes  {} Mbits/sec                  receiver"
    there, here = line.format(mbit), line.format(back or mbit)
    client = f"case \"$*\" in *' -D') ;; *-R*) echo '{here}' ;; *) echo '{there}' ;; esac\n"
    return World({"iperf3": client, "sleep": "", "ssh": REMOTELY})


def two_links(forth, back):
    return planned(links=(forth, back))


RTT = "--- 10.0.0.2 ping statistics ---\n50 packets transmitted, 50 received, 0% packet loss, time 9800ms\nrtt min/avg/max/mdev = 0.050/{}/{}/0.500 ms"
LOSS = "2000 packets transmitted, {} received, {}% packet loss, time 500ms"
SHAKY = RoundTrip(64, 500, 0.2e-3, 8e-3, 20e-3, 3e-3)
WRONG_END = LinkEnd("10.0.0.1", "eth0", "ens9", "eth0", 100 * 10**9)
far_host = host(
    nics=(nic(), nic("mlx5_1"), eth()),
    gpu_nics=((0, ("mlx5_1",)), (1, ("mlx5_1",))),
    nic_names=("mlx5_0", "mlx5_1"),
    gpu_nic_links=(("SYS", "PIX"), ("SYS", "PIX")),
)

CASES = (
    Case(
        "port-down",
        with_nic(state="down", physical="polling", rate_bits_s=None),
        GOOD,
        DOWN,
        UP,
        "red",
        "polling",
    ),
    Case(
        "rdma-mtu-small",
        with_nic(kind="roce", mtu_bytes=1024, netdev="ens1np0"),
        with_nic(kind="roce", mtu_bytes=4096, netdev="ens1np0"),
        World({"ibv_devinfo": says("\t\t\tactive_mtu:\t\t1024 (3)")}),
        World({"ibv_devinfo": says("\t\t\tactive_mtu:\t\t4096 (5)")}),
        "warning",
        "ens1np0",
    ),
    Case(
        "port-init",
        with_nic(state="down", physical="linkup", rate_bits_s=None),
        GOOD,
        INIT,
        UP,
        "red",
    ),
    Case(
        "port-slow",
        with_nic(rate_bits_s=100 * 10**9),
        GOOD,
        RATE100,
        RATE400,
        "red",
        "100 of 400 Gb/s",
    ),
    Case("port-narrow", with_nic(num_lanes=1), GOOD, LANE1, LANE4, "warning"),
    Case(
        "port-flapping",
        with_nic(num_link_downed=57),
        with_nic(num_link_downed=1),
        FLAPS,
        STEADY,
        "warning",
    ),
    Case("nic-far", planned(host(gpu_nic_links=(("SYS",), ("PIX",)))), GOOD, FAR, NEAR, "warning"),
    Case(
        "nic-planned-far",
        planned(far_host),
        GOOD,
        World(
            files={
                "/sys/class/infiniband/mlx5_0/device/numa_node": "1\n",
                "/sys/class/infiniband/mlx5_1/device/numa_node": "0\n",
            }
        ),
        World(
            files={
                "/sys/class/infiniband/mlx5_0/device/numa_node": "0\n",
                "/sys/class/infiniband/mlx5_1/device/numa_node": "0\n",
            }
        ),
        "warning",
        "mlx5_1",
    ),
    Case(
        "roce-gid-missing",
        roce(V1, LOCAL_V2),
        roce(V1, V2),
        gid_tree((0, V1.gid, "IB/RoCE v1"), (1, LOCAL_V2.gid, "RoCE v2")),
        gid_tree((0, V1.gid, "IB/RoCE v1"), (3, V2.gid, "RoCE v2")),
        "red",
    ),
    Case(
        "roce-gid-wrong",
        planned(
            host(nics=(nic(kind="roce", gids=(V1, V2)), eth())),
            wishes=(wish(env=(("UCX_IB_GID_INDEX", "0"),)),),
        ),
        planned(
            host(nics=(nic(kind="roce", gids=(V1, V2)), eth())),
            wishes=(wish(env=(("UCX_IB_GID_INDEX", "3"),)),),
        ),
        gid_tree((0, V1.gid, "IB/RoCE v1")),
        gid_tree((0, V2.gid, "RoCE v2")),
        "red",
    ),
    Case(
        "peer-memory-missing",
        planned(host(software=software(modules=("nvidia", "mlx5_ib")))),
        GOOD,
        *files(
            "/proc/modules",
            "nvidia 1 0 - Live 0x0\n",
            "nvidia 1 0 - Live 0x0\nnvidia_peermem 16384 0 - Live 0x0\n",
        ),
        "red",
    ),
    Case(
        "peer-memory-unregistered",
        planned(host(software=software(memory_peers=()))),
        GOOD,
        World(files={"/sys/kernel/mm/other": ""}),
        World(files={"/sys/kernel/mm/memory_peers/nv_mem/version": "1\n"}),
        "warning",
    ),
    Case(
        "mtu-differs",
        planned(host(nics=(nic(), eth(mtu_bytes=1500)))),
        GOOD,
        *files("/sys/class/net/eth0/mtu", "1500\n", "9000\n"),
        "warning",
    ),
    Case(
        "public-data-address",
        evidence(
            host(data_address="8.8.4.4", nics=(eth(address="8.8.4.4"), eth("eth1", "10.0.0.1")))
        ),
        GOOD,
        World({"ip": says("2: eth0    inet 8.8.4.4/24 scope global eth0")}),
        World({"ip": says(IP_ADDR.format("10.0.0.1"))}),
        "warning",
        "10.0.0.1",
    ),
    Case(
        "loopback-advertised",
        evidence(host(data_address="127.0.0.1"), b_host()),
        GOOD,
        World(),
        World({"ip": says("10.0.0.1 via 10.0.0.254 dev eth0 src 10.0.0.9")}),
        "red",
    ),
    Case(
        "data-address-foreign",
        evidence(host(data_address="10.9.9.9"), b_host()),
        GOOD,
        World({"ip": says(IP_ADDR.format("10.0.0.1"))}),
        World({"ip": says(IP_ADDR.format("10.9.9.9"))}),
        "red",
    ),
    Case(
        "address-family-differs",
        evidence(
            host("c", data_address="fd00::3", nics=(eth(address="fd00::3"),)), host(), b_host()
        ),
        GOOD,
        World({"ip": says("2: eth0    inet6 fd00::3/64 scope global")}),
        World({"ip": says("2: eth0    inet 10.0.0.3/24 scope global")}),
        "red",
    ),
    Case(
        "same-machine-twice",
        evidence(host(machine_id="m"), b_host(machine_id="m"), identities={"a": "k", "b": "k"}),
        evidence(host(machine_id="m"), b_host(machine_id="m"), identities={"a": "k", "b": "other"}),
        ids("m1", "m1"),
        ids("m1", "m2"),
        "red",
    ),
    Case(
        "machine-id-cloned",
        evidence(
            host(machine_id="m", boot_id="1"),
            b_host(machine_id="m", boot_id="2"),
            identities={"a": "k", "b": "other"},
        ),
        evidence(
            host(machine_id="m", boot_id="1"),
            b_host(machine_id="m", boot_id="1"),
            identities={"a": "k", "b": "other"},
        ),
        ids("m1", "m1"),
        ids("m1", "m2"),
        "warning",
    ),
    Case(
        "link-failed",
        two_links(
            link(points=(), round_trip=None, error="no connection within 5 s"), link("b", "a")
        ),
        GOOD,
        bash("bash: connect: No route to host", 1),
        bash("bash: connect: Connection refused", 1),
        "red",
    ),
    Case(
        "link-slow",
        two_links(link(gbit_s=9.2), link("b", "a")),
        GOOD,
        iperf(9200),
        iperf(94000),
        "red",
        "9.2 of 100 Gb/s",
    ),
    Case(
        "link-uneven",
        two_links(link(gbit_s=60), link("b", "a")),
        two_links(link(gbit_s=70), link("b", "a")),
        iperf(60000, 90000),
        iperf(88000, 90000),
        "warning",
        "60 Gb/s",
    ),
    Case(
        "link-jitter",
        two_links(link(round_trip=SHAKY), link("b", "a")),
        GOOD,
        ping(RTT.format("0.200", "9.000")),
        ping(RTT.format("0.060", "0.090")),
        "warning",
        "P95 8.00 ms",
    ),
    Case(
        "link-lossy",
        two_links(link(retransmit_ratio=0.02), link("b", "a")),
        two_links(link(retransmit_ratio=0.0001), link("b", "a")),
        ping(LOSS.format(1960, "2")),
        ping(LOSS.format(2000, "0")),
        "warning",
    ),
    Case(
        "link-wrong-device",
        two_links(link(source=WRONG_END), link("b", "a")),
        GOOD,
        World({"ip": says("10.0.0.2 via 192.168.0.254 dev ens9 src 192.168.0.1 uid 0")}),
        World({"ip": says("10.0.0.2 dev eth0 src 10.0.0.1 uid 0")}),
        "warning",
        "ens9",
    ),
    Case(
        "link-unmeasured",
        planned(links=(), state_dir="/state"),
        GOOD,
        World(files={"/state/links.json": to_json(LinkBook((), (link("b", "a"),))).decode()}),
        World(files={"/state/links.json": to_json(LinkBook((), (link(),))).decode()}),
        "info",
    ),
)

"""Cases of the checks of how hosts are set up: limits, ports, processes, kernel, SSH server, files.

Most verify commands run against the machine itself: real sockets, processes, files, limits, certificates.
"""

import socket
import sys

from checkcases.build import (
    NOW,
    audited,
    host,
    planned,
    warned,
    wish,
)
from checkcases.world import Case, World, says

from dynctl.checks.evidence import LocalFile, SshDifference
from dynctl.core.audit import (
    Certificate,
    KeptFile,
    KernelSettings,
    Listener,
    Reach,
    TaggedProcess,
)
from dynctl.core.inventory import HostEntry
from dynctl.core.machine import Clock, Limits, Sshd
from dynctl.core.units import GIB, MIB

GOOD = planned()
ROOT = "/root/.dynctl/lab"


def held_port():
    """A port nobody listens on and nobody else is given; the commands name it, so it has to be known before."""
    held = socket.socket()
    held.bind(("127.0.0.1", 0))
    # Who sets it too may listen there all the same.
    held.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    return held


HELD_PORTS = held_port(), held_port()
ROUTER_PORT, RELAY_PORT = (held.getsockname()[1] for held in HELD_PORTS)


def listen(port, address="0.0.0.0", **change):
    known = {"pid": 77, "program": "python -m vllm.entrypoints.openai.api_server", "user": "bob"}
    return Listener(address, port, **(known | change))


def serving(port, address="127.0.0.1", answer=None):
    """A world in which a process of the test listens while the command runs; it ends with the shell."""
    program = (
        "import socket, sys, time\\n"
        f"s = socket.create_server(('{address}', {port}))\\n"
        "print('up', flush=True)\\ntime.sleep(600)"
    )
    if answer is not None:
        program = (
            "import http.server as h\\n"
            "class H(h.BaseHTTPRequestHandler):\\n"
            f"    def do_GET(self): self.send_response({answer}); self.end_headers()\\n"
            "    def log_message(self, *a): pass\\n"
            f"s = h.HTTPServer(('{address}', {port}), H)\\nprint('up', flush=True)\\ns.serve_forever()"
        )
    return World(
        before=(
            f'printf "{program}" > serve.py; "{sys.executable}" serve.py > up & server=$!; '
            "trap 'kill $server' EXIT; i=0; until [ -s up ] || [ $i -ge 1200 ]; do sleep 0.05; i=$((i+1)); done"
        )
    )


def ss(*rows):
    """`ss -Hltn` as iproute2 6 prints it, filtered the way the command asks."""
    return World(
        {"ss": says("\n".join(f"LISTEN 0 128 {row} 0.0.0.0:*" for row in rows))}
        if rows
        else {"ss": "exit 0\n"}
    )


def limited(text, good):
    return World(before=text), World(before=good)


def kernel(**facts):
    return audited(kernel=KernelSettings(**({"num_numa_nodes": 2} | facts)))


def files(name, bad, good):
    return World(files={name: bad}), World(files={name: good})


def sshd(**facts):
    return planned(host(sshd=Sshd(**facts)))


def sshd_world(bad, good):
    return World({"sshd": says(bad)}), World({"sshd": says(good)})


def mode(octal):
    return World(before=f"mkdir -p keys; echo secret > keys/host.key; chmod {octal} keys/host.key")


TAGGED = (TaggedProcess(4321, ROOT, "inc", "python -m dynctl.sim", False),)
ALIVE = (TaggedProcess(4321, ROOT, "inc", "python -m dynctl.sim", True),)
# The command names pid 4321: its files are moved below the test's directory.
ENV = {"/proc/4321/environ": "PATH=/bin\0DYNCTL_INCARNATION=inc\0"}
STRANGER = {"/proc/4321/environ": "PATH=/bin\0HOME=/root\0"}
DF = "Filesystem 1024-blocks Used Available Capacity Mounted on\n{}"
OPEN_ROUTER = (wish(listen=f"0.0.0.0:{ROUTER_PORT}"),)
KEYED_ROUTER = (wish(listen=f"127.0.0.1:{ROUTER_PORT}"),)
SAFE_ROUTER = (wish(listen="0.0.0.0:9443", tls_cert="/c", tls_key="/k"),)
OPENSSL = "openssl req -x509 -newkey ec -pkeyopt ec_paramgen_curve:P-256 -nodes -keyout k -out end.crt -days {} -subj /CN=t 2>/dev/null"
SSH = ("ssh", "-F", "config", "-G", "--", "gpu-01")
REACH = Reach("relay", "b", "127.0.0.1", RELAY_PORT, "timeout", "timed out")
LINGER, LINGERS = (
    World({"id": "echo nobody-lingers\n"}),
    World({"id": "echo bob\n"}, {"/var/lib/systemd/linger/bob": ""}),
)
PYTHON = "wanted-python"


def no_python(**change):
    entries = (HostEntry("a", "192.168.0.1", python=PYTHON), HostEntry("b", "192.168.0.2"))
    return planned(warned("no-python", "none found", python=None), entries=entries)


def local(kind, octal, has_secret=True):
    return planned(local_files=(LocalFile("keys/host.key", octal, kind, has_secret),))


CASES = (
    Case(
        "port-clash",
        audited(listeners=(listen(18800, "10.0.0.1"),)),
        audited(listeners=(listen(18800, "10.0.0.1", root=ROOT),)),
        ss("10.0.0.1:18800"),
        ss(),
        "red",
        "relay",
    ),
    Case(
        "engine-port-open",
        audited(listeners=(listen(9000, is_engine=True),)),
        audited(
            listeners=(
                listen(9000, "127.0.0.1", is_engine=True),
                listen(18820, root=ROOT),
                listen(30005, root=ROOT),
            )
        ),
        ss("0.0.0.0:9000"),
        ss("127.0.0.1:9000"),
        "red",
    ),
    Case(
        "ray-dashboard-open",
        audited(listeners=(listen(8265, program="raylet"),)),
        audited(listeners=(listen(8265, "127.0.0.1", program="raylet"),)),
        ss("0.0.0.0:8265"),
        ss("127.0.0.1:8265"),
        "red",
    ),
    Case(
        "orphans",
        audited(tagged=TAGGED),
        audited(tagged=ALIVE),
        World(files=ENV),
        World(files=STRANGER),
        "warning",
        "4321",
    ),
    Case(
        "port-unreachable",
        audited(reaches=(REACH,)),
        audited(
            reaches=(
                Reach("relay", "b", "10.0.0.2", 18800, "refused"),
                Reach("relay", "b", "10.0.0.2", 18800, "open"),
            )
        ),
        World(),
        serving(RELAY_PORT, "127.0.0.1"),
        "red",
        "timeout",
    ),
    Case(
        "router-without-key",
        planned(wishes=OPEN_ROUTER),
        planned(wishes=KEYED_ROUTER),
        serving(ROUTER_PORT, answer=200),
        serving(ROUTER_PORT, answer=401),
        "red",
    ),
    Case(
        "router-without-tls",
        planned(wishes=OPEN_ROUTER, api_keys=("k",)),
        planned(wishes=SAFE_ROUTER, api_keys=("k",)),
        serving(ROUTER_PORT, answer=200),
        World(),
        "warning",
    ),
    Case(
        "memlock-low",
        planned(host(is_root=False, session_limits=Limits(64 * 1024, 1048576), has_linger=True)),
        planned(host(is_root=False, session_limits=Limits(-1, 1048576), has_linger=True)),
        *files(
            "/proc/self/limits",
            "Max locked memory         65536                65536                bytes\n",
            "Max locked memory         unlimited            unlimited            bytes\n",
        ),
        "red",
    ),
    Case(
        "nofile-low",
        planned(host(is_root=False, session_limits=Limits(-1, 1024), has_linger=True)),
        planned(host(is_root=False, session_limits=Limits(-1, 65536), has_linger=True)),
        *limited("ulimit -S -n 1024", "ulimit -S -n 8192"),
        "warning",
    ),
    Case(
        "shm-small",
        planned(host(shm_bytes=64 * MIB)),
        GOOD,
        World({"df": says(DF.format("shm 65536 0 65536 0% /dev/shm"))}),
        World({"df": says(DF.format("shm 9999999 0 9999999 0% /dev/shm"))}),
        "warning",
    ),
    Case(
        "disk-low",
        planned(host(disk_free_bytes=100 * MIB)),
        GOOD,
        World({"df": says(DF.format("/dev/sda1 99999999 99900000 99999 99% /"))}),
        World({"df": says(DF.format("/dev/sda1 99999999 0 99999999 1% /"))}),
        "red",
    ),
    Case(
        "cpus-limited",
        planned(host(num_cpus=8)),
        GOOD,
        World({"nproc": "echo 8\n", "getconf": "echo 64\n"}),
        World(
            {"nproc": "echo 64\n", "getconf": "echo 64\n"},
            {"/proc/self/cgroup": "0::/job\n", "/sys/fs/cgroup/job/cpu.max": "max 100000\n"},
        ),
        "info",
    ),
    Case(
        "memory-limited",
        planned(host(memory_bytes=64 * GIB)),
        GOOD,
        *(
            World(
                files={"/proc/self/cgroup": "0::/job/step\n", "/sys/fs/cgroup/job/memory.max": text}
            )
            for text in ("68719476736\n", "max\n")
        ),
        "warning",
    ),
    Case(
        "swap-on",
        kernel(swap_total_bytes=8 * GIB, swap_used_bytes=2 * GIB),
        kernel(swap_total_bytes=0),
        *files(
            "/proc/swaps",
            "Filename Type Size Used Priority\n/swapfile file 8388604 2097152 -2\n",
            "Filename Type Size Used Priority\n",
        ),
        "warning",
    ),
    Case(
        "numa-balancing-on",
        kernel(numa_balancing=1),
        kernel(numa_balancing=0),
        *files("/proc/sys/kernel/numa_balancing", "1\n", "0\n"),
        "info",
    ),
    Case(
        "hugepages-reserved",
        kernel(reserved_hugepages_bytes=128 * GIB),
        kernel(reserved_hugepages_bytes=0),
        *files("/proc/meminfo", "HugePages_Total:   65536\n", "HugePages_Total:       0\n"),
        "warning",
    ),
    Case(
        "iommu-translates",
        kernel(iommu_translates=True),
        kernel(iommu_translates=False),
        *files("/sys/kernel/iommu_groups/0/type", "DMA-FQ\n", "identity\n"),
        "warning",
    ),
    Case(
        "acs-on",
        planned(host(acs_bridges=("0000:00:01.0",))),
        planned(host(acs_bridges=())),
        World({"setpci": "echo 001d\n"}),
        World({"setpci": "echo 0000\n"}),
        "warning",
    ),
    Case(
        "clock-skew",
        planned(host(clock=Clock(-12.0, 0.05))),
        planned(host(clock=Clock(1.5, 0.3))),
        World({"ssh": "date -d '12 seconds ago' +%s\n"}),
        World({"ssh": "date +%s\n"}),
        "warning",
        "-12.00 s",
    ),
    Case(
        "linger-off",
        planned(host(is_root=False, has_linger=False)),
        planned(host(is_root=False, has_linger=True)),
        LINGER,
        LINGERS,
        "warning",
    ),
    Case(
        "python-missing",
        no_python(),
        GOOD,
        World({PYTHON: "echo Python 3.9.2\n"}),
        World({PYTHON: "echo Python 3.12.1\n"}),
        "red",
    ),
    Case(
        "sshd-sessions-few",
        sshd(max_sessions=2),
        sshd(max_sessions=10),
        *sshd_world("maxsessions 2", "maxsessions 10"),
        "red",
    ),
    Case(
        "sshd-startups-few",
        sshd(max_startups="2:30:10"),
        sshd(max_startups="10:30:100"),
        *sshd_world("maxstartups 2:30:10", "maxstartups 10:30:100"),
        "warning",
    ),
    Case(
        "sshd-forwarding-off",
        sshd(allows_forwarding=False),
        sshd(allows_forwarding=True),
        *sshd_world(
            "allowstreamlocalforwarding no", "allowstreamlocalforwarding yes\ndisableforwarding no"
        ),
        "red",
    ),
    Case(
        "inventory-readable",
        local("inventory", 0o644),
        local("inventory", 0o644, False),
        mode(644),
        mode(600),
        "red",
    ),
    Case(
        "ssh-key-open",
        local("ssh key", 0o640),
        local("ssh key", 0o600),
        mode(640),
        mode(600),
        "red",
    ),
    Case(
        "host-file-open",
        audited(files=(KeptFile("keys/host.key", 0o604, 0),)),
        audited(files=(KeptFile("keys/host.key", 0o600, 0),)),
        mode(604),
        mode(600),
        "red",
    ),
    Case(
        "certificate-ending",
        audited(certificates=(Certificate("end.crt", "CN=relay:a", NOW + 20 * 86400),)),
        audited(certificates=(Certificate("end.crt", "CN=relay:a", NOW + 400 * 86400),)),
        World(before=OPENSSL.format(20)),
        World(before=OPENSSL.format(400)),
        "warning",
        "20 days",
    ),
    Case(
        "ssh-config-differs",
        planned(ssh_differences=(SshDifference("a", "port", "22", "2222", SSH),)),
        GOOD,
        World(before="printf 'Host gpu-01\\n  Port 2222\\n' > config"),
        World(before="printf 'Host gpu-01\\n  User bob\\n' > config"),
        "warning",
    ),
)

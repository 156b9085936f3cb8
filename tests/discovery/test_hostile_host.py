"""Hosts that print what they should not, over OpenSSH's own server: what a person sees is clean, bounded and inert."""

import json
import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "lab"))

from hostlab.loopback import Loopback, why_no_sshd

pytestmark = [
    pytest.mark.skipif(why_no_sshd() is not None, reason="OpenSSH's sshd is not installed here"),
    pytest.mark.timeout(600),
]
NASTY = "\x1b[2J\x1b]0;owned\x07[bold red]$(touch {canary});`touch {canary}`\u202etxt\x9b31m"
SMI = r"""#!{python}
import sys
nasty = {nasty!r}
words = " ".join(sys.argv[1:])
if "query-gpu" in words:
    print("index, uuid, name, pci.bus_id, memory.total [MiB], memory.used [MiB], driver_version, mig.mode.current")
    print("0, GPU-00000000-0000-0000-0000-000000000000, " + nasty + ", 00000000:01:00.0, 81559, 4, " + nasty + ", Disabled")
    print("1, GPU-00000001-0000-0000-0000-000000000000, " + "A" * 2**20 + ", 00000000:02:00.0, 81559, 4, 570.1, Disabled")
elif "query-compute" in words:
    print("gpu_uuid, pid, process_name, used_gpu_memory [MiB]")
    print("GPU-00000000-0000-0000-0000-000000000000, 1, " + nasty + ", 4000")
elif words == "topo -m":
    print("\tGPU0\tGPU1\tNIC0\tCPU Affinity\nGPU0\t X \tNV4\tPIX\t" + nasty + "\nGPU1\tNV4\t X \tSYS\t" + "0" * 2**20)
    print("\nLegend:\n\nNIC Legend:\n\n  NIC0: " + nasty + "\n")
elif words == "-L":
    print("GPU 0: " + nasty + " (UUID: GPU-00000000-0000-0000-0000-000000000000)\n" + nasty)
elif "-x" in words:
    print("<?xml version='1.0'?><!DOCTYPE x [<!ENTITY a 'aaaa'><!ENTITY b '&a;&a;&a;&a;&a;&a;&a;&a;'>]><nvidia_smi_log><driver_version>&b;" + nasty + "</driver_version></nvidia_smi_log>")
else:
    sys.stdout.write(nasty * 100)
    sys.stderr.write(nasty * 100)
"""


@pytest.fixture(scope="module")
def host(tmp_path_factory):
    directory = tmp_path_factory.mktemp("evil")
    made = Loopback(["evil"], directory, {"evil": "hgx-h100"})
    with made:
        nasty = NASTY.replace("{canary}", str(directory / "canary"))
        tools = made.directory / "evil/gpus/bin"
        (tools / "nvidia-smi").write_text(SMI.replace("{python}", sys.executable).replace("{nasty!r}", repr(nasty)))  # fmt: skip
        for name in ("ibstat", "ibstatus", "ibv_devinfo", "ofed_info", "ucx_info", "nvidia-imex-ctl", "rdma", "uname"):  # fmt: skip
            (tools / name).write_text(f"#!{sys.executable}\nimport sys\nsys.stdout.write({nasty!r} * 50 + '\\n')\n")  # fmt: skip
            (tools / name).chmod(0o755)
        library = made.directory / "evil/gpus/lib/libnvidia-ml.so.1"
        library.unlink()
        path = directory / "inventory.yaml"
        path.write_text(
            "cluster: evil\nssh: {config: false, known_hosts: " + str(made.known_hosts) + "}\nhosts:\n"
            + "".join(f"  - {json.dumps(entry)}\n" for entry in made.entries)
        )  # fmt: skip
        yield made, path, directory


def test_what_is_shown_is_clean_and_bounded(host):
    made, inventory, directory = host
    done = made.dynctl("discover", "-i", str(inventory))

    shown = done.stdout + done.stderr
    assert done.returncode == 0, shown[-2000:]
    assert not [c for c in shown if not c.isprintable() and c != "\n"]
    assert len(shown) < 20_000
    assert max(len(line) for line in done.stdout.splitlines()) < 400
    assert "NV4" in shown
    assert not (directory / "canary").exists()


def test_the_document_holds_no_control_character_and_no_megabyte(host):
    made, inventory, directory = host
    done = made.dynctl("discover", "-i", str(inventory), "-o", "json")

    assert done.returncode == 0, done.stderr[-2000:]
    assert len(done.stdout) < 200_000
    texts = []

    def walk(value):
        if isinstance(value, dict):
            texts.extend(value)
            for item in value.values():
                walk(item)
        elif isinstance(value, list):
            for item in value:
                walk(item)
        elif isinstance(value, str):
            texts.append(value)

    said = json.loads(done.stdout)
    walk(said)
    assert not [text for text in texts if not text.isprintable()]
    assert max(map(len, texts)) <= 2000
    (described,) = said["hosts"]
    assert [gpu["index"] for gpu in described["gpus"]] == [0, 1]
    assert described["gpu_links"] == [["X", "NV4"], ["NV4", "X"]]
    assert not (directory / "canary").exists()

"""The closer look tells what is on a machine: read from played trees, from this machine, and from damage."""

import asyncio
import os
import random
import socket
import subprocess
import sys
from contextlib import contextmanager, suppress

import pytest

from dynctl import registry
from dynctl.core.audit import HostAudit, Reach
from dynctl.core.command import Command, Completed
from dynctl.core.inventory import HostEntry, Inventory
from dynctl.discovery.audit import AuditWish, audit
from dynctl.errors import ProbeError
from dynctl.remote.fleet import open_fleet

AUDITS = registry.load_all("dynctl.discovery.audits", "PROBE")
SAMPLES = {
    "listeners": (
        "listen 31 00000000:4967 0\nlisten 32 0100007F:1F40 1000\n"
        "listen 33 00000000000000000000000000000000:2049 0\nlisten 34 0000000000000000FFFF00000100000A:4968 0\n"
        "owner 31 77\nprocess 77\troot\t/r/lab\tpython -m vllm.entrypoints.cli.main serve /m\n"
    ),
    "tagged": "tagged 77\tinc1\t/r/lab\tpython -m dynctl.sim\ntagged 78\tinc2\t/r/old\tvllm\nagent /r/lab\n",
    "kernel": (
        "numa_balancing 1\nswappiness 60\nnodes 2\nmem HugePages_Total: 10\n"
        "mem Hugepagesize: 2048\nmem SwapTotal: 1000\nmem SwapFree: 400\niommu DMA-FQ\niommu identity\n"
    ),
    "files": "600 0 /r/lab/tls/host.key\n644 1000 /r/lab/secrets/a b\n",
    "models": "== yes /m/chat\nsize 700 ./config.json\nsize 9 ./a b.json\nsum 123 config.json\n== no /m/none\n",
    "reach": "relay\tb\t10.0.0.2\t18800\ttimeout\ttimed out\nrelay\ta\t10.0.0.1\t18800\topen\t\n",
}


def parsed(name, text):
    return AUDITS[name].parse(Completed(Command(("sh",)), 0, text.encode(), b""))


def look(wish, name="here"):
    inventory = Inventory("t", (HostEntry(name, "local"),))

    async def main():
        async with open_fleet(inventory.hosts, inventory.ssh) as fleet:
            return (await audit(fleet, {name: wish}))[name]

    found = asyncio.run(main())
    assert isinstance(found, HostAudit), found
    assert found.failures == ()
    return found


def test_listeners_know_address_process_and_kind():
    found = {at.port: at for at in parsed("listeners", SAMPLES["listeners"])}

    assert (found[0x4967].address, found[0x4967].pid, found[0x4967].root) == (
        "0.0.0.0",
        77,
        "/r/lab",
    )
    assert found[0x4967].is_engine
    assert (found[0x1F40].address, found[0x1F40].pid, found[0x1F40].user) == (
        "127.0.0.1",
        None,
        "uid 1000",
    )
    assert found[0x2049].address == "::"
    assert found[0x4968].address == "10.0.0.1"


def test_a_tagged_process_knows_whether_its_agent_runs():
    assert [(p.pid, p.is_agent_alive) for p in parsed("tagged", SAMPLES["tagged"])] == [
        (77, True),
        (78, False),
    ]


def test_kernel_settings_are_read():
    kernel = parsed("kernel", SAMPLES["kernel"])

    assert (kernel.numa_balancing, kernel.num_numa_nodes) == (1, 2)
    assert kernel.reserved_hugepages_bytes == 10 * 2048 * 1024
    assert (kernel.swap_total_bytes, kernel.swap_used_bytes) == (1000 * 1024, 600 * 1024)
    assert kernel.iommu_translates


def test_what_the_kernel_does_not_tell_is_unknown():
    kernel = parsed("kernel", "")

    assert (kernel.numa_balancing, kernel.iommu_translates, kernel.swap_total_bytes) == (
        None,
        None,
        None,
    )


def test_models_are_listed_with_sizes_and_checksums():
    first, second = parsed("models", SAMPLES["models"])

    assert dict(first.sizes_bytes) == {"config.json": 700, "a b.json": 9}
    assert first.digests == (("config.json", "123"),)
    assert not second.exists


@pytest.mark.parametrize("name", sorted(SAMPLES))
def test_damage_gives_a_value_or_a_named_error(name):
    chance = random.Random(name)
    for _ in range(1000):
        text = list(SAMPLES[name])
        for _ in range(chance.randint(1, 8)):
            at = chance.randrange(len(text) or 1)
            text[at : at + chance.randint(0, 20)] = chance.choices(
                "\t\n 0aé\x00|:/-", k=chance.randint(0, 4)
            )
        with suppress(ProbeError):  # anything else fails the test
            parsed(name, "".join(text))


def test_certificates_that_are_none_are_named():
    with pytest.raises(ProbeError, match="no certificate"):
        parsed("certificates", "== /r/tls/ca.crt\nnot a certificate\n")


@contextmanager
def listening():
    with socket.create_server(("127.0.0.1", 0)) as server:
        yield server.getsockname()[1]


def test_this_machine_shows_our_own_listener_and_process(tmp_path):
    process = subprocess.Popen(
        [sys.executable, "-c", "import time; time.sleep(600)"],
        env={**os.environ, "DYNCTL_INCARNATION": "inc9", "DYNCTL_ROOT": str(tmp_path)},
    )
    try:
        with listening() as port:
            found = look(AuditWish(str(tmp_path)))
    finally:
        process.kill()
        process.wait()

    ours = next(at for at in found.listeners if at.port == port)
    assert (ours.address, ours.pid) == ("127.0.0.1", os.getpid())
    tagged = next(p for p in found.tagged if p.pid == process.pid)
    assert (tagged.incarnation, tagged.root, tagged.is_agent_alive) == (
        "inc9",
        str(tmp_path),
        False,
    )


def test_this_machine_shows_files_certificates_and_models(tmp_path):
    (tmp_path / "tls").mkdir(mode=0o700)
    (tmp_path / "model").mkdir()
    (tmp_path / "model" / "config.json").write_text("{}")
    subprocess.run(
        "openssl req -x509 -newkey ec -pkeyopt ec_paramgen_curve:P-256 -nodes -keyout host.key -out host.crt "
        "-days 30 -subj /CN=relay:here && chmod 604 host.key",
        shell=True, cwd=tmp_path / "tls", check=True, capture_output=True,
    )  # fmt: skip
    found = look(AuditWish(str(tmp_path), models=(str(tmp_path / "model"), str(tmp_path / "none"))))

    modes = {file.path: file.mode for file in found.files}
    assert modes[f"{tmp_path}/tls/host.key"] == 0o604
    assert modes[f"{tmp_path}/tls"] == 0o700
    assert [c.subject for c in found.certificates] == ["CN=relay:here"]
    assert [m.exists for m in found.models] == [True, False]
    assert dict(found.models[0].digests)["config.json"].isdigit()


@pytest.mark.parametrize("python", [sys.executable, None], ids=["python", "bash"])
def test_reach_tells_open_from_refused(python):
    with listening() as port:
        with listening() as closed:
            pass
        wanted = (
            Reach("relay", "b", "127.0.0.1", port, ""),
            Reach("relay", "b", "127.0.0.1", closed, ""),
        )
        found = look(AuditWish("/nonexistent", python, reaches=wanted))

    assert {r.port: r.outcome for r in found.reaches} == {port: "open", closed: "refused"}


def test_hostile_names_stay_data(tmp_path):
    wish = AuditWish(
        f"{tmp_path}/$(touch {tmp_path}/owned)", models=(f"/tmp/'; touch {tmp_path}/owned; '",)
    )
    found = look(wish)

    assert not (tmp_path / "owned").exists()
    assert [m.exists for m in found.models] == [False]

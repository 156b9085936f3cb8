"""Discovery over a fleet: complete hosts beside failed ones, each with its cause; this machine for real."""

import asyncio
import json
import os

import pytest

from dynctl import registry
from dynctl.core.command import Completed
from dynctl.core.inventory import (
    DeploymentWish,
    EngineSpec,
    HostEntry,
    Inventory,
    PoolWish,
    SshSettings,
)
from dynctl.core.links import LinkBook, LinkHost, LinkKind, LinkMeasurement, LinkPoint
from dynctl.core.plan import Parallelism, Role
from dynctl.discovery.discover import discover
from dynctl.discovery.models import read_models
from dynctl.discovery.survey import survey
from dynctl.discovery.view import document
from dynctl.errors import CommandError, ConnectError, DynctlError, ExitCode, PlanError, TrustError
from dynctl.remote.fake import FakeRemote
from dynctl.remote.fleet import Fleet, open_fleet
from dynctl.store import to_json

MATRIX = (
    "\tGPU0\tGPU1\tCPU Affinity\tNUMA Affinity\nGPU0\t X \tNV4\t0-7\t0\nGPU1\tNV4\t X \t0-7\t0\n"
)
CSV = (
    "== gpus\n0, GPU-aaaaaaaa-1, NVIDIA A100-SXM4-80GB, 00000000:01:00.0, 81920, 4, 550.1, Disabled\n"
    "1, GPU-aaaaaaaa-2, NVIDIA A100-SXM4-80GB, 00000000:02:00.0, 81920, 4, 550.1, Disabled\n== processes\n== owners\n"
)
SYSTEM = (
    "host_name\tx\nmachine_id\tm\ncpus_nominal\t8\nmemory_kib\t1000000\nlibc\tglibc 2.36\narch\tx86_64\nuid\t0\n"
    "python\t/usr/bin/python3\t3.11.2\tcpython\nssh\t192.0.2.9 5000 10.0.0.5 22\n"
)
LLAMA = {
    "model_type": "llama",
    "hidden_size": 4096,
    "num_hidden_layers": 32,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "intermediate_size": 14336,
    "vocab_size": 128256,
    "max_position_embeddings": 131072,
}


def answer(**parts):
    """A host that answers the probe script with the given outputs."""
    silent = {
        name: (127, "")
        for name, p in registry.load_all("dynctl.discovery.probes", "PROBE").items()
        if p.script and p.needs
    }
    quiet = {
        "session": "memlock unlimited\nnofile 1024\n",
        "numa": "",
        "network": "",
        "software": "",
    }
    outputs = {**silent, **quiet, "nvidia_smi_csv": CSV, "nvidia_smi_topo": MATRIX, "system": SYSTEM, "pci": "", "infiniband": "", "nvidia_smi_list": "", **parts}  # fmt: skip

    def run(command):
        mark = command.stdin.split(b"\n", 1)[0].removeprefix(b"mark=").decode()
        text = "motd of the login shell\n"
        for name, out in outputs.items():
            status, body = out if isinstance(out, tuple) else (0, out)
            text += f"\n{mark} out {name} {status}\n{body}\n{mark} err {name}\n"
        return Completed(command, 0, (text + f"\n{mark} end\n").encode(), b"")

    return run


def fleet_of(**hosts):
    entries = [HostEntry(name, f"192.0.2.{i}") for i, name in enumerate(hosts, 1)]
    remotes = {
        name: host if isinstance(host, DynctlError | FakeRemote) else FakeRemote(name, {"sh": host})
        for name, host in hosts.items()
    }
    return entries, Fleet(entries, remotes)


def test_failed_hosts_are_named_with_their_cause_and_the_others_are_complete():
    entries, fleet = fleet_of(
        good=answer(),
        away=ConnectError("away: no route to host", "is it up?"),
        changed=TrustError("changed: the host key is not the known one"),
        broken=lambda command: Completed(command, 1, b"bye\n", b"out of memory"),
        hung=answer(nvidia_smi_csv=(124, "== gpus\n"), nvidia_smi_topo=(124, "")),
    )

    topology = asyncio.run(discover(entries, fleet))

    assert [host.name for host in topology.hosts] == ["good", "hung"]
    assert {f.name: f.exit_code for f in topology.failures} == {
        "away": 4,
        "changed": 7,
        "broken": 1,
    }
    causes = {f.name: f.cause for f in topology.failures}
    assert "no route" in causes["away"]
    assert "out of memory" in causes["broken"]
    good, hung = topology.hosts
    assert good.nvlink_islands == ((0, 1),)
    assert "gpu-timeout" in [w.code for w in hung.warnings]
    assert hung.python == "/usr/bin/python3"


def test_a_probe_that_prints_rubbish_fails_alone():
    entries, fleet = fleet_of(a=answer(nvidia_smi_topo="<html>nothing</html>"))

    (host,) = asyncio.run(discover(entries, fleet)).hosts

    assert len(host.gpus) == 2
    assert [w.code for w in host.warnings if w.code == "probe-failed"] == ["probe-failed"]


def test_the_json_document_has_its_stable_keys():
    entries, fleet = fleet_of(a=answer())

    text = to_json(document(asyncio.run(discover(entries, fleet))))

    (host,) = json.loads(text)["hosts"]
    assert host["gpu_links"] == [["X", "NV4"], ["NV4", "X"]]
    assert host["nvlink_islands"] == [[0, 1]]
    assert host["tp_groups"] == {"2": [[0, 1]]}
    assert {"index", "uuid", "name", "memory_bytes", "pci_bus_id", "numa_node", "nearest_nics", "state"} <= set(host["gpus"][0])  # fmt: skip
    assert all(
        {"name", "kind", "state", "rate_gbit_s", "numa_node"} <= set(n) for n in host["nics"]
    )
    assert all(set(w) == {"code", "text"} for w in host["warnings"])


def test_measured_links_stand_in_the_document_with_their_date_and_others_as_unmeasured():
    entries, fleet = fleet_of(a=answer(), b=answer())
    topology = asyncio.run(discover(entries, fleet))
    hosts = tuple(LinkHost(h.name, h.machine_id, h.data_address) for h in topology.hosts)
    point = LinkPoint(1 << 20, 1, 100, 1e9, 1e9, 9e8, 8e8)
    book = LinkBook(
        hosts, (LinkMeasurement("a", "b", LinkKind.TCP, 1700000000.0, points=(point,)),)
    )

    said = document(topology.with_links(book))

    (link,) = said["links"]
    assert (link["source"], link["target"], link["measured_unix_s"], link["bytes_s"]) == ("a", "b", 1700000000.0, 1e9)  # fmt: skip
    assert said["unmeasured_links"] == [["b", "a"]]


def test_this_machine_is_described_for_real():
    async def main():
        entries = [HostEntry("here", "local", cpu_slots=2)]
        async with open_fleet(entries, SshSettings()) as fleet:
            return await discover(entries, fleet)

    topology = asyncio.run(main())

    (host,) = topology.hosts
    assert topology.failures == ()
    assert host.is_local
    assert host.data_address == "127.0.0.1"
    assert host.num_cpus >= 1
    assert host.is_root == (os.getuid() == 0)
    assert host.python
    assert not [w for w in host.warnings if w.code == "probe-failed"]


def inventory_of(entries, **change):
    engine = change.pop("engine", EngineSpec("vllm"))
    wish = DeploymentWish("chat", "/m/llama", engine, **change)
    return Inventory("lab", tuple(entries), (wish,))


def models_of(files, **change):
    entries, fleet = fleet_of(
        **{name: FakeRemote(name, {"sh": answer()}, content) for name, content in files.items()}
    )
    inventory = inventory_of(entries, **change)

    async def main():
        topology = await discover(entries, fleet)
        return await read_models(inventory, topology, fleet)

    return asyncio.run(main())


CONFIG = json.dumps(LLAMA).encode()


def test_models_are_read_from_the_hosts():
    found = models_of({"a": {"/m/llama/config.json": CONFIG}})

    assert found["chat"].num_params == pytest.approx(8.03e9, rel=0.01)


@pytest.mark.parametrize(
    ("files", "said"),
    [
        ({"a": {"/m/llama/config.json": CONFIG}, "b": {}}, r"/m/llama/config\.json cannot be read on b"),
        ({"a": {"/m/llama/config.json": b"{"}}, r"a:/m/llama/config\.json is no JSON"),
        ({"a": {"/m/llama/config.json": CONFIG}, "b": {"/m/llama/config.json": CONFIG + b"\n"}}, "differs between a and b"),
        ({"a": {"/m/llama/config.json": b'{"model_type": "mamba"}'}}, "mamba is unknown"),
    ],
    ids=["missing", "no-json", "differs", "unknown"],
)  # fmt: skip
def test_a_model_that_cannot_be_read_names_host_and_path(files, said):
    with pytest.raises(PlanError, match=said) as caught:
        models_of(files)

    assert caught.value.exit_code is ExitCode.REFUSED
    assert caught.value.hint


@pytest.mark.parametrize(
    ("args", "num_bytes"),
    [((), 1), ((("kv_cache_dtype", "auto"),), 1), ((("kv_cache_dtype", "bfloat16"),), 2)],
)
def test_a_plan_takes_the_cache_to_be_as_wide_as_the_engine_will(args, num_bytes):
    """Engines follow what a checkpoint declares where no flag says otherwise, and so does `dynctl estimate`."""
    quant = {"quant_method": "modelopt", "quant_algo": "FP8", "kv_cache_quant_algo": "FP8"}
    content = json.dumps({**LLAMA, "quantization_config": quant}).encode()
    found = models_of(
        {"a": {"/m/llama/config.json": content}}, engine=EngineSpec("vllm", args=args)
    )

    assert found["chat"].kv_value_bytes == num_bytes
    assert found["chat"].kv_bytes_per_token == num_bytes * 2 * 32 * 8 * 128


def test_an_unknown_architecture_is_let_through_where_pools_are_written():
    pools = (PoolWish(Role.AGGREGATED, 1, Parallelism(2)),)

    found = models_of({"a": {"/m/llama/config.json": b'{"model_type": "mamba"}'}}, pools=pools)

    assert found == {"chat": None}


def test_a_file_that_only_other_hosts_lack_is_no_problem():
    pools = (PoolWish(Role.AGGREGATED, 1, hosts=("a*",)),)

    found = models_of({"a": {"/m/llama/config.json": CONFIG}, "b": {}}, pools=pools)

    assert found["chat"] is not None


@pytest.mark.parametrize(
    ("errors", "code"),
    [((ConnectError, CommandError), 4), ((ConnectError, TrustError), 7)],
)
def test_no_host_at_all_ends_with_every_cause(errors, code):
    hosts = {f"h{i}": error(f"h{i}: cause {i}") for i, error in enumerate(errors)}
    entries, fleet = fleet_of(**hosts)

    with pytest.raises(DynctlError, match="h0: cause 0\n  h1: cause 1") as caught:
        asyncio.run(survey(inventory_of(entries), fleet))

    assert caught.value.exit_code == code

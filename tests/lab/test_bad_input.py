"""What can be wrong from the start: each ends with the host, the cause and the next step, and nothing done.

The machines are real ones of the lab, so that the causes are what a kernel, an sshd or a driver says.
"""

import re
import subprocess
from collections.abc import Callable, Iterator

import pytest
from hostlab import gpu_files
from hostlab.cluster import fetch_wheels
from hostlab.gpus import PRESETS
from hostlab.lab import HostSpec, Lab, wait_until
from hostlab.operator_home import new_key

pytestmark = [pytest.mark.lab, pytest.mark.root, pytest.mark.timeout(600)]

SIM = {"name": "chat", "model": "sim-model", "engine": "sim"}


@pytest.fixture(scope="module")
def machines(make_lab: Callable[..., Lab]) -> Lab:
    """A host with two GPUs, one without, and one without Python."""
    lab = make_lab(
        HostSpec("box", gpus="l40s-pair"), HostSpec("head"), HostSpec("bare", has_python=False)
    )
    fetch_wheels(lab, "head")
    return lab


@pytest.fixture
def lab(machines: Lab) -> Iterator[Lab]:
    """The machines, with nothing of dynctl on them before the test or after it."""
    yield machines
    gpu_files.write_topology(machines["box"].root, PRESETS["l40s-pair"]("box"))
    (machines.home / "plan.yaml").unlink(missing_ok=True)
    left = machines.left_on_hosts()
    if left:
        inventory(machines, "box", "head")
        machines.dynctl("down", "--yes", "--now")
    assert left == {}


def inventory(lab: Lab, *names: str, deployments: object = (SIM,), **more: object) -> None:
    """Write an inventory of some of the machines."""
    kept, lab.entries = lab.entries, [e for e in lab.entries if e["name"] in names]
    try:
        lab.write_inventory(deployments, **more)
    finally:
        lab.entries = kept


def refused(done: subprocess.CompletedProcess[str], code: int, *patterns: str) -> None:
    """Check the exit code, that all patterns are said in order, and that a next step is named."""
    said = done.stderr
    assert done.returncode == code, (done.returncode, said, done.stdout)
    assert "Traceback" not in said
    at = 0
    for pattern in patterns:
        found = re.compile(pattern, re.IGNORECASE | re.DOTALL).search(said, at)
        assert found is not None, f"{pattern!r} is not in: {said}"
        at = found.start()
    assert re.search(r"^\s*hint: \S", said, re.MULTILINE), said


def test_a_host_whose_name_is_unknown(lab: Lab) -> None:
    inventory(lab, "head", "box", hosts={"box": {"address": "nobody.invalid"}})
    refused(lab.dynctl("discover", "--limit", "box"), 4, "box", "resolve.*nobody.invalid")
    partial = lab.dynctl("discover")
    assert "head" in partial.stdout
    refused(partial, 3, "box", "nobody.invalid")
    refused(lab.dynctl("up", "--yes"), 4, "box", "nobody.invalid")
    assert lab.left_on_hosts() == {}


def test_a_host_that_does_not_answer(lab: Lab) -> None:
    inventory(
        lab,
        "box",
        hosts={"box": {"address": "10.88.0.99"}},
        ssh={"known_hosts": str(lab.known_hosts), "config": False, "connect_timeout_s": 4},
    )
    refused(lab.dynctl("up", "--yes"), 4, "box", "10.88.0.99")
    assert lab.left_on_hosts() == {}


def test_a_key_the_host_does_not_know(lab: Lab) -> None:
    new_key(lab.home / "other")
    inventory(lab, "head", hosts={"head": {"key": str(lab.home / "other")}})
    for command in (["discover"], ["up", "--yes"]):
        refused(lab.dynctl(*command), 4, "head", "ops|key|authentic|permission|login")
    assert lab.left_on_hosts() == {}


def test_a_key_file_that_is_missing(lab: Lab) -> None:
    inventory(lab, "head", hosts={"head": {"key": str(lab.home / "no-such-key")}})
    done = lab.dynctl("discover")
    assert done.returncode in {2, 4}
    assert "no-such-key" in done.stderr
    assert "Traceback" not in done.stderr


def test_a_host_key_that_has_changed(lab: Lab) -> None:
    known = lab.home / "changed_hosts"
    public = new_key(lab.home / "impostor")
    known.write_text(f"head,{lab['head'].address} {public}")
    inventory(lab, "head", ssh={"known_hosts": str(known), "config": False})
    before = known.read_text()
    for command in (["discover"], ["up", "--yes"]):
        refused(lab.dynctl(*command), 7, "head", "host key", "chang|differ|not the one")
    assert known.read_text() == before
    assert lab.left_on_hosts() == {}


def test_a_host_key_nobody_has_seen(lab: Lab) -> None:
    known = lab.home / "empty_hosts"
    known.write_text("")
    inventory(lab, "head", ssh={"known_hosts": str(known), "config": False})
    refused(lab.dynctl("discover"), 7, "head", "host key|SHA256")
    assert known.read_text() == ""
    accept = {"known_hosts": str(known), "config": False, "host_keys": "accept-new"}
    inventory(lab, "head", ssh=accept)
    assert lab.dynctl("discover").returncode == 0
    assert lab["head"].address in known.read_text() or "|1|" in known.read_text()


def test_a_host_without_python(lab: Lab) -> None:
    inventory(lab, "bare")
    refused(lab.dynctl("up", "--yes"), 4, "bare", r"python", r"3\.11")
    assert lab.left_on_hosts() == {}


def test_a_full_disk(lab: Lab) -> None:
    lab["head"].mount_small_disk("/srv/small", 8_000_000)
    inventory(lab, "head", hosts={"head": {"root": "/srv/small/dynctl"}})
    refused(lab.dynctl("up", "--yes"), 4, "head", "/srv/small", "free|space|full", "MiB|GiB|MB")
    assert lab.left_on_hosts() == {}
    assert lab["head"].run(["find", "/srv/small", "-mindepth", "1"]).stdout == ""
    lab["head"].run(["umount", "/srv/small"])


def test_a_directory_the_user_may_not_write(lab: Lab) -> None:
    inventory(lab, "head", hosts={"head": {"root": "/opt/not-mine"}})
    refused(lab.dynctl("up", "--yes"), 4, "head", "/opt/not-mine|/opt", "not writable")
    assert lab.left_on_hosts() == {}


def test_a_busy_port(lab: Lab) -> None:
    listen = "import socket, time\ns = socket.create_server(('127.0.0.1', 8000))\ntime.sleep(600)"
    lab["head"].run(["systemd-run", "--quiet", "--unit=squatter", "python3", "-c", listen])
    try:
        wait_until(lambda: ("127.0.0.1", 8000) in lab["head"].listening(), "the port is taken")
        inventory(lab, "head")
        refused(lab.dynctl("up", "--yes"), 4, "head", "8000", "in use|taken|busy|listen")
        left = lab["head"].processes("dynctl")
        assert left == []
        assert not (lab["head"].root / "home/ops/.dynctl").exists()
    finally:
        lab["head"].run(["systemctl", "stop", "squatter"])


def test_a_model_that_is_not_there(lab: Lab) -> None:
    engine = {"kind": "vllm", "python": "/usr/bin/python3"}
    wanted = {"name": "chat", "model": "/models/missing", "engine": engine}
    inventory(lab, "box", "head", deployments=[wanted])
    refused(lab.dynctl("plan"), 4, "/models/missing")
    refused(lab.dynctl("up", "--yes"), 4, "/models/missing")
    assert not (lab.home / "plan.yaml").exists()
    assert lab.left_on_hosts() == {}


def test_an_engine_that_needs_gpus_where_there_are_none(lab: Lab) -> None:
    engine = {"kind": "vllm", "python": "/usr/bin/python3"}
    wanted = {"name": "chat", "model": "/models/tiny", "engine": engine}
    lab["head"].write("/models/tiny/config.json", LLAMA)
    inventory(lab, "head", deployments=[wanted])
    refused(lab.dynctl("plan"), 4, "gpu")
    assert lab.left_on_hosts() == {}


def test_a_gpu_in_use_by_somebody_else(lab: Lab) -> None:
    lab["box"].write("/models/tiny/config.json", LLAMA)
    lab["box"].write("/models/tiny/model.safetensors", b"\0" * 64)
    engine = {"kind": "vllm", "python": "/usr/bin/python3"}
    pools = [{"role": "aggregated", "replicas": 2}]
    wanted = {"name": "chat", "model": "/models/tiny", "engine": engine, "pools": pools}
    inventory(lab, "box", "head", deployments=[wanted])
    done = lab.dynctl("plan")
    assert done.returncode == 0, done.stderr
    # Between plan and up somebody starts a job on the second GPU; PID 1 is a process the host really has.
    busy = PRESETS["l40s-pair-one-busy"]("box")
    gpu_files.write_topology(lab["box"].root, busy)
    refused(lab.dynctl("up", "--yes"), 4, "GPU 1", "box", "busy|in use", r"pid 1\b", "systemd")
    refused(lab.dynctl("plan", "--out", "other.yaml"), 4, "gpu")
    assert lab.left_on_hosts() == {}


def test_a_malformed_inventory_names_every_mistake_with_its_place(lab: Lab) -> None:
    (lab.home / "broken.yaml").write_text(
        "cluster: lab\n"
        "hosts:\n"
        "  - name: head\n"
        "    adress: 10.0.0.1\n"
        "    port: eighty\n"
        "deployments:\n"
        "  - name: chat\n"
        "    model: m\n"
        "    engine: warp\n"
    )
    done = lab.dynctl("up", "-i", "broken.yaml", "--yes")
    assert done.returncode == 2
    for place, word in (("4:5", "adress"), ("5:", "port"), ("9:", "warp")):
        assert re.search(rf"broken\.yaml:{place}.*{word}", done.stderr), (place, done.stderr)
    assert "address" in done.stderr  # did you mean
    assert "^" in done.stderr
    (lab.home / "cut.yaml").write_text("cluster: lab\nhosts: [head\n")
    done = lab.dynctl("config", "validate", "-i", "cut.yaml")
    assert done.returncode == 2
    assert re.search(r"cut\.yaml:\d+:\d+", done.stderr), done.stderr
    done = lab.dynctl("discover", "-i", "absent.yaml")
    assert done.returncode == 2
    assert "absent.yaml" in done.stderr


LLAMA = """{"architectures": ["LlamaForCausalLM"], "model_type": "llama", "hidden_size": 128,
 "intermediate_size": 384, "num_attention_heads": 4, "num_hidden_layers": 2, "num_key_value_heads": 2,
 "head_dim": 32, "max_position_embeddings": 8192, "vocab_size": 4096, "torch_dtype": "bfloat16",
 "tie_word_embeddings": false}
"""

"""`dynctl discover` and `dynctl plan` as an operator types them, on this machine."""

import json
import os
import subprocess
import sys

import pytest

from dynctl.cli.main import run

LLAMA = {
    "model_type": "llama", "hidden_size": 128, "num_hidden_layers": 2, "num_attention_heads": 4,
    "num_key_value_heads": 2, "intermediate_size": 256, "vocab_size": 4096, "max_position_embeddings": 8192,
}  # fmt: skip
INVENTORY = """\
cluster: here
hosts:
  - name: box
    address: local
    cpu_slots: {slots}
deployments:
  - name: chat
    model: {model}
    engine:
      kind: {kind}
{more}
"""


@pytest.fixture(autouse=True)
def elsewhere(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)


def inventory(tmp_path, kind="sim", model="m", slots=2, more=""):
    path = tmp_path / "inventory.yaml"
    path.write_text(INVENTORY.format(kind=kind, model=model, slots=slots, more=more))
    return path


def test_discover_prints_a_table_that_fits_and_json_with_its_schema(tmp_path, capsys):
    inventory(tmp_path)

    assert run(["discover"]) == 0
    table = capsys.readouterr().out
    assert run(["discover", "-o", "json"]) == 0
    document = json.loads(capsys.readouterr().out)

    assert "box" in table
    assert max(len(line.rstrip()) for line in table.splitlines()) <= 80
    assert document["schema"] == "dynctl.topology/1"
    assert document["hosts"][0]["name"] == "box"


def test_plan_writes_a_file_and_says_what_comes_next(tmp_path, capsys):
    inventory(tmp_path)

    assert run(["plan"]) == 0
    printed = capsys.readouterr()

    assert "chat-aggregated-0" in printed.out
    assert "next: dynctl up" in printed.err
    assert (tmp_path / "plan.yaml").exists()


def test_a_second_plan_changes_nothing_and_exit_codes_tell(tmp_path, capsys):
    inventory(tmp_path)

    assert run(["plan", "--detailed-exitcode"]) == 10
    first = (tmp_path / "plan.yaml").read_bytes()
    assert run(["plan", "--detailed-exitcode"]) == 0

    assert (tmp_path / "plan.yaml").read_bytes() == first


def test_an_edited_plan_is_kept_when_a_new_one_is_made(tmp_path, capsys):
    inventory(tmp_path)
    run(["plan"])
    path = tmp_path / "plan.yaml"
    path.write_text(path.read_text().replace("relay_port: 18800", "relay_port: 18900"))

    assert run(["plan"]) == 0

    assert "relay_port: 18900" in (tmp_path / "plan.yaml.edited").read_text()
    assert "kept as" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("out", "why"),
    [
        ("new/dir/plan.yaml", "there is no directory {}/new/dir"),
        ("here", "--out here is a directory"),
        ("/dev/null", "--out /dev/null is no file"),
        ("pipe", "--out pipe is no file"),
        ("/dev/fd/{pipe}", "is no file"),
        ("a" * 300, "File name too long"),
        ("inventory.yaml/plan.yaml", "there is no directory {}/inventory.yaml"),
    ],
)
def test_where_no_plan_can_be_written_is_said_before_hosts_are_asked(tmp_path, capsys, out, why):
    inventory(tmp_path, kind="vllm", model="/nowhere/m", more="      python: /usr/bin/python3")
    (tmp_path / "here").mkdir()
    os.mkfifo(tmp_path / "pipe")
    ends = os.pipe()

    assert run(["plan", "--out", out.format(pipe=ends[1])]) == 2

    assert why.format(tmp_path) in capsys.readouterr().err
    assert not (tmp_path / "new").exists()
    for end in ends:
        os.close(end)


@pytest.mark.parametrize("output", ["json", "yaml"])
def test_plan_prints_for_programs_on_stdout_alone(tmp_path, capsys, output):
    inventory(tmp_path)

    assert run(["plan", "-o", output, "--out", "other.yaml"]) == 0

    out, told = capsys.readouterr()
    assert "wrote other.yaml; next: dynctl up other.yaml\n" in told
    if output == "json":
        assert json.loads(out)["schema"] == "dynctl.plan/1"
    else:
        assert out == (tmp_path / "other.yaml").read_text()


def test_gpu_engines_without_gpus_are_refused_with_exit_4(tmp_path, capsys):
    inventory(tmp_path, kind="vllm", model=str(tmp_path), more="      python: /opt/vllm/bin/python")
    (tmp_path / "config.json").write_text(json.dumps(LLAMA))

    assert run(["plan"]) == 4

    assert "needs GPUs and no host has one" in capsys.readouterr().err
    assert not (tmp_path / "plan.yaml").exists()


def test_a_missing_model_names_host_and_path(tmp_path, capsys):
    inventory(
        tmp_path,
        kind="vllm",
        model="/nowhere/m",
        more="      device: cpu\n      python: /usr/bin/python3",
    )

    assert run(["plan"]) == 4

    told = capsys.readouterr().err
    assert "/nowhere/m/config.json" in told
    assert "box" in told


def test_a_model_on_cpu_slots_is_planned_from_its_config(tmp_path, capsys):
    inventory(
        tmp_path,
        kind="vllm",
        model=str(tmp_path),
        more="      device: cpu\n      python: /usr/bin/python3",
    )
    (tmp_path / "config.json").write_text(json.dumps(LLAMA))

    assert run(["plan"]) == 0

    assert "no figures for CPUs" in capsys.readouterr().out


def test_local_needs_no_file(tmp_path, capsys):
    assert run(["plan", "--local"]) == 0

    assert "prefill" in capsys.readouterr().out
    assert (tmp_path / ".dynctl" / "local" / "plan.yaml").exists()


def test_planning_loads_neither_textual_nor_a_tokenizer():
    code = (
        "import sys, dynctl.planner.search, dynctl.planner.text, dynctl.discovery.survey\n"
        "print([m for m in ('textual', 'tokenizers', 'zmq', 'asyncssh', 'rich') if m in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, check=True, text=True)

    assert done.stdout.strip() == "[]"

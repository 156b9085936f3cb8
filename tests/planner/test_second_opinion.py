"""`plan --predictor`: another predictor is asked in its own environment, and the plan stands whatever becomes of it."""

import json
import sys
from pathlib import Path

import pytest

from dynctl.cli.main import run
from dynctl.cli.second_opinion import CHILD
from dynctl.core.plan import Figure
from dynctl.core.workload import Slo, Workload
from dynctl.planner.opinion import Asked, Question, compare, questions
from dynctl.planner.search import make_plan

HOST = "  - {name: gpu-1, address: local, root: ROOT, simulated_gpus: {count: 8, name: NVIDIA H200, memory: 141 GiB}}"
LIBRARY = """
import sys
def cli_estimate(**call):
    print("a banner that is no answer")
    if call["tp_size"] > 4:
        raise ValueError("no table\\nfor this")
    config = open(call["model_path"] + "/config.json").read()
    assert "LlamaForCausalLM" in config
    class Found:
        ttft, tpot, tokens_per_second_per_gpu, backend_version = 100.0, 20.0, 300.0, "0.24.0"
    return Found
"""


def program(path: Path, body: str) -> Path:
    """A program that stands for the other environment's Python."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(f"#!{sys.executable}\nimport sys, json, time, os, subprocess\n{body}\n")
    path.chmod(0o755)
    return path


def environment(tmp_path: Path) -> Path:
    """An environment with a library of that name, which runs the real child program."""
    package = tmp_path / "lib" / "aiconfigurator" / "cli"
    package.mkdir(parents=True)
    for init in (package, package.parent):
        (init / "__init__.py").write_text("")
    (package / "api.py").write_text(LIBRARY)
    facts = tmp_path / "lib" / "aiconfigurator-9.9.dist-info"
    facts.mkdir()
    (facts / "METADATA").write_text("Metadata-Version: 2.1\nName: aiconfigurator\nVersion: 9.9\n")
    body = (
        f"sys.path.insert(0, {str(tmp_path / 'lib')!r})\nimport runpy\n"
        "assert sys.argv[1] == '-I'\nrunpy.run_path(sys.argv[2], run_name='__main__')"
    )
    program(tmp_path / "env" / "bin" / "python", body)
    return tmp_path / "env"


@pytest.fixture
def inventory(tmp_path, build):
    model = tmp_path / "llama-8b"
    model.mkdir()
    config = build.configs["llama-8b"] | {"architectures": ["LlamaForCausalLM"]}
    (model / "config.json").write_text(json.dumps(config))
    file = tmp_path / "inventory.yaml"
    file.write_text(
        "cluster: lab\nhosts:\n"
        + HOST.replace("ROOT", str(tmp_path / "root"))
        + f"\ndeployments:\n  - {{name: chat, model: {model}, engine: {{kind: vllm, python: /v/bin/python}}, "
        "workload: {isl_tokens: 2048, osl_tokens: 256, rate_rps: 2}}\n"
    )
    return file


def plan(inventory, python, capsys, *more):
    code = run(
        ["plan", "-i", str(inventory), "--predictor", "aiconfigurator", "--predictor-python", str(python), *more]
    )  # fmt: skip
    said = capsys.readouterr()
    return code, said.out, said.err


def test_both_are_shown_with_the_gap(inventory, tmp_path, capsys):
    code, out, _ = plan(inventory, environment(tmp_path), capsys)

    assert code == 0
    assert "aiconfigurator 9.9, tables of vllm 0.24.0" in out
    (row,) = [line.split() for line in out.splitlines() if line.startswith("TPOT ms")]
    ours, theirs, gap = float(row[2]), float(row[6]), row[7]
    assert theirs == 20
    assert gap == f"{20 / ours - 1:+.0%}" or abs(float(gap.rstrip("%")) / 100 - (20 / ours - 1)) < 0.02  # fmt: skip


def test_json_holds_the_opinion_in_numbers(inventory, tmp_path, capsys):
    code, out, _ = plan(inventory, environment(tmp_path), capsys, "-o", "json")

    (opinion,) = json.loads(out)["second_opinions"]
    assert (code, opinion["deployment"], opinion["error"]) == (0, "chat", "")
    assert {each["figure"]: each["theirs"] for each in opinion["compared"]} == {
        "ttft_ms": 100.0,
        "tpot_ms": 20.0,
        "out_tok_s_per_gpu": 300.0,
    }


@pytest.mark.parametrize(
    ("body", "said"),
    [
        ("sys.stderr.write('no table\\nlicence ended\\n'); sys.exit(3)", "failed (exit 3): licence ended"),
        ("os.kill(os.getpid(), 11)", "failed (signal 11)"),
        ("print('Python 3.11 welcomes you')", "something else than asked: 'Python 3.11 welcomes you"),
        ("print('[1, 2]')", "something else than asked"),
        ("print(json.dumps({'answers': 7}))", "something else than asked"),
    ],
)  # fmt: skip
def test_what_goes_wrong_there_is_said_and_the_plan_stands(inventory, tmp_path, capsys, body, said):
    code, out, err = plan(inventory, program(tmp_path / "python", body), capsys)

    assert code == 1
    assert said in err
    assert "verdict  single engine" in out
    assert (tmp_path / "plan.yaml").exists()


def test_an_environment_without_the_library_says_how_to_install_it(inventory, tmp_path, capsys):
    code, _, err = plan(inventory, sys.executable, capsys)

    assert code == 1
    assert "cannot be used there: ModuleNotFoundError" in err
    assert "pip install aiconfigurator==" in err


def test_one_that_hangs_is_ended_with_all_it_started(inventory, tmp_path, capsys, ended):
    pid_file = tmp_path / "pid"
    body = (
        "child = subprocess.Popen(['sleep', '600'])\n"
        f"open('{pid_file}.new', 'w').write(str(child.pid))\n"
        f"os.rename('{pid_file}.new', '{pid_file}')\n"
        "time.sleep(600)"
    )
    python = program(tmp_path / "python", body)
    for timeout_s in (3, 60):  # until it got as far as to its child
        code, _, err = plan(inventory, python, capsys, "--predictor-timeout", str(timeout_s))
        assert code == 1
        assert f"no answer within {timeout_s} s" in err
        if pid_file.exists():
            break

    ended(int(pid_file.read_text()))


@pytest.mark.parametrize("python", [None, "/does/not/exist", "/etc/passwd"])
def test_without_a_program_it_ends_before_anything_is_done(inventory, tmp_path, capsys, python):
    flags = ["--predictor-python", python] if python else []
    code = run(["plan", "-i", str(inventory), "--predictor", "aiconfigurator", *flags])

    assert code == 2
    assert "python3 -m venv" in capsys.readouterr().err
    assert not (tmp_path / "plan.yaml").exists()


def test_the_child_does_not_import_us():
    assert "import dynctl" not in CHILD.read_text()
    assert "from dynctl" not in CHILD.read_text()


def test_pools_of_both_roles_are_one_question(build):
    wish = build.wish("llama-70b", workload=Workload(8192, 256, 3.0), slo=Slo(3000, 30))
    hosts = [build.host(f"g{i}", 8, "h200", nics=True) for i in range(4)]
    topology, inventory, models = build.cluster(hosts, wish)
    made = make_plan(topology, inventory, models)
    (question,) = questions(made, topology, inventory, models).questions
    prefill, decode = made.deployments[0].pools

    assert question.call["mode"] == "disagg"
    assert question.call["prefill_num_workers"] == len(prefill.replicas)
    assert question.call["decode_tp_size"] == decode.parallelism.tp
    assert set(question.ours) == {"ttft_ms", "tpot_ms", "out_tok_s_per_gpu"}


def test_a_gpu_without_tables_is_left_out_with_the_reason(build):
    ground = build.cluster([build.host("a", 1, "4090")], build.wish("llama-8b"))
    asked = questions(make_plan(*ground), *ground)

    assert asked.questions == []
    assert asked.left_out[0].error == "it has no tables for rtx-4090"


@pytest.mark.parametrize("answer", [{}, {"ttft_ms": "7"}, {"tpot_ms": float("nan")}, {"tpot_ms": -1.0}])  # fmt: skip
def test_an_answer_without_numbers_is_no_opinion(answer):
    ours = {name: Figure(1, 2, 3, "") for name in ("ttft_ms", "tpot_ms", "out_tok_s_per_gpu")}
    asked = Asked([Question("q", "chat", "1 × tp1", 4, {}, ours)])

    (opinion,) = compare(asked, "x", {"q": answer})

    assert (opinion.compared, opinion.error) == ((), "no number in its answer")

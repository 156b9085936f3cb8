"""Cases of the checks of engines, their environments, models and settings, and of what agents report.

Interpreters are the test's own; packages are played by directories with metadata on PYTHONPATH.
"""

import sys

from checkcases.build import (
    PYTHON,
    audited,
    eth,
    host,
    nic,
    planned,
    software,
    status,
    unit,
    wish,
)
from checkcases.world import Case, World, says

from dynctl.checks.evidence import CacheFinding
from dynctl.core.audit import HostAudit, ModelFiles, NixlLoad
from dynctl.core.deployment import EngineState
from dynctl.core.machine import EngineSoftware
from dynctl.core.units import GIB

GOOD = planned()
ROOT = "/root/.dynctl/lab"


def engines(*packages, **change):
    return planned(host(software=software(packages, **change)))


def python(**packages):
    """An interpreter at the engine's path that has these packages."""
    lines = [
        f"mkdir -p site/{n} site/{n}-{v}.dist-info; : > site/{n}/__init__.py; printf 'Metadata-Version: 2.1\\nName: {n}\\nVersion: {v}\\n' > site/{n}-{v}.dist-info/METADATA"
        for n, v in packages.items()
    ]
    return World(
        files={PYTHON: ""},
        before="\n".join(
            [
                "mkdir -p site",
                *lines,
                f"export PYTHONPATH=$PWD/site; ln -sf '{sys.executable}' \"$PWD{PYTHON}\"",
            ]
        ),
    )


def inventory(text):
    return World(before=f"cat > inventory.yaml <<'END'\n{text}\nEND")


def models(a, b):
    base = planned()
    return planned(
        audits={"a": HostAudit(models=(a,)), "b": HostAudit(models=(b,))},
        wishes=base.inventory.deployments,
    )


def model(exists=True, size=GIB, **digests):
    sizes = (("config.json", 700), ("model.safetensors", size), ("tokenizer.json", 9000))
    return ModelFiles(
        "/models/chat",
        exists,
        sizes if exists else (),
        tuple(sorted({"config.json": "1", **digests}.items())) if exists else (),
    )


def args(*pairs, **change):
    return planned(wishes=(wish(args=pairs, **change),))


def env(*pairs, args=()):
    return planned(wishes=(wish(env=pairs, args=args),))


def agents(*units, on="a", silent=None, cache_findings=(), **change):
    return planned(
        agents={on: status(*units, **change)},
        silent_agents=silent or {},
        cache_findings=cache_findings,
        bundles={"a": "b1"},
    )


def ssh(a, b):
    return World({"ssh": f'case "$*" in *192.168.0.1*) echo {a} ;; *) echo {b} ;; esac\n'})


BARE = software((), engines=(EngineSoftware(PYTHON, None, (), "No such file or directory"),))
NO_TOKENIZER = ModelFiles("/models/chat", True, (("config.json", 1), ("model.safetensors", 2)), ())
NOT_THERE = ModelFiles("/models/chat", False)
FULL = {"/models/chat/config.json": "{}", "/models/chat/tokenizer.json": "{}"}
SOCKET = {f"{ROOT}/agent.socket-path": "/run/agent.sock"}
RUNS = {"/proc/999/environ": "DYNCTL_INCARNATION=abc123\0"}
BUNDLE = "HOME=/root\0PYTHONPATH=/root/.dynctl/lab/bundles/{}\0"
LOG = {f"{ROOT}/logs/chat-prefill-0.log": "CUDA out of memory\n"}
NEVER_HIT = CacheFinding(
    *("a", "chat-router", "chat-0", "topic"),
    *("its KV events have a topic nobody subscribes to", "give the same topic on both sides"),
)
SLOW = CacheFinding(
    *("a", "chat-router", "", "slow_decisions"),
    *("9 of 400 decisions took more than 2 ms", "give the router a core of its own"),
)
SAYS_SLOW = '[{"engine":"","cause":"slow_decisions","text":"t","hint":"h"}]'
FOUND = '[{"engine":"chat-0","cause":"topic","text":"t","hint":"h"}]'
CURL = '{{"version":"0.1.0","degraded":[{}]}}'


def process_table(age):
    return World({"ps": f"echo ' {age}'\n" if age is not None else "exit 1\n"})


BROKEN = "raise ImportError('libucp.so.0: cannot open shared object file')"
WORKING = "nixl_agent_config = dict\nnixl_agent = lambda *a: None"


def nixl(api):
    """An interpreter whose NIXL is this."""
    base = python(nixl="1.5.1")
    return World(
        files=base.files, before=f"{base.before}\ncat > site/nixl/_api.py <<'END'\n{api}\nEND"
    )


def fabrics(a, b):
    return World({"ssh": f'case "$*" in *192.168.0.1*) echo {a} ;; *) echo {b} ;; esac\n'})


FAILED = NixlLoad(PYTHON, "failed", "libucp.so.0: cannot open shared object file")
OLD_PYTHON = software(
    engines=(EngineSoftware(PYTHON, "3.11.9", (("vllm", "0.33.0"), ("nixl", "1.5.1"))),)
)

CASES = (
    Case(
        "nixl-broken",
        audited(nixl=(FAILED,)),
        audited(nixl=(NixlLoad(PYTHON, "works"), NixlLoad("/b", "timeout"))),
        nixl(BROKEN),
        nixl(WORKING),
        "red",
        "libucp",
    ),
    Case(
        "python-differs",
        planned(host(software=OLD_PYTHON)),
        GOOD,
        ssh("Python 3.11.9", "Python 3.12.3"),
        ssh("Python 3.12.3", "Python 3.12.3"),
        "warning",
    ),
    Case(
        "transfer-fabric-differs",
        planned(host(nics=(nic(kind="roce"), eth()))),
        GOOD,
        fabrics("Ethernet", "InfiniBand"),
        fabrics("InfiniBand", "InfiniBand"),
        "red",
    ),
    Case("engine-python-missing", planned(host(software=BARE)), GOOD, World(), python(), "red"),
    Case(
        "engine-missing",
        engines(("torch", "2.9.0")),
        GOOD,
        python(torch="2.9.0"),
        python(vllm="0.33.0"),
        "red",
    ),
    Case(
        "nixl-missing",
        engines(("vllm", "0.33.0")),
        GOOD,
        python(vllm="0.33.0"),
        python(vllm="0.33.0", nixl="1.5.1"),
        "red",
    ),
    Case(
        "vllm-below-floor",
        engines(("vllm", "0.29.1"), ("nixl", "1.5.1")),
        GOOD,
        python(vllm="0.29.1"),
        python(vllm="0.33.0"),
        "red",
        "CVE-2026-114051",
    ),
    Case(
        "versions-differ",
        engines(("vllm", "0.33.0"), ("nixl", "1.4.0"), ("torch", "2.9.0+cu128")),
        GOOD,
        ssh("1.4.0", "1.5.1"),
        ssh("1.5.1", "1.5.1"),
        "red",
        "nixl",
    ),
    Case(
        "model-missing",
        models(NOT_THERE, model()),
        models(model(), model()),
        World(files={"/models/other": ""}),
        World(files=FULL),
        "red",
    ),
    Case(
        "model-differs",
        models(model(size=2 * GIB), model()),
        models(model(), model()),
        ssh("111 5", "222 5"),
        ssh("111 5", "111 5"),
        "red",
        "model.safetensors",
    ),
    Case(
        "tokenizer-missing",
        models(NO_TOKENIZER, NO_TOKENIZER),
        models(model(), model()),
        World(files={"/models/chat/config.json": "{}"}),
        World(files=FULL),
        "red",
    ),
    Case(
        "kv-recompute-set",
        args(("kv-load-failure-policy", "recompute")),
        args(("kv-load-failure-policy", "fail")),
        inventory("args: {kv-load-failure-policy: recompute}"),
        inventory("args: {}"),
        "warning",
    ),
    Case(
        "kv-events-missing",
        args(kind="external"),
        args(("kv-events", "tcp://127.0.0.1:5557"), kind="external"),
        inventory("engine: {kind: external}"),
        inventory("args: {kv-events: tcp://x}"),
        "warning",
    ),
    Case(
        "hash-seed-fixed",
        env(("PYTHONHASHSEED", "0"), args=(("prefix-caching-hash-algo", "builtin"),)),
        env(("PYTHONHASHSEED", "0")),
        inventory("env: {PYTHONHASHSEED: '0'}"),
        inventory("env: {}"),
        "red",
    ),
    Case(
        "remote-code-trusted",
        args(("trust-remote-code", "")),
        args(),
        inventory("args: {trust-remote-code: ''}"),
        inventory("args: {}"),
        "red",
    ),
    Case(
        "client-package-old",
        planned(local_packages={"asyncssh": "2.20.0"}, python=PYTHON),
        planned(local_packages={"asyncssh": "2.24.1"}),
        python(asyncssh="2.20.0"),
        python(asyncssh="2.24.1"),
        "red",
    ),
    Case(
        "agent-silent",
        agents(silent={"b": "no agent of cluster lab here"}),
        agents(),
        World({"pgrep": "exit 1\n"}),
        World({"pgrep": "echo 4242 python -m dynctl.agents\n"}),
        "red",
    ),
    Case(
        "agent-degraded",
        agents(degraded=("cannot write its state: disk full",)),
        agents(),
        World({"curl": says(CURL.format('"cannot write its state"'))}, SOCKET),
        World({"curl": says(CURL.format(""))}, SOCKET),
        "warning",
        "disk full",
    ),
    Case(
        "kv-hits-missing",
        agents(cache_findings=(NEVER_HIT,)),
        agents(),
        World({"curl": says(FOUND)}, SOCKET),
        World({"curl": says("[]")}, SOCKET),
        "warning",
        "a topic nobody",
    ),
    Case(
        "router-degraded",
        agents(cache_findings=(NEVER_HIT, SLOW)),
        agents(cache_findings=(NEVER_HIT,)),
        World({"curl": says(SAYS_SLOW)}, SOCKET),
        World({"curl": says(FOUND)}, SOCKET),
        "warning",
        "9 of 400",
    ),
    Case(
        "agent-outdated",
        agents(bundle="old"),
        agents(),
        World(files={"/proc/4242/environ": BUNDLE.format("old")}),
        World(files={"/proc/4242/environ": BUNDLE.format("b1")}),
        "warning",
    ),
    Case(
        "unit-failed",
        agents(unit(state=EngineState.FAILED, last_error="CUDA out of memory", num_restarts=5)),
        agents(unit()),
        World(files=LOG | {"/proc/999/environ": "X=1\0"}),
        World(files=LOG | RUNS),
        "red",
        "CUDA out of memory",
    ),
    Case(
        "unit-restarting",
        agents(unit(num_restarts=4, last_error="killed by signal 9")),
        agents(unit(num_restarts=1)),
        process_table(12),
        process_table(90000),
        "warning",
    ),
    Case(
        "unit-unready",
        agents(),
        agents(unit()),
        World(files={f"{ROOT}/slice.json": "{}"}),
        World(files={f"{ROOT}/slice.json": '{"engines":[{"id":"chat-prefill-0"}]}'}),
        "warning",
    ),
    Case(
        "plan-not-applied",
        agents(unit(), plan_digest="sha256:2222"),
        agents(unit()),
        World(files={f"{ROOT}/slice.json": '{"plan_digest":"sha256:2222"}'}),
        World(files={f"{ROOT}/slice.json": '{"plan_digest":"sha256:1111"}'}),
        "info",
    ),
)

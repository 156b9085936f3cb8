"""The rival routers: how they are installed, once, and with which flags each stands before the same engines.

Versions, packages and flags are those of the peers measurement. Every rival has a virtual environment of its own below
one folder; one that cannot be had is left out, with a line that says so.
"""

import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

BLOCK_SIZE = 16


@dataclass(frozen=True)
class Rival:
    """A router and how to get it."""

    name: str
    program: str
    """Exists below its environment once it is installed."""
    installs: tuple[tuple[str, ...], ...]
    """Arguments of `pip install`, one call each."""


RIVALS = {
    rival.name: rival
    for rival in (
        Rival("sglang", "bin/python", (("sglang-router==0.3.2",),)),
        Rival("smg", "bin/smg", (("smg==1.13.0",),)),
        Rival("vllm-router", "bin/vllm-router", (("vllm-router==0.1.17",),)),
        # Its metadata names a package that the registry holds only as a stub; frontend and KV router run without it, so
        # what else they need is named here.
        Rival(
            "dynamo",
            "bin/python",
            (
                ("ai-dynamo-runtime==1.6.1",),
                ("--no-deps", "ai-dynamo==1.6.1"),
                (
                    *("aiohttp<4", "certifi", "kubernetes<33,>=32.0.1", "msgspec>=0.19"),
                    *("prometheus-client<1,>=0.23.1", "pyzmq>=26", "redis<9,>=6.2", "tqdm"),
                    *("transformers>=4.56", "uvloop>=0.19", "zstandard<1,>=0.23"),
                ),
            ),
        ),
    )
}

FOLDERS = {"vllm-router": "router"}
"""Where the harness's own script puts it, so that one installation serves both."""


def environment(folder, name):
    return Path(folder) / FOLDERS.get(name, name)


def install(folder):
    """Install what is missing; the names of those that are there."""
    present = []
    for name, rival in RIVALS.items():
        place = environment(folder, name)
        if not (place / rival.program).exists() or (place / ".unfinished").exists():
            print(f"installing {rival.installs[0][-1]} in {place}", flush=True)
            failure = _install(place, rival)
            if failure:
                print(f"{name}: left out, it cannot be installed: {failure}")
                continue
        present.append(name)
    return present


def _install(place, rival):
    place.mkdir(parents=True, exist_ok=True)
    (place / ".unfinished").touch()
    steps = [[sys.executable, "-m", "venv", place]]
    pip = [place / "bin/python", "-m", "pip", "install", "--quiet", "--disable-pip-version-check"]
    steps += [[*pip, *arguments] for arguments in rival.installs]
    for step in steps:
        done = subprocess.run(step, capture_output=True, text=True, check=False)
        if done.returncode:
            lines = (done.stderr or done.stdout).strip().splitlines()
            return lines[-1] if lines else f"{step[0]} ended with {done.returncode}"
    (place / ".unfinished").unlink()
    return ""


def command(folder, name, policy, port, engine_ports, kv_ports):
    """A rival's command line before engines that speak HTTP."""
    bin_folder = environment(folder, name) / "bin"
    urls = [f"http://127.0.0.1:{engine}" for engine in engine_ports]
    common = ["--host", "127.0.0.1", "--port", port, "--prometheus-host", "127.0.0.1"]
    common += ["--prometheus-port", port + 1, "--worker-urls", *urls, "--policy", policy]
    common += ["--worker-startup-check-interval", 1]
    if name == "sglang":
        program = [bin_folder / "python", "-m", "sglang_router.launch_router"]
        return [*program, *common, "--log-level", "warn"]
    if name == "smg":
        flags = ["--log-level", "warn", "--block-size", BLOCK_SIZE]
        return [bin_folder / "smg", "launch", *common, *flags]
    flags = ["--log-level", "warning"]
    if policy == "kv_aware":
        for url, kv_port in zip(urls, kv_ports, strict=True):
            flags += ["--kv-event-source", f"{url}=tcp://127.0.0.1:{kv_port}"]
        flags += ["--kv-event-block-size", BLOCK_SIZE, "--kv-event-model", "mock"]
    return [bin_folder / "vllm-router", *common, *flags]


_PLANE = ("--discovery-backend", "file", "--request-plane", "tcp", "--event-plane", "zmq")


def dynamo_frontend(folder, policy, port):
    """Dynamo's router; it reaches only workers of its own kind."""
    python = environment(folder, "dynamo") / "bin/python"
    mode = ["--router-mode", policy.replace("_", "-")]
    http = ["--http-host", "127.0.0.1", "--http-port", port, "--kv-cache-block-size", BLOCK_SIZE]
    return [python, "-m", "dynamo.frontend", *http, *mode, *_PLANE]


def dynamo_worker(folder, number, model, flags):
    """One worker: the same simulated engine behind Dynamo's own interface."""
    python = environment(folder, "dynamo") / "bin/python"
    return [python, "dynamo_worker.py", "--wid", number, "--model-path", model, *flags]

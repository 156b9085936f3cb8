"""Put fake GPUs on a host: the NVML library and nvidia-smi, both reading one topology file.

IO: files, gcc.
"""

import hashlib
import sysconfig
from pathlib import Path

from hostlab.gpus import TOPOLOGY_PATH, GpuMachine
from hostlab.rootfs import cache_dir
from hostlab.shell import run

_FAKE = Path(__file__).resolve().parent / "fake"


def nvml_library() -> Path:
    """Return the compiled library, built again whenever its source changes."""
    source = _FAKE / "nvml.c"
    digest = hashlib.sha256(source.read_bytes()).hexdigest()[:12]
    target = cache_dir() / f"libnvidia-ml-{digest}.so.1"
    if not target.exists():
        target.parent.mkdir(parents=True, exist_ok=True)
        partial = target.with_suffix(".partial")
        flags = ["-shared", "-fPIC", "-O1", "-Wall", "-Wextra", "-Werror", "-fvisibility=hidden"]
        soname = "-Wl,-soname,libnvidia-ml.so.1"
        run(["gcc", *flags, soname, "-o", str(partial), str(source)])
        partial.rename(target)
    return target


def install(root: Path, machine: GpuMachine) -> None:
    """Give the file system at `root` the GPUs of a machine."""
    multiarch = sysconfig.get_config_var("MULTIARCH") or "x86_64-linux-gnu"
    library = root / "usr/lib" / multiarch / "libnvidia-ml.so.1"
    library.write_bytes(nvml_library().read_bytes())
    smi = root / "usr/bin/nvidia-smi"
    smi.write_text((_FAKE / "nvidia_smi.py").read_text())
    smi.chmod(0o755)
    write_topology(root, machine)


def install_beside(directory: Path, machine: GpuMachine) -> None:
    """Make `bin`, `lib` and `gpus.tsv` in a directory, for hosts that share this machine's file system.

    They are found through PATH, LD_LIBRARY_PATH and DYNCTL_LAB_GPUS.
    """
    for name in ("bin", "lib"):
        (directory / name).mkdir(parents=True, exist_ok=True)
    (directory / "lib/libnvidia-ml.so.1").write_bytes(nvml_library().read_bytes())
    smi = directory / "bin/nvidia-smi"
    smi.write_text((_FAKE / "nvidia_smi.py").read_text())
    smi.chmod(0o755)
    (directory / "gpus.tsv").write_text(machine.text())


def write_topology(root: Path, machine: GpuMachine) -> None:
    """Replace what the GPUs of a host show, also while it runs."""
    target = root / TOPOLOGY_PATH.lstrip("/")
    target.parent.mkdir(parents=True, exist_ok=True)
    fresh = target.with_name(target.name + ".new")
    fresh.write_text(machine.text())
    fresh.replace(target)

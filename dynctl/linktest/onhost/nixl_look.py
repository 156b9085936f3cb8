"""Tell whether this interpreter has NIXL, and whether its CUDA driver works; nothing is imported but by name.

Runs on the host in the engine's Python, standard library only. IO: files, CUDA driver.
"""

import contextlib
import ctypes
import importlib.metadata
import importlib.util
import json
import sys
from typing import Any


def main(wish: dict[str, Any]) -> None:  # noqa: ARG001 - every program is called alike
    """Print what is there as one JSON line."""
    sys.stdout.write(json.dumps({"nixl": nixl_version(), "num_gpus": num_gpus()}) + "\n")


def nixl_version() -> str | None:
    """The installed NIXL; None when it cannot be imported from here."""
    if importlib.util.find_spec("nixl") is None:
        return None
    for name in ("nixl", "nixl-cu13", "nixl-cu12"):
        with contextlib.suppress(importlib.metadata.PackageNotFoundError):
            return importlib.metadata.version(name)
    return "unknown"


def num_gpus() -> int:
    """How many GPUs the CUDA driver lets this process use; 0 without one."""
    count = ctypes.c_int(0)
    with contextlib.suppress(OSError, AttributeError):
        driver = ctypes.CDLL("libcuda.so.1")
        if driver.cuInit(0) == 0 and driver.cuDeviceGetCount(ctypes.byref(count)) == 0:
            return count.value
    return 0

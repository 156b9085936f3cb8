"""The engine was built for a newer CUDA than the host's driver supports. Pure."""

import re
from collections.abc import Iterator

from dynctl.checks.advisories import release, version_of
from dynctl.checks.evidence import Evidence, Need
from dynctl.checks.finding import Check, Finding, Severity
from dynctl.checks.shell import where
from dynctl.core.machine import EngineSoftware

CODE = "cuda-too-old"


def _judge(evidence: Evidence) -> Iterator[Finding]:
    for host, wish, software in evidence.engines():
        supported = release(host.software.cuda_version or "")
        wanted = _cuda(software)
        if not supported or not wanted or wish.engine.device == "cpu" or supported[0] >= wanted[0]:
            continue
        yield Finding(
            CODE,
            Severity.RED,
            host.name,
            wish.name,
            f"built for CUDA {wanted[0]}, the driver supports {host.software.cuda_version} at most",
            (
                f"driver {host.software.driver_version}",
                *(f"{n} {v}" for n, v in software.packages if n == "torch"),
            ),
            "update the driver, or install an engine built for this CUDA",
            verify=f"nvidia-smi | grep -oE 'CUDA Version: *[0-9.]+' | {where(f'$3 + 0 < {wanted[0]}')}",
            verify_on=host.name,
        )


def _cuda(software: EngineSoftware) -> tuple[int, ...]:
    """The CUDA an environment was built for: by torch's local version (`+cu128`) or its CUDA runtime package."""
    torch = version_of(software, ("torch",))
    if torch and (match := re.search(r"\+cu(\d{2})(\d)$", torch[1])):
        return int(match[1]), int(match[2])
    runtime = version_of(
        software, ("nvidia-cuda-runtime-cu13", "nvidia-cuda-runtime-cu12", "nvidia-cuda-runtime")
    )
    return release(runtime[1]) if runtime else ()


CHECK = Check(CODE, "Driver too old for the engine's CUDA", _judge, (Need.GPUS,))

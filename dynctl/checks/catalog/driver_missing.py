"""There are GPUs on the bus and no driver that answers for them. Pure."""

from collections.abc import Iterator

from dynctl.checks.evidence import Evidence, Need
from dynctl.checks.finding import Check, Finding, Severity
from dynctl.checks.shell import root_line

CODE = "driver-missing"


_CODES = {
    "gpu-driver-absent": (
        "NVIDIA devices are there, nvidia-smi is not installed",
        "install the NVIDIA driver",
    ),
    "gpu-driver-not-loaded": (
        "the NVIDIA driver is not loaded",
        "load it (modprobe nvidia), or see dmesg why it does not load",
    ),
    "gpu-no-usable-gpu": ("the driver sees no usable GPU", "see dmesg for NVRM and Xid lines"),
    "gpu-nvml-failed": (
        "the driver's library cannot be initialised",
        "run nvidia-smi on the host and follow what it says",
    ),
}


def _judge(evidence: Evidence) -> Iterator[Finding]:
    for host in evidence.topology.hosts:
        for warning in host.warnings:
            if warning.code in _CODES:
                text, fix = _CODES[warning.code]
                yield Finding(
                    CODE,
                    Severity.RED,
                    host.name,
                    "",
                    text,
                    (warning.text,),
                    fix,
                    root_line(host, "modprobe", "nvidia") if "load it" in fix else None,
                    # nvidia-smi ends with another status than 0 whenever it cannot answer, also when it is not there.
                    verify="! nvidia-smi -L",
                    verify_on=host.name,
                )


CHECK = Check(CODE, "No GPU driver answers", _judge, (Need.GPUS,))

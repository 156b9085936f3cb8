"""The kernel module of the GPU driver and its user library have different versions: nothing can use the GPUs. Pure."""

from collections.abc import Iterator

from dynctl.checks.evidence import Evidence, Need
from dynctl.checks.finding import Check, Finding, Severity
from dynctl.checks.shell import root_line

CODE = "driver-mismatch"


def _judge(evidence: Evidence) -> Iterator[Finding]:
    for host in evidence.topology.hosts:
        said = [w.text for w in host.warnings if w.code == "gpu-driver-library-mismatch"]
        software = host.software
        if not said and software.module_version and software.driver_version:
            if software.module_version == software.driver_version:
                continue
            said = [f"module {software.module_version}, library {software.driver_version}"]
        if said:
            yield Finding(
                CODE,
                Severity.RED,
                host.name,
                "",
                "the GPU driver's kernel module and library have different versions; no GPU can be used",
                tuple(said),
                "reboot the host, or unload and load the nvidia modules",
                root_line(host, "reboot"),
                verify="nvidia-smi 2>&1 | grep -i 'version mismatch'",
                verify_on=host.name,
            )


CHECK = Check(CODE, "GPU driver and its library differ", _judge, (Need.GPUS,))

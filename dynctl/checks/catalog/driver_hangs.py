"""nvidia-smi does not come back: the driver hangs, usually after a GPU fault. Pure."""

from collections.abc import Iterator

from dynctl.checks.evidence import Evidence, Need
from dynctl.checks.finding import Check, Finding, Severity
from dynctl.checks.shell import root_line

CODE = "driver-hangs"


def _judge(evidence: Evidence) -> Iterator[Finding]:
    for host in evidence.topology.hosts:
        for warning in host.warnings:
            if warning.code == "gpu-timeout":
                yield Finding(
                    CODE,
                    Severity.RED,
                    host.name,
                    "",
                    "nvidia-smi does not answer within 10 s: the driver hangs",
                    (warning.text,),
                    "look for Xid lines in dmesg, then reboot the host",
                    root_line(host, "reboot"),
                    verify="timeout -k 1 10 nvidia-smi -L; [ $? -ge 124 ]",
                    verify_on=host.name,
                )
                break


CHECK = Check(CODE, "GPU driver does not answer", _judge, (Need.GPUS,))

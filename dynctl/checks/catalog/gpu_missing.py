"""The PCI bus shows more NVIDIA devices than the driver does. Pure."""

from collections.abc import Iterator

from dynctl.checks.evidence import Evidence, Need
from dynctl.checks.finding import Check, Finding, Severity

CODE = "gpu-missing"


def _judge(evidence: Evidence) -> Iterator[Finding]:
    for host in evidence.topology.hosts:
        for warning in host.warnings:
            if warning.code == "gpu-missing":
                yield Finding(
                    CODE,
                    Severity.RED,
                    host.name,
                    "",
                    "the PCI bus shows more NVIDIA GPUs than the driver does",
                    (warning.text,),
                    "see dmesg for NVRM lines; a GPU without power or with a failed start stays out until a reboot",
                    "dmesg | grep -E 'NVRM|Xid'",
                    verify=(
                        "bus=$(cd /sys/bus/pci/devices && grep -l 0x10de */vendor | cut -d/ -f1 | "
                        "while read -r d; do grep -hE '^0x030[02]' $d/class; done | wc -l); "
                        'seen=$(nvidia-smi -L | grep -c ^GPU); echo "bus $bus, driver $seen"; [ "$bus" -gt "$seen" ]'
                    ),
                    verify_on=host.name,
                )


CHECK = Check(CODE, "Fewer GPUs than on the bus", _judge, (Need.GPUS,))

"""Fabric manager and driver have different versions; the manager then refuses to work. Pure."""

from collections.abc import Iterator

from dynctl.checks.evidence import Evidence, Need
from dynctl.checks.finding import Check, Finding, Severity

CODE = "fabric-manager-version"


def _judge(evidence: Evidence) -> Iterator[Finding]:
    for host in evidence.topology.hosts:
        manager, driver = host.fabric.manager_version, host.software.driver_version
        if not manager or not driver or manager == driver:
            continue
        yield Finding(
            CODE,
            Severity.RED,
            host.name,
            "nvidia-fabricmanager",
            f"fabric manager {manager} with driver {driver}: they must be equal",
            (f"manager {manager}", f"driver {driver}"),
            f"install fabric manager {driver}",
            verify='nv-fabricmanager --version | grep -vF "$(nvidia-smi --query-gpu=driver_version --format=csv,noheader | head -n 1)"',
            verify_on=host.name,
        )


CHECK = Check(CODE, "Fabric manager of another version", _judge, (Need.GPUS,))

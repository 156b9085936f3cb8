"""A GPU has not finished registering with the NVLink fabric, or failed to. Pure."""

from collections.abc import Iterator

from dynctl.checks.evidence import Evidence, Need
from dynctl.checks.finding import Check, Finding, Severity

CODE = "fabric-not-ready"


def _judge(evidence: Evidence) -> Iterator[Finding]:
    for host, gpu in evidence.gpus():
        state, status = gpu.health.fabric_state, gpu.health.fabric_status
        is_done = state is None or state.lower() == "completed"
        if is_done and (status is None or status.lower() == "success"):
            continue
        yield Finding(
            CODE,
            Severity.RED,
            host.name,
            f"GPU{gpu.index}",
            "not joined to the NVLink fabric",
            (f"state {state}, status {status}",),
            "wait while it is in progress; else see the fabric manager's log",
            "journalctl -u nvidia-fabricmanager -n 50",
            verify=f"nvidia-smi -i {gpu.index} -q | grep -A 2 '^ *Fabric' | grep -E '(State|Status) *:' | grep -vE ': *(Completed|Success|N/A)'",
            verify_on=host.name,
        )


CHECK = Check(CODE, "GPU not joined to its fabric", _judge, (Need.GPUS,))

"""Some NVLinks of a GPU are inactive while others work, or all of them on a board with NVSwitches. Pure."""

from collections.abc import Iterator

from dynctl.checks.evidence import Evidence, Need
from dynctl.checks.finding import Check, Finding, red_if
from dynctl.checks.shell import root_line

CODE = "nvlink-inactive"


def _judge(evidence: Evidence) -> Iterator[Finding]:
    for host, gpu in evidence.gpus():
        rates = gpu.nvlink_rates_bytes_s
        dead = gpu.dead_nvlinks
        if not rates or not dead:
            continue
        # A card without a bridge has all links inactive, and that is how it should be.
        if len(dead) == len(rates) and not host.fabric.num_switches:
            continue
        shares = any(
            len(r.gpus) > 1 and any(p.uuid == gpu.uuid for p in r.gpus)
            for r in evidence.replicas_on(host.name)
        )
        yield Finding(
            CODE,
            red_if(shares or len(dead) == len(rates)),
            host.name,
            f"GPU{gpu.index}",
            f"{len(dead)} of {len(rates)} NVLinks inactive",
            (f"inactive: {', '.join(map(str, dead))}",),
            "reset the GPUs of the board while nothing runs, then see dmesg for NVLink errors; a bridge or the board may be bad",
            root_line(host, "nvidia-smi", "--gpu-reset"),
            verify=f"nvidia-smi nvlink --status -i {gpu.index} | grep -i inactive",
            verify_on=host.name,
        )


CHECK = Check(CODE, "NVLink inactive", _judge, (Need.GPUS,))

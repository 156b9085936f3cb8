"""Without persistence mode the driver unloads a GPU's state whenever nobody uses it. Pure."""

from collections.abc import Iterator

from dynctl.checks.evidence import Evidence, Need
from dynctl.checks.finding import Check, Finding, Severity
from dynctl.checks.shell import as_root, root_line, smi

CODE = "gpu-persistence-off"


def _judge(evidence: Evidence) -> Iterator[Finding]:
    for host, gpu in evidence.gpus():
        if gpu.health.has_persistence is False:
            fix = ("nvidia-smi", "-i", str(gpu.index), "-pm", "1")
            yield Finding(
                CODE,
                Severity.INFO,
                host.name,
                f"GPU{gpu.index}",
                "persistence mode is off: each start initialises the GPU anew, and its settings are lost in between",
                ("persistence mode: disabled",),
                "turn it on, or let nvidia-persistenced run",
                root_line(host, *fix),
                as_root(host, *fix),
                verify=f"{smi(gpu, 'persistence_mode')} | grep -i disabled",
                verify_on=host.name,
            )


CHECK = Check(CODE, "Persistence mode off", _judge, (Need.GPUS,))

"""A GPU runs below its clocks because of heat or power. Pure."""

from collections.abc import Iterator

from dynctl.checks.evidence import Evidence, Need
from dynctl.checks.finding import Check, Finding, Severity

CODE = "gpu-throttled"


_SERIOUS = ("thermal", "brake", "hw_slowdown")
_HEAT, _POWER = "Slowdown|Power Brake", "Power Cap|Power Capping"


def _judge(evidence: Evidence) -> Iterator[Finding]:
    for host, gpu in evidence.gpus():
        reasons = gpu.health.throttle_reasons
        if not reasons:
            continue
        is_serious = any(word in reason for reason in reasons for word in _SERIOUS)
        facts = [f"active: {', '.join(reasons)}"]
        if gpu.health.temperature_celsius is not None:
            facts.append(f"{gpu.health.temperature_celsius:g} °C")
        if gpu.health.power_w is not None and gpu.health.power_limit_w is not None:
            facts.append(f"{gpu.health.power_w:g} W of {gpu.health.power_limit_w:g} W")
        yield Finding(
            CODE,
            Severity.WARNING if is_serious else Severity.INFO,
            host.name,
            f"GPU{gpu.index}",
            "clocks are held down by heat or power"
            if is_serious
            else "clocks are held down by the power limit",
            tuple(facts),
            "check fans, airflow and the power supply; a tensor-parallel group runs at the pace of its slowest GPU",
            verify=f"nvidia-smi -i {gpu.index} -q -d PERFORMANCE | grep -E '({_HEAT if is_serious else _POWER})[^:]*: *Active'",
            verify_on=host.name,
        )


CHECK = Check(CODE, "GPU throttled", _judge, (Need.GPUS,))

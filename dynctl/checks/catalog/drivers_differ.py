"""Hosts have different GPU driver versions. Pure."""

from collections import Counter
from collections.abc import Iterator

from dynctl.checks.evidence import Evidence, Need
from dynctl.checks.finding import Check, Finding, Severity
from dynctl.checks.shell import on_host

CODE = "drivers-differ"


def _judge(evidence: Evidence) -> Iterator[Finding]:
    found = [
        (host, host.software.driver_version)
        for host in evidence.topology.hosts
        if host.software.driver_version and host.gpus
    ]
    counts = Counter(version for _, version in found)
    if len(counts) < 2:
        return
    usual = counts.most_common(1)[0][0]
    other = next(host for host, version in found if version == usual)
    line = "nvidia-smi --query-gpu=driver_version --format=csv,noheader | head -n 1"
    for host, version in found:
        if version != usual:
            yield Finding(
                CODE,
                Severity.WARNING,
                host.name,
                "",
                f"GPU driver {version}, other hosts have {usual}",
                tuple(f"{h.name}: {v}" for h, v in found),
                "use one version, at least for prefill and decode hosts of a deployment",
                verify=(
                    f"a=$({on_host(evidence.entry(host), line)}); b=$({on_host(evidence.entry(other), line)}); "
                    'echo "$a $b"; [ "$a" != "$b" ]'
                ),
            )


CHECK = Check(CODE, "GPU drivers differ between hosts", _judge, (Need.PEERS, Need.GPUS))

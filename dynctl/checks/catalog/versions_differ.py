"""Engines that hand KV blocks to each other have different versions of vLLM, NIXL, UCX or CUDA. Pure."""

from collections import Counter, defaultdict
from collections.abc import Iterator

from dynctl.checks.evidence import Evidence, Need
from dynctl.checks.finding import Check, Finding, Severity
from dynctl.checks.shell import on_host, program, quote
from dynctl.core.hardware import Host
from dynctl.core.machine import EngineSoftware

CODE = "versions-differ"


_HARD = ("vllm", "nixl", "ucx")
_SOFT = ("torch", "nccl", "cuda", "transformers")


def _judge(evidence: Evidence) -> Iterator[Finding]:
    by_wish: dict[str, list[tuple[Host, EngineSoftware]]] = defaultdict(list)
    for host, wish, software in evidence.engines():
        by_wish[wish.name].append((host, software))
    for name, members in by_wish.items():
        packages = sorted({package for _, software in members for package, _ in software.packages})
        for package in packages:
            severity = _severity(package)
            found = [
                (h, s, dict(s.packages)[package]) for h, s in members if package in dict(s.packages)
            ]
            counts = Counter(version for _, _, version in found)
            if severity is None or len(counts) < 2:
                continue
            usual = counts.most_common(1)[0][0]
            one = next(item for item in found if item[2] == usual)
            for host, software, version in found:
                if version != usual:
                    yield _finding(
                        evidence, name, package, severity, (host, software, version), one
                    )


def _severity(package: str) -> Severity | None:
    plain = package.lower().replace("_", "-")
    if any(part in plain for part in _HARD):
        return Severity.RED
    return Severity.WARNING if any(part in plain for part in _SOFT) else None


def _finding(
    evidence: Evidence,
    deployment: str,
    package: str,
    severity: Severity,
    odd: tuple[Host, EngineSoftware, str],
    usual: tuple[Host, EngineSoftware, str],
) -> Finding:
    def ask(host: Host, software: EngineSoftware) -> str:
        text = f'import importlib.metadata as m; print(m.version("{package}"))'
        return on_host(evidence.entry(host), f"{program(software.python)} -c {quote(text)}")

    return Finding(
        CODE,
        severity,
        odd[0].name,
        deployment,
        f"{package} {odd[2]}, other hosts have {usual[2]}: engines that hand over KV must match",
        (f"{odd[0].name}: {odd[2]}", f"{usual[0].name}: {usual[2]}"),
        f"install the same version everywhere ({usual[2]})",
        f"{program(odd[1].python)} -m pip install {quote(f'{package}=={usual[2]}')}",
        verify=f'a=$({ask(odd[0], odd[1])}); b=$({ask(usual[0], usual[1])}); echo "$a $b"; [ "$a" != "$b" ]',
    )


CHECK = Check(CODE, "Versions differ between engines of a deployment", _judge, (Need.PEERS,))

"""Probes that failed, and captures that are not whole. Pure."""

from dynctl.discovery.bounds import MAX_GPUS, MAX_ITEMS
from dynctl.discovery.facts import NvmlFacts, QueryFacts, RdmaFacts
from dynctl.discovery.merge import QUERIES, differences
from dynctl.discovery.nics import TOOLS
from dynctl.discovery.rules.case import Case, Found, Rule

_FIRST = "nvidia_smi_csv"
"""The probe that speaks for the driver: others that fail for the same reason are not told again."""
_MAX_DIFFERENCES = 6


def failed(case: Case) -> Found:
    """Each failed probe with its cause, the same fault once."""
    for name, cause in sorted(case.found.failures.items()):
        kind = case.found.kinds.get(name, "")
        of_driver = name.startswith(("nvidia_smi", "nvml")) and kind
        code = f"gpu-{kind.replace('_', '-')}" if of_driver else "probe-failed"
        if of_driver and name != _FIRST and case.found.kinds.get(_FIRST) == kind:
            continue
        yield code, f"{name}: {cause}"


def cut(case: Case) -> Found:
    """Output that ends before its end."""
    for name in QUERIES:
        query = case.found.fact(name, QueryFacts)
        if query is None or not query.gpus or not query.is_cut:
            continue
        partial = sum(1 for gpu in query.gpus if not gpu.is_complete)
        whole = f" of {query.num_attached}" if query.num_attached is not None else ""
        some = f", {partial} of them partial" if partial else ""
        yield (
            "gpu-output-cut",
            f"nvidia-smi gave records of {len(query.gpus)}{whole} GPUs{some}: cut, killed, or it hung on a GPU",
        )
    nvml = case.found.fact("nvml", NvmlFacts)
    if nvml and nvml.is_cut:
        yield (
            "gpu-output-cut",
            f"NVML told of {len(nvml.query.gpus)} GPUs and then stopped: it hung on the next one, or was killed",
        )
    for name in TOOLS:
        facts = case.found.fact(name, RdmaFacts)
        if facts and facts.is_cut:
            yield "capture-cut", f"{name}: its closing line is missing: the output was cut"
        for device, words in facts.failed if facts else ():
            yield "rdma-device-failed", f"{name} failed on {device} ({words}): the others were kept"
    for note in case.found.notes:
        yield "capture-cut", note


def bounded(case: Case) -> Found:
    """More of something than a host can have."""
    if len(case.host.gpus) >= MAX_GPUS:
        yield "facts-cut", f"{MAX_GPUS} GPUs or more: only the first {MAX_GPUS} are kept"
    if len(case.host.nics) >= MAX_ITEMS:
        yield (
            "facts-cut",
            f"{MAX_ITEMS} network devices or more: only the first {MAX_ITEMS} are kept",
        )


def differing(case: Case) -> Found:
    """NVML against what nvidia-smi printed."""
    odd = list(differences(case.found))
    for text in odd[:_MAX_DIFFERENCES]:
        yield (
            "sources-differ",
            f"NVML and nvidia-smi tell different things: {text}",
        )
    if len(odd) > _MAX_DIFFERENCES:
        yield (
            "sources-differ",
            f"NVML and nvidia-smi differ in {len(odd) - _MAX_DIFFERENCES} more facts",
        )


RULES: tuple[Rule, ...] = (failed, cut, bounded, differing)

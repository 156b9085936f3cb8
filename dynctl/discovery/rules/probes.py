"""Probes that failed, and captures that are not whole. Pure."""

from dynctl.discovery.facts import QueryFacts, RdmaFacts
from dynctl.discovery.gpus import QUERIES
from dynctl.discovery.nics import TOOLS
from dynctl.discovery.rules.case import Case, Found, Rule

_FIRST = "nvidia_smi_csv"
"""The probe that speaks for the driver: others that fail for the same reason are not told again."""


def failed(case: Case) -> Found:
    """Each failed probe with its cause, the same fault once."""
    for name, cause in sorted(case.found.failures.items()):
        kind = case.found.kinds.get(name, "")
        of_driver = name.startswith("nvidia_smi") and kind
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
    for name in TOOLS:
        facts = case.found.fact(name, RdmaFacts)
        if facts and facts.is_cut:
            yield "capture-cut", f"{name}: its closing line is missing: the output was cut"
        for device, words in facts.failed if facts else ():
            yield "rdma-device-failed", f"{name} failed on {device} ({words}): the others were kept"
    for note in case.found.notes:
        yield "capture-cut", note


RULES: tuple[Rule, ...] = (failed, cut)

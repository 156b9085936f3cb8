"""Every warning code a program may meet is explained in docs/findings.md, and nothing else is."""

import inspect
import re
from pathlib import Path

from dynctl.discovery import judge, probe
from dynctl.discovery.rules import gpus, links, nics, numa, probes, system

OURS = {"Probes", "GPUs", "Links", "Network", "Host"}
"""Sections of the page about discovery; link tests and checks have their own."""
DOCS = Path(__file__).parents[2] / "docs" / "findings.md"


def test_codes_in_the_code_and_in_the_documentation_are_the_same():
    source = "".join(map(inspect.getsource, (judge, gpus, links, nics, numa, probes, system)))
    used = set(re.findall(r'yield \(?\s*"([a-z0-9-]+)"', source))
    used |= set(re.findall(r'HostWarning\(\s*"([a-z0-9-]+)"', source))
    kinds = set(
        re.findall(r'"([a-z_]+)"', str([fault[1] for fault in probe._SMI_FAULTS]).replace("'", '"'))
    )
    used |= {f"gpu-{kind.replace('_', '-')}" for kind in kinds | {"timeout", "failed"}}

    listed = set()
    for section in re.split(r"(?m)^## ", DOCS.read_text()):
        if section.split("\n")[0].strip() in OURS:
            rows = [line.split("|")[1] for line in section.splitlines() if line.startswith("| `")]
            listed |= set(re.findall(r"`([a-z][a-z0-9-]+)`", " ".join(rows)))

    assert used | {"probe-failed"} == listed

"""Every warning code a program may meet is explained in docs/findings.md, and nothing else is."""

import inspect
import re
from pathlib import Path

from dynctl.discovery import judge, probe

DOCS = Path(__file__).parents[2] / "docs" / "findings.md"


def test_codes_in_the_code_and_in_the_documentation_are_the_same():
    source = inspect.getsource(judge)
    used = set(re.findall(r'yield \(?\s*"([a-z-]+)"', source))
    used |= set(re.findall(r'HostWarning\(\s*"([a-z-]+)"', source))
    kinds = set(
        re.findall(r'"([a-z_]+)"', str([fault[1] for fault in probe._SMI_FAULTS]).replace("'", '"'))
    )
    used |= {f"gpu-{kind.replace('_', '-')}" for kind in kinds | {"timeout", "failed"}}

    listed = set(re.findall(r"`([a-z][a-z-]+)`", " ".join(
        line.split("|")[1] for line in DOCS.read_text().splitlines() if line.startswith("| `")
    )))  # fmt: skip

    assert used | {"probe-failed"} == listed

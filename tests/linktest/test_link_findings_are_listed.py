"""Every warning code of a link test is explained in its section of docs/findings.md, and nothing else is there."""

import inspect
import re
from pathlib import Path

from dynctl.linktest import judge

DOCS = Path(__file__).parents[2] / "docs" / "findings.md"


def test_codes_in_the_code_and_in_the_section_are_the_same():
    used = set(re.findall(r'"((?:link|nixl)-[a-z-]+)"', inspect.getsource(judge)))
    section = DOCS.read_text().partition("## Measured links")[2].partition("\n## ")[0]

    assert used == set(re.findall(r"^\| `([a-z-]+)` \|", section, re.MULTILINE))

"""Decisions are numbered as their files are, and their index has them all."""

import re
from pathlib import Path

FOLDER = Path(__file__).parents[2] / "docs" / "decisions"


def test_every_decision_has_its_number_and_stands_in_the_index():
    listed = [
        line for line in (FOLDER / "README.md").read_text().splitlines() if line.startswith("- ")
    ]

    wanted = []
    for path in sorted(FOLDER.glob("[0-9]*.md")):
        number, title = re.match(r"# (\d{4})\. (.+)\n", path.read_text()).groups()
        assert path.name.startswith(f"{number}-")
        wanted.append(f"- [{number}]({path.name}) {title}")
    assert listed == wanted

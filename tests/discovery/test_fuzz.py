"""10,000 mutated captures: facts or a named ProbeError with its line, never another exception, a hang or a wrong link."""

import importlib.util
import sys
from pathlib import Path

import pytest

SOURCE = Path(__file__).parents[2] / "benchmarks" / "fuzz_captures.py"
COUNT = 10_000


@pytest.mark.timeout(900)
def test_mutated_captures_give_facts_or_a_named_error():
    spec = importlib.util.spec_from_file_location("fuzz_captures", SOURCE)
    fuzz_captures = importlib.util.module_from_spec(spec)
    sys.modules["fuzz_captures"] = fuzz_captures
    spec.loader.exec_module(fuzz_captures)

    fuzz = fuzz_captures.run(0, COUNT)

    assert fuzz.wrong == []
    assert sum(fuzz.outcomes.values()) >= COUNT
    assert fuzz.outcomes["facts"] > COUNT // 2

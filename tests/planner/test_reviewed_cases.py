"""Plans for many clusters and models with all their reasons. DYNCTL_UPDATE_GOLDEN=1 rewrites them; review the diff."""

import os
from pathlib import Path

import pytest
from planning_cases import CLUSTERS, MODELS, ground, story

CASES = Path(__file__).parent / "cases"


@pytest.mark.parametrize("model", MODELS)
@pytest.mark.parametrize("cluster", CLUSTERS, ids=lambda make: make.__name__)
def test_the_plan_and_its_reasons_are_those_that_were_reviewed(build, cluster, model):
    told = story(*ground(build, cluster, model))
    path = CASES / cluster.__name__ / f"{model}.txt"
    if os.environ.get("DYNCTL_UPDATE_GOLDEN"):
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(told)

    assert told == path.read_text()


def test_every_case_on_disk_is_tested():
    known = {f"{cluster.__name__}/{model}.txt" for cluster in CLUSTERS for model in MODELS}

    assert {str(path.relative_to(CASES)) for path in CASES.rglob("*.txt")} == known

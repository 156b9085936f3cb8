"""A GPU has one holder."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dynctl.agents.leases import grant, holders, release
from dynctl.errors import EngineError

GPUS = st.lists(st.sampled_from(["g0", "g1", "g2", "g3"]), unique=True, max_size=4)


def test_second_holder_is_refused_and_nothing_is_given():
    leases = grant({}, "a", ["g0", "g1"])

    with pytest.raises(EngineError, match="g1 is leased to a, so b cannot"):
        grant(leases, "b", ["g2", "g1"])

    assert holders(leases, "b", ["g1", "g2"]) == {"g1": "a"}


def test_same_holder_may_ask_again():
    leases = grant({}, "a", ["g0"])

    assert grant(leases, "a", ["g0", "g1"]) == {"g0": "a", "g1": "a"}


def test_gpu_named_twice_is_refused():
    with pytest.raises(EngineError, match="twice"):
        grant({}, "a", ["g0", "g0"])


@given(st.lists(st.tuples(st.sampled_from("abc"), GPUS, st.booleans()), max_size=30))
def test_no_history_of_grants_and_releases_leaves_a_gpu_with_two_holders(steps):
    leases, books = {}, {}
    for unit, wanted, gives_back in steps:
        if gives_back:
            leases = release(leases, unit)
            books.pop(unit, None)
            continue
        try:
            leases = grant(leases, unit, wanted)
        except EngineError:
            assert any(w in held for w in wanted for u, held in books.items() if u != unit)
        else:
            books[unit] = books.get(unit, set()) | set(wanted)
        assert leases == {gpu: u for u, held in books.items() for gpu in held}

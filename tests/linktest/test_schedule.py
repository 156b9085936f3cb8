"""A tournament: every pair once, nobody twice in a round, no more rounds than needed."""

from itertools import combinations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dynctl.linktest.schedule import rounds


@given(st.integers(min_value=0, max_value=80))
def test_every_pair_meets_exactly_once(count):
    players = [f"host-{i}" for i in range(count)]

    met = [frozenset(pair) for pairs in rounds(players) for pair in pairs]

    assert len(met) == len(set(met))
    assert set(met) == {frozenset(pair) for pair in combinations(players, 2)}


@given(st.integers(min_value=2, max_value=80))
def test_rounds_are_disjoint_and_as_few_as_can_be(count):
    drawn = rounds(list(range(count)))

    assert len(drawn) == (count - 1 if count % 2 == 0 else count)
    for pairs in drawn:
        in_round = [player for pair in pairs for player in pair]
        assert len(in_round) == len(set(in_round))
        assert len(pairs) == count // 2


@pytest.mark.parametrize("players", [[], ["alone"]])
def test_fewer_than_two_players_have_no_rounds(players):
    assert rounds(players) == []

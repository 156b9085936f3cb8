from hypothesis import given
from hypothesis import strategies as st

from dynctl.sim.chain import Chain

CHAIN = Chain(range(100, 1100), seed=3)
ids = st.lists(st.integers(0, 4095), min_size=1, max_size=40)


@given(ids, st.data())
def test_any_change_of_the_prompt_changes_the_answer(prompt, data):
    at = data.draw(st.integers(0, len(prompt) - 1))
    kind = data.draw(st.sampled_from(["lose", "double", "alter"]))
    changed = list(prompt)
    if kind == "lose":
        del changed[at]
    elif kind == "double":
        changed.insert(at, changed[at])
    else:
        changed[at] += 1

    assert CHAIN.continuation(prompt, 8) != CHAIN.continuation(changed, 8)


@given(ids, st.integers(1, 30))
def test_an_answer_goes_on_the_same_from_any_point(prompt, cut):
    whole = CHAIN.continuation(prompt, 30)

    assert CHAIN.continuation([*prompt, *whole[:cut]], 30 - cut) == whole[cut:]


def test_seeds_are_different_models_and_tokens_come_from_the_words():
    other = Chain(range(100, 1100), seed=4)

    assert CHAIN.continuation([1, 2], 50) != other.continuation([1, 2], 50)
    assert set(CHAIN.continuation([1, 2], 500)) <= set(range(100, 1100))


def test_end_of_sequence_comes_about_as_often_as_asked_and_not_before_min_tokens():
    chain = Chain(range(100, 1100), eos_id=1, eos_every=20)
    lengths = [len(chain.continuation([i], 10_000)) for i in range(300)]

    assert 15 < sum(lengths) / len(lengths) < 25
    assert all(len(chain.continuation([i], 100, min_tokens=30)) > 30 for i in range(50))
    assert 1 not in chain.continuation([5], 500, ignore_eos=True)


def test_the_chain_is_the_same_in_every_process():
    assert CHAIN.continuation([1, 2, 3], 3) == [902, 357, 935]

"""What is sent: lengths, shared prefixes, chats, seeds, refused specs."""

from collections import Counter

import pytest

from dynctl.bench.words import COMMON, LETTERS, TokenCount, alike, fit
from dynctl.bench.workload import Script, parse_workload, prompt_text
from dynctl.errors import UsageError


def num_words(ask):
    return len(prompt_text(ask.messages).split())


COUNT = TokenCount(overhead_tokens=5.0)


def script(spec, seed=1, count=COUNT):
    return Script(parse_workload(spec), count, seed)


def test_an_answer_stands_right_behind_the_prompt_it_continued():
    first = (("system", "be kind"), ("user", "hello there"))
    later = (*first, ("assistant", " you too"), ("user", "and now"))

    assert prompt_text(first) == "be kind\nhello there"
    assert prompt_text(later) == prompt_text(first) + " you too" + "\nand now"


def test_synthetic_prompts_have_the_length_asked_for_overhead_included():
    ask = script("synthetic:isl=100,osl=7").next()

    assert num_words(ask) == 95
    assert (ask.isl_tokens, ask.osl_tokens, ask.group) == (100, 7, None)


def test_words_that_cost_more_are_fewer():
    count = TokenCount(LETTERS, overhead_tokens=4.0, per_word_tokens=2.0)

    assert num_words(script("synthetic:isl=100,osl=1", count=count).next()) == 48


def test_synthetic_prompts_share_no_start():
    made = script("synthetic:isl=64,osl=1")
    starts = {tuple(prompt_text(made.next().messages).split()[:12]) for _ in range(50)}

    assert len(starts) == 50


def test_the_seed_decides_the_content():
    def texts(seed):
        made = script("prefix:groups=3,len=20,suffix=30", seed)
        return [made.next() for _ in range(5)]

    assert texts(1) == texts(1)
    assert texts(1) != texts(2)


def test_prefix_groups_share_their_start_and_nothing_else():
    made = script("prefix:groups=2,len=20,suffix=30,osl=4")
    asks = [made.next() for _ in range(40)]
    heads = {group: {a.messages[0] for a in asks if a.group == group} for group in (0, 1)}

    assert {a.group for a in asks} == {0, 1}
    assert all(len(messages) == 1 for messages in heads.values())
    assert heads[0] != heads[1]
    assert len({a.messages[1] for a in asks}) == 40
    assert {num_words(a) for a in asks} == {50}
    assert {(a.isl_tokens, a.shared_tokens) for a in asks} == {(55, 20)}


def test_turn_n_contains_all_earlier_turns_with_the_real_answers():
    made = script("multiturn:chats=1,turns=3,system=10,isl=8,osl=4")
    first = made.next()
    made.answered(first, "answer one")
    second = made.next()
    made.answered(second, "answer two")
    third = made.next()

    assert [role for role, _ in third.messages] == [
        "system",
        "user",
        "assistant",
        "user",
        "assistant",
        "user",
    ]
    assert second.messages[:2] == first.messages
    assert second.messages[2] == ("assistant", "answer one")
    assert third.messages[: len(second.messages)] == second.messages
    assert third.messages[4] == ("assistant", "answer two")
    assert (first.turn, second.turn, third.turn) == (1, 2, 3)
    assert first.chat == second.chat == third.chat
    assert first.isl_tokens == 23
    assert third.isl_tokens is None


def test_a_chat_ends_after_its_turns_and_a_new_one_begins():
    made = script("multiturn:chats=1,turns=2")
    chats = []
    for _ in range(4):
        ask = made.next()
        chats.append((ask.chat, ask.turn))
        made.answered(ask, "a")

    assert chats == [(0, 1), (0, 2), (1, 1), (1, 2)]


def test_arrivals_are_never_held_up_by_chats_that_are_being_answered():
    made = script("multiturn:chats=2,turns=5")
    asks = [made.next() for _ in range(5)]

    assert [a.chat for a in asks] == [0, 1, 2, 3, 4]


def test_chats_take_turns():
    made = script("multiturn:chats=2,turns=3")
    first, second = made.next(), made.next()
    made.answered(first, "a")
    made.answered(second, "b")

    assert [(made.next().chat, made.next().chat)] == [(0, 1)]


def test_a_failed_turn_ends_its_chat():
    made = script("multiturn:chats=1,turns=5")
    ask = made.next()
    made.answered(ask, None)

    assert made.next().chat == 1


def test_chats_of_one_group_share_the_system_prompt():
    made = script("multiturn:chats=4,turns=1,groups=2")
    heads = [made.next().messages[0] for _ in range(4)]

    assert heads[0] == heads[2] != heads[1] == heads[3]


def test_drawn_lengths_have_the_mean_asked_for():
    made = script("synthetic:isl=lognormal(200,0.5),osl=uniform(10,20)")
    asks = [made.next() for _ in range(2000)]

    assert sum(a.isl_tokens for a in asks) / 2000 == pytest.approx(200, rel=0.05)
    assert {a.osl_tokens for a in asks} == set(range(10, 21))


@pytest.mark.parametrize(
    "spec",
    ["", "nonsense", "synthetic:isl=0", "synthetic:isl=-5", "synthetic:isl=abc", "synthetic:foo=1",
     "synthetic:isl=1,,osl=2", "synthetic:isl", "prefix:groups=uniform(1,2)", "multiturn:turns=0",
     "synthetic:isl=uniform(5,2)", "synthetic:isl=99999999999", "synthetic:osl=uniform(0,4)"],
)  # fmt: skip
def test_bad_workloads_are_refused_with_what_there_is(spec):
    with pytest.raises(UsageError) as caught:
        parse_workload(spec)

    assert "synthetic" in caught.value.hint or "knows" in caught.value.hint


def test_the_longest_request_is_known_for_fixed_lengths():
    assert parse_workload("synthetic:isl=100,osl=20").longest_tokens == 120
    assert parse_workload("prefix:len=100,suffix=10,osl=5").longest_tokens == 115
    assert parse_workload("multiturn:turns=3,system=100,isl=10,osl=5").longest_tokens == 145
    assert parse_workload("synthetic:isl=uniform(1,9)").longest_tokens is None


def test_fitting_the_count_of_a_server():
    count = fit(COMMON, (8, 20), (243, 255))

    assert (count.overhead_tokens, count.per_word_tokens) == (12.0, 1.0)
    with pytest.raises(ValueError, match="tokens"):
        fit(COMMON, (8, 20), (243, 20))


def test_words_that_cost_alike_are_chosen_cheap_ones_first():
    cheap = {f"c{i}": 16 for i in range(16)}
    dear = {f"d{i}": 32 for i in range(40)}

    assert alike(cheap | dear) == tuple(cheap)
    assert alike({"x": 16} | dear) == tuple(dear)
    assert alike({"x": 16, "y": 32, "z": 32}) == ("y", "z")


def test_words_are_distinct():
    assert len(set(COMMON)) == len(COMMON) >= 200


def test_mixed_prompts_and_answers_are_short_or_long_each_on_its_own():
    made = script("mixed:isl=either(40,200),osl=either(2,9)")
    kinds = Counter(
        (num_words(ask) + 5, ask.isl_tokens, ask.osl_tokens)
        for ask in (made.next() for _ in range(400))
    )

    assert set(kinds) == {(isl, isl, osl) for isl in (40, 200) for osl in (2, 9)}
    assert min(kinds.values()) > 60


def test_mixed_has_lengths_of_its_own():
    assert parse_workload("mixed").longest_tokens == 2048 + 256
    assert (
        parse_workload("prefix:groups=2,len=100,suffix=either(20,10),osl=5").longest_tokens == 125
    )


@pytest.mark.parametrize("length", ["either(0,5)", "either(1.5,4)", "either(4)", "either(1,99999999999)", "either(a,b)"])  # fmt: skip
def test_what_is_no_pair_of_lengths_is_refused(length):
    with pytest.raises(UsageError, match="mixed:isl="):
        parse_workload(f"mixed:isl={length}")

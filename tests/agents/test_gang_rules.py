"""When members of a gang start, join, and end: by what they heard of each other."""

import pytest

from dynctl.agents import gang
from dynctl.agents.gang import Word
from dynctl.agents.protocol import Gang, MemberInfo, Peer
from dynctl.core.deployment import EngineState as S

PEERS = [Peer(f"e0.{rank}" if rank else "e0", f"h{rank}", f"10.0.0.{rank}", 1) for rank in range(3)]
LEADER = Gang("e0", 0, 3, "10.0.0.0", 2, tuple(PEERS[1:]), "d")
MEMBER = Gang("e0", 1, 3, "10.0.0.0", 2, (PEERS[0],), "d")


def info(rank=1, state=S.STARTING, **fields):
    return MemberInfo(PEERS[rank].id, rank, **({"digest": "d", "state": state} | fields))


def hears(*words):
    """Words of ranks in order; a member's only peer is rank 0."""
    by_id = {peer.id: word for peer, word in zip(PEERS, words, strict=False)}
    return lambda peer: by_id[peer.id]


WAITING = Word(info(is_waiting=True), "")


def test_rank_0_starts_once_all_others_wait_for_it():
    assert gang.lacking(LEADER, hears(None, WAITING, WAITING)) == ""


@pytest.mark.parametrize(
    ("word", "why"),
    [
        (
            Word(None, "connection refused"),
            "e0.2 on h2: its host does not answer: connection refused",
        ),
        (Word(info(2, is_waiting=True), "lost"), "e0.2 on h2: its host does not answer: lost"),
        (Word(None, ""), "e0.2 on h2: its host has not been told of it"),
        (
            Word(info(2, digest="other", is_waiting=True), ""),
            "e0.2 on h2: its host has another plan",
        ),
        (Word(info(2, S.FAILED, error="no GPU"), ""), "e0.2 on h2: failed: no GPU"),
        (Word(info(2, S.READY, incarnation="old"), ""), "e0.2 on h2: ready still"),
    ],
)
def test_rank_0_says_which_member_is_missing_and_why(word, why):
    assert gang.lacking(LEADER, hears(None, WAITING, word)) == f"waits for {why}"


def test_a_member_joins_the_incarnation_that_rank_0_begins():
    hear = hears(Word(info(0, incarnation="x"), ""))
    assert gang.to_join(MEMBER, hear, "") == "x.1"
    assert gang.to_join(MEMBER, hear, "w.1") == "x.1"


@pytest.mark.parametrize(
    "word",
    [
        Word(info(0, incarnation="x"), "lost"),
        Word(None, ""),
        Word(info(0, incarnation=""), ""),
        Word(info(0, S.READY, incarnation="x"), ""),
        Word(info(0, digest="other", incarnation="x"), ""),
    ],
)
def test_a_member_does_not_join_what_has_not_just_begun_with_it(word):
    assert gang.to_join(MEMBER, hears(word), "") == ""


def test_a_member_joins_no_incarnation_twice():
    assert gang.to_join(MEMBER, hears(Word(info(0, incarnation="x"), "")), "x.1") == ""


def test_rank_0_ends_when_a_member_that_had_joined_is_gone():
    gone = Word(info(2, S.BACKOFF, last_incarnation="x.2", error="ended by SIGKILL"), "")
    cause = gang.broken(LEADER, hears(None, Word(info(1, incarnation="x.1"), ""), gone), "x")
    assert cause is not None
    assert cause.text == "e0.2 on h2 ended: ended by SIGKILL"
    assert not cause.is_final


def test_rank_0_goes_on_while_members_have_not_joined_yet_or_are_not_heard():
    joined = Word(info(1, incarnation="x.1", last_incarnation="x.1"), "lost")
    assert gang.broken(LEADER, hears(None, joined, WAITING), "x") is None
    assert gang.broken(LEADER, hears(None, Word(None, ""), WAITING), "x") is None


def test_rank_0_names_the_members_that_did_not_join():
    joined = Word(info(1, incarnation="x.1"), "")
    assert gang.absent(LEADER, hears(None, joined, WAITING), "x") == "e0.2 on h2 not started yet"
    assert gang.absent(LEADER, hears(None, joined, Word(info(2, incarnation="x.2"), "")), "x") == ""


def test_a_member_ends_when_rank_0_has_ended_or_is_another_incarnation():
    for leader in (info(0, S.BACKOFF), info(0, S.STARTING, incarnation="y"), info(0, S.FAILED)):
        assert gang.broken(MEMBER, hears(Word(leader, "")), "x.1") is not None


def test_a_member_goes_on_while_rank_0_is_not_heard():
    known = Word(info(0, S.READY, incarnation="x"), "connection refused")
    assert gang.broken(MEMBER, hears(known), "x.1") is None
    assert gang.broken(MEMBER, hears(Word(None, "connection refused")), "x.1") is None
    assert gang.broken(MEMBER, hears(Word(None, "")), "x.1") is None


def test_a_member_is_ready_with_rank_0_of_its_own_incarnation():
    assert gang.is_led(MEMBER, hears(Word(info(0, S.READY, incarnation="x"), "")), "x.1")
    assert not gang.is_led(MEMBER, hears(Word(info(0, S.STARTING, incarnation="x"), "")), "x.1")
    assert not gang.is_led(MEMBER, hears(Word(info(0, S.READY, incarnation="y"), "")), "x.1")


def test_a_member_is_needed_until_rank_0_is_heard_to_have_ended():
    assert not gang.is_left(MEMBER, hears(Word(info(0, S.DRAINING, incarnation="x"), "")), "x.1")
    assert not gang.is_left(
        MEMBER, hears(Word(info(0, S.DRAINING, incarnation="x"), "lost")), "x.1"
    )
    assert gang.is_left(MEMBER, hears(Word(info(0, S.STOPPED), "")), "x.1")
    assert gang.is_left(MEMBER, hears(Word(None, "")), "x.1")


@pytest.mark.parametrize(
    "named", ["/models/llama-3", "../../models/llama-3", "x/y", "x.y", "x\0", "x\n", "x" * 9, "Ж"]
)
def test_a_member_is_part_of_nothing_whose_name_could_lead_out_of_its_directory(named):
    assert gang.to_join(MEMBER, hears(Word(info(0, incarnation=named), "")), "") == ""


def test_rank_0_ends_when_a_member_will_never_join():
    failed = Word(info(1, S.FAILED, error="10.0.0.1 is not one of this host's"), "")
    cause = gang.broken(LEADER, hears(None, failed, WAITING), "x")
    assert cause is not None
    assert cause.text == "e0.1 on h1 ended: 10.0.0.1 is not one of this host's"

"""S119: an engine's token ids are compared with ours over fifty prompts, one at a time, when it registers."""

import json
from types import SimpleNamespace

import pytest

from dynctl.http1.upstream import UpstreamError
from dynctl.router.findings import Evidence, diagnose
from dynctl.router.sources import parity
from dynctl.router.sources.corpus import CHATS, TEXTS
from dynctl.router.sources.parity import check_parity
from dynctl.router.tokens import load_tokenizer
from dynctl.sim.options import MODEL_DIR

OURS = load_tokenizer(str(MODEL_DIR))


class Engine:
    """Answers /tokenize as the tokenizer of the model does, but for what `change` does to an answer."""

    def __init__(self, change=lambda _body, tokens: (200, tokens)):
        self.change = change
        self.asked = []
        self.num_open = 0

    async def fetch(self, method, path, content):
        assert (method, path, self.num_open) == ("POST", "/tokenize", 0)
        self.num_open += 1
        body = json.loads(content)
        self.asked.append(body)
        ids = (
            OURS.chat_ids(body["messages"])
            if "messages" in body
            else OURS.encode(body["prompt"], has_special=body["add_special_tokens"])
        )
        status, tokens = self.change(body, ids)
        self.num_open -= 1
        return SimpleNamespace(status=status, body=json.dumps({"tokens": tokens}).encode())


def parity_of(run, engine):
    noted = []
    fleet = SimpleNamespace(set_parity=lambda *said: noted.append(said))
    run(lambda: check_parity(fleet, engine, ("e", "e.1", "m"), OURS))
    ((engine_id, incarnation, *outcome),) = noted
    assert (engine_id, incarnation) == ("e", "e.1")
    return tuple(outcome)


def test_fifty_different_prompts_of_all_roles_are_compared(run):
    engine = Engine()
    assert parity_of(run, engine) == ("verified", "")
    assert len({json.dumps(body) for body in engine.asked}) == len(engine.asked) == 50
    roles = {message["role"] for chat in CHATS for message in chat}
    assert roles == {"system", "user", "assistant", "tool"}
    assert all(body["model"] == "m" for body in engine.asked)


@pytest.mark.parametrize("text", TEXTS)
def test_one_text_that_differs_is_enough_and_named(run, text):
    engine = Engine(lambda body, ids: (200, ids[:-1] if body.get("prompt") == text else ids))
    outcome, detail = parity_of(run, engine)
    assert (outcome, detail) == ("mismatch", f"first difference in {text!r}")
    named = diagnose(
        Evidence("e", num_ended=9, parity=outcome, parity_detail=detail, num_stored_blocks=9)
    )
    assert named.cause == "tokenizer"


@pytest.mark.parametrize("number", range(len(CHATS)))
def test_one_chat_that_differs_is_enough_and_its_roles_are_named(run, number):
    chat = json.loads(json.dumps(CHATS[number]))
    engine = Engine(lambda body, ids: (200, [*ids, 1] if body.get("messages") == chat else ids))
    outcome, detail = parity_of(run, engine)
    roles = ", ".join(message["role"] for message in chat)
    assert (outcome, detail) == ("mismatch", f"first difference in 'a chat of {roles}'")
    named = diagnose(
        Evidence("e", num_ended=9, parity=outcome, parity_detail=detail, num_stored_blocks=9)
    )
    assert named.cause == "chat_template"


def test_a_chat_the_engine_refuses_says_nothing_of_the_others(run):
    def refuse_tools(body, ids):
        has_tool = any(one["role"] == "tool" for one in body.get("messages", ()))
        return (400, None) if has_tool else (200, ids)

    engine = Engine(refuse_tools)
    assert parity_of(run, engine) == ("verified", "")
    assert len(engine.asked) == 50


@pytest.mark.parametrize("status", [400, 404, 500])
def test_an_engine_that_does_not_tokenize_is_not_verified_and_asked_no_further(run, status):
    engine = Engine(lambda _body, _ids: (status, None))
    outcome, detail = parity_of(run, engine)
    assert outcome == "unverified"
    assert f"/tokenize answers {status}" in detail
    assert len(engine.asked) == 1


def test_an_engine_that_does_not_answer_is_asked_anew_and_then_let_be(run, monkeypatch):
    monkeypatch.setattr(parity, "_RETRY_S", 0.0)

    def fall_silent(body, ids):
        if body.get("prompt") == TEXTS[3]:
            raise UpstreamError("timeout", "no answer")
        return 200, ids

    class Silent(Engine):
        async def fetch(self, *asked):
            self.num_open = 0
            return await super().fetch(*asked)

    engine = Silent(fall_silent)
    outcome, detail = parity_of(run, engine)
    assert outcome == "unverified"
    assert "no answer" in detail
    assert len(engine.asked) == 3 * 4

"""Does the engine count tokens as we do? Asked once per incarnation, over a fixed set of prompts, one at a time. IO: sockets."""

import asyncio
import logging
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import msgspec

from dynctl.core.text import clean
from dynctl.http1.upstream import UpstreamError
from dynctl.router.sources.corpus import CHATS, TEXTS
from dynctl.router.sources.fleet import Fleet
from dynctl.router.sources.route import Route
from dynctl.router.tokens import NOT_FAULTS, ModelTokenizer

log = logging.getLogger("dynctl.router")

_ATTEMPTS = 3
_RETRY_S = 2.0
_LIMIT_S = 60.0
"""One attempt."""

_REFUSED = frozenset((400, 422))


class _Tokens(msgspec.Struct):
    tokens: list[int]


async def check_parity(
    fleet: Fleet, route: Route, engine: tuple[str, str, str], tokenizer: ModelTokenizer | None
) -> None:
    """Compare and note the outcome; `engine` is id, incarnation, model. An engine that differs is routed by text."""
    engine_id, incarnation, model = engine
    if tokenizer is None:
        return
    parity, detail = "unverified", ""
    for attempt in range(_ATTEMPTS):
        try:
            async with asyncio.timeout(_LIMIT_S):
                parity, detail = await _compare(route, model, tokenizer)
            break
        except UpstreamError as error:
            detail = error.message
        except TimeoutError:
            detail = f"/tokenize takes more than {_LIMIT_S:.0f} s"
        except NOT_FAULTS:
            raise
        except BaseException as error:  # noqa: BLE001 - it must not end the watch over engines
            detail = f"our own tokenizer fails: {error!r}"
            break
        await asyncio.sleep(_RETRY_S * (attempt + 1))
    fleet.set_parity(engine_id, incarnation, parity, detail)
    if parity == "mismatch":
        log.warning(
            "engine %s counts tokens differently, so blocks of text stand for what it holds: %s",
            clean(engine_id),
            clean(detail),
        )
    elif parity == "unverified":
        log.warning("engine %s: tokenizer given, not verified: %s", clean(engine_id), clean(detail))


async def _compare(route: Route, model: str, tokenizer: ModelTokenizer) -> tuple[str, str]:
    for body, ours, what in _questions(model, tokenizer):
        answer = await route.fetch("POST", "/tokenize", msgspec.json.encode(body))
        if answer.status in _REFUSED and "messages" in body:
            continue  # not all templates know all roles; what the engine refuses it never computes
        if answer.status != 200:
            # Engines without this endpoint answer 404; one that refuses a text tells nothing about the others.
            if answer.status in {404, 405, 501}:
                return "unverified", f"/tokenize answers {answer.status}"
            return "unverified", f"/tokenize answers {answer.status} for {what!r}"
        try:
            theirs = msgspec.json.decode(answer.body, type=_Tokens).tokens
        except msgspec.MsgspecError:
            return "unverified", "/tokenize answers something else"
        if theirs != ours:
            return "mismatch", f"first difference in {what!r}"
    return "verified", ""


def _questions(
    model: str, tokenizer: ModelTokenizer
) -> Iterator[tuple[Mapping[str, Any], Sequence[int], str]]:
    for text in TEXTS:
        ids = tokenizer.encode(text, has_special=True)
        yield {"model": model, "prompt": text, "add_special_tokens": True}, ids, text
    for messages in CHATS:
        chat_ids = tokenizer.chat_ids(messages)
        if chat_ids is not None:
            body = {"model": model, "messages": messages, "add_generation_prompt": True}
            yield body, chat_ids, f"a chat of {', '.join([one['role'] for one in messages])}"

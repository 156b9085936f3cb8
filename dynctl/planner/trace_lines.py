"""JSON lines → a recorded workload; what is wrong is named with line and column.

Each line is one request: its time (`timestamp` in milliseconds or `timestamp_s`), and either lengths or texts.
Lengths: `input_length`, `output_length` in tokens and `hash_ids`, one number per block of the prompt that names the block
with everything before it, as the Mooncake traces have; or `session`, whose prompts each begin with all of the one before.
Texts: `prompt` or `messages`, and `output` or `max_tokens`; they are counted and cut here.
Not here: opening files. Pure.
"""

import itertools
import json
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from typing import Any

import xxhash

from dynctl.errors import UsageError
from dynctl.planner.trace import Call, Trace

BLOCK_TOKENS = 512
"""What one of `hash_ids` stands for in the Mooncake traces."""
TEXT_BLOCK_TOKENS = 64
SESSION_BLOCK_TOKENS = 16
CHARS_PER_TOKEN = 4
"""Of English text under the usual vocabularies."""
MAX_CALLS = 1_000_000
_OUTPUTS = ("output_length", "osl", "completion_tokens", "output_tokens", "max_tokens")
_INPUTS = ("input_length", "isl", "prompt_tokens", "input_tokens")
_KEYS = (
    "each line needs timestamp, and input_length, output_length with hash_ids or session, "
    "or prompt or messages with output or max_tokens"
)
_MAX_NUMBER = 1e18
_MAX_LENGTH_TOKENS = 10_000_000


class _LineError(Exception):
    """Raised when a line is no request; `key` is where."""

    def __init__(self, why: str, key: str = "") -> None:
        super().__init__(why)
        self.key = key


def read_trace(
    lines: Iterable[str], name: str, *, block_tokens: int = BLOCK_TOKENS, keep_texts: bool = False
) -> Trace:
    """Read JSON lines; `block_tokens` is what one of `hash_ids` stands for.

    Raises:
        UsageError: naming line and column and what is wrong there; when there is no request in it.
    """
    calls: list[Call] = []
    texts = named = 0
    for number, line in enumerate(lines, 1):
        if not line.strip():
            continue
        record = _record(line, f"{name}:{number}")
        try:
            call, is_text = _read_call(record, keep_texts=keep_texts)
        except _LineError as error:
            where = f"{name}:{number}:{_column(line, error.key)}"
            raise UsageError(f"{where}: {error}", _KEYS) from error
        calls.append(call)
        texts += is_text
        named += bool(call.blocks)
        if len(calls) > MAX_CALLS:
            raise UsageError(f"{name}: more than {MAX_CALLS} requests", "give a part of it")
    if not calls:
        raise UsageError(f"{name} holds no request", _KEYS)
    if texts not in {0, len(calls)}:
        raise UsageError(f"{name}: some lines have texts, others lengths", "make them alike")
    if not texts and not named:
        calls, block_tokens = [_by_session(call) for call in calls], SESSION_BLOCK_TOKENS
    calls.sort(key=lambda call: call.at_s)
    first = calls[0].at_s
    moved = tuple(replace(call, at_s=call.at_s - first) for call in calls)
    return Trace(moved, TEXT_BLOCK_TOKENS if texts else block_tokens, name)


def _record(line: str, where: str) -> Mapping[str, Any]:
    try:
        record = json.loads(line)
    except json.JSONDecodeError as error:
        raise UsageError(f"{where}:{error.colno}: this is no JSON: {error.msg}", _KEYS) from error
    except (ValueError, RecursionError) as error:
        raise UsageError(f"{where}:1: this is no JSON that can be read: {error}", _KEYS) from error
    if not isinstance(record, dict):
        raise UsageError(f"{where}:1: a line has to be one JSON object", _KEYS)
    return record


def _column(line: str, key: str) -> int:
    """Where a key stands; inside a string its quotes would be escaped."""
    found = re.search(rf'"{key}"\s*:', line) if key else None
    return found.start() + 1 if found else 1


def _read_call(record: Mapping[str, Any], *, keep_texts: bool) -> tuple[Call, bool]:
    at_s = (
        _number(record, ("timestamp_s",))
        if "timestamp_s" in record
        else _number(record, ("timestamp",)) / 1e3
    )
    session = record.get("session", "")
    if isinstance(session, bool) or not isinstance(session, str | int):
        raise _LineError("session has to be a text or a number", "session")
    _check_characters(str(session), "session")
    messages = _messages(record)
    if messages:
        is_prompt = isinstance(record.get("prompt"), str)
        text = messages[0][1] if is_prompt else "\n".join(map(": ".join, messages))
        isl = max(1, len(text) // CHARS_PER_TOKEN)
        kept = messages if keep_texts else ()
        for part in itertools.chain.from_iterable(kept):
            _check_characters(part, "prompt" if is_prompt else "messages")
        return Call(at_s, isl, _answer_tokens(record), _cut(text), kept, str(session)), True
    ids = record.get("hash_ids", [])
    if not isinstance(ids, list) or any(type(i) is not int for i in ids):
        raise _LineError("hash_ids has to be a list of whole numbers", "hash_ids")
    isl, osl = _length(record, _INPUTS), _length(record, _OUTPUTS)
    return Call(at_s, isl, osl, tuple(ids), (), str(session)), False


def _check_characters(text: str, key: str) -> None:
    """Refuse what cannot be sent: JSON may escape one half of a character."""
    try:
        text.encode()
    except UnicodeEncodeError as error:
        raise _LineError(f"{key} holds half of a character (a lone surrogate)", key) from error


def _answer_tokens(record: Mapping[str, Any]) -> int:
    answer = record.get("output") or record.get("response")
    if isinstance(answer, str):
        return max(1, len(answer) // CHARS_PER_TOKEN)
    return _length(record, _OUTPUTS)


def _length(record: Mapping[str, Any], keys: Sequence[str]) -> int:
    return max(1, int(_number(record, keys, _MAX_LENGTH_TOKENS)))


def _number(record: Mapping[str, Any], keys: Sequence[str], most: float = _MAX_NUMBER) -> float:
    for key in keys:
        if key in record:
            value = record[key]
            if isinstance(value, bool) or not isinstance(value, int | float):
                raise _LineError(f"{key} has to be a number", key)
            if not 0 <= value <= most:
                raise _LineError(f"{key} has to be a number of 0 or more, at most {most:g}", key)
            return float(value)
    raise _LineError(f"{keys[0]!r} is missing")


def _messages(record: Mapping[str, Any]) -> tuple[tuple[str, str], ...]:
    """Role and text of each message, `prompt` being the user's; empty: it has lengths."""
    if isinstance(record.get("prompt"), str):
        return (("user", record["prompt"]),)
    messages = record.get("messages")
    if messages is None:
        return ()
    if not isinstance(messages, list) or not messages:
        raise _LineError("messages has to be a list of messages", "messages")
    return tuple(_message(each) for each in messages)


def _message(message: object) -> tuple[str, str]:
    if not isinstance(message, dict) or not isinstance(message.get("role"), str):
        raise _LineError("messages have to be objects with role and content", "messages")
    content = message.get("content")
    if isinstance(content, list):
        parts = [part.get("text") for part in content if isinstance(part, dict)]
        content = "".join(part for part in parts if isinstance(part, str))
    if content is not None and not isinstance(content, str):
        raise _LineError("a message's content has to be text, or parts with text", "messages")
    return message["role"], content or ""


def _cut(text: str) -> tuple[int, ...]:
    """Name every whole block of a text with everything before it."""
    step = TEXT_BLOCK_TOKENS * CHARS_PER_TOKEN
    state = xxhash.xxh3_64()
    found = []
    for start in range(0, len(text) - step + 1, step):
        state.update(text[start : start + step].encode(errors="surrogatepass"))
        found.append(state.intdigest())
    return tuple(found)


def _by_session(call: Call) -> Call:
    """Name a prompt's whole blocks by its session and their place: each prompt of it begins with the one before."""
    if not call.session:
        return call
    whole = range(call.isl_tokens // SESSION_BLOCK_TOKENS)
    names = (xxhash.xxh3_64_intdigest(f"{call.session}/{at}".encode()) for at in whole)
    return replace(call, blocks=tuple(names))

"""What comes back from an engine: a stream followed event by event, or a whole answer checked once.

Bytes pass untouched, except usage the client did not ask for, which is cut out. A stream that is broken in any way
is never made to look complete. Not here: sockets, retries. Pure.
"""

from dataclasses import dataclass
from typing import Any

import msgspec

from dynctl.http1.sse import EventSplitter, EventTooLongError, event_data

_FAILED_REASONS = frozenset(("error", "abort"))
"""Finish reasons that mean the engine gave up; vLLM says abort when it is shut down under a request."""


class _Details(msgspec.Struct):
    cached_tokens: int | None = None


class Usage(msgspec.Struct):
    """What the engine counted."""

    prompt_tokens: int = 0
    completion_tokens: int | None = None
    prompt_tokens_details: _Details | None = None

    @property
    def output_tokens(self) -> int:
        """Generated tokens."""
        return self.completion_tokens or 0

    @property
    def cached_tokens(self) -> int | None:
        """Prompt tokens found in the cache; None when the engine does not say."""
        return (
            None if self.prompt_tokens_details is None else self.prompt_tokens_details.cached_tokens
        )


class _Part(msgspec.Struct):
    content: Any = None
    reasoning: Any = None
    reasoning_content: Any = None
    tool_calls: Any = None
    function_call: Any = None
    refusal: Any = None


class _Choice(msgspec.Struct):
    text: str | None = None
    delta: _Part | None = None
    message: _Part | None = None
    finish_reason: str | None = None


class _Chunk(msgspec.Struct):
    choices: list[_Choice] | None = None
    usage: Usage | None = None
    error: Any = None


class _RawUsage(msgspec.Struct):
    usage: msgspec.Raw


class _Answer(msgspec.Struct):
    choices: list[_Choice] | None = None
    usage: Usage | None = None
    error: Any = None
    kv_transfer_params: Any = None


_decode_chunk = msgspec.json.Decoder(_Chunk).decode
_decode_answer = msgspec.json.Decoder(_Answer).decode
_decode_raw_usage = msgspec.json.Decoder(_RawUsage).decode


class StreamFollower:
    """One engine's event stream. `feed` returns what may go to the client; look at the fields after each call."""

    __slots__ = (
        "_has_finish",
        "_hides_usage",
        "_splitter",
        "broken",
        "is_done",
        "num_token_events",
        "usage",
    )

    def __init__(self, *, hides_usage: bool) -> None:
        self._splitter = EventSplitter()
        self._hides_usage = hides_usage
        self._has_finish = False
        self.num_token_events = 0
        """Events so far that carried text, reasoning or tool calls."""
        self.is_done = False
        """`[DONE]` came after a finish reason: the stream is whole."""
        self.broken = ""
        """Why the stream is not to be believed any more; empty while it is sound."""
        self.usage: Usage | None = None

    def feed(self, data: bytes) -> bytes:
        """Take bytes, return the complete events to forward; nothing more after an end or a fault."""
        if self._is_over():
            return b""
        try:
            events = self._splitter.feed(data)
        except EventTooLongError:
            self.broken = "an event is too long"
            return b""
        kept = []
        for event in events:
            kept.append(self._follow(event))
            if self._is_over():
                break
        return kept[0] if len(kept) == 1 else b"".join(kept)

    def ended(self) -> str:
        """Say what is wrong when the engine ends the body now; empty: nothing."""
        if self._is_over():
            return self.broken
        return "it ended before its end mark"

    def _is_over(self) -> bool:
        return self.is_done or bool(self.broken)

    def _follow(self, event: bytes) -> bytes:
        data = event_data(event)
        if data is None:
            return event if event.startswith(b":") else self._break("an event without data")
        if data == b"[DONE]":
            if not self._has_finish:
                return self._break("an end mark without a finish reason")
            self.is_done = True
            return event
        try:
            chunk = _decode_chunk(data)
        except (msgspec.MsgspecError, UnicodeDecodeError):
            return self._break("an event that is no completion chunk")
        if chunk.error is not None:
            return self._break("the engine reported an error")
        return self._follow_chunk(event, data, chunk)

    def _follow_chunk(self, event: bytes, data: bytes, chunk: _Chunk) -> bytes:
        for choice in chunk.choices or ():
            reason = choice.finish_reason
            if reason is not None:
                if reason in _FAILED_REASONS:
                    return self._break(f"the engine ended it with {reason}")
                self._has_finish = True
            if choice.text or (choice.delta is not None and _has_token(choice.delta)):
                self.num_token_events += 1
        if chunk.usage is not None:
            self.usage = chunk.usage
        if not self._hides_usage:
            return event
        if chunk.usage is None:
            # An engine asked for usage may write it as null in the other chunks.
            return event.replace(b',"usage":null', b"", 1)
        if not chunk.choices:
            return b""
        return event.replace(b',"usage":' + bytes(_decode_raw_usage(data).usage), b"", 1)

    def _break(self, why: str) -> bytes:
        self.broken = why
        return b""


def _has_token(part: _Part) -> bool:
    return bool(
        part.content
        or part.reasoning_content
        or part.reasoning
        or part.tool_calls
        or part.function_call
        or part.refusal
    )


@dataclass(frozen=True, slots=True)
class Answer:
    """A whole answer, looked at once."""

    usage: Usage | None
    transfer: Any
    """`kv_transfer_params`, unchecked."""
    fault: str
    """Why it is no sound answer; empty: it is one."""


def read_answer(content: bytes) -> Answer:
    """Read a 200 answer that is not streamed; an answer that only looks like one is a fault, never forwarded."""
    try:
        answer = _decode_answer(content)
    except (msgspec.MsgspecError, UnicodeDecodeError):
        return Answer(None, None, "an answer that is no completion")
    return Answer(answer.usage, answer.kv_transfer_params, _answer_fault(answer))


def _answer_fault(answer: _Answer) -> str:
    if answer.error is not None:
        return "an error inside a 200"
    if not answer.choices:
        return "an answer without choices"
    for choice in answer.choices:
        if choice.finish_reason in _FAILED_REASONS:
            return f"the engine ended it with {choice.finish_reason}"
        if choice.text is None and choice.message is None:
            return "a choice without text or message"
    return ""

"""What comes back from an engine: a stream followed event by event, or a whole answer checked once.

Bytes pass untouched, except usage the client did not ask for, which is cut out. A stream that is broken in any way
is never made to look complete. Not here: sockets, retries. Pure.
"""

from typing import Final

import msgspec

from dynctl.http1.sse import EventSplitter, EventTooLongError, event_data
from dynctl.router.api.shapes import (
    Answer,
    Choice,
    Chunk,
    Part,
    Usage,
    WholeAnswer,
    decode_answer,
    decode_chunk,
    read_usage,
)

_FAILED_REASONS: Final = frozenset(("error", "abort"))
"""Finish reasons that mean the engine gave up; vLLM says abort when it is shut down under a request."""


_NULL_USAGE: Final = b',"usage":null'
_NO_MARKS: Final = bytes(byte for byte in range(256) if byte not in b'"\\\r\n')
_NUM_TELLING: Final = 12
"""Bytes of a key: longer needles are found faster than two quotes."""


class _Plain:
    """What events look like that differ from one already parsed in the text of one string alone.

    Between two such events stands `joint`. A read that begins with `prefix`, ends with `suffix` and has, besides what
    stands in strings, just the marks its number of joints accounts for holds whole events of this shape and nothing
    else: neither another key nor an event border fits in without one more quote or line end.
    """

    __slots__ = ("_empty", "_joint", "_marks", "has_null_usage", "prefix", "suffix")

    def __init__(self, prefix: bytes, suffix: bytes) -> None:
        self.prefix = prefix
        self.suffix = suffix
        self.has_null_usage = _NULL_USAGE in prefix or _NULL_USAGE in suffix
        self._joint = suffix + prefix
        self._marks = (prefix + suffix).translate(None, _NO_MARKS)
        self._empty = prefix[-_NUM_TELLING:] + b'"'
        """How an event without text would look."""

    def count(self, data: bytes) -> int:
        """How many events `data` is, all of this shape and none without text; 0 when it is anything else."""
        if not data.startswith(self.prefix) or not data.endswith(self.suffix):
            return 0
        number = data.count(self._joint) + 1
        if data.translate(None, _NO_MARKS) != self._marks * number or self._empty in data:
            return 0
        return number


class StreamFollower:
    """One engine's event stream. `feed` returns what may go to the client; look at the fields after each call."""

    __slots__ = (
        "_has_finish",
        "_hides_usage",
        "_num_learned",
        "_plain",
        "_splitter",
        "_teacher",
        "broken",
        "is_done",
        "num_token_events",
        "usage",
    )

    def __init__(self, *, hides_usage: bool) -> None:
        self._splitter = EventSplitter()
        self._hides_usage = hides_usage
        self._has_finish = False
        self._plain: _Plain | None = None
        self._teacher: tuple[bytes, Chunk] | None = None
        """The last event and what it said, while no shape is known."""
        self._num_learned = 0
        self.num_token_events = 0
        """Events so far that carried text, reasoning or tool calls."""
        self.is_done = False
        """`[DONE]` came after a finish reason: the stream is whole."""
        self.broken = ""
        """Why the stream is not to be believed any more; empty while it is sound."""
        self.usage: Usage | None = None

    def feed(self, data: bytes) -> bytes:
        """Take bytes, return the complete events to forward; nothing more after an end or a fault."""
        if self._plain is not None:
            return self._feed_plain(data)
        out = b""
        for _ in range(_MAX_LEARNED):
            # Event by event, until one teaches the shape of those behind it: only now, for the first is waited for.
            if self._teacher is not None:
                self._plain, self._teacher = _learn(*self._teacher), None
            end = data.find(b"\n\n") + 2
            if end < 2 or end == len(data) or self._plain is not None:
                break
            out += self._feed(data[:end])
            data = data[end:]
        return out + self._feed_plain(data)

    def _feed_plain(self, data: bytes) -> bytes:
        """Take bytes that are probably events of the known shape: those are counted, not parsed again."""
        plain = self._plain
        if plain is None or self._splitter.has_rest or self._is_over():
            return self._feed(data)
        number = plain.count(data)
        if number:
            self.num_token_events += number
            return self._without_null(data) if plain.has_null_usage else data
        end = data.rfind(plain.suffix) + len(plain.suffix)
        number = plain.count(data[:end]) if len(plain.suffix) < end < len(data) else 0
        if not number:
            return self._feed(data)
        self.num_token_events += number
        return self._without_null(data[:end]) + self._feed(data[end:])

    def ended(self) -> str:
        """Say what is wrong when the engine ends the body now; empty: nothing."""
        if self._is_over():
            return self.broken
        return "it ended before its end mark"

    def _is_over(self) -> bool:
        return self.is_done or bool(self.broken)

    def _feed(self, data: bytes) -> bytes:
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

    def _follow(self, event: bytes) -> bytes:
        plain = self._plain
        if plain is not None and plain.count(event) == 1:
            self.num_token_events += 1
            return self._without_null(event)
        data = event_data(event)
        if data is None:
            return event if event.startswith(b":") else self._break("an event without data")
        if data == b"[DONE]":
            if not self._has_finish:
                return self._break("an end mark without a finish reason")
            self.is_done = True
            return event
        try:
            chunk = decode_chunk(data)
        except (msgspec.MsgspecError, UnicodeDecodeError):
            return self._break("an event that is no completion chunk")
        if chunk.error is not None:
            return self._break("the engine reported an error")
        return self._follow_chunk(event, chunk)

    def _follow_chunk(self, event: bytes, chunk: Chunk) -> bytes:
        for choice in chunk.choices or ():
            reason = choice.finish_reason
            if reason is not None:
                if reason in _FAILED_REASONS:
                    return self._break(f"the engine ended it with {reason}")
                self._has_finish = True
            if choice.text or (choice.delta is not None and _has_token(choice.delta)):
                self.num_token_events += 1
        told = bytes(chunk.usage)
        has_usage = told != b"null"
        if has_usage:
            self.usage = read_usage(chunk.usage)
        elif self._plain is None and self._num_learned < _MAX_LEARNED:
            self._num_learned += 1
            self._teacher = (event, chunk)
        if not self._hides_usage:
            return event
        if not has_usage:
            return self._without_null(event)
        if not chunk.choices:
            return b""
        return event.replace(b',"usage":' + told, b"", 1)

    def _without_null(self, events: bytes) -> bytes:
        """Cut out the null that an engine asked for usage may write in chunks that have none.

        Inside a string its quotes would be escaped, so it cannot be text.
        """
        return events.replace(_NULL_USAGE, b"") if self._hides_usage else events

    def _break(self, why: str) -> bytes:
        self.broken = why
        return b""


_MAX_LEARNED: Final = 8
"""A stream whose events change their shape all the time (several choices, token ids) is parsed event by event."""


def _learn(event: bytes, chunk: Chunk) -> _Plain | None:
    """The shape of an event that is one choice's text and no more; None when it is anything else."""
    choices = chunk.choices
    if choices is None or len(choices) != 1 or choices[0].finish_reason is not None:
        return None
    if b"\\" in event or b"\r" in event or event.count(b"\n") != 2:
        return None
    text, name = _only_text(choices[0])
    if not text or event.count(name) != 1:
        return None
    # Behind the key: a colon, perhaps a space, the quote.
    start = event.find(b'"', event.find(name) + len(name)) + 1
    plain = _Plain(event[:start], event[start + len(text.encode()) :])
    return plain if plain.count(event) == 1 else None


def _only_text(choice: Choice) -> tuple[str | None, bytes]:
    """The one string of a choice that is its token, and its key; nothing when it has none or several."""
    delta = choice.delta
    if choice.text:
        return (choice.text, b'"text"') if delta is None else (None, b"")
    if delta is None or delta.tool_calls or delta.function_call or delta.refusal:
        return None, b""
    found = [
        (text, name)
        for text, name in (
            (delta.content, b'"content"'),
            (delta.reasoning, b'"reasoning"'),
            (delta.reasoning_content, b'"reasoning_content"'),
        )
        if text
    ]
    text, name = found[0] if len(found) == 1 else (None, b"")
    return (text, name) if isinstance(text, str) else (None, b"")


def _has_token(part: Part) -> bool:
    return bool(
        part.content
        or part.reasoning_content
        or part.reasoning
        or part.tool_calls
        or part.function_call
        or part.refusal
    )


def read_answer(content: bytes) -> Answer:
    """Read a 200 answer that is not streamed; an answer that only looks like one is a fault, never forwarded."""
    try:
        answer = decode_answer(content)
    except (msgspec.MsgspecError, UnicodeDecodeError):
        return Answer(None, None, "an answer that is no completion")
    return Answer(read_usage(answer.usage), answer.kv_transfer_params, _answer_fault(answer))


def _answer_fault(answer: WholeAnswer) -> str:
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

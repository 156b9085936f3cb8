"""A streamed OpenAI answer as it arrives: which events carry tokens, and when they came.

Only a non-empty content, reasoning or tool-call delta counts as a token event; role-only, empty, usage and comment
frames never do. Not here: reading sockets; times are passed in. Pure.
"""

from dataclasses import dataclass
from typing import Any, NamedTuple

import msgspec

MAX_LINE_BYTES = 1 << 20
"""A line longer than this is no sane event."""


class Chunk(NamedTuple):
    """One event that carried tokens."""

    at_s: float
    num_tokens: int | None
    """Completion tokens so far, by the server's own count; None when it does not say."""


class _Delta(msgspec.Struct):
    content: str | None = None
    reasoning: str | None = None
    reasoning_content: str | None = None
    tool_calls: list[msgspec.Raw] | None = None


class _Choice(msgspec.Struct):
    delta: _Delta | None = None
    text: str | None = None
    finish_reason: str | None = None


class _PromptDetails(msgspec.Struct):
    cached_tokens: int | None = None


class _Usage(msgspec.Struct):
    prompt_tokens: int | None = None
    completion_tokens: int | None = None
    prompt_tokens_details: _PromptDetails | None = None


class _Event(msgspec.Struct):
    choices: list[_Choice] = []
    usage: _Usage | None = None
    error: Any = None


_DECODER = msgspec.json.Decoder(_Event)


@dataclass(slots=True)
class Stream:
    """What has been read of one streamed answer; feed it bytes in any pieces."""

    first_s: float | None = None
    """First token event."""
    first_answer_s: float | None = None
    """First one that is not reasoning."""
    end_s: float | None = None
    """When `[DONE]` came."""
    error: str | None = None
    """Error event, or an event that cannot be understood."""
    finish_reason: str | None = None
    prompt_tokens: int | None = None
    output_tokens: int | None = None
    cached_tokens: int | None = None
    _rest: bytes = b""
    _data: list[bytes] | None = None
    _chunks: list[Chunk] | None = None
    _text: list[str] | None = None

    @property
    def chunks(self) -> tuple[Chunk, ...]:
        """The token events, in order."""
        return tuple(self._chunks or ())

    @property
    def text(self) -> str:
        """The answer without reasoning."""
        return "".join(self._text or ())

    def feed(self, data: bytes, now_s: float) -> None:
        """Take in bytes that arrived at `now_s`; all events they complete get that time."""
        if self.error is not None:
            return
        *lines, self._rest = (self._rest + data).split(b"\n")
        if len(self._rest) > MAX_LINE_BYTES:
            self.error = f"an event line is longer than {MAX_LINE_BYTES} bytes"
        for line in lines:
            self._line(line.removesuffix(b"\r"), now_s)

    def _line(self, line: bytes, now_s: float) -> None:
        if line.startswith(b"data:"):
            self._data = [*(self._data or ()), line[5:].removeprefix(b" ")]
        elif not line and self._data is not None:
            payload = b"\n".join(self._data)
            self._data = None
            self._event(payload, now_s)

    def _event(self, payload: bytes, now_s: float) -> None:
        if self.error is not None or self.end_s is not None:
            return
        if payload == b"[DONE]":
            self.end_s = now_s
            return
        try:
            event = _DECODER.decode(payload)
        except msgspec.DecodeError as error:
            self.error = f"an event is no answer chunk: {error}"
            return
        if event.error is not None:
            self.error = f"error event: {_message(event.error)}"
            return
        if event.usage is not None:
            self._usage(event.usage)
        for choice in event.choices:
            self._choice(choice, event.usage, now_s)

    def _usage(self, usage: _Usage) -> None:
        self.prompt_tokens = usage.prompt_tokens or self.prompt_tokens
        if usage.completion_tokens is not None:
            self.output_tokens = usage.completion_tokens
        details = usage.prompt_tokens_details
        if details is not None and details.cached_tokens is not None:
            self.cached_tokens = details.cached_tokens

    def _choice(self, choice: _Choice, usage: _Usage | None, now_s: float) -> None:
        self.finish_reason = choice.finish_reason or self.finish_reason
        delta = choice.delta or _Delta()
        answer = choice.text or delta.content
        if not (answer or delta.tool_calls or delta.reasoning or delta.reasoning_content):
            return
        if self.first_s is None:
            self.first_s = now_s
        if self.first_answer_s is None and (answer or delta.tool_calls):
            self.first_answer_s = now_s
        if answer:
            self._text = [] if self._text is None else self._text
            self._text.append(answer)
        self._chunks = [] if self._chunks is None else self._chunks
        self._chunks.append(Chunk(now_s, usage.completion_tokens if usage else None))


def _message(error: object) -> str:
    if isinstance(error, dict) and isinstance(error.get("message"), str):
        return str(error["message"])
    return str(error)

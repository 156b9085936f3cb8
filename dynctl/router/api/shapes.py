"""What of an engine's answers is read: the types they are decoded into.

Not here: what follows from them (`streams`). Not compiled: `msgspec` builds these classes itself. Pure.
"""

from typing import Annotated, Any

import msgspec

_Count = Annotated[int, msgspec.Meta(ge=0, lt=2**31)]


class _Details(msgspec.Struct):
    cached_tokens: _Count | None = None


class Usage(msgspec.Struct):
    """What the engine counted."""

    prompt_tokens: _Count = 0
    completion_tokens: _Count | None = None
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


class Part(msgspec.Struct):
    """A message, or what a chunk adds to one."""

    content: Any = None
    reasoning: Any = None
    reasoning_content: Any = None
    tool_calls: Any = None
    function_call: Any = None
    refusal: Any = None


class Choice(msgspec.Struct):
    """One of the sequences asked for."""

    text: str | None = None
    delta: Part | None = None
    message: Part | None = None
    finish_reason: str | None = None


_NOTHING = msgspec.Raw(b"null")


class Chunk(msgspec.Struct):
    """One event of a stream."""

    choices: list[Choice] | None = None
    usage: msgspec.Raw = _NOTHING
    error: Any = None


class WholeAnswer(msgspec.Struct):
    """An answer that is not streamed."""

    choices: list[Choice] | None = None
    usage: msgspec.Raw = _NOTHING
    error: Any = None
    kv_transfer_params: Any = None


class Answer(msgspec.Struct, frozen=True):
    """A whole answer, looked at once."""

    usage: Usage | None
    transfer: Any
    """`kv_transfer_params`, unchecked."""
    fault: str
    """Why it is no sound answer; empty: it is one."""


decode_chunk = msgspec.json.Decoder(Chunk).decode
decode_answer = msgspec.json.Decoder(WholeAnswer).decode

_decode_usage = msgspec.json.Decoder(Usage | None).decode


def read_usage(raw: msgspec.Raw) -> Usage | None:
    """What an engine counted; None where it did not, or says what cannot be: an answer is no worse for that."""
    try:
        return _decode_usage(raw)
    except msgspec.MsgspecError:
        return None

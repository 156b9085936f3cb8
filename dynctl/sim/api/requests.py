"""What clients ask for: OpenAI request bodies decoded, checked as vLLM does, turned into a wish for the scheduler.

Fields nobody here knows are ignored, as vLLM does. What the simulated engine cannot do is refused, never ignored.
Not here: routes, answers, texts of tokens. Pure.
"""

from typing import Annotated, Any, TypeVar

import msgspec

from dynctl.errors import EngineError

_Positive = Annotated[int, msgspec.Meta(ge=1)]
_NotNegative = Annotated[int, msgspec.Meta(ge=0)]
_Temperature = Annotated[float, msgspec.Meta(ge=0)]
_TopP = Annotated[float, msgspec.Meta(gt=0, le=1)]
_Penalty = Annotated[float, msgspec.Meta(ge=-2, le=2)]

COMPLETION_MAX_TOKENS = 16
"""OpenAI's and vLLM's default for /v1/completions."""


class RefusedError(EngineError):
    """Raised when a request is answered with an error; carries the status and the parts of an OpenAI error."""

    def __init__(
        self,
        message: str,
        *,
        status: int = 400,
        kind: str = "BadRequestError",
        param: str | None = None,
    ) -> None:
        super().__init__(message)
        self.status = status
        self.kind = kind
        self.param = param


class StreamOptions(msgspec.Struct):
    """Part of both bodies."""

    include_usage: bool | None = None
    continuous_usage_stats: bool | None = None


class _Sampling(msgspec.Struct, kw_only=True):
    """Fields both bodies share. None means not given."""

    model: str | None = None
    n: int | None = None
    stop: str | list[str] | None = None
    stop_token_ids: list[int] | None = None
    include_stop_str_in_output: bool = False
    min_tokens: _NotNegative = 0
    ignore_eos: bool = False
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    temperature: _Temperature | None = None
    top_p: _TopP | None = None
    presence_penalty: _Penalty | None = None
    frequency_penalty: _Penalty | None = None
    seed: int | None = None
    cache_salt: str | None = None
    kv_transfer_params: dict[str, Any] | None = None
    return_token_ids: bool | None = None
    add_special_tokens: bool | None = None
    use_beam_search: bool = False
    prompt_logprobs: int | None = None
    response_format: dict[str, Any] | None = None
    structured_outputs: dict[str, Any] | None = None
    truncate_prompt_tokens: int | None = None
    echo: bool | None = None


class CompletionBody(_Sampling, kw_only=True):
    """POST /v1/completions."""

    prompt: Any = None
    max_tokens: _Positive | None = COMPLETION_MAX_TOKENS
    logprobs: int | None = None
    suffix: str | None = None
    best_of: int | None = None


class ChatBody(_Sampling, kw_only=True):
    """POST /v1/chat/completions."""

    messages: list[dict[str, Any]]
    max_tokens: _Positive | None = None
    max_completion_tokens: _Positive | None = None
    logprobs: bool | None = None
    top_logprobs: int | None = None
    tools: list[dict[str, Any]] | None = None
    add_generation_prompt: bool = True
    continue_final_message: bool = False
    chat_template: str | None = None
    chat_template_kwargs: dict[str, Any] | None = None


class TokenizeBody(msgspec.Struct, kw_only=True):
    """POST /tokenize, with a text or with messages."""

    model: str | None = None
    prompt: str | None = None
    messages: list[dict[str, Any]] | None = None
    add_special_tokens: bool | None = None
    add_generation_prompt: bool = True
    return_token_strs: bool | None = None
    chat_template_kwargs: dict[str, Any] | None = None


class DetokenizeBody(msgspec.Struct, kw_only=True):
    """POST /detokenize."""

    model: str | None = None
    tokens: list[int]


_Body = TypeVar("_Body")

_DECODERS: dict[Any, msgspec.json.Decoder[Any]] = {
    kind: msgspec.json.Decoder(kind)
    for kind in (CompletionBody, ChatBody, TokenizeBody, DetokenizeBody)
}


def decode_body(kind: type[_Body], body: bytes) -> _Body:
    """Read a request's body.

    Raises:
        RefusedError: when it is no JSON, or a field has the wrong type or range.
    """
    try:
        decoded: _Body = _DECODERS[kind].decode(body)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise RefusedError(str(error)) from error
    return decoded


def refuse_unsupported(body: CompletionBody | ChatBody) -> None:
    """Refuse what the simulated engine cannot do.

    Raises:
        RefusedError: naming the field.
    """
    unsupported = {
        "n": body.n not in {None, 1},
        "logprobs": body.logprobs not in {None, False},
        "prompt_logprobs": body.prompt_logprobs is not None,
        "echo": bool(body.echo),
        "use_beam_search": body.use_beam_search,
        "response_format": (body.response_format or {}).get("type", "text") != "text",
        "structured_outputs": body.structured_outputs is not None,
        "truncate_prompt_tokens": body.truncate_prompt_tokens is not None,
    }
    if isinstance(body, CompletionBody):
        unsupported["suffix"] = body.suffix is not None
        unsupported["best_of"] = body.best_of not in {None, 1}
    else:
        unsupported["tools"] = bool(body.tools)
        unsupported["chat_template"] = body.chat_template is not None
        unsupported["top_logprobs"] = bool(body.top_logprobs)
    for name, is_asked in unsupported.items():
        if is_asked:
            raise RefusedError(f"the simulated engine does not support this {name}", param=name)
    if body.stream_options is not None and not body.stream:
        raise RefusedError(
            "Stream options can only be defined when `stream=True`.", param="stream_options"
        )


def stop_strings(body: CompletionBody | ChatBody) -> tuple[str, ...]:
    """Return the texts that end the answer.

    Raises:
        RefusedError: when one is empty.
    """
    stop = (body.stop,) if isinstance(body.stop, str) else tuple(body.stop or ())
    if "" in stop:
        raise RefusedError("stop cannot contain an empty string.", param="stop")
    return stop


def flat_messages(messages: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Check messages and join the text parts of each content, as vLLM does for templates that take strings.

    Raises:
        RefusedError: when a message has no role, or content that is no text.
    """
    if not messages:
        raise RefusedError("messages must not be empty", param="messages")
    return [{**message, "content": _content(message)} for message in messages]


def _content(message: dict[str, Any]) -> str:
    if not isinstance(message.get("role"), str):
        raise RefusedError("every message needs a role", param="messages")
    content = message.get("content")
    if content is None or isinstance(content, str):
        return content or ""
    if not isinstance(content, list):
        raise RefusedError("content must be text or a list of parts", param="messages")
    texts = []
    for part in content:
        is_text = isinstance(part, dict) and part.get("type") == "text"
        if not is_text or not isinstance(part.get("text"), str):
            raise RefusedError("the simulated engine takes text only", param="messages")
        texts.append(part["text"])
    return "\n".join(texts)

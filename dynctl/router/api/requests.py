"""A client's JSON → a checked request, and the body each leg sends to an engine.

What goes to an engine is encoded anew from what was checked, so an engine never sees a key the router did not.
Fields the router owns never come from a client. Not here: tokens, routing, HTTP. Pure.
"""

import re
from typing import Any, Final

import msgspec

from dynctl.router.api.answers import Failure, bad_request
from dynctl.router.config import Settings

COMPLETIONS: Final = "/v1/completions"
CHAT: Final = "/v1/chat/completions"

_REFUSED: Final = (
    "kv_transfer_params",
    "ec_transfer_params",
    "vllm_xargs",
    "chat_template",
    "mm_processor_kwargs",
    "logprob_token_ids",
    "data_parallel_rank",
)
"""A client that sends one of these tries to speak to the engine behind the router's back."""

_REPLACED: Final = ("request_id", "priority", "cache_salt")
"""Owned by the router; dropped, not refused, since client libraries may send them in good faith."""

_OWNED: Final = frozenset((*_REFUSED, *_REPLACED, "chat_template_kwargs"))
"""What most requests do not have, looked for in one step."""

_USAGE_ASKED: Final = b',"stream_options":{"include_usage":true}}'

# Strings of a JSON text; the group holds the colon behind those that are keys.
_STRING: Final = re.compile(rb'"(?:[^"\\]++|\\.)*+"\s*+(:?)', re.DOTALL)

_BOOL_OR_NONE: Final = (bool, type(None))

_SELDOM: Final = frozenset(
    ("stream_options", "max_completion_tokens", "stop", "n", "best_of", "use_beam_search")
)
"""Likewise, of what is checked."""

_encode = msgspec.json.Encoder().encode
_decode = msgspec.json.Decoder().decode


class RefusedError(Exception):
    """Raised when a request is refused at the router; carries what the client is told."""

    def __init__(self, failure: Failure) -> None:
        super().__init__(failure.message)
        self.failure = failure


class ApiRequest:
    """One checked generation request."""

    __slots__ = (
        "_body",
        "_has_options",
        "_num_chars",
        "encoded",
        "endpoint",
        "has_usage_asked",
        "is_stream",
        "kind",
        "max_tokens",
        "model",
        "num_sequences",
        "route_key",
    )

    def __init__(self, endpoint: str, encoded: bytes, model: str, kind: str) -> None:
        self.endpoint = endpoint
        self.encoded = encoded
        """The body, encoded anew."""
        self.model = model
        self.kind = kind
        """Endpoint and limit, in powers of two: the route key where nobody names one."""
        self.is_stream = False
        self.num_sequences = 1
        """Prompts times samples; only single sequences go through a hand-off."""
        self.has_usage_asked = False
        self.max_tokens: int | None = None
        self.route_key = ""
        """What kind of request this is; whoever takes it in says it (`route_keys`)."""
        self._has_options = False
        self._body: dict[str, Any] | None = None
        self._num_chars = -1

    @classmethod
    def of(
        cls,
        endpoint: str,
        body: dict[str, Any],
        num_sequences: int = 1,
        encoded: bytes | None = None,
    ) -> "ApiRequest":
        """Read the fields routing needs from a checked body; `encoded` is the same as JSON."""
        limit = body.get("max_completion_tokens") if endpoint == CHAT else None
        limit = body.get("max_tokens") if limit is None else limit
        if limit is None and endpoint == COMPLETIONS:
            limit = 16  # Source: OpenAI's default for completions; chat runs to the model's limit.
        if encoded is None:
            encoded = _encode(body)
        request = ApiRequest(endpoint, encoded, body["model"], _kind(endpoint, limit))
        options = body.get("stream_options")
        request.is_stream = body.get("stream") or False
        request.num_sequences = num_sequences
        request.has_usage_asked = bool(options and options.get("include_usage"))
        request.max_tokens = limit
        request._has_options = "stream_options" in body
        request._body = body
        return request

    def again(self, encoded: bytes, num_chars: int) -> "ApiRequest":
        """The same request with another text: `num_chars` of it."""
        request = ApiRequest(self.endpoint, encoded, self.model, self.kind)
        request.is_stream = self.is_stream
        request.num_sequences = self.num_sequences
        request.has_usage_asked = self.has_usage_asked
        request.max_tokens = self.max_tokens
        request._has_options = self._has_options
        request._num_chars = num_chars
        return request

    @property
    def body(self) -> dict[str, Any]:
        """The checked object."""
        if self._body is None:
            self._body = _decode(self.encoded)
        return self._body

    @property
    def num_chars(self) -> int:
        """Length of the prompt's text, roughly: what decides where it is tokenised, and a guess of its tokens."""
        if self._num_chars < 0:
            self._num_chars = _count_chars(self.endpoint, self.body)
        return self._num_chars

    @property
    def prompt_ids(self) -> list[int] | None:
        """The prompt's token ids when the client gave a single prompt as ids."""
        prompt = self.body.get("prompt")
        if not isinstance(prompt, list) or not prompt:
            return None
        if isinstance(prompt[0], int):
            return prompt
        if len(prompt) == 1 and isinstance(prompt[0], list):
            ids: list[int] = prompt[0]
            return ids
        return None

    @property
    def prompt_text(self) -> str | None:
        """The prompt when the client gave a single one as text."""
        prompt = self.body.get("prompt")
        if isinstance(prompt, list) and len(prompt) == 1:
            prompt = prompt[0]
        return prompt if isinstance(prompt, str) else None

    def main_body(self, model: str, transfer: dict[str, Any] | None) -> bytes:
        """Encode what the engine that generates gets; `transfer` is the prefill engine's answer, verbatim."""
        if transfer is None and model == self.model:
            if not self.is_stream:
                return self.encoded
            if not self._has_options:
                return self.encoded[:-1] + _USAGE_ASKED
        body = self.body | {"model": model}
        if self.is_stream:
            body["stream_options"] = (body.get("stream_options") or {}) | {"include_usage": True}
        if transfer is not None:
            body["kv_transfer_params"] = transfer
        return _encode(body)

    def prefill_body(self, model: str) -> bytes:
        """Encode what a prefill engine gets: one token, no stream, blocks to be kept for another engine."""
        body = self.body | {
            "model": model,
            "stream": False,
            "max_tokens": 1,
            "kv_transfer_params": {"do_remote_decode": True, "do_remote_prefill": False},
        }
        body.pop("stream_options", None)
        if "min_tokens" in body:
            body["min_tokens"] = 1
        if "max_completion_tokens" in body:
            body["max_completion_tokens"] = 1
        return _encode(body)


def _count_chars(endpoint: str, body: dict[str, Any]) -> int:
    if endpoint != CHAT:
        prompt = body["prompt"]
        return sum(map(len, prompt)) if isinstance(prompt, list) else len(prompt)
    total = 0
    for message in body["messages"]:
        content = message.get("content")
        if isinstance(content, str):
            total += len(content)
        elif isinstance(content, list):
            total += sum(
                len(text)
                for part in content
                if isinstance(part, dict) and isinstance(text := part.get("text"), str)
            )
    if body.get("tools"):
        total += len(_encode(body["tools"]))
    return total


def parse_request(endpoint: str, content: bytes, settings: Settings) -> ApiRequest:
    """Read and check a request's body.

    Raises:
        RefusedError: with the answer for the client, when it is no request that could be served.
    """
    body, encoded = _read_json(content, settings.max_json_depth)
    if not _OWNED.isdisjoint(body):
        _refuse_or_drop(body)
        encoded = _encode(body)
    samples = _check_common(body, settings)
    prompts = _check_chat(body) if endpoint == CHAT else _check_completion(body, settings)
    return ApiRequest.of(endpoint, body, prompts * samples, encoded)


def _read_json(content: bytes, max_depth: int) -> tuple[dict[str, Any], bytes]:
    """The object, and the same encoded anew."""
    try:
        body = _decode(content)
        encoded = _encode(body)
    except (msgspec.MsgspecError, UnicodeError, OverflowError) as error:
        raise _refused(f"the body is no valid JSON: {error}", code="invalid_json") from error
    except RecursionError as error:
        raise _refused("the body is nested too deeply", code="invalid_json") from error
    if not isinstance(body, dict):
        raise _refused("the body is no JSON object", code="invalid_json")
    _check_keys(content, encoded, body, max_depth)
    return body, encoded


def _refuse_or_drop(body: dict[str, Any]) -> None:
    for name in _REFUSED:
        if name in body:
            raise _refused(f"{name} is not a field for clients", name, "field_not_allowed")
    template_args = body.get("chat_template_kwargs")
    if isinstance(template_args, dict) and "chat_template" in template_args:
        raise _refused(
            "chat_template is not a field for clients", "chat_template_kwargs", "field_not_allowed"
        )
    for name in _REPLACED:
        body.pop(name, None)


def _check_keys(content: bytes, encoded: bytes, body: dict[str, Any], max_depth: int) -> None:
    """Refuse a key that is there twice in one object, and objects nested too deeply.

    Where strings hold no quotes, each has two around it: as many as in the body encoded anew means that no key was lost.
    """
    holds_quotes = b"\\" in content and (b'\\"' in content or b"\\u0022" in content)
    if (
        not holds_quotes
        and content.count(b"{") + content.count(b"[") <= max_depth
        and content.count(b'"') == encoded.count(b'"')
    ):
        return
    num_keys = _count_keys(body, max_depth)
    if _STRING.findall(content).count(b":") != num_keys:
        raise _refused("the body has a key twice in one object", code="invalid_json")


def _count_keys(value: dict[str, Any] | list[Any], depth_left: int) -> int:
    """Count the keys of all objects; lists of plain numbers cost one pass in C.

    Raises:
        RefusedError: beyond the allowed depth.
    """
    if depth_left == 0:
        raise _refused("the body is nested too deeply", code="invalid_json")
    if type(value) is dict:
        num_keys = len(value)
        parts: Any = value.values()
    else:
        num_keys = 0
        parts = value
        kinds = set(map(type, parts))
        if dict not in kinds and list not in kinds:
            return 0
    for part in parts:
        kind = type(part)
        if kind is dict or kind is list:
            num_keys += _count_keys(part, depth_left - 1)
    return num_keys


def _check_common(body: dict[str, Any], settings: Settings) -> int:
    """Check what both endpoints share; return the number of samples."""
    model = body.get("model")
    if not isinstance(model, str) or not model:
        raise _refused("model is missing or no text", "model")
    if not isinstance(body.get("stream", False), _BOOL_OR_NONE):
        raise _refused("stream is neither true nor false", "stream")
    if _SELDOM.isdisjoint(body):
        _check_limit(body, "max_tokens")
        return 1
    options = body.get("stream_options")
    if options is not None:
        if not isinstance(options, dict):
            raise _refused("stream_options is no object", "stream_options")
        if not body.get("stream"):
            raise _refused("stream_options is for streams only", "stream_options")
    _check_limit(body, "max_tokens")
    _check_limit(body, "max_completion_tokens")
    stop = body.get("stop")
    if isinstance(stop, list) and len(stop) > 16:
        raise _refused("more than 16 stop strings", "stop")
    return _samples(body, settings)


def _kind(endpoint: str, limit: int | None) -> str:
    """What kind of request it is by what it asks for; limits rounded up, so that there are few kinds."""
    return f"{endpoint}:{limit if limit is None else 1 << (max(limit, 1) - 1).bit_length()}"


KINDS: Final = tuple(
    _kind(endpoint, limit)
    for endpoint in (COMPLETIONS, CHAT)
    for limit in (None, *(1 << bits for bits in range(32)))
)
"""All there are."""


def _check_limit(body: dict[str, Any], name: str) -> None:
    limit = body.get(name)
    if limit is not None and (type(limit) is not int or not 0 <= limit < 2**31):
        raise _refused(f"{name} is no number of tokens", name)


def _samples(body: dict[str, Any], settings: Settings) -> int:
    samples = 1
    for name in ("n", "best_of"):
        value = body.get(name)
        if value is None:
            continue
        if not _is_int(value) or not 1 <= value <= settings.max_n:
            raise _refused(f"{name} is not between 1 and {settings.max_n}", name)
        samples = max(samples, value)
    if body.get("use_beam_search"):
        # Beams are sequences of their own inside the engine.
        samples = max(samples, 2)
    return samples


def _check_chat(body: dict[str, Any]) -> int:
    messages = body.get("messages")
    if not isinstance(messages, list) or not messages:
        raise _refused("messages is empty or no list", "messages")
    for position, message in enumerate(messages):
        if not isinstance(message, dict) or not isinstance(message.get("role"), str):
            raise _refused(f"messages[{position}] is no object with a role", "messages")
    if "prompt" in body:
        raise _refused("prompt belongs to /v1/completions", "prompt")
    return 1


def _check_completion(body: dict[str, Any], settings: Settings) -> int:
    """Check the prompt; return the number of prompts."""
    prompt = body.get("prompt")
    if isinstance(prompt, str):
        return 1
    if not isinstance(prompt, list) or not prompt:
        raise _refused("prompt is missing or empty", "prompt")
    kinds = set(map(type, prompt))
    if kinds == {int}:
        _check_ids(prompt)
        return 1
    if len(prompt) > settings.max_prompts:
        raise _refused(f"more than {settings.max_prompts} prompts in one request", "prompt")
    if kinds == {list}:
        for ids in prompt:
            _check_ids(ids)
        return len(prompt)
    if kinds != {str}:
        raise _refused("prompt is neither text, nor token ids, nor a list of those", "prompt")
    return len(prompt)


def _check_ids(ids: list[Any]) -> None:
    if not ids or set(map(type, ids)) != {int} or min(ids) < 0 or max(ids) >= 2**32 - 1:
        raise _refused("prompt holds a list that is no list of token ids", "prompt")


def _is_int(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)


def _refused(message: str, param: str | None = None, code: str = "invalid_request") -> RefusedError:
    return RefusedError(bad_request(message, param, code))

"""From a request's body to a job: prompt ids, limits, stop texts, ids and flags for the answer.

Not here: routes, answers.
IO: wall clock and random ids only.
"""

import time
import uuid
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from dynctl.sim.api.requests import (
    ChatBody,
    CompletionBody,
    RefusedError,
    TokenizeBody,
    flat_messages,
    refuse_unsupported,
    stop_strings,
)
from dynctl.sim.sequence import Wish
from dynctl.sim.text import TemplateError, TextModel

_MAX_PORT = 65535


@dataclass(frozen=True, slots=True)
class Job:
    """One accepted request and how it is to be answered."""

    id: str
    """As the client sees it."""
    wish: Wish
    model: str
    created_unix_s: int
    is_chat: bool
    is_streamed: bool
    include_usage: bool
    continuous_usage: bool
    return_token_ids: bool
    stop: tuple[str, ...]
    include_stop_text: bool
    prefill_cached_tokens: int | None
    """What the prefill engine had cached, reported instead of our own hit, as vLLM does."""


class Intake:
    """Knows the model's names and limits. `has_connector`: kv_transfer_params mean something here."""

    def __init__(
        self,
        text: TextModel,
        served_names: Sequence[str],
        max_model_len: int,
        *,
        has_connector: bool,
    ) -> None:
        self._text = text
        self._served_names = tuple(served_names)
        self._max_model_len = max_model_len
        self._has_connector = has_connector

    def completion(self, body: CompletionBody, request_id: str | None) -> Job:
        """Accept a completion.

        Raises:
            RefusedError: when it cannot be served.
        """
        self.check_model(body.model)
        refuse_unsupported(body)
        prompt_ids = self._prompt_ids(body)
        return self._job(body, prompt_ids, body.max_tokens, f"cmpl-{request_id or _new_id()}", "-0")

    def chat(self, body: ChatBody, request_id: str | None) -> Job:
        """Accept a chat completion.

        Raises:
            RefusedError: when it cannot be served.
        """
        self.check_model(body.model)
        refuse_unsupported(body)
        prompt_ids = self.chat_ids(
            body.messages,
            add_generation_prompt=body.add_generation_prompt,
            add_special_tokens=bool(body.add_special_tokens),
            options=body.chat_template_kwargs or {},
        )
        max_tokens = body.max_completion_tokens or body.max_tokens
        return self._job(body, prompt_ids, max_tokens, f"chatcmpl-{request_id or _new_id()}", "")

    def tokenize(self, body: TokenizeBody) -> list[int]:
        """Cut a text or messages into ids.

        Raises:
            RefusedError: when there is neither, or the template refuses them.
        """
        self.check_model(body.model)
        if body.messages is not None:
            return self.chat_ids(
                body.messages,
                add_generation_prompt=body.add_generation_prompt,
                add_special_tokens=bool(body.add_special_tokens),
                options=body.chat_template_kwargs or {},
            )
        if body.prompt is None:
            raise RefusedError("either prompt or messages is needed")
        return self._text.encode(
            body.prompt, add_special_tokens=body.add_special_tokens is not False
        )

    def check_model(self, model: str | None) -> None:
        """Refuse an unknown model; none means ours.

        Raises:
            RefusedError: with status 404.
        """
        if model is not None and model not in self._served_names:
            raise RefusedError(
                f"The model `{model}` does not exist.",
                status=404,
                kind="NotFoundError",
                param="model",
            )

    def check_ids(self, token_ids: Sequence[int]) -> None:
        """Refuse ids outside the vocabulary.

        Raises:
            RefusedError: naming the first.
        """
        for token_id in token_ids:
            if not 0 <= token_id < self._text.vocab_size:
                raise RefusedError(f"Token id {token_id} is out of vocabulary", param="prompt")

    def chat_ids(
        self,
        messages: list[dict[str, Any]],
        *,
        add_generation_prompt: bool,
        add_special_tokens: bool,
        options: dict[str, Any],
    ) -> list[int]:
        """Render messages and cut them into ids; the template writes the special tokens itself.

        Raises:
            RefusedError: when messages or template options are refused.
        """
        options = {**options, "add_generation_prompt": add_generation_prompt}
        try:
            text = self._text.render(flat_messages(messages), **options)
        except TemplateError as error:
            raise RefusedError(error.message, param="messages") from error
        return self._text.encode(text, add_special_tokens=add_special_tokens)

    def _prompt_ids(self, body: CompletionBody) -> list[int]:
        prompt = body.prompt
        if isinstance(prompt, list) and len(prompt) == 1 and not isinstance(prompt[0], int):
            prompt = prompt[0]  # a batch of one
        if isinstance(prompt, str):
            return self._text.encode(
                prompt, add_special_tokens=body.add_special_tokens is not False
            )
        if isinstance(prompt, list) and prompt and all(type(item) is int for item in prompt):
            self.check_ids(prompt)
            return prompt
        if isinstance(prompt, list) and len(prompt) > 1:
            raise RefusedError("the simulated engine takes one prompt per request", param="prompt")
        raise RefusedError("prompt must be a text or a list of token ids", param="prompt")

    def _job(
        self,
        body: CompletionBody | ChatBody,
        prompt_ids: list[int],
        max_tokens: int | None,
        public_id: str,
        part: str,
    ) -> Job:
        max_tokens = self._fit(len(prompt_ids), max_tokens)
        if body.min_tokens > max_tokens:
            raise RefusedError(
                f"min_tokens must be less than or equal to max_tokens={max_tokens}, got {body.min_tokens}.",
                param="min_tokens",
            )
        transfer = body.kv_transfer_params if self._has_connector else None
        transfer = transfer or {}
        remote_prefill = transfer if transfer.get("do_remote_prefill") else None
        if remote_prefill is not None:
            _check_transfer(remote_prefill)
        options = body.stream_options
        wish = Wish(
            id=f"{public_id}{part}-{uuid.uuid4().hex[:8]}",
            prompt_ids=prompt_ids,
            max_tokens=max_tokens,
            min_tokens=body.min_tokens,
            ignore_eos=body.ignore_eos,
            stop_token_ids=frozenset(body.stop_token_ids or ()),
            cache_salt=body.cache_salt,
            remote_prefill=remote_prefill,
            is_remote_decode=bool(transfer.get("do_remote_decode")),
        )
        return Job(
            id=public_id,
            wish=wish,
            model=body.model or self._served_names[0],
            created_unix_s=int(time.time()),
            is_chat=isinstance(body, ChatBody),
            is_streamed=bool(body.stream),
            include_usage=bool(options and options.include_usage),
            continuous_usage=bool(
                options and options.include_usage and options.continuous_usage_stats
            ),
            return_token_ids=bool(body.return_token_ids),
            stop=stop_strings(body),
            include_stop_text=body.include_stop_str_in_output,
            prefill_cached_tokens=(remote_prefill or {}).get("remote_prefill_cached_tokens"),
        )

    def _fit(self, num_prompt: int, max_tokens: int | None) -> int:
        """Settle how many tokens may be said.

        Raises:
            RefusedError: when the prompt is empty, or prompt and answer do not fit the model.
        """
        if num_prompt == 0:
            raise RefusedError("The prompt cannot be empty", param="prompt")
        room = self._max_model_len - num_prompt
        if room < 1 or (max_tokens or 1) > room:
            raise RefusedError(
                f"This model's maximum context length is {self._max_model_len} tokens. However, you requested "
                f"{num_prompt + (max_tokens or 1)} tokens ({num_prompt} in the prompt, {max_tokens or 1} in the "
                "completion). Please reduce the length of the prompt or completion.",
                param="max_tokens" if room >= 1 else "prompt",
            )
        return max_tokens or room


def _new_id() -> str:
    return uuid.uuid4().hex


def _check_transfer(params: dict[str, Any]) -> None:
    """Check the fields a pull needs.

    Raises:
        RefusedError: when one is missing or has the wrong type.
    """
    port = params.get("remote_port")
    is_sound = (
        isinstance(params.get("remote_host"), str)
        and isinstance(params.get("remote_engine_id"), str)
        and isinstance(params.get("remote_request_id"), str)
        and isinstance(port, int)
        and 0 < port <= _MAX_PORT
    )
    if not is_sound:
        raise RefusedError(
            "kv_transfer_params lack a remote host, port, engine or request",
            param="kv_transfer_params",
        )

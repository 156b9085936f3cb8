"""How answers look: whole bodies, stream events, usage and errors, field for field as vLLM writes them.

A stream's constant parts are encoded once; per token only text, ids and usage are. Stop texts are cut here.
Not here: sockets, scheduling. IO: none of its own; it writes for jobs that `intake` made.
"""

from collections.abc import Sequence
from typing import Any

import msgspec

from dynctl.sim.api.intake import Job

DONE = b"data: [DONE]\n\n"
_json = msgspec.json.Encoder().encode


def error_body(message: str, kind: str, status: int, param: str | None = None) -> bytes:
    """Write an error as vLLM does."""
    return _json({"error": {"message": message, "type": kind, "param": param, "code": status}})


def error_event(message: str, kind: str, status: int) -> bytes:
    """Write an error as one event of a stream."""
    return b"data: " + error_body(message, kind, status) + b"\n\n"


def usage(num_prompt: int, num_output: int, num_cached: int) -> dict[str, Any]:
    """Count tokens."""
    return {
        "prompt_tokens": num_prompt,
        "total_tokens": num_prompt + num_output,
        "completion_tokens": num_output,
        "prompt_tokens_details": {"cached_tokens": num_cached},
    }


class StopText:
    """Watches text for the strings that end it, and holds back what may be the beginning of one."""

    __slots__ = ("_held", "_hold_chars", "_include", "_stops", "stopped_by")

    def __init__(self, stops: Sequence[str], *, include: bool) -> None:
        self._stops = tuple(stops)
        self._include = include
        self._hold_chars = max((len(stop) for stop in stops), default=1) - 1
        self._held = ""
        self.stopped_by: str | None = None

    def feed(self, piece: str) -> str:
        """Take a piece and return the text that is settled; `stopped_by` says when the answer is over."""
        if not self._stops:
            return piece
        text = self._held + piece
        found = [(at, stop) for stop in self._stops if (at := text.find(stop)) >= 0]
        if found:
            at, self.stopped_by = min(found)
            self._held = ""
            return text[: at + len(self.stopped_by)] if self._include else text[:at]
        cut = len(text) - self._hold_chars
        self._held = text[max(0, cut) :]
        return text[: max(0, cut)]

    def rest(self) -> str:
        """Return what was held back, at the end of an answer that no stop text ended."""
        held, self._held = self._held, ""
        return held


def whole_body(
    job: Job,
    text: str,
    token_ids: Sequence[int],
    finish_reason: str,
    stop_reason: int | str | None,
    num_cached: int,
    kv_transfer_params: dict[str, Any] | None,
) -> bytes:
    """Write an answer that is not streamed."""
    prompt_ids = list(job.wish.prompt_ids)
    tail = {
        "logprobs": None,
        "finish_reason": finish_reason,
        "stop_reason": stop_reason,
        "token_ids": list(token_ids) if job.return_token_ids else None,
    }
    shown_prompt = prompt_ids if job.return_token_ids else None
    body: dict[str, Any] = {
        "id": job.id,
        "object": "",
        "created": job.created_unix_s,
        "model": job.model,
    }
    if job.is_chat:
        body["object"] = "chat.completion"
        message: dict[str, Any] = {
            "role": "assistant",
            "content": text,
            "refusal": None,
            "annotations": None,
            "audio": None,
            "function_call": None,
            "tool_calls": [],
            "reasoning": None,
        }
        body["choices"] = [{"index": 0, "message": message, **tail}]
    else:
        body["object"] = "text_completion"
        choice = {
            "index": 0,
            "text": text,
            **tail,
            "prompt_logprobs": None,
            "prompt_token_ids": shown_prompt,
        }
        body["choices"] = [choice]
    body |= {"service_tier": None, "system_fingerprint": None}
    body["usage"] = usage(len(prompt_ids), len(token_ids), num_cached)
    if job.is_chat:
        body |= {"prompt_logprobs": None, "prompt_token_ids": shown_prompt}
    body["kv_transfer_params"] = kv_transfer_params
    return _json(body)


class StreamWriter:
    """Writes one stream's events."""

    __slots__ = ("_head", "_is_first", "_job")

    def __init__(self, job: Job) -> None:
        kind = "chat.completion.chunk" if job.is_chat else "text_completion"
        head = {"id": job.id, "object": kind, "created": job.created_unix_s, "model": job.model}
        self._head = b"data: " + _json(head)[:-1] + b',"choices":['
        self._job = job
        self._is_first = True

    def tokens(
        self,
        text: str,
        token_ids: Sequence[int],
        finish_reason: str | None,
        stop_reason: int | str | None,
        counts: tuple[int, int, int],
    ) -> bytes:
        """Write new text and ids; `counts` are prompt, output and cached tokens so far. A chat begins with its role."""
        opening = self._open(counts) if self._is_first else b""
        is_first, self._is_first = self._is_first, False
        ids = _json(list(token_ids)) if self._job.return_token_ids else b"null"
        reason = b"null" if finish_reason is None else b'"%b"' % finish_reason.encode()
        stop = b"null" if stop_reason is None else _json(stop_reason)
        if self._job.is_chat:
            delta = b'{"content":%b}' % _json(text)
            ending = b"" if finish_reason is None else b',"stop_reason":%b' % stop
            choice = b'{"index":0,"delta":%b,"logprobs":null,"finish_reason":%b%b,"token_ids":%b}]'
            choice %= (delta, reason, ending, ids)
        else:
            choice = (
                b'{"index":0,"text":%b,"logprobs":null,"finish_reason":%b,"stop_reason":%b,'
                % (
                    _json(text),
                    reason,
                    stop,
                )
            )
            choice += b'"prompt_token_ids":%b,"token_ids":%b}]' % (
                self._prompt_ids() if is_first else b"null",
                ids,
            )
        return opening + self._head + choice + self._usage(counts) + b"}\n\n"

    def last(self, counts: tuple[int, int, int]) -> bytes:
        """Write the usage, if asked for, and the end mark."""
        if not self._job.include_usage:
            return DONE
        return self._head + b'],"usage":' + _json(usage(*counts)) + b"}\n\n" + DONE

    def _open(self, counts: tuple[int, int, int]) -> bytes:
        """Begin a chat: an event with the role and no text."""
        if not self._job.is_chat:
            return b""
        choice = b'{"index":0,"delta":{"role":"assistant","content":""},"logprobs":null,"finish_reason":null}]'
        prompt = b',"prompt_token_ids":%b' % self._prompt_ids()
        num_prompt, _, num_cached = counts
        return self._head + choice + prompt + self._usage((num_prompt, 0, num_cached)) + b"}\n\n"

    def _prompt_ids(self) -> bytes:
        return _json(list(self._job.wish.prompt_ids)) if self._job.return_token_ids else b"null"

    def _usage(self, counts: tuple[int, int, int]) -> bytes:
        if self._job.continuous_usage:
            return b',"usage":' + _json(usage(*counts))
        return b"" if self._job.is_chat else b',"usage":null'

"""Errors in the shape OpenAI clients read, as whole answers and as the last event of a broken stream. Pure."""

import re
from dataclasses import dataclass

import msgspec

from dynctl.core.text import clean

_TYPES = {
    400: "invalid_request_error",
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    408: "timeout_error",
    413: "invalid_request_error",
    415: "invalid_request_error",
    422: "invalid_request_error",
    429: "rate_limit_error",
}

_ADDRESS = re.compile(
    r"\b(?:\d{1,3}\.){3}\d{1,3}(?::\d{1,5})?\b|\blocalhost:\d{1,5}\b|\[[0-9a-fA-F:]{2,}\](?::\d{1,5})?"
)
_PATH = re.compile(r"(?<![\w/])(?:/[\w.+-]+){2,}/?")


@dataclass(frozen=True, slots=True)
class Failure:
    """Why a request was not served, as the client is told."""

    status: int
    message: str
    code: str
    param: str | None = None
    retry_after_s: int | None = None
    reason: str = ""
    """Label in `errors_total`; empty for faults of the client."""

    def body(self) -> bytes:
        """The whole answer's body."""
        return msgspec.json.encode({"error": self._error()})

    def event(self) -> bytes:
        """The last event of a stream that broke; `[DONE]` never follows."""
        return b"data: " + self.body() + b"\n\n"

    def headers(self) -> tuple[tuple[bytes, bytes], ...]:
        """Header fields that belong to this failure."""
        if self.retry_after_s is None:
            return ()
        return ((b"retry-after", b"%d" % self.retry_after_s),)

    def _error(self) -> dict[str, object]:
        kind = _TYPES.get(self.status, "server_error")
        return {"message": self.message, "type": kind, "param": self.param, "code": self.code}


def bad_request(message: str, param: str | None = None, code: str = "invalid_request") -> Failure:
    """The client's request cannot be served as it is."""
    return Failure(400, message, code, param)


def no_engine() -> Failure:
    """Every engine of the model is down."""
    return Failure(
        503, "no engine serves this model at the moment", "no_engine", None, 5, "no_engine"
    )


def scrubbed(text: str, max_chars: int = 500) -> str:
    """Take addresses and file paths out of an engine's text and make it one safe line."""
    return clean(_PATH.sub("[path]", _ADDRESS.sub("[address]", text)), max_chars)


def from_engine(status: int, body: bytes) -> Failure:
    """Say an engine's refusal in our own frame, its text cleaned of paths and addresses."""
    message, code, param = f"the engine refused the request with status {status}", "", None
    try:
        document = msgspec.json.decode(body)
        error = document.get("error", document)
        if isinstance(error, str):
            message = error
        else:
            message = str(error.get("message") or error.get("detail") or message)
            code = str(error.get("code") or "")
            param = error.get("param")
    except (msgspec.MsgspecError, AttributeError, UnicodeDecodeError):
        if body:
            message = f"{message}: {body[:300].decode('utf-8', 'replace')}"
    param = scrubbed(param, 80) if isinstance(param, str) else None
    return Failure(status, scrubbed(message), scrubbed(code, 60) or "engine_refused", param)

"""What an engine's whole answer, or the lack of one, means: fine, the request's own fault, or the engine's. IO: none of its own; it reads errors of calls."""

from collections.abc import Iterable

from dynctl.http1.call import Call, UpstreamError
from dynctl.http1.message import Header
from dynctl.router.api.answers import Failure, from_engine
from dynctl.router.handoff import Fault

_REFUSALS = frozenset((400, 404, 405, 413, 415, 422))
"""The engine's verdict on the request itself; another engine would say the same."""

_BUSY = frozenset((429, 503))

_RELAY_ERROR = b"x-dynctl-relay-error"
"""A relay puts it on answers of its own, and takes it off those of engines."""

BLAMED = frozenset(("connect", "closed", "protocol", "timeout", "bad_answer", "error_500"))
"""Faults that count against the engine."""

ANSWERED_BADLY = frozenset(("error_500", "bad_answer"))
"""The engine is there, and says it could not, or says nonsense."""

REPEATABLE = frozenset(("connect", "closed", "stale"))
"""Faults of the way there: where there is no other engine, the same one may be tried again."""


def blames_engine(fault: Fault, call: Call | None) -> bool:
    """Whether a fault counts against the engine; a pooled connection it had just closed says nothing about it."""
    if fault.reason == "closed" and call is not None and call.was_reused and not call.has_received:
        return False
    return fault.reason in BLAMED


def failed(status: int = 502) -> Failure:
    """What a client hears about an engine that failed it."""
    if status == 504:
        return Failure(
            504, "the engine did not answer in time", "engine_timeout", None, None, "engine_timeout"
        )
    return Failure(
        502, "the engine failed before it answered", "engine_failure", None, None, "engine_failure"
    )


def judge(
    status: int, headers: Iterable[Header], body: bytes, *, is_relayed: bool
) -> Fault | Failure | None:
    """Judge a status: None for 200, a Failure that goes to the client as it is, or a Fault of the engine."""
    if status == 200:
        return None
    if is_relayed and (kind := _field(headers, _RELAY_ERROR)):
        return _from_relay(kind.decode("ascii", "replace"))
    if status in _REFUSALS:
        return from_engine(status, body)
    if status in _BUSY:
        failure = Failure(
            503,
            "the engines are busy",
            "engine_busy",
            None,
            retry_after_s(headers),
            "engine_failure",
        )
        return Fault("busy", failure)
    if status >= 500:
        return Fault("error_500", failed())
    return Fault("bad_answer", failed())


def _from_relay(kind: str) -> Fault:
    """The relay's own words: the engine is another one by now, not there, or did not answer it."""
    if kind == "timeout":
        return late(is_open=False)
    if kind in {"closed", "protocol"}:
        return Fault(kind, failed())
    return Fault("connect" if kind == "connect" else "stale", failed(), was_sent=False)


def _field(headers: Iterable[Header], wanted: bytes) -> bytes:
    return next((value for name, value in headers if name == wanted), b"")


def retry_after_s(headers: Iterable[Header]) -> int:
    """How long an engine asks to be left alone: its Retry-After in seconds, 1 without one."""
    value = _field(headers, b"retry-after")
    return max(1, int(value)) if value.isdigit() and len(value) < 6 else 1


def from_upstream(error: UpstreamError, *, is_open: bool) -> Fault:
    """Turn a transport's failure into a fault; `is_open`: the client has part of a stream already."""
    if error.kind == "timeout":
        return late(is_open=is_open)
    failure = _broken("the engine's connection was lost") if is_open else failed()
    return Fault(error.kind, failure, was_sent=error.kind != "connect")


def late(*, is_open: bool) -> Fault:
    """The engine let a deadline pass."""
    return Fault("timeout", _broken("the engine fell silent") if is_open else failed(504))


def bad_answer(why: str, *, is_open: bool) -> Fault:
    """The engine said something that is not to be believed."""
    return Fault("bad_answer", _broken(why) if is_open else failed())


def own_fault() -> Failure:
    """What a client hears when the router itself has failed it."""
    return Failure(500, "the router failed", "internal", None, None, "internal")


def _broken(why: str) -> Failure:
    """What the client of a stream reads in its last event."""
    return Failure(502, f"the stream broke: {why}", "stream_broken", None, None, "stream_broken")

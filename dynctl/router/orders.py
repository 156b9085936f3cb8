"""What a request says about how it is to be placed. Pure."""

from typing import Final

from dynctl.http1.request import Request
from dynctl.router.api.requests import ApiRequest
from dynctl.router.turns import CLASSES, NORMAL

_MAX_DEADLINE_DIGITS: Final = 9
_MAX_SESSION_BYTES: Final = 128


def session_of(head: Request) -> bytes:
    """The session a request says it belongs to; empty where it names none, or by a name too long to keep."""
    given = head.header(b"x-dynctl-session")
    return given if given is not None and len(given) <= _MAX_SESSION_BYTES else b""


def level_of(head: Request, top: int) -> int:
    """The class a client asks for, but none above `top`. What is no class is taken for normal: a request is not refused
    for a field that is looked at only when it has to wait.
    """
    given = (head.header(b"x-dynctl-priority") or b"").decode("latin-1").lower()
    return max(CLASSES.index(given) if given in CLASSES else NORMAL, top)


def deadline_s(head: Request) -> float | None:
    """How long after its arrival a request is still worth sending to an engine; None where it does not say a whole number."""
    given = head.header(b"x-dynctl-deadline-ms") or b""
    return int(given) / 1e3 if given.isdigit() and len(given) <= _MAX_DEADLINE_DIGITS else None


def local_reason(request: ApiRequest, *, wants_prefill: bool) -> str:
    """Why the engine that generates has to prefill too; empty: it need not."""
    if request.num_sequences > 1:
        return "many_sequences"
    return "" if wants_prefill else "prefill_failed"

"""What a request says about how it is to be placed. Pure."""

from dynctl.http1.request import Request
from dynctl.router.api.requests import ApiRequest

_MAX_ROUTE_KEY_BYTES = 64


def route_key(head: Request, request: ApiRequest) -> str:
    """What kind of request this is: as the client says, else by what it asks for."""
    given = head.header(b"x-dynctl-route-key")
    if given is not None and len(given) <= _MAX_ROUTE_KEY_BYTES:
        return given.decode("latin-1")
    return f"{request.endpoint}:{request.max_tokens}"


def local_reason(request: ApiRequest, *, wants_prefill: bool) -> str:
    """Why the engine that generates has to prefill too; empty: it need not."""
    if request.num_sequences > 1:
        return "many_sequences"
    return "" if wants_prefill else "prefill_failed"

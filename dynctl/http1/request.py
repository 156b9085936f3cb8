"""What a request is once its head was let through. No sockets, no parsing.

Not compiled: msgspec makes this class itself, and copies of it in one step. Pure.
"""

import msgspec

from dynctl.http1.message import Header


class Request(msgspec.Struct, eq=False):
    """One request as the guard let it through; the body is filled in once it is there."""

    method: str
    target: bytes
    """As it came: the only thing to route and authorise by, besides `path`."""
    path: str
    """Percent-decoded once; has no dot segments, no empty segments."""
    query: bytes
    headers: tuple[Header, ...] = ()
    """Without Content-Length and a plain X-Request-Id, which `content_length_bytes` and `request_id` say: mostly the same
    object for all requests of a connection."""
    body: bytes = b""
    peer_name: str = ""
    """Common name in the client's certificate; empty without one."""
    content_length_bytes: int = 0
    request_id: bytes = b""
    """X-Request-Id where that is plain: at most 128 letters, digits and `-._:`; else empty."""
    is_chunked: bool = False
    can_keep_alive: bool = True
    expects_continue: bool = False
    is_http10: bool = False
    known: dict[bytes, bytes] | None = None
    """Values by name, once somebody has asked."""

    def header(self, name: bytes) -> bytes | None:
        """Return the first value of a field (`name` in lower case) without the space around it, or None."""
        known = self.known
        if known is None:
            known = {field: value.rstrip(b" \t") for field, value in reversed(self.headers)}
            self.known = known
        return known.get(name)

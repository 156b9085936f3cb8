"""What a request is once its head was let through. No sockets, no parsing. Pure."""

from dynctl.http1.message import Header


class Request:
    """One request as the guard let it through; the body is filled in once it is there."""

    __slots__ = (
        "_known",
        "body",
        "can_keep_alive",
        "content_length_bytes",
        "expects_continue",
        "headers",
        "is_chunked",
        "is_http10",
        "method",
        "path",
        "peer_name",
        "query",
        "request_id",
        "target",
    )

    def __init__(
        self,
        method: str,
        target: bytes,
        path: str,
        query: bytes,
        headers: tuple[Header, ...] = (),
    ) -> None:
        self.method = method
        self.target = target
        """As it came: the only thing to route and authorise by, besides `path`."""
        self.path = path
        """Percent-decoded once; has no dot segments, no empty segments."""
        self.query = query
        self.headers = headers
        """Without Content-Length and a plain X-Request-Id, which `content_length_bytes` and `request_id` say: mostly the same
        object for all requests of a connection."""
        self.body = b""
        self.peer_name = ""
        """Common name in the client's certificate; empty without one."""
        self.content_length_bytes = 0
        self.request_id = b""
        """X-Request-Id where that is plain: at most 128 letters, digits and `-._:`; else empty."""
        self.is_chunked = False
        self.can_keep_alive = True
        self.expects_continue = False
        self.is_http10 = False
        self._known: dict[bytes, bytes] | None = None
        """Values by name, once somebody has asked."""

    def header(self, name: bytes) -> bytes | None:
        """Return the first value of a field (`name` in lower case) without the space around it, or None."""
        known = self._known
        if known is None:
            known = {field: value.rstrip(b" \t") for field, value in reversed(self.headers)}
            self._known = known
        return known.get(name)

    def again(self) -> "Request":
        """A request with the same head and no body; it shares the look-up of fields."""
        same = Request(self.method, self.target, self.path, self.query, self.headers)
        same.peer_name = self.peer_name
        same.content_length_bytes = self.content_length_bytes
        same.request_id = self.request_id
        same.is_chunked = self.is_chunked
        same.can_keep_alive = self.can_keep_alive
        same.expects_continue = self.expects_continue
        same.is_http10 = self.is_http10
        same._known = self._known
        return same

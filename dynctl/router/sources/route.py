"""The way to one engine: which connection pool, which path, which extra fields.

IO: sockets.
"""

from dataclasses import dataclass, field, replace

from dynctl.core.units import whole
from dynctl.errors import UsageError
from dynctl.http1.message import Header
from dynctl.http1.upstream import (
    Address,
    Call,
    Response,
    ResponseSink,
    Upstream,
    UpstreamLimits,
)

_JSON = (b"content-type", b"application/json")

_RELAY_IDLE_S = 30.0


@dataclass(frozen=True, slots=True)
class Route:
    """How requests reach one engine incarnation."""

    upstream: Upstream
    prefix: str = ""
    """Before the engine's own path, without a slash at the end."""
    headers: tuple[Header, ...] = ()
    """Sent with every request."""
    is_relayed: bool = False
    """A relay is in between; it marks answers of its own."""
    _starts: dict[str, bytes] = field(default_factory=dict, init=False, compare=False, repr=False)
    """Heads by path, written once."""

    def send(self, path: str, request_id: str, body: bytes, sink: ResponseSink) -> Call:
        """POST a JSON body; the id is ours."""
        start = self._starts.get(path)
        if start is None:
            headers = (_JSON, *self.headers)
            start = self.upstream.prepare("POST", self.prefix + path, headers)
            self._starts[path] = start
        return self.upstream.send_prepared(start, request_id.encode("ascii"), body, sink)

    async def fetch(
        self, method: str, path: str, body: bytes = b"", timeout_s: float = 5.0
    ) -> Response:
        """Make a control request.

        Raises:
            UpstreamError: when there is no whole answer in time.
        """
        headers = (_JSON, *self.headers) if body else self.headers
        return await self.upstream.fetch(method, self.prefix + path, headers, body, timeout_s)


def parse_url(url: str) -> tuple[Address, str]:
    """Split an engine's URL into an address and a path prefix.

    Raises:
        UsageError: when it is neither `http://host:port` nor `unix:/path`.
    """
    if url.startswith("unix:"):
        path = url[5:]
        path = "/" + path.lstrip("/") if path.startswith("//") else path
        if path:
            return Address(path=path), ""
    if url.startswith("http://"):
        authority, _, prefix = url[7:].partition("/")
        host, _, text = authority.rpartition(":")
        if not host:
            host, text = authority, "80"
        port = whole(text)
        if host and port is not None and 0 < port < 65536 and "@" not in host:
            prefix = "/" + prefix.strip("/") if prefix.strip("/") else ""
            return Address(host=host.strip("[]"), port=port), prefix.removesuffix("/v1")
    raise UsageError(
        f"engine URL {url!r} is not understood", "write http://HOST:PORT or unix:/path/to.sock"
    )


def limits(connect_timeout_s: float, *, is_relay: bool = False) -> UpstreamLimits:
    """Bounds of a pool towards one engine or relay.

    A relay keeps idle connections for a minute, and a new one costs a TLS handshake: half of that is kept here.
    """
    bounds = UpstreamLimits(max_connections=4096, connect_timeout_s=connect_timeout_s)
    return replace(bounds, idle_timeout_s=_RELAY_IDLE_S) if is_relay else bounds

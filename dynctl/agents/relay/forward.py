"""One request on its way to an engine: bytes pass untouched, back-pressure and cancel both ways.

Not here: which engine, who may ask.
IO: sockets (through http1).
"""

from dynctl.agents.relay.metrics import RelayMetrics
from dynctl.http1.call import UpstreamError
from dynctl.http1.message import Header, error_body, field_lines, forwardable
from dynctl.http1.server import Exchange, Request
from dynctl.http1.upstream import Upstream

INCARNATION = b"x-dynctl-incarnation"
RELAY_ERROR = b"x-dynctl-relay-error"
"""Marks answers the relay gave itself: the engine did not answer."""

PATHS = {
    "v1/completions": "POST",
    "v1/chat/completions": "POST",
    "v1/models": "GET",
    "tokenize": "POST",
    "health": "GET",
    "metrics": "GET",
    "version": "GET",
    "kv_event_sources": "GET",
}
"""What of an engine's HTTP may be reached from other hosts; all else stays on the host."""

_STATUS = {"timeout": 504}


def refuse(exchange: Exchange, status: int, kind: str, message: str) -> None:
    """Give an answer of the relay's own."""
    body = error_body(message, kind, "server_error" if status >= 500 else "invalid_request_error")
    exchange.respond(status, body, headers=[(RELAY_ERROR, kind.encode())])


class Way:
    """Where requests of one head go: whoever made it has looked at engine, incarnation and path.

    A router's next request mostly has the same head but for its length and id: nothing is looked up or written anew.
    """

    __slots__ = ("_fields", "_lines", "_metrics", "_stamp", "_start", "_upstream")

    def __init__(
        self,
        upstream: Upstream,
        request: Request,
        path: str,
        incarnation: str,
        metrics: RelayMetrics,
    ) -> None:
        """To the engine's `/{path}`."""
        self._upstream = upstream
        self._metrics = metrics
        kept = [pair for pair in forwardable(request.headers) if pair[0] != INCARNATION]
        self._start = upstream.prepare(request.method, f"/{path}", kept)
        self._stamp = (INCARNATION, incarnation.encode())
        self._fields: list[Header] = []
        """Of the last answer, without its length …"""
        self._lines = field_lines((self._stamp,))
        """… and what the router gets for them."""

    def forward(self, exchange: Exchange) -> None:
        """Send the request on and stream the answer back."""
        request = exchange.request
        call = self._upstream.send_prepared(
            self._start,
            request.request_id,
            request.body,
            _Passage(exchange, self),
            is_safe=request.method == "GET",
        )
        exchange.on_gone = call.cancel
        exchange.on_pause = call.pause
        exchange.on_resume = call.resume

    def head(self, exchange: Exchange, status: int, headers: list[Header]) -> None:
        """Begin the answer."""
        length, fields = None, []
        for pair in headers:
            if pair[0] == b"content-length":
                length = int(pair[1])
            else:
                fields.append(pair)
        if fields != self._fields:
            kept = [pair for pair in forwardable(fields) if pair[0] != RELAY_ERROR]
            self._fields, self._lines = fields, field_lines((*kept, self._stamp))
        self._metrics.request(status, len(exchange.request.body))
        exchange.start(status, (), length, lines=self._lines)

    def fault(self, exchange: Exchange, error: UpstreamError) -> None:
        """Say that the engine gave no proper answer."""
        status = _STATUS.get(error.kind, 502)
        self._metrics.request(status, len(exchange.request.body))
        refuse(exchange, status, error.kind, error.message)


class _Passage:
    """Hands the engine's answer to the client."""

    __slots__ = ("_exchange", "_way", "on_data")

    def __init__(self, exchange: Exchange, way: Way) -> None:
        self._exchange = exchange
        self._way = way
        self.on_data = exchange.write

    def on_head(self, status: int, headers: list[Header]) -> None:
        self._way.head(self._exchange, status, headers)

    def on_end(self) -> None:
        self._exchange.finish()

    def on_error(self, error: UpstreamError) -> None:
        if self._exchange.is_started:
            # An answer that broke must not look complete.
            self._exchange.abort()
        else:
            self._way.fault(self._exchange, error)

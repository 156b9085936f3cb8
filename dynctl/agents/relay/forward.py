"""One request on its way to an engine: bytes pass untouched, back-pressure and cancel both ways.

Not here: which engine, who may ask.
IO: sockets (through http1).
"""

from dynctl.agents.relay.metrics import RelayMetrics
from dynctl.http1.call import UpstreamError
from dynctl.http1.message import Header, error_body, forwardable
from dynctl.http1.server import Exchange
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


def forward(
    exchange: Exchange, upstream: Upstream, path: str, incarnation: str, metrics: RelayMetrics
) -> None:
    """Send the request on to the engine's `/{path}` and stream the answer back."""
    request = exchange.request
    headers = [pair for pair in forwardable(request.headers) if pair[0] != INCARNATION]
    sink = _Passage(exchange, incarnation, metrics)
    call = upstream.send(request.method, f"/{path}", headers, request.body, sink)
    exchange.on_gone = call.cancel
    exchange.on_pause = call.pause
    exchange.on_resume = call.resume


class _Passage:
    """Hands the engine's answer to the client."""

    __slots__ = ("_exchange", "_incarnation", "_metrics", "on_data")

    def __init__(self, exchange: Exchange, incarnation: str, metrics: RelayMetrics) -> None:
        self._exchange = exchange
        self._incarnation = incarnation
        self._metrics = metrics
        self.on_data = exchange.write

    def on_head(self, status: int, headers: list[Header]) -> None:
        length = next((value for name, value in headers if name == b"content-length"), None)
        kept = [pair for pair in forwardable(headers) if pair[0] != RELAY_ERROR]
        kept.append((INCARNATION, self._incarnation.encode()))
        self._metrics.request(status, len(self._exchange.request.body))
        self._exchange.start(status, kept, None if length is None else int(length))

    def on_end(self) -> None:
        self._exchange.finish()

    def on_error(self, error: UpstreamError) -> None:
        if self._exchange.is_started:
            # An answer that broke must not look complete.
            self._exchange.abort()
        else:
            status = _STATUS.get(error.kind, 502)
            self._metrics.request(status, len(self._exchange.request.body))
            refuse(self._exchange, status, error.kind, error.message)

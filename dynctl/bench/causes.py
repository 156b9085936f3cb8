"""Why a server could not be asked, in an operator's words and with the next step.

IO: the kinds of errors aiohttp and the system know.
"""

import socket
import ssl

import aiohttp

from dynctl.core.text import clean
from dynctl.files import reason

_IS_UP = "is it up? `dynctl status` shows where the router listens"
_KINDS: tuple[tuple[type[Exception], str, str], ...] = (
    (ssl.SSLCertVerificationError, "its certificate is not trusted", "SSL_CERT_FILE names its CA"),
    (ssl.SSLError, "it does not speak TLS as it should", "is it http:// ?"),
    (socket.gaierror, "its name cannot be resolved", "check the name"),
    (aiohttp.InvalidURL, "that is no address", "write http://HOST:PORT"),
    (aiohttp.ServerDisconnectedError, "it closed the connection without an answer", _IS_UP),
    (aiohttp.ClientPayloadError, "its answer broke off", _IS_UP),
    (aiohttp.ClientResponseError, "what it answers is no HTTP", "check the port"),
    (TimeoutError, "no answer in time", _IS_UP),
)
"""The first that fits counts; then what the system says. Texts of aiohttp name classes and repeat the address."""


def cause(error: Exception) -> tuple[str, str]:
    """What went wrong, and what to do about it."""
    inner = error.os_error if isinstance(error, aiohttp.ClientConnectorError) else error
    for kind, what, next_step in _KINDS:
        if isinstance(inner, kind):
            return what, next_step
    if isinstance(inner, OSError) and inner.errno:
        return reason(inner).lower(), _IS_UP
    return clean(str(inner)) or type(inner).__name__, _IS_UP

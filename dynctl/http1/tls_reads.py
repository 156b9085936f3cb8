"""Reads of a TLS connection go through one buffer of the process.

Given a protocol that takes bytes, both asyncio and uvloop make 256 KiB for each read and cut it to what came: beyond
malloc's threshold that is three system calls and fresh pages, more than the rest of a small message costs.
IO: none of its own; transports call it.
"""

import asyncio

_BUFFER = memoryview(bytearray(1024 * 1024))
"""Both layers call `buffer_updated` before anybody else is asked for a buffer. When a peer closes, both read once more and
then drop the rest, so it holds more than they take in at once (256 KiB, and one read of as much). Unused pages cost nothing."""


class TlsReads(asyncio.BufferedProtocol):
    """Stands between a TLS transport and a protocol that takes bytes, which it is given anew at each read."""

    __slots__ = ("protocol",)

    def __init__(self, protocol: asyncio.Protocol) -> None:
        self.protocol = protocol

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """Hand on."""
        self.protocol.connection_made(transport)

    def get_buffer(self, sizehint: int) -> memoryview:  # noqa: ARG002 - it holds all there can be
        """Lend the buffer."""
        return _BUFFER

    def buffer_updated(self, nbytes: int) -> None:
        """Give the protocol bytes of its own."""
        self.protocol.data_received(_BUFFER[:nbytes].tobytes())

    def eof_received(self) -> bool | None:
        """Hand on."""
        return self.protocol.eof_received()

    def connection_lost(self, exc: Exception | None) -> None:
        """Hand on."""
        self.protocol.connection_lost(exc)

    def pause_writing(self) -> None:
        """Hand on."""
        self.protocol.pause_writing()

    def resume_writing(self) -> None:
        """Hand on."""
        self.protocol.resume_writing()

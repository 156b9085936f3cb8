"""The ways to other members' hosts: their relays are asked how members there stand, as long as one of ours needs to know.

What was said stays known while a way is broken; the reason is told beside it.
Not here: what follows from it (`gang`). IO: sockets (mutual TLS), files (certificates).
"""

import asyncio
import logging
import ssl
from collections.abc import Callable, Collection
from pathlib import Path

import msgspec

from dynctl.agents.gang import Word
from dynctl.agents.protocol import MEMBER_CERTIFICATE, MemberInfo, Peer
from dynctl.core.text import clean
from dynctl.files import reason
from dynctl.http1.stream import open_stream
from dynctl.http1.upstream import Address, Upstream, UpstreamError

_log = logging.getLogger("dynctl.agent")

_SILENCE_S = 6.0
"""A relay speaks at least every 2 s."""
_RETRY_S = 0.25
_MAX_RETRY_S = 2.0
_MAX_LINE_BYTES = 4 * 1024**2

_decode = msgspec.json.Decoder(tuple[MemberInfo, ...]).decode

Place = tuple[str, str, int]
"""Host name, address and port of a relay."""


class Links:
    """Follows the relays of other hosts; `close` it."""

    def __init__(self, tls: Path, group: asyncio.TaskGroup, changed: Callable[[], None]) -> None:
        """`changed` is called at every news."""
        self._tls = tls
        self._group = group
        self._changed = changed
        self._tasks: dict[Place, asyncio.Task[None]] = {}
        self._told: dict[Place, dict[str, MemberInfo]] = {}
        self._silent: dict[Place, str] = {}
        self._news = asyncio.Event()

    def follow(self, peers: Collection[Peer]) -> None:
        """Ask about these, and no others."""
        wanted = {_place(peer) for peer in peers}
        for place in [place for place in self._tasks if place not in wanted]:
            self._tasks.pop(place).cancel()
            self._told.pop(place, None)
            self._silent.pop(place, None)
        for place in wanted - self._tasks.keys():
            self._silent[place] = "not asked yet"
            task = self._group.create_task(self._ask_on(place), name=f"members:{place[0]}")
            self._tasks[place] = task

    def hear(self, peer: Peer) -> Word:
        """What was last heard of a member."""
        place = _place(peer)
        info = self._told.get(place, {}).get(peer.id)
        return Word(info, self._silent.get(place, "" if place in self._tasks else "not asked"))

    async def wait(self, limit_s: float) -> None:
        """Return at the next news, or when the time is over."""
        news = self._news
        try:
            async with asyncio.timeout(limit_s):
                await news.wait()
        except TimeoutError:
            return

    async def close(self) -> None:
        """Ask no more."""
        tasks = list(self._tasks.values())
        self.follow(())
        if tasks:
            await asyncio.wait(tasks)

    async def _ask_on(self, place: Place) -> None:
        retry_s = _RETRY_S
        while True:
            if await self._ask(place):
                retry_s = _RETRY_S
            await asyncio.sleep(retry_s)
            retry_s = min(retry_s * 2, _MAX_RETRY_S)

    async def _ask(self, place: Place) -> bool:
        """Follow one connection until it breaks; True when something was heard."""
        was_heard = False
        rest = b""
        try:
            upstream = Upstream(self._address(place))
        except OSError as error:
            self._lose(place, f"certificate {MEMBER_CERTIFICATE}: {reason(error)}")
            return False
        try:
            async with open_stream(upstream, "/v1/members", _SILENCE_S) as pieces:
                async for piece in pieces:
                    *lines, rest = (rest + piece).split(b"\n")
                    if lines:
                        # Each line says all: only the newest counts.
                        self._take(place, _decode(lines[-1]))
                        was_heard = True
                    elif len(rest) > _MAX_LINE_BYTES:
                        self._lose(place, "a line without end")
                        return was_heard
            self._lose(place, "its relay ended the connection")
        except UpstreamError as error:
            self._lose(place, error.message)
        except (msgspec.MsgspecError, ValueError, RecursionError) as error:
            self._lose(place, f"its relay said what cannot be read: {error}")
        finally:
            await upstream.close()
        return was_heard

    def _address(self, place: Place) -> Address:
        """Where and as whom a relay is asked; certificates may have been replaced since the last time."""
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
        context.minimum_version = ssl.TLSVersion.TLSv1_3
        context.load_verify_locations(self._tls / "ca.crt")
        context.load_cert_chain(
            self._tls / f"{MEMBER_CERTIFICATE}.crt", self._tls / f"{MEMBER_CERTIFICATE}.key"
        )
        host_name, address, port = place
        return Address(host=address, port=port, ssl=context, server_hostname=host_name)

    def _take(self, place: Place, infos: tuple[MemberInfo, ...]) -> None:
        told = {info.id: info for info in infos}
        if place in self._silent:
            _log.info("members on %s are heard of", clean(place[0]))
        elif told == self._told.get(place):
            return
        self._told[place] = told
        self._silent.pop(place, None)
        self._tell()

    def _lose(self, place: Place, why: str) -> None:
        if place not in self._tasks:
            return
        if place not in self._silent:
            _log.warning("members on %s are not heard of: %s", clean(place[0]), clean(why))
        self._silent[place] = why
        self._tell()

    def _tell(self) -> None:
        news, self._news = self._news, asyncio.Event()
        news.set()
        self._changed()


def _place(peer: Peer) -> Place:
    return peer.host_name, peer.address, peer.port

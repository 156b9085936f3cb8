"""The router's HTTP routes: the OpenAI API for clients; health, metrics and decisions for those who run it.

Not here: one request's way (`flight`), engines (`sources`). IO: sockets.
"""

import asyncio
import logging
import os
import socket
import ssl
from collections.abc import Iterable, Sequence
from typing import Any, Final

import msgspec

from dynctl.errors import ExitCode, RouterError
from dynctl.files import reason
from dynctl.http1.server import Exchange, Rejection, Request, Server, ServerLimits, serve
from dynctl.router import admin
from dynctl.router.admission import at_capacity, draining
from dynctl.router.api.answers import Failure
from dynctl.router.api.known_bodies import KnownBodies
from dynctl.router.api.requests import CHAT, COMPLETIONS, RefusedError
from dynctl.router.config import RouterConfig, TlsFiles
from dynctl.router.desk import Desk
from dynctl.router.flight import Flight
from dynctl.router.merging import Shown, add_answers
from dynctl.router.port_owner import port_owner
from dynctl.router.processes import Place, Siblings, listen_together
from dynctl.router.short_flight import begin_short
from dynctl.router.verdicts import own_fault

log = logging.getLogger("dynctl.router")

_GENERATE: Final = frozenset((COMPLETIONS, CHAT))
_TEXT: Final = b"text/plain; version=0.0.4; charset=utf-8"

_UNAUTHORIZED: Final = Failure(401, "the API key is missing or not known here", "invalid_api_key")


class Entrance:
    """The clients' port, and the admin socket where there is one; `close` both."""

    def __init__(self, desk: Desk, place: Place | None = None) -> None:
        """`place`: among the processes of one port."""
        self._desk = desk
        self._place = place
        self._siblings = Siblings(place) if place is not None else None
        self._asking: set[asyncio.Task[None]] = set()
        self._keys = desk.keys
        self._clients: list[Server] = []
        self._servers: list[Server] = []
        """Beside the clients': of siblings and the admin."""
        self._id_prefix = os.urandom(6).hex()
        self._num_ids = 0

    async def open(self, taken: Sequence[socket.socket] = ()) -> int:
        """Listen for clients, on the sockets `taken` over if there are any; return the port.

        Raises:
            RouterError: when the place cannot be bound or the certificate not read.
        """
        config = self._desk.config
        host, port = config.host_port
        places: list[dict[str, Any]] = [{"sock": one} for one in taken]
        try:
            if self._place is not None:
                places = [{"sock": listen_together(host, port)}]
                self._servers.append(await serve(self._on_sibling, path=self._place.own_socket))
                # From here on it is told of every change; what was changed before, it asks for.
                await self._agree(self._place)
            context = server_context(config.server_tls)
            limits = ServerLimits(max_body_bytes=config.settings.max_body_bytes)
            for where in places or [{"host": host, "port": port}]:
                server = await serve(
                    self._on_client, **where, ssl=context, limits=limits, admit=self._admit
                )
                self._clients.append(server)
        except OSError as error:
            raise bind_error(config, error) from error
        return self._clients[0].port

    async def _agree(self, place: Place) -> None:
        """Take over what was changed since the first process read the configuration, if it serves already."""
        if place.process == 0 or self._siblings is None:
            return
        answers = [await self._siblings.ask_first(target) for target in ("/policy", "/shadow")]
        policy, shadow = (
            None if answer is None else msgspec.json.decode(answer) for answer in answers
        )
        if policy is not None and self._desk.policy_name == self._desk.config.policy:
            self._desk.set_policy(policy["policy"])
            self._desk.set_stickiness(policy["stickiness"])
        if shadow is not None and self._desk.placement.shadow is None:
            self._desk.set_shadow(shadow["shadow"]["policy"])

    async def open_admin(self, path: str) -> None:
        """Listen on the admin socket.

        Raises:
            RouterError: when the path cannot be bound.
        """
        try:
            self._servers.append(await serve(self._on_admin, path=path))
        except OSError as error:
            raise RouterError(
                f"cannot listen on {path}: {reason(error)}",
                "name a socket in a directory that is there",
            ) from error

    def descriptors(self) -> list[int]:
        """Of the clients' listening sockets."""
        return [one for server in self._clients for one in server.descriptors]

    async def retire(self, idle_s: float, limit_s: float) -> None:
        """A successor listens: serve who is connected until all have gone over to it, or for `limit_s`."""
        async with asyncio.TaskGroup() as group:
            for server in self._clients:
                group.create_task(server.retire(idle_s, limit_s))

    async def close(self, grace_s: float) -> None:
        """Stop listening; answers under way may end within `grace_s`."""
        async with asyncio.TaskGroup() as group:
            for server in (*self._clients, *self._servers):
                group.create_task(server.close(grace_s))
        if self._asking:
            await asyncio.wait(self._asking)
        if self._siblings is not None:
            await self._siblings.close()

    # Clients

    def _admit(self, request: Request) -> Rejection | None:
        """Look at head only: key and content type, before the body is read."""
        if request.path == "/health":
            return None
        if not self._keys.is_open and self._keys.owner(request.header(b"authorization")) is None:
            return _rejection(_UNAUTHORIZED, (b"www-authenticate", b"Bearer"))
        if request.method == "POST":
            kind = (request.header(b"content-type") or b"application/json").split(b";")[0]
            if kind.strip().lower() != b"application/json":
                return _rejection(Failure(415, "send application/json", "unsupported_media_type"))
            if request.header(b"content-encoding") not in {None, b"identity"}:
                return _rejection(
                    Failure(415, "bodies must not be compressed", "unsupported_encoding")
                )
        return None

    def _on_client(self, exchange: Exchange) -> None:
        request = exchange.request
        if request.path in _GENERATE:
            if request.method == "POST":
                self._generate(exchange)
            else:
                self._refuse(exchange, Failure(405, "use POST", "method_not_allowed"))
        elif request.method not in {"GET", "HEAD"}:
            self._refuse(exchange, Failure(404, f"no POST {request.path} here", "not_found"))
        elif request.path == "/v1/models":
            self._respond(exchange, 200, self._models())
        elif request.path == "/health":
            self._health(exchange)
        elif request.path == "/metrics":
            self._show(exchange)
        else:
            self._refuse(exchange, Failure(404, f"no {request.path} here", "not_found"))

    def _generate(self, exchange: Exchange) -> None:
        try:
            self._begin(exchange)
        except Exception:
            log.exception("a request could not be begun, by a fault of the router's own")
            self._refuse(exchange, own_fault(), is_counted=True)

    def _begin(self, exchange: Exchange) -> None:
        desk, request = self._desk, exchange.request
        desk.afterwards.keep()
        if desk.max_flights and desk.is_at_capacity():
            self._refuse(exchange, at_capacity(desk.max_flights), is_counted=True)
            return
        try:
            wanted = self._bodies(exchange).read(request.path, request.body, desk.settings)
            model = desk.model_of(wanted.model)
        except RefusedError as refused:
            self._refuse(exchange, refused.failure, is_counted=True)
            return
        except KeyError:
            failure = Failure(
                404, f"the model `{wanted.model[:200]}` does not exist", "model_not_found", "model"
            )
            self._refuse(exchange, failure, is_counted=True)
            return
        if desk.is_draining:
            self._refuse(exchange, draining(), is_counted=True)
            return
        wanted.route_key = desk.route_keys.of(request, wanted)
        request_id = self._new_id()
        shown_id = _shown_id(request, request_id)
        if not begin_short(desk, exchange, wanted, model, request_id, shown_id):
            flight = Flight(desk, exchange, wanted, model, request_id, shown_id)
            desk.act(flight, flight.begin)

    def _bodies(self, exchange: Exchange) -> KnownBodies:
        """What bodies this client has sent."""
        kept = exchange.kept
        if isinstance(kept, KnownBodies):
            return kept
        bodies = exchange.kept = KnownBodies()
        return bodies

    def _models(self) -> bytes:
        data = []
        for name, length in sorted(self._desk.models().items()):
            entry = {"id": name, "object": "model", "created": 0, "owned_by": "dynctl"}
            if length:
                entry["max_model_len"] = length
            data.append(entry)
        return msgspec.json.encode({"object": "list", "data": data})

    # Those who run it

    def _on_admin(self, exchange: Exchange) -> None:
        if exchange.request.path == "/health":
            self._readiness(exchange)
        else:
            self._show(exchange)

    def _on_sibling(self, exchange: Exchange) -> None:
        """Answer another process of this port: for this one alone."""
        self._give(exchange, self._own_answer(exchange.request))

    def _show(self, exchange: Exchange) -> None:
        """Answer for all processes of this port."""
        own = self._own_answer(exchange.request)
        if self._siblings is None and self._desk.decision_log is None:
            self._give(exchange, own)
            return
        task = asyncio.create_task(self._show_all(exchange, own), name="show")
        self._asking.add(task)
        task.add_done_callback(self._asking.discard)

    async def _show_all(self, exchange: Exchange, own: Shown) -> None:
        try:
            self._give(exchange, await self._joined(exchange.request, own))
        except Exception:
            log.exception("the answer to %s could not be put together", exchange.request.path)
            self._refuse(exchange, own_fault())

    async def _joined(self, request: Request, own: Shown) -> Shown:
        shown = own
        if self._siblings is not None:
            # Sent to the others too: what changes something is to change it everywhere.
            others = await self._siblings.ask(request.method, request.target.decode("ascii"))
            shown = add_answers(request.path, request.query, own, others)
        return await admin.recalled(self._desk, request.path, request.query, shown)

    def _own_answer(self, request: Request) -> Shown:
        if request.path == "/metrics":
            return 200, self._desk.exposition(), _TEXT
        return admin.answer(self._desk, request.method, request.path, request.query)

    def _give(self, exchange: Exchange, shown: Shown) -> None:
        if isinstance(shown, Failure):
            self._refuse(exchange, shown)
        else:
            self._respond(exchange, *shown)

    def _health(self, exchange: Exchange) -> None:
        if self._desk.can_serve():
            self._respond(exchange, 200, b'{"status":"ok"}')
            return
        why = "draining" if self._desk.is_draining else "no engine is ready"
        self._respond(exchange, 503, msgspec.json.encode({"status": why}))

    def _readiness(self, exchange: Exchange) -> None:
        """Health for who starts it: at first relays, and the caches of engines that serve, have to be heard of, too."""
        why = self._desk.awaits() if self._desk.can_serve() else ""
        if why:
            self._respond(exchange, 503, msgspec.json.encode({"status": why}))
        else:
            self._health(exchange)

    # Answers

    def _refuse(self, exchange: Exchange, failure: Failure, *, is_counted: bool = False) -> None:
        if is_counted:
            endpoint = "chat" if exchange.request.path == CHAT else "completions"
            self._desk.metrics.requests.add(endpoint, str(failure.status))
            if failure.reason:
                self._desk.metrics.errors.add(failure.reason)
        self._respond(
            exchange, failure.status, failure.body(), b"application/json", failure.headers()
        )

    def _respond(
        self,
        exchange: Exchange,
        status: int,
        body: bytes,
        content_type: bytes = b"application/json",
        headers: Iterable[tuple[bytes, bytes]] = (),
    ) -> None:
        shown = _shown_id(exchange.request, self._new_id())
        exchange.respond(status, body, content_type, (*headers, (b"x-request-id", shown)))

    def _new_id(self) -> str:
        """A request id no other start of any router makes."""
        self._num_ids += 1
        return self._id_prefix + str(self._num_ids)


def server_context(files: TlsFiles | None) -> ssl.SSLContext | None:
    """Make the TLS context towards clients; None without files.

    Raises:
        RouterError: when they cannot be read.
    """
    if files is None:
        return None
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.minimum_version = ssl.TLSVersion.TLSv1_2
    try:
        context.load_cert_chain(files.cert, files.key)
        if files.ca:
            context.load_verify_locations(files.ca)
            context.verify_mode = ssl.CERT_REQUIRED
    except (OSError, ssl.SSLError) as error:
        raise RouterError(
            f"cannot use the certificate {files.cert} with its key {files.key}: {reason(error)}",
            "give PEM files that belong together",
            code=ExitCode.USAGE,
        ) from error
    return context


def _shown_id(request: Request, request_id: str) -> bytes:
    """The client's own X-Request-Id where it is harmless, else ours."""
    return request.request_id or request_id.encode()


def _rejection(failure: Failure, *headers: tuple[bytes, bytes]) -> Rejection:
    shown = (b"x-request-id", os.urandom(8).hex().encode())
    return Rejection(failure.status, failure.body(), headers=(*headers, shown))


def bind_error(config: RouterConfig, error: OSError) -> RouterError:
    """Say why the port cannot be bound, and who holds it."""
    host, port = config.host_port
    if isinstance(error, socket.gaierror):
        return RouterError(f"cannot listen on {host}: no such address")
    owner = port_owner(port)
    by = f" by {owner}" if owner else ""
    if "in use" in str(error).lower():
        return RouterError(
            f"port {port} on {host} is in use{by}", "stop that process, or listen on another port"
        )
    return RouterError(f"cannot listen on {host}:{port}: {reason(error)}")

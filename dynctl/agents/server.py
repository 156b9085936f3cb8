"""The agent's control API on a Unix socket that only its own user can open; reached over the SSH connection.

Not here: what the answers mean, TCP. Every answer is JSON but logs (text) and streams (one JSON value per line).
IO: sockets.
"""

import asyncio
import logging
from collections.abc import Callable, Coroutine
from functools import partial
from urllib.parse import parse_qs, unquote

from dynctl.agents import ask
from dynctl.agents.host.logs import LogFile
from dynctl.agents.programs import RouterProgram
from dynctl.agents.protocol import ApiError, HostSlice, ShutdownRequest, decode, encode
from dynctl.agents.sampler import Sampler
from dynctl.agents.supervisor import StaleError, Supervisor
from dynctl.core.text import clean, is_name
from dynctl.core.units import whole
from dynctl.errors import DynctlError, RouterError
from dynctl.http1.server import Exchange, serve
from dynctl.http1.upstream import UpstreamError

_log = logging.getLogger("dynctl.agent")

_HEARTBEAT_S = 2.0
"""Longest silence of the relay's table: its reader tells a dead agent from a quiet one."""
_FOLLOW_S = 0.25
_MAX_TAIL = 100_000
_ROUTER_ANSWER_S = 10.0
_OF_ROUTERS = {
    "GET": ("decisions", "engines", "hits", "findings", "policy", "shadow", "skew"),
    "POST": ("policy", "shadow"),
}
_CLOSE_GRACE_S = 2.0
_TEXT = b"text/plain; charset=utf-8"
_LINES = b"application/x-ndjson"


class ControlServer:
    """Answers control requests for one supervisor."""

    def __init__(self, supervisor: Supervisor) -> None:
        self._supervisor = supervisor
        self._sampler = Sampler(supervisor)
        self._group: asyncio.TaskGroup
        self._streams: set[asyncio.Task[None]] = set()

    async def run(self, until: asyncio.Event, started: Callable[[], None]) -> None:
        """Serve until told; `started` is called when the socket is open.

        Raises:
            OSError: when the socket cannot be bound.
        """
        async with asyncio.TaskGroup() as group:
            self._group = group
            server = await serve(self._accept, path=self._supervisor.root.socket)
            try:
                started()
                await until.wait()
            finally:
                # Streams would go on for ever; their readers come back to the next agent.
                for task in self._streams:
                    task.cancel()
                await server.close(_CLOSE_GRACE_S)

    def _accept(self, exchange: Exchange) -> None:
        path = exchange.request.path
        name = f"{exchange.request.method} {path}"
        task = self._group.create_task(self._answer(exchange), name=name)
        if path == "/v1/relay-table" or path.startswith("/v1/logs/"):
            self._streams.add(task)
            task.add_done_callback(self._streams.discard)
            exchange.on_gone = partial(_cancel, task)

    async def _answer(self, exchange: Exchange) -> None:
        try:
            await self._route(exchange)
        except StaleError as error:
            _refuse(exchange, 409, error)
        except DynctlError as error:
            _refuse(exchange, 400, error)
        except asyncio.CancelledError:
            exchange.abort()
            raise
        except Exception:  # noqa: BLE001 - a fault of ours is one answer, not the agent's end
            _log.exception("%s %s failed", exchange.request.method, exchange.request.path)
            _refuse(exchange, 500, DynctlError("internal error of the agent", "see its log"))

    def _route(self, exchange: Exchange) -> Coroutine[None, None, None]:
        request = exchange.request
        words = [unquote(word) for word in request.path.split("/")[1:]]
        match (request.method, words):
            case ("GET", ["v1", "status"]):
                return self._status(exchange)
            case ("PUT", ["v1", "slice"]):
                return self._put_slice(exchange)
            case ("GET", ["v1", "sample"]):
                return self._sample(exchange)
            case ("GET" | "POST", ["v1", ("logs" | "router"), unit_id, *rest]):
                return self._ask_unit(exchange, unit_id, rest)
            case ("POST", ["v1", ("drain" | "restart") as verb, unit_id]):
                return self._change_unit(exchange, verb, unit_id)
            case ("POST", ["v1", "shutdown"]):
                return self._shutdown(exchange)
            case ("GET", ["v1", "relay-table"]):
                return self._relay_table(exchange)
            case _:
                return _not_found(exchange, f"{request.method} {clean(request.path)} is not known")

    async def _status(self, exchange: Exchange) -> None:
        exchange.respond(200, encode(self._supervisor.status))

    async def _put_slice(self, exchange: Exchange) -> None:
        await self._supervisor.apply(decode(exchange.request.body, HostSlice))
        exchange.respond(200, encode(self._supervisor.status))

    async def _sample(self, exchange: Exchange) -> None:
        exchange.respond(200, encode(await self._sampler.sample()))

    async def _ask_unit(self, exchange: Exchange, unit_id: str, rest: list[str]) -> None:
        method, path = exchange.request.method, exchange.request.path
        match (method, path.split("/")[2], rest):
            case ("GET", "logs", []):
                await self._logs(exchange, unit_id)
            case (_, "router", [what]) if what in _OF_ROUTERS[method]:
                await self._ask_router(exchange, unit_id, what)
            case _:
                await _not_found(exchange, f"{method} {clean(path)} is not known")

    async def _ask_router(self, exchange: Exchange, unit_id: str, what: str) -> None:
        unit = self._supervisor.units.get(unit_id)
        if unit is None or unit.run is None or not isinstance(unit.program, RouterProgram):
            await _not_found(exchange, f"no router {clean(unit_id)} runs on this host")
            return
        request = exchange.request
        target = f"/{what}?{request.query.decode('ascii', 'replace')}"
        try:
            answer = await ask.ask(unit.run.at, request.method, target, timeout_s=_ROUTER_ANSWER_S)
        except UpstreamError as error:
            raise RouterError(f"{unit_id} does not answer: {error.message}") from error
        if answer.status != 200:
            said = ask.complaint(answer) or "without saying why"
            raise RouterError(f"{unit_id} answered {answer.status} to /{what}: {said}")
        exchange.respond(200, answer.body)

    async def _change_unit(self, exchange: Exchange, verb: str, unit_id: str) -> None:
        if unit_id not in self._supervisor.units:
            await _not_found(exchange, f"no unit {clean(unit_id)} on this host")
            return
        if verb == "drain":
            self._supervisor.hold(unit_id)
        else:
            self._supervisor.restart(unit_id)
        exchange.respond(200, encode(self._supervisor.status))

    async def _shutdown(self, exchange: Exchange) -> None:
        body = exchange.request.body
        wish = decode(body, ShutdownRequest) if body else ShutdownRequest()
        left = await self._supervisor.shutdown(now=wish.now)
        if left:
            names = ", ".join(unit.program.id for unit in left)
            details = tuple(f"{unit.program.id}: {unit.life.last_error}" for unit in left)
            error = ApiError(f"could not end {names}", "a reboot of the host ends them", details)
            exchange.respond(500, encode(error))
        else:
            exchange.respond(200, encode(self._supervisor.status))

    async def _relay_table(self, exchange: Exchange) -> None:
        exchange.start(200, ((b"content-type", _LINES),))
        while not exchange.is_gone:
            exchange.write(encode(self._supervisor.relay_table) + b"\n")
            await self._supervisor.wait_change(_HEARTBEAT_S)

    async def _logs(self, exchange: Exchange, unit_id: str) -> None:
        unit = self._supervisor.units.get(unit_id)
        if unit is not None:
            log = unit.log
        else:
            if not is_name(unit_id) or not self._supervisor.root.log_path(unit_id).is_file():
                await _not_found(exchange, f"no unit {clean(unit_id)} on this host")
                return
            settings = self._supervisor.host.settings
            log = LogFile(self._supervisor.root.log_path(unit_id), settings.log)
        query = parse_qs(exchange.request.query.decode("ascii", "replace"))
        tail = _number(query, "tail", 100)
        offset = log.size_bytes()
        lines = await asyncio.to_thread(log.last_lines, tail)
        exchange.start(200, ((b"content-type", _TEXT),))
        exchange.write("".join(f"{line}\n" for line in lines).encode())
        if _number(query, "follow", 0):
            await _follow(exchange, log, offset)
        exchange.finish()


def _cancel(task: asyncio.Task[None]) -> None:
    task.cancel()


async def _follow(exchange: Exchange, log: LogFile, offset: int) -> None:
    """Send what is appended until the reader leaves; waits while it reads too slowly."""
    may_write = asyncio.Event()
    may_write.set()
    exchange.on_pause = may_write.clear
    exchange.on_resume = may_write.set
    while not exchange.is_gone:
        await may_write.wait()
        piece, offset = log.read_from(offset)
        if piece:
            exchange.write(piece)
        else:
            await asyncio.sleep(_FOLLOW_S)


def _number(query: dict[str, list[str]], name: str, otherwise: int) -> int:
    text = query.get(name, [""])[-1]
    if not text:
        return otherwise
    number = whole(text)
    if number is None:
        raise DynctlError(f"{name} must be a number")
    return min(number, _MAX_TAIL)


def _refuse(exchange: Exchange, status: int, error: DynctlError) -> None:
    if exchange.is_started:
        exchange.abort()
        return
    exchange.respond(status, encode(ApiError(error.message, error.hint)))


async def _not_found(exchange: Exchange, message: str) -> None:
    exchange.respond(404, encode(ApiError(message)))

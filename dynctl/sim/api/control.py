"""The control socket: faults on demand, and facts no engine tells otherwise.

    GET /state    free blocks, requests, leases          GET /aborts   requests whose client left, with times
    GET /faults   in force      POST /faults  {"spec": "die,after_tokens=5"}      DELETE /faults
    POST /reset_prefix_cache    POST /sleep     POST /wake_up

Not here: the engine's own routes. IO: through http1 exchanges.
"""

import msgspec

from dynctl.errors import UsageError
from dynctl.http1.server import Exchange
from dynctl.sim.api.answers import error_body
from dynctl.sim.api.requests import RefusedError
from dynctl.sim.engine import SimEngine

_json = msgspec.json.Encoder().encode


class _FaultBody(msgspec.Struct):
    spec: str


_fault_bodies = msgspec.json.Decoder(_FaultBody)


class Control:
    """Answers the requests on the control socket."""

    def __init__(self, engine: SimEngine) -> None:
        self._engine = engine

    def handle(self, exchange: Exchange) -> None:
        """Answer one request."""
        try:
            answer = self._answer(exchange)
        except (RefusedError, UsageError, msgspec.DecodeError) as error:
            status = error.status if isinstance(error, RefusedError) else 400
            exchange.respond(status, error_body(str(error), "BadRequestError", status))
            return
        exchange.respond(200, _json(answer))

    def _answer(self, exchange: Exchange) -> object:
        engine = self._engine
        match exchange.request.method, exchange.request.path:
            case "GET", "/state":
                return self._state()
            case "GET", "/aborts":
                return list(engine.aborts)
            case "GET", "/faults":
                return engine.faults.listed()
            case "POST", "/faults":
                engine.faults.add(_fault_bodies.decode(exchange.request.body).spec)
                engine.apply_faults()
                return engine.faults.listed()
            case "DELETE", "/faults":
                engine.faults.clear()
                engine.apply_faults()
                return []
            case "POST", "/reset_prefix_cache":
                return {"cleared": engine.reset_prefix_cache()}
            case "POST", "/sleep":
                return {"is_asleep": engine.sleep()}
            case "POST", "/wake_up":
                engine.wake_up()
                return {"is_asleep": False}
            case _:
                raise RefusedError("Not Found", status=404)

    def _state(self) -> dict[str, object]:
        scheduler = self._engine.scheduler
        return {
            "engine_id": self._engine.engine_id,
            "num_open": self._engine.num_open,
            "num_running": len(scheduler.running),
            "num_waiting": scheduler.num_waiting,
            "num_leases": len(self._engine.leases),
            "num_blocks": scheduler.cache.num_blocks,
            "num_free_blocks": scheduler.cache.num_free,
            "num_cached_blocks": scheduler.cache.num_cached,
            "side_channel": list(self._engine.side_channel_address),
        }

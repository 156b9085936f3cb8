"""The control socket: faults on demand, and facts no engine tells otherwise.

    GET /state    free blocks, requests, leases          GET /aborts   requests whose client left, with times
    GET /faults   in force      POST /faults  {"spec": "die,after_tokens=5"}      DELETE /faults
    POST /reset_prefix_cache    POST /sleep     POST /wake_up

What is asked is told of the first data-parallel rank, or of the one that X-data-parallel-rank names; all hear what to do.
Not here: the engine's own routes. IO: through http1 exchanges.
"""

import msgspec

from dynctl.errors import UsageError
from dynctl.http1.server import Exchange
from dynctl.sim.api.answers import error_body
from dynctl.sim.api.ranks import rank_asked
from dynctl.sim.api.requests import RefusedError
from dynctl.sim.engine import SimEngine

_json = msgspec.json.Encoder().encode


class _FaultBody(msgspec.Struct):
    spec: str


_fault_bodies = msgspec.json.Decoder(_FaultBody)


class Control:
    """Answers the requests on the control socket."""

    def __init__(self, *ranks: SimEngine) -> None:
        self._ranks = ranks

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
        engine = rank_asked(exchange.request, self._ranks) or self._ranks[0]
        match exchange.request.method, exchange.request.path:
            case "GET", "/state":
                return _state(engine)
            case "GET", "/aborts":
                return list(engine.aborts)
            case "GET", "/faults":
                return engine.faults.listed()
            case "POST", "/faults":
                engine.faults.add(_fault_bodies.decode(exchange.request.body).spec)
                self._apply_faults()
                return engine.faults.listed()
            case "DELETE", "/faults":
                engine.faults.clear()
                self._apply_faults()
                return []
            case "POST", "/reset_prefix_cache":
                have_cleared = [rank.reset_prefix_cache() for rank in self._ranks]
                return {"cleared": all(have_cleared)}
            case "POST", "/sleep":
                are_asleep = [rank.sleep() for rank in self._ranks]
                return {"is_asleep": all(are_asleep)}
            case "POST", "/wake_up":
                for rank in self._ranks:
                    rank.wake_up()
                return {"is_asleep": False}
            case _:
                raise RefusedError("Not Found", status=404)

    def _apply_faults(self) -> None:
        for rank in self._ranks:
            rank.apply_faults()


def _state(engine: SimEngine) -> dict[str, object]:
    scheduler = engine.scheduler
    return {
        "engine_id": engine.engine_id,
        "num_open": engine.num_open,
        "num_running": len(scheduler.running),
        "num_waiting": scheduler.num_waiting,
        "num_leases": len(engine.leases),
        "num_blocks": scheduler.cache.num_blocks,
        "num_free_blocks": scheduler.cache.num_free,
        "num_cached_blocks": scheduler.cache.num_cached,
        "side_channel": list(engine.side_channel_address),
    }

"""The routes of one engine and what each answers, as vLLM 0.32 does.

Not here: listening (`run`), how bodies look (`answers`). IO: through http1 exchanges.
"""

import itertools
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec

from dynctl import __version__
from dynctl.http1.server import Exchange
from dynctl.sim.api.answers import error_body
from dynctl.sim.api.intake import Intake
from dynctl.sim.api.ranks import rank_asked
from dynctl.sim.api.replies import StreamReply, WholeReply
from dynctl.sim.api.requests import (
    ChatBody,
    CompletionBody,
    DetokenizeBody,
    RefusedError,
    TokenizeBody,
    decode_body,
)
from dynctl.sim.engine import SimEngine
from dynctl.sim.faults import FaultKind
from dynctl.sim.metrics import merge
from dynctl.sim.options import model_dir

_PLAIN = b"text/plain; version=0.0.4; charset=utf-8"
_json = msgspec.json.Encoder().encode
_DRAINING = "cannot schedule new futures after shutdown"


class Api:
    """Answers the requests to one engine, whatever its data-parallel ranks."""

    def __init__(self, *ranks: SimEngine) -> None:
        engine = ranks[0]
        options = engine.options
        self._ranks = ranks
        self._engine = engine
        """For what is the same of all ranks."""
        self._turns = itertools.count()
        self._intake = Intake(
            engine.text,
            (options.model,),
            options.max_model_len,
            has_connector=options.side_channel is not None,
        )
        self._created_unix_s = int(time.time())
        self._num_requests: dict[tuple[str, str, int], int] = {}
        self.is_draining = False
        """After SIGTERM: /health still says 200, new requests get 500, as with vLLM."""
        self._routes: dict[tuple[str, str], Callable[[Exchange], None]] = {
            ("POST", "/v1/completions"): self._complete,
            ("POST", "/v1/chat/completions"): self._chat,
            ("GET", "/v1/models"): self._models,
            ("GET", "/health"): self._health,
            ("GET", "/ping"): self._health,
            ("GET", "/version"): self._version,
            ("GET", "/load"): self._load,
            ("GET", "/metrics"): self._metrics,
            ("GET", "/kv_event_sources"): self._event_sources,
            ("POST", "/tokenize"): self._tokenize,
            ("POST", "/detokenize"): self._detokenize,
        }
        self._paths = {path for _, path in self._routes}

    def handle(self, exchange: Exchange) -> None:
        """Answer one request."""
        request = exchange.request
        route = self._routes.get((request.method, request.path), self._unknown)
        try:
            route(exchange)
        except RefusedError as error:
            body = error_body(error.message, error.kind, error.status, error.param)
            exchange.respond(error.status, body)
            self._count(exchange, error.status)
        else:
            self._count(exchange, 200)

    def _unknown(self, exchange: Exchange) -> None:
        is_known = exchange.request.path in self._paths
        status, message = (405, "Method Not Allowed") if is_known else (404, "Not Found")
        raise RefusedError(message, status=status, kind="NotFoundError")

    def _complete(self, exchange: Exchange) -> None:
        self._admit(exchange)
        body = decode_body(CompletionBody, exchange.request.body)
        self._generate(exchange, body)

    def _chat(self, exchange: Exchange) -> None:
        self._admit(exchange)
        body = decode_body(ChatBody, exchange.request.body)
        self._generate(exchange, body)

    def _admit(self, exchange: Exchange) -> None:
        """Refuse while draining, or when a fault says so.

        Raises:
            RefusedError: with the status to answer.
        """
        if self.is_draining:
            raise RefusedError(_DRAINING, status=500, kind="InternalServerError")
        for fault in self._engine.faults.marked(exchange.request.body):
            if fault.kind is FaultKind.REJECT and fault.strike():
                kind = "ServiceUnavailableError" if fault.status == 503 else "InternalServerError"
                raise RefusedError("a fault says so", status=fault.status, kind=kind)

    def _generate(self, exchange: Exchange, body: CompletionBody | ChatBody) -> None:
        request_id = exchange.request.request_id.decode("ascii", "replace") or None
        if isinstance(body, ChatBody):
            job = self._intake.chat(body, request_id)
        else:
            job = self._intake.completion(body, request_id)
        faults = self._engine.faults.marked(exchange.request.body)
        rank = rank_asked(exchange.request, self._ranks) or self._least_busy()
        if job.is_streamed:
            is_split = any(f.kind is FaultKind.SPLIT and f.strike() for f in faults)
            StreamReply(job, exchange, rank, is_split=is_split).begin(faults)
        else:
            WholeReply(job, exchange, rank).begin(faults)

    def _least_busy(self) -> SimEngine:
        """Of equals each in turn, as vLLM spreads requests that name no rank."""
        first = next(self._turns) % len(self._ranks)
        return min(self._ranks[first:] + self._ranks[:first], key=lambda rank: rank.num_open)

    def _models(self, exchange: Exchange) -> None:
        options = self._engine.options
        card = {
            "id": options.model,
            "object": "model",
            "created": self._created_unix_s,
            "owned_by": "dynctl-sim",
            "root": str(model_dir(options)),
            "parent": None,
            "max_model_len": options.max_model_len,
            "permission": [],
        }
        exchange.respond(200, _json({"object": "list", "data": [card]}))

    def _health(self, exchange: Exchange) -> None:
        fault = self._engine.faults.struck(FaultKind.HEALTH)
        exchange.respond(200 if fault is None else fault.status, b"")

    def _version(self, exchange: Exchange) -> None:
        exchange.respond(200, _json({"version": __version__, "engine": "dynctl-sim"}))

    def _load(self, exchange: Exchange) -> None:
        exchange.respond(200, _json({"server_load": sum(rank.num_open for rank in self._ranks)}))

    def _event_sources(self, exchange: Exchange) -> None:
        sources: dict[str, Any] = {
            str(rank.rank): {
                "endpoint": rank.publisher.endpoint,
                "replay_endpoint": rank.publisher.replay_endpoint,
                "topic": rank.publisher.topic,
            }
            for rank in self._ranks
            if rank.publisher is not None
        }
        exchange.respond(200, _json(sources))

    def _tokenize(self, exchange: Exchange) -> None:
        body = decode_body(TokenizeBody, exchange.request.body)
        token_ids = self._intake.tokenize(body)
        answer = {
            "count": len(token_ids),
            "max_model_len": self._engine.options.max_model_len,
            "tokens": token_ids,
            "token_strs": self._engine.text.pieces(token_ids) if body.return_token_strs else None,
        }
        exchange.respond(200, _json(answer))

    def _detokenize(self, exchange: Exchange) -> None:
        body = decode_body(DetokenizeBody, exchange.request.body)
        self._intake.check_model(body.model)
        self._intake.check_ids(body.tokens)
        exchange.respond(200, _json({"prompt": self._engine.text.decode(body.tokens)}))

    def _metrics(self, exchange: Exchange) -> None:
        options = self._engine.options
        config = {
            "block_size": str(options.block_size),
            "num_gpu_blocks": str(options.num_cache_blocks),
            "kv_cache_size_tokens": str(options.num_cache_blocks * options.block_size),
            "enable_prefix_caching": str(options.prefix_caching > 0),
            "prefix_caching_hash_algo": "xxh3",
            "cache_dtype": "auto",
        }
        texts = [
            rank.metrics.render(rank.scheduler.counts, rank.gauges(), config)
            for rank in self._ranks
        ]
        exchange.respond(200, merge(texts) + self._http_counts() + _process(), _PLAIN)

    def _http_counts(self) -> bytes:
        lines = [
            "# HELP http_requests_total Requests answered.",
            "# TYPE http_requests_total counter",
        ]
        for (path, method, status), count in self._num_requests.items():
            labels = f'handler="{path}",method="{method}",status="{status}xx"'
            lines.append(f"http_requests_total{{{labels}}} {float(count)}")
        return ("\n".join(lines) + "\n").encode()

    def _count(self, exchange: Exchange, status: int) -> None:
        """Count a request by its first status; unknown paths share one label, so that it stays bounded."""
        request = exchange.request
        path = request.path if request.path in self._paths else "none"
        method = request.method if request.method in {"GET", "POST"} else "other"
        key = (path, method, status // 100)
        self._num_requests[key] = self._num_requests.get(key, 0) + 1


def _process() -> bytes:
    """Write the process's own figures."""
    pages = int(Path("/proc/self/statm").read_text(encoding="ascii").split()[1])
    return (
        "# HELP process_resident_memory_bytes Resident memory size in bytes.\n"
        "# TYPE process_resident_memory_bytes gauge\n"
        f"process_resident_memory_bytes {float(pages * 4096)}\n"
        "# HELP process_cpu_seconds_total Processor time in seconds.\n"
        "# TYPE process_cpu_seconds_total counter\n"
        f"process_cpu_seconds_total {time.process_time():.2f}\n"
    ).encode()

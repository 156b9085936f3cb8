"""What a router's shared state looks like at this moment, as Prometheus text. Names and meanings: docs/metrics.md.

Not here: what is counted as it happens (`metrics`). Pure.
"""

from collections.abc import Iterable
from typing import TYPE_CHECKING

from dynctl.router import index_progress
from dynctl.router.metrics import Values, gauge
from dynctl.router.prefix_index import PrefixIndex
from dynctl.router.workers import Worker

if TYPE_CHECKING:
    from dynctl.router.desk import Desk

_ENGINE_GAUGES = (
    ("inflight", "Booked requests."),
    ("pending_prefill_tokens", "Booked prompt tokens not yet prefilled."),
    ("reserved_tokens", "Booked KV memory."),
    ("blocks", "Blocks in the index."),
    ("loadable_blocks", "Blocks in slower media."),
)


def gauges(desk: "Desk") -> Iterable[str]:
    """The exposition lines of all of them."""
    workers = desk.workers.all()
    by_state: dict[tuple[str, ...], float] = {}
    by_parity: dict[tuple[str, ...], float] = {}
    for worker in workers:
        state = str(worker.info.state) if worker.is_reachable else "unreachable"
        key = (worker.info.role, state)
        by_state[key] = by_state.get(key, 0) + 1
        parity = worker.parity if desk.tokens.tokenizer else "none"
        by_parity[(parity,)] = by_parity.get((parity,), 0) + 1
    yield from gauge("compiled", "1 where compiled modules serve.", {(): float(desk.is_compiled)})
    yield from gauge("inflight", "Requests accepted and not ended.", {(): len(desk.flights)})
    yield from gauge("queued", "Requests waiting for an engine.", {(): len(desk.line)})
    yield from gauge("engines", "Engines known.", by_state, ("role", "state"))
    yield from _of_engines(desk.index, workers)
    yield from gauge("tokenizer_engines", "Engines by parity.", by_parity, ("parity",))
    yield from gauge("index_blocks", "Distinct block hashes.", {(): len(desk.index)})
    parts: dict[tuple[str, ...], float] = {
        (part,): float(tokens) for part, tokens in desk.hits.tokens.items()
    }
    yield from gauge("hit_tokens", "Prompt tokens by what became of them.", parts, ("part",))
    probes: dict[tuple[str, ...], float] = {
        ("asked",): float(desk.hits.probe_tokens),
        ("cached",): float(desk.hits.probe_cached_tokens),
    }
    yield from gauge("probe_tokens", "Tokens of own questions asked again.", probes, ("what",))
    yield from _of_parts(desk)
    yield from _by_route_key(desk)
    found: dict[tuple[str, ...], float] = {(f.engine, f.cause): 1.0 for f in desk.findings()}
    yield from gauge("findings", "Broken preconditions.", found, ("engine", "cause"))
    yield from gauge("start_time_seconds", "Start, Unix time.", {(): desk.started_unix_s})


def _of_engines(index: PrefixIndex, workers: Iterable[Worker]) -> Iterable[str]:
    facts = [
        (
            (w.id,),
            (
                w.active_requests,
                w.pending_prefill_tokens,
                w.reserved_tokens,
                index.num_blocks(w.id),
                index.num_slower_blocks(w.id),
            ),
        )
        for w in workers
    ]
    for column, (name, text) in enumerate(_ENGINE_GAUGES):
        values: Values = {key: row[column] for key, row in facts}
        yield from gauge(f"engine_{name}", text, values, ("engine",))


def _of_parts(desk: "Desk") -> Iterable[str]:
    yield from desk.placement.sessions.exposition()
    yield from desk.placement.links.exposition(desk.settings.kv_bytes_per_token)
    yield from index_progress.exposition(desk.workers, desk.index, desk.fleet.reading)
    if desk.decision_log is not None:
        yield from desk.decision_log.exposition()


def _by_route_key(desk: "Desk") -> Iterable[str]:
    learned = desk.workers.lengths.learned(desk.route_keys.sums.names())
    lengths: dict[tuple[str, ...], float] = {
        (key,): round(tokens, 1) for key, tokens in learned.items()
    }
    yield from gauge("expected_output_tokens", "Of an answer.", lengths, ("route_key",))
    yield from desk.route_keys.sums.lines()

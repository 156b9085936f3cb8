"""With pools: which way a prompt's KV gets onto a decode engine, and what each way costs. Pure: times are passed in.

Not here: what a link costs (`transfer_cost`), choosing and booking engines (`placement`).
"""

from collections.abc import Container, Sequence
from dataclasses import dataclass

from dynctl.core.deployment import may_exchange_kv
from dynctl.router.choosing import Load
from dynctl.router.config import Settings
from dynctl.router.decisions import Decision
from dynctl.router.loading import Held
from dynctl.router.prompt import Prompt
from dynctl.router.transfer_cost import Links, PathCosts, TransferFacts, can_transfer, stall_ms
from dynctl.router.worker_table import View, WorkerTable
from dynctl.router.workers import Worker


@dataclass(slots=True)
class Pick:
    """A choice not yet booked."""

    workers: Sequence[Worker]
    decision: Decision

    @property
    def worker(self) -> Worker:
        """The engine chosen."""
        return self.workers[self.decision.position]

    @property
    def overlap(self) -> int:
        """In time: what would be loaded counts as what that saves."""
        return self.decision.overlaps_tokens[self.decision.position]

    @property
    def uncached(self) -> int:
        """What it lacks of the prompt; at least one token is computed."""
        return max(self.decision.prompt_tokens - self.overlap, 1)

    @property
    def ends_ms(self) -> float:
        """How long until its prefill would be over."""
        worker = self.worker
        queue_ms = max(worker.free_at_s - self.decision.need.now_s, 0.0) * 1e3
        return queue_ms + worker.prefill.at(self.uncached)


def partners(workers: Sequence[Worker], others: Sequence[Worker]) -> list[Worker]:
    """Those whose KV blocks are of use to at least one of the others."""
    return [
        worker
        for worker in workers
        if any(may_exchange_kv(worker.info, other.info) for other in others)
    ]


def fitting(
    table: WorkerTable, workers: Sequence[Worker], others: Sequence[Worker]
) -> Sequence[Worker]:
    """The same, where there are any others, and any pair that does not fit at all."""
    is_any = not (others and table.has_strange_pairs)
    return workers if is_any else partners(workers, others)


def unfit(table: WorkerTable, view: View, others: Sequence[Worker]) -> Container[str]:
    """The rest of a view's engines, by id."""
    found = fitting(table, view.workers, others)
    if found is view.workers:
        return ()
    return {worker.id for worker in view.workers if worker not in found}


def lacking(prompt: Prompt, held: Held | None) -> Sequence[int]:
    """What each candidate lacks of a prompt; nothing where nobody could be asked."""
    return () if held is None else [max(prompt.num_tokens - tokens, 1) for tokens in held.tokens]


def with_moves(
    links: Links,
    loads: Sequence[Load],
    sender: Pick | None,
    decode_stall: float,
    now_s: float,
    apart: Container[str] = (),
    lefts: Sequence[int] = (),
) -> list[Load]:
    """Say what KV costs to come to each decode engine from who does the prefill, where that is known.

    Where the pair is not to be used, or the engine stands `apart`, the prompt would be computed there: that is its cost. So it is
    where that is less than the move alone: `lefts` says how many tokens each lacks, where both ways are weighed.
    """
    if sender is None:
        price = links.usual_price(now_s)
        return [_moved(load, price) for load in loads]
    source, start_s = sender.worker.id, now_s + sender.ends_ms / 1e3
    found = []
    for position, load in enumerate(loads):
        if load.engine in apart or not links.is_usable(source, load.engine, now_s):
            price = _price_in_place(load, decode_stall, now_s)
        else:
            price = links.price(source, load.engine, start_s, now_s)
            if lefts:
                price = _cheaper(price, load, lefts[position], decode_stall, now_s)
        found.append(_moved(load, price))
    return found


def _cheaper(
    move: tuple[float, float], load: Load, left: int, decode_stall: float, now_s: float
) -> tuple[float, float]:
    move_ms = move[0] + left * move[1]
    if move_ms <= load.prefill_base_ms + left * load.prefill_ms_per_token:
        return move  # computing takes so long at least
    own = _price_in_place(load, decode_stall, now_s)
    return own if own[0] + left * own[1] < move_ms else move


def _moved(load: Load, price: tuple[float, float]) -> Load:
    # As `load._replace(…)`, in a quarter of the time.
    return tuple.__new__(Load, (*load[:-2], *price))


def _price_in_place(load: Load, decode_stall: float, now_s: float) -> tuple[float, float]:
    queue_ms = max(load.free_at_s - now_s, 0.0) * 1e3
    times = 1.0 + stall_ms(1.0, load.active_requests, decode_stall)
    return queue_ms + times * load.prefill_base_ms, times * load.prefill_ms_per_token


def way(
    settings: Settings, links: Links, main: Pick, prefill: Pick, now_s: float, *, is_weighed: bool
) -> tuple[str, PathCosts | None]:
    """Say why the decode engine should prefill itself; empty: it should not. Both costs where they are weighed."""
    source, target = prefill.worker, main.worker
    left = main.uncached
    if left <= settings.local_prefill_max_tokens:
        return "short", None
    if not may_exchange_kv(source.info, target.info):
        return "other_kv", None
    capacity = target.capacity_tokens
    reason = can_transfer(
        TransferFacts(
            left,
            max(capacity - target.reserved_tokens, 0) if capacity else None,
            links.is_usable(source.id, target.id, now_s),
            settings.kv_bytes_per_token,
            settings.transfer_max_bytes,
        )
    )
    if reason or not is_weighed:
        return reason, None
    local_ms = target.prefill.at(left)
    recompute_ms = max(target.free_at_s - now_s, 0.0) * 1e3 + local_ms
    recompute_ms += stall_ms(local_ms, target.active_requests, settings.decode_stall)
    remote_ms = prefill.ends_ms
    move = links.cost(source.id, target.id, left, now_s + remote_ms / 1e3, now_s)
    costs = PathCosts(recompute_ms, remote_ms + move.wait_ms + move.move_ms)
    return "cheaper" if costs.recompute_ms < costs.copy_ms else "", costs

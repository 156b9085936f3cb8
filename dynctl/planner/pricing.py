"""One engine on GPUs of a kind, without hosts: what it needs, holds and serves; or why it cannot be.

For `dynctl estimate`: a closed loop of users or requests at a rate, on an aggregated, prefill or decode engine.
Not here: choosing among layouts (`search`).
Pure.
"""

import math
from dataclasses import dataclass, field, replace

from dynctl.core.model import Model
from dynctl.core.plan import Figure, MemorySheet, Parallelism, Role
from dynctl.core.units import GIB, format_bytes, format_number
from dynctl.core.workload import Slo, Workload
from dynctl.planner.calibration import Calibration, Constants, shipped, stored_as
from dynctl.planner.closed_loop import Loop, prefill_batch_s, run_loop
from dynctl.planner.estimate import Layout, Side, by_rank, figure, max_rate_rps, serve
from dynctl.planner.limits import default_batched_tokens
from dynctl.planner.memory import (
    MAX_BATCHED_TOKENS,
    MAX_NUM_SEQS,
    Room,
    legal_tp,
    no_kernels,
    rank_tokens,
    sheet,
)
from dynctl.planner.peaks import GpuSpec
from dynctl.planner.roofline import Engine, group_link

KV_MARGIN = 0.15
"""How wrong the memory beside weights and KV may be, as a share of it; engines differ in what they keep."""

LARGE_NUM_SEQS = 1024
"""What vLLM itself bounds the requests of a step to on its largest GPUs."""
FLOOD_USERS = 256
"""With more users than this, engines are bound by their hosts and their queues: fitted points say little there."""


@dataclass(frozen=True, slots=True)
class Query:
    """What is asked."""

    model: Model
    spec: GpuSpec
    parallelism: Parallelism
    role: Role
    workload: Workload
    concurrency: float | None = None
    """None: requests arrive at `workload.rate_rps`."""
    engine: str = "vllm"
    utilization: float = 0.9
    max_num_seqs: int = 0
    """0: what vLLM bounds a step to on such GPUs when it is told nothing."""
    link: str | None = None
    """Worst PCIe path of a group without NVLink, as `PIX` or `SYS`."""
    slo: Slo = field(default_factory=Slo)
    constants: Constants | None = None
    """None: those of the calibration."""
    calibration: Calibration = field(default_factory=shipped, repr=False, compare=False)

    @property
    def num_seqs(self) -> int:
        """Requests one attention rank runs at a time."""
        return self.max_num_seqs or (LARGE_NUM_SEQS if self._is_large else MAX_NUM_SEQS)

    @property
    def batched_tokens(self) -> int:
        """Tokens of one step."""
        return default_batched_tokens(self.spec.usable_bytes, self.spec.name)

    @property
    def _is_large(self) -> bool:
        return self.batched_tokens >= MAX_BATCHED_TOKENS


@dataclass(frozen=True, slots=True)
class Priced:
    """The answer; figures that a role does not have are None."""

    feasible: bool
    reason: str = ""
    hint: str = ""
    """The nearest change, of one that is not feasible."""
    note: str = ""
    """What to know of a feasible one; empty: nothing."""
    ttft_ms: Figure | None = None
    tpot_ms: Figure | None = None
    out_tok_s_per_gpu: Figure | None = None
    req_s: Figure | None = None
    memory_gib: Figure | None = None
    kv_capacity_tokens: Figure | None = None
    ttft_p50_ms: Figure | None = None
    ttft_p95_ms: Figure | None = None
    ttft_p99_ms: Figure | None = None
    itl_p99_ms: Figure | None = None
    goodput_req_s: Figure | None = None
    hit_ratio: float | None = None
    memory: MemorySheet | None = None


def price_engine(query: Query) -> Priced:
    """Price one engine."""
    refusal = illegal(query.model, query.parallelism) or no_kernels(
        query.model, query.spec, query.spec.name
    )
    if refusal:
        return Priced(False, refusal, "name other sizes, or another model or GPU")
    memory = memory_of(query)
    needed = query.workload.isl_tokens + query.workload.osl_tokens
    if rank_tokens(memory, query.parallelism) < needed:
        reason = f"{_short(query, memory, needed)}; {_nearest(query, needed)}"
        return Priced(
            False, reason, "more GPUs, smaller weights, or shorter requests", memory=memory
        )
    priced = _looped if query.concurrency is not None else _arriving
    return replace(priced(query, engine_of(query), memory), note=_note(query.model, needed))


def _note(model: Model, needed: int) -> str:
    if not 0 < model.max_len_tokens < needed:
        return ""
    return (
        f"requests of {needed} tokens are longer than the {model.max_len_tokens} the model is published with: "
        "engines refuse them unless its positions are stretched"
    )


def engine_of(query: Query) -> Engine:
    """The asked engine as the roofline sees it."""
    link = group_link(query.spec, query.spec.num_nvlinks, query.link)
    return Engine(
        query.model,
        query.spec,
        query.parallelism,
        link,
        query.engine,
        query.constants,
        query.calibration,
    )


def keeps_small_cache(model: Model, engine: str) -> bool:
    """Whether the KV cache is in 8 bit though nobody says so.

    The 8- and 4-bit checkpoints that TensorRT-LLM is measured with declare such a cache.
    """
    return engine == "trtllm" and stored_as(model) in {"fp8", "nvfp4"}


def illegal(model: Model, parallelism: Parallelism) -> str:
    """Why no engine accepts these sizes; empty when one does."""
    tp, pp, dp, ep = parallelism.tp, parallelism.pp, parallelism.dp, parallelism.ep
    if min(tp, pp, dp, ep) < 1:
        return "parallel sizes are at least 1"
    if not legal_tp(model, tp):
        return f"tp {tp} does not divide the model's {model.num_heads} heads and {model.num_kv_heads} KV heads"
    if pp > model.num_layers:
        return f"pp {pp} is more than the model's {model.num_layers} layers"
    if ep > 1 and not model.num_experts:
        return f"ep {ep} needs experts, and this model is dense"
    if ep > 1 and (tp * dp) % ep:
        return f"ep {ep} does not divide the {tp * dp} ranks of tp {tp} × dp {dp}"
    if ep > 1 and model.num_experts % ep:
        return f"ep {ep} does not divide the model's {model.num_experts} experts"
    return ""


def memory_of(query: Query) -> MemorySheet:
    """The memory of one of its GPUs."""
    return sheet(query.model, query.parallelism, room_of(query))


def room_of(query: Query) -> Room:
    """The memory it may use of each."""
    work, total = query.workload, query.spec.usable_bytes
    return Room(
        total,
        query.utilization,
        query.num_seqs,
        work.isl_tokens + work.osl_tokens,
        query.batched_tokens,
        query.calibration.beside_of(query.engine, total),
    )


def _short(query: Query, memory: MemorySheet, needed: int) -> str:
    where = f"{query.model.name} on {query.parallelism.num_gpus} × {query.spec.name}"
    if memory.kv_bytes <= 0:
        needs = memory.weight_bytes + memory.activation_bytes + memory.reserve_bytes
        return (
            f"{where} does not fit: weights {format_bytes(memory.weight_bytes)} and "
            f"{format_bytes(memory.activation_bytes)} beside them make {format_bytes(needs)} with the reserve, "
            f"a GPU has {format_bytes(memory.total_bytes)}: {format_bytes(needs - memory.total_bytes)} short"
        )
    return (
        f"{where} holds {rank_tokens(memory, query.parallelism)} tokens of KV{' a rank' if query.parallelism.dp > 1 else ''}, "
        f"one request needs {needed}: "
        f"{format_bytes(memory.kv_bytes)} are left beside weights of {format_bytes(memory.weight_bytes)}"
    )


def _nearest(query: Query, needed: int) -> str:
    """The smallest layout of this kind that would hold the model and one request."""
    own = query.parallelism
    for factor in (2, 4, 8, 16):
        for tp, pp in ((own.tp * factor, own.pp), (own.tp, own.pp * factor)):
            larger = replace(query, parallelism=replace(own, tp=tp, pp=pp))
            is_legal = not illegal(query.model, larger.parallelism)
            if is_legal and rank_tokens(memory_of(larger), larger.parallelism) >= needed:
                return f"it fits with tp {tp}" + (f" and pp {pp}" if pp > 1 else "")
    return "no layout of up to sixteen times the GPUs holds it"


def _max_sequences(query: Query, memory: MemorySheet, answered: float = 1.0) -> float:
    """Requests the engine holds at once with this share of their answers; what they share is stored once."""
    work = query.workload
    own = work.isl_tokens * (1 - work.shared_prefix_ratio) + work.osl_tokens * answered
    return max(
        1.0,
        min(query.num_seqs * query.parallelism.dp, memory.kv_capacity_tokens / own),
    )


def loop_of(query: Query, memory: MemorySheet) -> Loop:
    """The asked users as a closed loop on this engine."""
    work = query.workload
    cached = work.isl_tokens * work.shared_prefix_ratio
    return Loop(
        work.isl_tokens,
        work.osl_tokens,
        query.concurrency or 1.0,
        cached,
        # Engines admit what fits now: on average requests are half answered.
        _max_sequences(query, memory, answered=0.5),
    )


def is_flood(query: Query, loop: Loop) -> bool:
    """Whether users wait for each other more than for the engine."""
    return loop.concurrency > min(FLOOD_USERS * query.parallelism.dp, loop.max_sequences)


def _looped(query: Query, engine: Engine, memory: MemorySheet) -> Priced:
    work, users = query.workload, query.concurrency or 1.0
    gpus = query.parallelism.num_gpus
    ttft_s: float | None = None
    tpot_s: float | None = None
    loop = loop_of(query, memory)
    held = min(users, loop.max_sequences)
    if query.role is Role.PREFILL:
        ttft_s, requests = _prefilling(query, engine, loop)
        tokens = requests
    elif query.role is Role.DECODE:
        tpot_s = engine.decode_s(held, work.isl_tokens + work.osl_tokens / 2)
        tokens = held / tpot_s
        requests = tokens / work.osl_tokens
    else:
        found = run_loop(engine.load, engine.used_constants, loop)
        ttft_s, tpot_s, tokens = found.ttft_s, found.tpot_s, found.tokens_s
        requests = tokens / work.osl_tokens
    source = f"{engine.source}; closed loop of {users:g} users"
    through = engine.band("tokens-flood" if is_flood(query, loop) else "tokens")
    return Priced(
        True,
        ttft_ms=_ms(ttft_s, engine, "ttft", source),
        tpot_ms=_ms(tpot_s, engine, "tpot", source),
        out_tok_s_per_gpu=None
        if query.role is Role.PREFILL
        else figure(tokens / gpus, through, source),
        req_s=figure(requests, through, source),
        memory_gib=_memory(query, memory, held),
        kv_capacity_tokens=_capacity(query, memory),
        hit_ratio=work.shared_prefix_ratio,
        memory=memory,
    )


def _prefilling(query: Query, engine: Engine, loop: Loop) -> tuple[float, float]:
    """Seconds to a first token and requests per second of a prefill engine whose users ask again at once."""
    users = loop.concurrency / engine.batches
    new = max(1.0, loop.isl_tokens - loop.cached_tokens)
    together = max(1.0, min(users, query.batched_tokens / new))
    one = prefill_batch_s(engine.load, engine.used_constants, together, new, loop.cached_tokens)
    # Whoever comes waits for those before.
    ttft = one * max(1.0, users / together) + engine.host_s
    return ttft, min(engine.batches * together / one, loop.concurrency / ttft)


def _arriving(query: Query, engine: Engine, memory: MemorySheet) -> Priced:
    work, gpus = query.workload, query.parallelism.num_gpus
    side = by_rank(
        Side(engine, 1, _max_sequences(query, memory), memory.kv_capacity_tokens),
        query.parallelism.dp,
    )
    layout = Layout(side)
    if query.role is Role.PREFILL:
        layout = Layout(side, _endless(side), math.inf)
    elif query.role is Role.DECODE:
        layout = Layout(_endless(side), side, math.inf)
    served = serve(layout, work, work.rate_rps)
    if not served.is_stable:
        most = max_rate_rps(layout, work, Slo())
        return Priced(
            False,
            f"{work.rate_rps:g} req/s is more than it serves ({served.limit} binds): at most {format_number(most)} req/s",
            "a lower rate, more GPUs, or shorter requests",
            memory=memory,
        )
    source = f"{engine.source}; arrivals at random, {work.rate_rps:g} req/s"
    is_prefill, is_decode = query.role is Role.PREFILL, query.role is Role.DECODE
    req_s = figure(work.rate_rps, (1.0, 1.0), "asked")
    most = max_rate_rps(layout, work, query.slo)
    low, high = engine.band("tokens")
    goodput = Figure(
        min(work.rate_rps, most * low),
        min(work.rate_rps, most),
        min(work.rate_rps, most * high),
        source,
    )

    def ttft(value: float) -> Figure | None:
        return None if is_decode else _ms(value, engine, "ttft", source)

    return Priced(
        True,
        ttft_ms=ttft(served.ttft_s),
        tpot_ms=None if is_prefill else _ms(served.itl_s, engine, "tpot", source),
        out_tok_s_per_gpu=None
        if is_prefill
        else figure(work.rate_rps * work.osl_tokens / gpus, (1.0, 1.0), "asked"),
        req_s=req_s,
        memory_gib=_memory(query, memory, served.sequences * query.parallelism.dp),
        kv_capacity_tokens=_capacity(query, memory),
        ttft_p50_ms=ttft(served.ttft_p50_s),
        ttft_p95_ms=ttft(served.ttft_p95_s),
        ttft_p99_ms=ttft(served.ttft_p99_s),
        itl_p99_ms=None if is_prefill else _ms(served.itl_p99_s, engine, "tpot", source),
        goodput_req_s=goodput,
        hit_ratio=served.hit_ratio,
        memory=memory,
    )


def _endless(side: Side) -> Side:
    """So many engines of the other role that only the asked one binds."""
    return Side(side.engine, 10_000, math.inf)


def _ms(value_s: float | None, engine: Engine, name: str, source: str) -> Figure | None:
    return None if value_s is None else figure(value_s * 1e3, engine.band(name), source)


def _memory(query: Query, memory: MemorySheet, sequences: float) -> Figure:
    """What one GPU holds while these sequences run."""
    work = query.workload
    per_token = max(0, memory.kv_bytes) / max(1, memory.kv_capacity_tokens)
    kv = min(
        float(max(0, memory.kv_bytes)),
        sequences * (work.isl_tokens + work.osl_tokens / 2) * per_token,
    )
    beside = KV_MARGIN * memory.activation_bytes + query.model.margin * memory.weight_bytes
    used = memory.weight_bytes + memory.activation_bytes + kv
    return Figure(
        round((used - beside) / GIB, 2),
        round(used / GIB, 2),
        round((used + beside) / GIB, 2),
        f"weights and activations {memory.source}; KV of {format_number(sequences)} sequences; context and graphs by default",
    )


def _capacity(query: Query, memory: MemorySheet) -> Figure:
    """KV tokens of the whole engine; off by what is kept beside weights and KV."""
    per_token = memory.kv_bytes / max(1, memory.kv_capacity_tokens)
    off = int(
        (2 * KV_MARGIN * memory.activation_bytes + query.model.margin * memory.weight_bytes)
        / per_token
    )
    tokens = memory.kv_capacity_tokens
    return Figure(
        max(0, tokens - off), tokens, tokens + off, f"{memory.source}, share {query.utilization:g}"
    )


def summary_rows(priced: Priced) -> list[tuple[str, Figure]]:
    """The figures there are, by name, for a table."""
    names = (
        "ttft_ms", "ttft_p50_ms", "ttft_p95_ms", "ttft_p99_ms", "tpot_ms", "itl_p99_ms", "out_tok_s_per_gpu",
        "req_s", "goodput_req_s", "memory_gib", "kv_capacity_tokens",
    )  # fmt: skip
    found = ((name, getattr(priced, name)) for name in names)
    return [(name, value) for name, value in found if value is not None]

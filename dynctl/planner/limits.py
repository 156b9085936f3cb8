"""The limits engines are started with, each with how it was got: declared, else modelled, else a default.

What `engine.args` says counts as declared: the engine would follow it anyway.
Not here: which pieces of prompts serve a workload best (`choosing`), argv (`agents/engines`).
Pure.
"""

from dynctl.core.engine_flags import count_of, memory_share_of
from dynctl.core.inventory import DeploymentWish
from dynctl.core.model import Model
from dynctl.core.plan import ENGINE_DEFAULT, Role, Sourced
from dynctl.core.units import GIB
from dynctl.errors import PlanError
from dynctl.planner.calibration import Calibration
from dynctl.planner.memory import BLOCK_TOKENS, MAX_BATCHED_TOKENS, MAX_NUM_SEQS, Room
from dynctl.planner.placement import GpuKind
from dynctl.sim.options import SimOptions

BATCHED_TOKENS = (MAX_BATCHED_TOKENS, 4096, 2048, 1024, 512, 256)
"""What a step's tokens may be bounded to: every halving halves how long a prompt holds up the tokens of others."""
_SMALL_BATCHED_TOKENS = 2048
_HUGE_BATCHED_TOKENS = 16384
_LARGE_GPU_BYTES = 70 * GIB
_HUGE_GPU_BYTES = 160 * GIB
_SIM = SimOptions()
_FLAGS = {
    "max_model_len_tokens": "max-model-len",
    "max_num_seqs": "max-num-seqs",
    "max_num_batched_tokens": "max-num-batched-tokens",
    "block_size_tokens": "block-size",
}
DECLARED = "declared in the inventory"
MEMORY_SHARE = 0.9


def declared(wish: DeploymentWish, key: str) -> Sourced | None:
    """What the inventory says of a limit, under limits or as a flag of the engine; None: nothing."""
    value = getattr(wish.limits, key)
    if value is not None:
        return Sourced(value, DECLARED)
    count = count_of(wish.engine, _FLAGS[key])
    return Sourced(count, "declared in engine.args") if count else None


def max_num_seqs(wish: DeploymentWish) -> Sourced:
    """Requests one engine runs at a time."""
    found = declared(wish, "max_num_seqs")
    if found is not None:
        return found
    if wish.engine.kind == "sim":
        return Sourced(_SIM.max_num_seqs, ENGINE_DEFAULT)
    step = declared(wish, "max_num_batched_tokens")
    if step is not None and step.value < MAX_NUM_SEQS:
        return Sourced(step.value, "modelled: no more than a step has tokens")
    return Sourced(MAX_NUM_SEQS, "default: more in one step gain little")


def memory_share(wish: DeploymentWish) -> Sourced:
    """Share of each GPU's memory one engine takes."""
    if wish.limits.gpu_memory_utilization != MEMORY_SHARE:
        return Sourced(wish.limits.gpu_memory_utilization, DECLARED)
    share = memory_share_of(wish.engine)
    if share is not None:
        return Sourced(share, "declared in engine.args")
    return Sourced(MEMORY_SHARE, "default: a tenth stays free")


def block_size(wish: DeploymentWish) -> Sourced:
    """Tokens in one KV block. Attention kernels may ask for other blocks, so engines are not told the default."""
    found = declared(wish, "block_size_tokens")
    return found if found is not None else Sourced(BLOCK_TOKENS, ENGINE_DEFAULT)


def max_model_len(
    wish: DeploymentWish, model: Model | None, kv_tokens: int | None
) -> Sourced | None:
    """The context length to start engines with: as declared, else what the model allows and a cache of so much holds."""
    found = declared(wish, "max_model_len_tokens")
    if found is not None:
        return found
    if model is None or kv_tokens is None or not model.max_len_tokens:
        return None
    room = kv_tokens * 9 // 10
    if model.max_len_tokens <= room:
        return Sourced(model.max_len_tokens, "default: the model's own limit")
    typical = wish.workload.isl_tokens + wish.workload.osl_tokens
    if room < typical <= kv_tokens:
        return Sourced(
            typical, "modelled: a typical request, of which the KV cache holds no second"
        )
    return Sourced(max(1, room), "modelled: 90 % of what the KV cache holds")


def refuse_length(wish: DeploymentWish, model: Model | None) -> None:
    """Refuse a workload whose typical request no engine takes: all that the plan says would be of requests that fail.

    Raises:
        PlanError: naming the limit.
    """
    work, limit = wish.workload, _longest(wish, model)
    if limit is not None and limit.value < work.isl_tokens + work.osl_tokens:
        raise PlanError(
            f"deployment {wish.name}: a typical request has {work.isl_tokens} prompt and {work.osl_tokens} answer tokens, "
            f"its engines take {int(limit.value)} ({limit.source})",
            "correct workload.isl_tokens and osl_tokens, or raise limits.max_model_len_tokens where the model allows it",
        )


def _longest(wish: DeploymentWish, model: Model | None) -> Sourced | None:
    """Tokens of the longest request; None: not known before engines run."""
    found = declared(wish, "max_model_len_tokens")
    if found is not None:
        return found
    if wish.engine.kind == "sim":
        return Sourced(_SIM.max_model_len, "default of the simulated engine")
    if model is None or not model.max_len_tokens:
        return None
    return Sourced(model.max_len_tokens, "the model's own limit")


def about_length(wish: DeploymentWish, model: Model | None) -> list[str]:
    """What a context longer than the model was made for means."""
    found = declared(wish, "max_model_len_tokens")
    if found is None or model is None or not 0 < model.max_len_tokens < found.value:
        return []
    return [
        (
            f"max-model-len {int(found.value)} is beyond the {model.max_len_tokens} tokens of the model's config.json: vLLM does not "
            "start so unless its positions are stretched (engine.args: hf-overrides)"
        )
    ]


def default_batched_tokens(memory_bytes: int, gpu_name: str) -> int:
    """Tokens vLLM's server bounds a step to on such a GPU when it is told nothing.

    Source: vLLM 0.32, `EngineArgs.get_batch_defaults`; large steps cost an A100 throughput (vllm-project/vllm#17885).
    """
    if memory_bytes >= _HUGE_GPU_BYTES:
        return _HUGE_BATCHED_TOKENS
    is_large = memory_bytes >= _LARGE_GPU_BYTES and "a100" not in gpu_name.lower()
    return MAX_BATCHED_TOKENS if is_large else _SMALL_BATCHED_TOKENS


def batched_choices(wish: DeploymentWish, kind: GpuKind) -> tuple[int, ...]:
    """What a step's tokens may be bounded to, the default first, then smaller and larger ones.

    Never fewer than the requests of a step: engines refuse that.
    """
    found = declared(wish, "max_num_batched_tokens")
    if found is not None:
        return (int(found.value),)
    first = default_batched_tokens(kind.memory_bytes, kind.name)
    least = int(max_num_seqs(wish).value)
    smaller = [tokens for tokens in BATCHED_TOKENS if tokens < first]
    larger = [tokens for tokens in reversed(BATCHED_TOKENS) if tokens > first]
    return tuple(t for t in (first, *smaller, *larger) if t >= least) or (least,)


def batched_tokens(wish: DeploymentWish, kind: GpuKind, tokens: int, role: Role) -> Sourced:
    """Say why a step is bounded to so many tokens."""
    found = declared(wish, "max_num_batched_tokens")
    if found is not None:
        return found
    if tokens == default_batched_tokens(kind.memory_bytes, kind.name):
        return Sourced(tokens, "default: vLLM's own on such GPUs")
    goal_ms = wish.slo.itl_ms
    if goal_ms is not None and role is Role.DECODE:
        return Sourced(tokens, f"modelled: a prompt computed here holds slo.itl_ms {goal_ms:g}")
    if goal_ms is not None:
        return Sourced(tokens, f"modelled: bears most within slo.itl_ms {goal_ms:g}")
    return Sourced(tokens, "modelled: what the memory allows and the rate needs")


def room_of(
    wish: DeploymentWish, kind: GpuKind, calibration: Calibration, batched: int | None = None
) -> Room:
    """The memory an engine of this deployment may use per GPU; `batched` tokens a step, None: the default."""
    tokens = batched_choices(wish, kind)[0] if batched is None else batched
    memory_bytes = kind.memory_bytes
    return Room(
        memory_bytes,
        memory_share(wish).value,
        int(max_num_seqs(wish).value),
        max_num_batched_tokens=tokens,
        beside=calibration.beside_of(wish.engine.kind, memory_bytes),
    )


def simulated_batched_tokens(wish: DeploymentWish) -> Sourced:
    """Tokens of one step of a simulated engine."""
    found = declared(wish, "max_num_batched_tokens")
    return found or Sourced(_SIM.max_num_batched_tokens, ENGINE_DEFAULT)

"""Where each architecture keeps its numbers in `config.json`, and what its configuration class fills in. Pure.

Field names and defaults follow Hugging Face transformers' configuration classes.
"""

from dataclasses import dataclass
from typing import Any

GQA = "gqa"
MLA = "mla"


@dataclass(frozen=True, slots=True)
class Family:
    """One `model_type`."""

    attention: str = GQA
    is_moe: bool = False
    num_experts: str = "num_experts"
    expert_width: str = "moe_intermediate_size"
    shared: str = ""
    """Key of the number of shared experts, or of their width when it ends in `_size`; `=N` is a fixed number."""
    dense_width: str = "intermediate_size"
    is_tied: bool = False
    """Default of tie_word_embeddings where the file leaves it out."""
    has_qkv_bias: bool = False
    has_all_bias: bool = False
    """Every linear module, the experts' too, carries a bias."""
    gated: bool = True
    """Three matrices per MLP (gate, up, down), not two."""
    norms_per_layer: int = 2
    window_every: int = 0
    """One layer in this many looks at everything, the others at a window; 0: as `layer_types` says, else none."""
    window_key: str = "sliding_window"
    moe_step: str = "decoder_sparse_step"
    state_interval: str = ""
    """Key of how often a layer attends; the others keep a fixed state (gated delta rule). Empty: all attend."""
    has_gated_attention: bool = False
    """Queries come with a gate of their own width."""
    defaults: tuple[tuple[str, Any], ...] = ()


_DEEPSEEK = Family(MLA, is_moe=True, num_experts="n_routed_experts", shared="n_shared_experts")
_GEMMA3 = Family(
    is_tied=True,
    norms_per_layer=4,
    window_every=6,
    defaults=(
        ("vocab_size", 262_208),
        ("num_attention_heads", 8),
        ("num_key_value_heads", 4),
        ("head_dim", 256),
        ("sliding_window", 4096),
        ("max_position_embeddings", 131_072),
    ),
)
_LLAMA4 = Family(
    is_moe=True,
    num_experts="num_local_experts",
    expert_width="intermediate_size",
    shared="=1",
    dense_width="intermediate_size_mlp",
    window_every=4,
    window_key="attention_chunk_size",
    moe_step="interleave_moe_layer_step",
    defaults=(
        ("attention_chunk_size", 8192),
        ("vocab_size", 202_048),
        ("interleave_moe_layer_step", 1),
        ("num_experts_per_tok", 1),
    ),
)
_LOCAL_EXPERTS = Family(
    is_moe=True, num_experts="num_local_experts", expert_width="intermediate_size"
)
_PHI2 = Family(has_qkv_bias=True, has_all_bias=True, gated=False, norms_per_layer=1)

FAMILIES = {
    "llama": Family(),
    "llama4": _LLAMA4,
    "llama4_text": _LLAMA4,
    "mistral": Family(),
    "mistral3": Family(),
    "ministral": Family(),
    "qwen2": Family(has_qkv_bias=True),
    "qwen3": Family(),
    "phi": _PHI2,
    "phi3": Family(),
    "phimoe": Family(
        is_moe=True,
        num_experts="num_local_experts",
        expert_width="intermediate_size",
        has_qkv_bias=True,
    ),
    "gemma2": Family(
        is_tied=True,
        norms_per_layer=4,
        window_every=2,
        defaults=(("vocab_size", 256_000), ("head_dim", 256), ("sliding_window", 4096)),
    ),
    "gemma3": _GEMMA3,
    "gemma3_text": _GEMMA3,
    "glm4": Family(has_qkv_bias=True, norms_per_layer=4),
    "mixtral": _LOCAL_EXPERTS,
    "minimax_m2": _LOCAL_EXPERTS,
    "gpt_oss": Family(
        is_moe=True,
        num_experts="num_local_experts",
        expert_width="intermediate_size",
        has_qkv_bias=True,
        has_all_bias=True,
        window_every=2,
    ),
    "qwen2_moe": Family(is_moe=True, shared="shared_expert_intermediate_size", has_qkv_bias=True),
    "qwen3_moe": Family(is_moe=True),
    "qwen3_next": Family(
        is_moe=True,
        shared="shared_expert_intermediate_size",
        state_interval="full_attention_interval",
        has_gated_attention=True,
    ),
    "glm4_moe": Family(
        is_moe=True, num_experts="n_routed_experts", shared="n_shared_experts", has_qkv_bias=True
    ),
    "deepseek_v2": _DEEPSEEK,
    "deepseek_v3": _DEEPSEEK,
    "kimi_k2": _DEEPSEEK,
    "kimi_k25": _DEEPSEEK,
}

KNOWN_ARCHITECTURES = tuple(sorted(FAMILIES))

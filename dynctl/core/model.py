"""The shape of an LLM, from its `config.json`: weight bytes and KV bytes per token. Pure."""

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Model:
    """Shape of a decoder-only transformer; counts are per whole model."""

    name: str
    num_layers: int
    hidden_size: int
    num_heads: int
    num_kv_heads: int
    head_size: int
    vocab_size: int
    num_params: int
    """All parameters, from the shape or the checkpoint's index."""
    num_active_params: int
    """Parameters one token touches (smaller than `num_params` for MoE)."""
    weight_bytes: int
    dtype_bytes: float
    """Bytes per weight, 2 for bf16, 1 for fp8."""
    kv_bytes_per_token: int
    """K and V over all layers in the KV dtype (MLA: the compressed latent)."""
    max_len_tokens: int
    num_experts: int = 0
    num_experts_per_token: int = 0
    num_moe_layers: int = 0
    expert_weight_bytes: int = 0
    """Routed experts' share of `weight_bytes`."""
    embedding_weight_bytes: int = 0
    """Embedding and output head's share of `weight_bytes`; one token reads only the head."""
    is_mla: bool = False
    """KV is one compressed latent: every tensor-parallel rank holds all of it."""
    source: str = "config.json"
    """Where the numbers come from: `config.json`, `safetensors index`, `file sizes`, `declared`."""

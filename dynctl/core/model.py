"""The shape of an LLM, from its `config.json`: weight bytes and KV bytes per token. Pure."""

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class WeightPart:
    """Weights that are sharded, read and quantised alike."""

    name: str
    """`attention`, `state` (of layers that keep a fixed state), `mlp`, `experts`, `shared`, `router`, `norms`, `embedding`, `head` or `vision`."""
    num_params: int
    num_bytes: int
    format: str = "bf16"
    """How most of it is stored: `bf16`, `fp8`, `fp8-block`, `int8`, `int4`, `nvfp4` or `mxfp4`."""


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
    parts: tuple[WeightPart, ...] = ()
    """All weights by part; empty where only totals are known."""
    qk_size: int = 0
    """Per head, the width queries meet keys in; 0: `head_size`. MLA has another than for values."""
    v_size: int = 0
    """Per head, the width of values; 0: `head_size`."""
    window_tokens: int = 0
    """How far back sliding-window (or chunked) layers look; 0: there are none."""
    num_window_layers: int = 0
    kv_value_bytes: float = 2.0
    """Bytes of one value of it, 1 for an 8-bit cache."""
    num_state_layers: int = 0
    """Linear-attention or state-space layers: a fixed state per sequence instead of KV per token."""
    state_bytes_per_sequence: int = 0
    """Over all state layers."""
    margin: float = 0.0
    """How wrong the byte counts may be, as a share; 0 where they follow from the shape."""

    def part(self, name: str) -> WeightPart:
        """The part of that name; an empty one when the model has none."""
        return next((p for p in self.parts if p.name == name), WeightPart(name, 0, 0))

    def kv_bytes(self, context_tokens: float) -> float:
        """KV and state one sequence of this length holds: window layers forget what lies outside."""
        keeping = self.num_layers - self.num_state_layers
        windowed = self.num_window_layers if self.window_tokens else 0
        per_layer = self.kv_bytes_per_token / keeping if keeping else 0.0
        inside = min(context_tokens, self.window_tokens) if windowed else 0.0
        return (
            per_layer * ((keeping - windowed) * context_tokens + windowed * inside)
            + self.state_bytes_per_sequence
        )

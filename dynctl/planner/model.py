"""The shape of an LLM from its `config.json`: parameters, weight bytes by part, KV bytes per token.

Field names follow Hugging Face transformers' configuration classes. Architectures outside the table are refused:
a wrong guess would be a wrong plan.
Not here: reading files.
Pure.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from dynctl.core.model import Model
from dynctl.core.text import clean
from dynctl.errors import PlanError

Config = Mapping[str, Any]

_GQA = "gqa"
_MLA = "mla"


@dataclass(frozen=True, slots=True)
class _Family:
    """Where an architecture keeps its numbers."""

    attention: str = _GQA
    is_moe: bool = False
    num_experts: str = "num_experts"
    expert_width: str = "moe_intermediate_size"
    shared: str = ""
    """Key of the number of shared experts, or of their width when it ends in `_size`."""
    is_tied: bool = False
    """Default of tie_word_embeddings where the file leaves it out."""


_FAMILIES = {
    "llama": _Family(),
    "mistral": _Family(),
    "qwen2": _Family(),
    "qwen3": _Family(),
    "phi3": _Family(),
    "gemma2": _Family(is_tied=True),
    "gemma3_text": _Family(is_tied=True),
    "mixtral": _Family(is_moe=True, num_experts="num_local_experts", expert_width="intermediate_size"),
    "gpt_oss": _Family(is_moe=True, num_experts="num_local_experts", expert_width="intermediate_size"),
    "qwen2_moe": _Family(is_moe=True, shared="shared_expert_intermediate_size"),
    "qwen3_moe": _Family(is_moe=True),
    "glm4_moe": _Family(is_moe=True, num_experts="n_routed_experts", shared="n_shared_experts"),
    "deepseek_v2": _Family(_MLA, is_moe=True, num_experts="n_routed_experts", shared="n_shared_experts"),
    "deepseek_v3": _Family(_MLA, is_moe=True, num_experts="n_routed_experts", shared="n_shared_experts"),
    "kimi_k2": _Family(_MLA, is_moe=True, num_experts="n_routed_experts", shared="n_shared_experts"),
}  # fmt: skip

KNOWN_ARCHITECTURES = tuple(sorted(_FAMILIES))

_BLOCK_SCALES = 1 / 128
_INT4 = 0.53
"""4-bit weights with one 16-bit scale and zero point per 128."""
_NVFP4 = 0.5625
_MXFP4 = 0.53


def read_model(config: Config, name: str, kv_dtype_bytes: float = 2.0) -> Model:
    """Read a parsed `config.json`; `kv_dtype_bytes` is 1 for an fp8 KV cache.

    Raises:
        PlanError: when the architecture or quantisation is unknown, or a number is missing; says which.
    """
    text = config.get("text_config")
    inner: Config = {**config, **text} if isinstance(text, Mapping) else config
    kind = str(inner.get("model_type", ""))
    family = _FAMILIES.get(kind)
    if family is None:
        named = ", ".join(str(a) for a in config.get("architectures") or [kind or "none named"])
        raise PlanError(
            f"model {clean(name)}: architecture {clean(named)} is unknown, so its size cannot be computed",
            "give the layout yourself (pools: with replicas and tp), which is then not checked against memory; "
            f"known: {', '.join(KNOWN_ARCHITECTURES)}",
        )
    return _Reader(inner, name, family).model(kv_dtype_bytes)


class _Reader:
    """Reads one configuration; keeps it and the model's name for messages."""

    def __init__(self, config: Config, name: str, family: _Family) -> None:
        self._config = config
        self._name = name
        self._family = family

    def model(self, kv_dtype_bytes: float) -> Model:
        layers, hidden = self._count("num_hidden_layers"), self._count("hidden_size")
        heads = self._count("num_attention_heads")
        kv_heads = self._count("num_key_value_heads", heads)
        head = self._count("head_dim", hidden // heads if heads else 0)
        attention = self._attention(hidden, heads, kv_heads, head)
        moe_layers = self._moe_layers(layers)
        expert, shared, experts, active = self._experts(hidden)
        mlp = 3 * hidden * self._count("intermediate_size")
        dense = attention * layers + mlp * (layers - moe_layers)
        dense += (shared + hidden * experts) * moe_layers + 2 * hidden * layers + hidden
        routed = expert * experts * moe_layers
        embedding = self._count("vocab_size") * hidden
        is_tied = bool(self._config.get("tie_word_embeddings", self._family.is_tied))
        num_embeddings = 1 if is_tied else 2
        dense_bytes, expert_bytes = self._weight_bytes()
        kv_width = (
            self._count("kv_lora_rank") + self._count("qk_rope_head_dim")
            if self._family.attention == _MLA
            else 2 * kv_heads * head
        )
        embedding_bytes = int(num_embeddings * embedding * 2)
        return Model(
            name=self._name,
            num_layers=layers,
            hidden_size=hidden,
            num_heads=heads,
            num_kv_heads=kv_heads,
            head_size=head,
            vocab_size=self._count("vocab_size"),
            num_params=dense + routed + num_embeddings * embedding,
            num_active_params=dense + expert * active * moe_layers + num_embeddings * embedding,
            weight_bytes=int(dense * dense_bytes + routed * expert_bytes) + embedding_bytes,
            dtype_bytes=dense_bytes,
            kv_bytes_per_token=int(kv_width * layers * kv_dtype_bytes),
            max_len_tokens=self._count("max_position_embeddings", 0),
            num_experts=experts,
            num_experts_per_token=active,
            num_moe_layers=moe_layers,
            expert_weight_bytes=int(routed * expert_bytes),
            embedding_weight_bytes=embedding_bytes,
            is_mla=self._family.attention == _MLA,
        )

    def _count(self, key: str, default: int | None = None) -> int:
        value = self._config.get(key)
        if value is None and default is not None:
            return default
        if isinstance(value, bool) or not isinstance(value, int | float) or not 0 <= value < 10**9:
            raise PlanError(
                f"model {clean(self._name)}: config.json has no usable {key} ({clean(repr(value), 40)})",
                "is this the model's own config.json?",
            )
        if key in {"num_hidden_layers", "hidden_size", "num_attention_heads"} and not value:
            raise PlanError(f"model {clean(self._name)}: {key} is 0 in config.json")
        return int(value)

    def _attention(self, hidden: int, heads: int, kv_heads: int, head: int) -> int:
        """Parameters of one attention block: q, k, v and output, or MLA's low-rank pairs."""
        if self._family.attention == _GQA:
            return hidden * head * (heads + 2 * kv_heads) + heads * head * hidden
        rank, rope = self._count("kv_lora_rank"), self._count("qk_rope_head_dim")
        nope, value = self._count("qk_nope_head_dim"), self._count("v_head_dim")
        q_rank = self._count("q_lora_rank", 0)
        query = heads * (nope + rope) * (q_rank or hidden) + hidden * q_rank
        return (
            query + hidden * (rank + rope) + rank * heads * (nope + value) + heads * value * hidden
        )

    def _moe_layers(self, layers: int) -> int:
        if not self._family.is_moe:
            return 0
        first = self._count("first_k_dense_replace", 0)
        step = self._count("decoder_sparse_step", 1) or 1
        only_mlp = self._config.get("mlp_only_layers") or ()
        return sum(
            1 for i in range(layers) if i >= first and (i + 1) % step == 0 and i not in only_mlp
        )

    def _experts(self, hidden: int) -> tuple[int, int, int, int]:
        """Parameters of one routed expert and of the shared ones of a layer, number of experts, active ones."""
        family = self._family
        if not family.is_moe:
            return 0, 0, 0, 0
        expert = 3 * hidden * self._count(family.expert_width)
        experts = self._count(family.num_experts)
        active = self._count("num_experts_per_tok", self._count("experts_per_token", 0))
        if not active:
            raise PlanError(f"model {clean(self._name)}: config.json has no num_experts_per_tok")
        shared = self._count(family.shared, 0) if family.shared else 0
        shared *= 3 * hidden if family.shared.endswith("_size") else expert
        return expert, shared, experts, active

    def _weight_bytes(self) -> tuple[float, float]:
        """Bytes per weight of dense parts and of routed experts, embeddings apart (they stay in 16 bit)."""
        quant = self._config.get("quantization_config") or self._config.get("compression_config")
        if not isinstance(quant, Mapping):
            # Engines load float32 checkpoints in 16 bit too.
            return 2.0, 2.0
        method = str(quant.get("quant_method", "")).lower()
        size = self._quantised(method, quant)
        return (2.0, size) if method == "mxfp4" else (size, size)

    def _quantised(self, method: str, quant: Config) -> float:
        algorithm = str(quant.get("quant_algo", "")).lower()
        bits = quant.get("bits")
        if method in {"fp8", "fbgemm_fp8"} or algorithm == "fp8":
            return 1.0 + (_BLOCK_SCALES if quant.get("weight_block_size") else 0.0)
        if "nvfp4" in algorithm or "nvfp4" in str(quant.get("format", "")).lower():
            return _NVFP4
        if method == "mxfp4":
            return _MXFP4
        if method in {"awq", "gptq", "auto-round"} and bits in {4, 8}:
            return _INT4 if bits == 4 else 1.03
        if method == "bitsandbytes":
            return _INT4 if quant.get("load_in_4bit") else 1.03
        if method == "compressed-tensors":
            for group in (quant.get("config_groups") or {}).values():
                weights = group.get("weights") if isinstance(group, Mapping) else None
                if isinstance(weights, Mapping) and weights.get("num_bits") in {4, 8}:
                    return _INT4 if weights["num_bits"] == 4 else 1.0
        raise PlanError(
            f"model {clean(self._name)}: quantisation {clean(method or algorithm or 'without a name')} is unknown, "
            "so its size cannot be computed",
            "give the layout yourself with pools:, or use a checkpoint in bf16, fp8, int4 (awq, gptq) or nvfp4",
        )

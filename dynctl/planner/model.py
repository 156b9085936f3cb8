"""The shape of an LLM from its `config.json`: parameters, weight bytes by part, KV bytes per token.

Architectures outside `families` are refused unless the missing numbers are declared: a wrong guess would be a wrong plan.
Not here: reading files (`checkpoint`), formats (`quantisation`).
Pure.
"""

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from dynctl.core.model import Model, WeightPart
from dynctl.core.text import clean
from dynctl.errors import PlanError
from dynctl.planner.families import FAMILIES, KNOWN_ARCHITECTURES, MLA, Family
from dynctl.planner.quantisation import BF16, Format, Scheme, read_scheme
from dynctl.planner.quantisation import kv_dtype_bytes as declared_kv

Config = Mapping[str, Any]
Pieces = tuple[tuple[str, int], ...]
"""Linear modules of one layer by name, with their parameters."""

SHAPE_KEYS = (
    "num_hidden_layers",
    "hidden_size",
    "num_attention_heads",
    "intermediate_size",
    "vocab_size",
)
"""What an unknown architecture must have, in its file or declared, to be read as a Llama-like one."""
UNKNOWN_MARGIN = 0.1
"""How wrong the bytes of an architecture read from declared numbers may be."""


def read_model(
    config: Config,
    name: str,
    kv_dtype_bytes: float | None = 2.0,
    shape: Mapping[str, float] | None = None,
    index_bytes: int | None = None,
) -> Model:
    """Read a parsed `config.json`; `kv_dtype_bytes` is 1 for an fp8 KV cache, None as the checkpoint declares.

    `shape` holds declared numbers, which go before the file's and let an unknown architecture be read;
    `index_bytes` is `total_size` of the safetensors index, which then is the model's weight.

    Raises:
        PlanError: when the architecture or quantisation is unknown, or a number is missing; says which.
    """
    text = config.get("text_config")
    inner: Config = {**config, **text} if isinstance(text, Mapping) else config
    family = FAMILIES.get(str(inner.get("model_type", "")))
    inner = {**dict(family.defaults if family else ()), **_present(inner), **(shape or {})}
    if family is None and not shape:
        raise _unknown(inner, name)
    is_moe = bool(inner.get("num_experts"))
    found = _Reader(inner, name, family or Family(is_moe=is_moe)).model(
        declared_kv(inner) if kv_dtype_bytes is None else kv_dtype_bytes
    )
    if family is None:
        found = replace(found, source="declared", margin=UNKNOWN_MARGIN)
    elif shape:
        found = replace(found, source="config.json, declared")
    return scaled(found, index_bytes) if index_bytes else found


def _present(config: Config) -> Config:
    return {key: value for key, value in config.items() if value is not None}


def _unknown(config: Config, name: str) -> PlanError:
    kind = str(config.get("model_type", ""))
    named = ", ".join(str(a) for a in config.get("architectures") or [kind or "none named"])
    missing = [key for key in SHAPE_KEYS if key not in config]
    ask = f"declare {', '.join(missing)}" if missing else "declare at least num_hidden_layers"
    return PlanError(
        f"model {clean(name)}: architecture {clean(named)} is unknown, so its size cannot be computed",
        f"{ask} under shape: of the deployment (MoE: num_experts, num_experts_per_tok, moe_intermediate_size), or "
        "give the layout yourself (pools: with replicas and tp), which is then not checked against memory; "
        f"known: {', '.join(KNOWN_ARCHITECTURES)}",
    )


def scaled(model: Model, index_bytes: int) -> Model:
    """The model with the weight its checkpoint's index states: parts keep their proportions.

    The index also counts what engines do not load, such as layers for speculative decoding.
    """
    ratio = index_bytes / model.weight_bytes if model.weight_bytes else 1.0
    parts = tuple(replace(p, num_bytes=int(p.num_bytes * ratio)) for p in model.parts)
    return replace(
        model,
        weight_bytes=index_bytes,
        parts=parts,
        expert_weight_bytes=int(model.expert_weight_bytes * ratio),
        embedding_weight_bytes=int(model.embedding_weight_bytes * ratio),
        source="safetensors index" if model.source == "config.json" else model.source,
        margin=max(model.margin, abs(ratio - 1)),
    )


def model_of_files(name: str, num_bytes: int, shape: Mapping[str, float]) -> Model:
    """A model of which only its files' sizes and a few declared numbers are known; dense, and told with a margin.

    Raises:
        PlanError: when the declared numbers do not suffice.
    """
    missing = [k for k in ("num_hidden_layers", "hidden_size") if not shape.get(k)]
    if missing or num_bytes <= 0:
        raise PlanError(
            f"model {clean(name)}: neither a known config.json nor {', '.join(missing) or 'its files'}",
            "declare num_hidden_layers and hidden_size under shape: of the deployment",
        )
    config = {
        "intermediate_size": 0,
        "vocab_size": 0,
        "num_attention_heads": max(1, int(shape["hidden_size"]) // 128),
        "max_position_embeddings": 0,
        **shape,
    }
    found = _Reader(config, name, Family()).model(2.0)
    per_weight = float(shape.get("bytes_per_weight", 2.0))
    num_params = int(num_bytes / per_weight)
    return replace(
        found,
        num_params=num_params,
        num_active_params=num_params,
        weight_bytes=num_bytes,
        dtype_bytes=per_weight,
        embedding_weight_bytes=0,
        parts=(WeightPart("mlp", num_params, num_bytes, "bf16" if per_weight >= 2 else "fp8"),),
        source="file sizes",
        margin=0.15,
    )


class _Reader:
    """Reads one configuration; keeps it and the model's name for messages."""

    def __init__(self, config: Config, name: str, family: Family) -> None:
        self._config = config
        self._name = name
        self._family = family
        self._scheme: Scheme = read_scheme(config, name)

    def model(self, kv_dtype_bytes: float) -> Model:
        layers, hidden = self._count("num_hidden_layers"), self._count("hidden_size")
        heads = self._count("num_attention_heads")
        kv_heads = self._count("num_key_value_heads", heads)
        head = self._count("head_dim", hidden // heads if heads else 0)
        is_mla = self._family.attention == MLA
        experts, active = self._num_experts()
        moe_layers = self._moe_layers(layers)
        state_layers = self._state_layers(layers)
        attention = self._attention(hidden, heads, kv_heads, head)
        parts = self._parts(hidden, attention, moe_layers, state_layers)
        by_name = {part.name: part for part in parts}
        routed = by_name["experts"]
        num_params = sum(part.num_params for part in parts)
        idle = routed.num_params * (experts - active) // experts if experts else 0
        latent = (
            self._count("kv_lora_rank") + self._count("qk_rope_head_dim") if is_mla else 2 * kv_heads * head
        )  # fmt: skip
        window, window_layers = self._window(layers)
        return Model(
            name=self._name,
            num_layers=layers,
            hidden_size=hidden,
            num_heads=heads,
            num_kv_heads=kv_heads,
            head_size=head,
            vocab_size=self._count("vocab_size"),
            num_params=num_params,
            num_active_params=num_params - idle,
            weight_bytes=sum(part.num_bytes for part in parts),
            dtype_bytes=self._dtype_bytes(by_name),
            kv_bytes_per_token=int(latent * (layers - len(state_layers)) * kv_dtype_bytes),
            kv_value_bytes=kv_dtype_bytes,
            max_len_tokens=self._count("max_position_embeddings", 0),
            num_experts=experts,
            num_experts_per_token=active,
            num_moe_layers=len(moe_layers),
            expert_weight_bytes=routed.num_bytes,
            embedding_weight_bytes=by_name["embedding"].num_bytes + by_name["head"].num_bytes,
            is_mla=is_mla,
            parts=tuple(part for part in parts if part.num_params),
            qk_size=self._count("qk_nope_head_dim") + self._count("qk_rope_head_dim") if is_mla else head,
            v_size=self._count("v_head_dim") if is_mla else head,
            window_tokens=window,
            num_window_layers=window_layers,
            num_state_layers=len(state_layers),
            state_bytes_per_sequence=self._state_bytes() * len(state_layers),
        )  # fmt: skip

    @staticmethod
    def _dtype_bytes(parts: Mapping[str, WeightPart]) -> float:
        """Bytes per weight of the linear modules that every token meets."""
        dense = [parts[name] for name in ("attention", "mlp", "shared") if parts[name].num_params]
        total = sum(part.num_params for part in dense)
        return sum(part.num_bytes for part in dense) / total if total else 2.0

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

    def _attention(self, hidden: int, heads: int, kv_heads: int, head: int) -> Pieces:
        """Modules of one attention block: q, k, v and output, or MLA's low-rank pairs."""
        if self._family.attention != MLA:
            bias = 1 if self._family.has_qkv_bias else 0
            out_bias = hidden if self._family.has_all_bias else 0
            gates = 2 if self._family.has_gated_attention else 1
            return (
                ("self_attn.q_proj", (hidden + bias) * heads * head * gates),
                ("self_attn.k_proj", (hidden + bias) * kv_heads * head),
                ("self_attn.v_proj", (hidden + bias) * kv_heads * head),
                ("self_attn.o_proj", heads * head * hidden + out_bias),
            )
        rank, rope = self._count("kv_lora_rank"), self._count("qk_rope_head_dim")
        nope, value = self._count("qk_nope_head_dim"), self._count("v_head_dim")
        q_rank = self._count("q_lora_rank", 0)
        query = (
            (("self_attn.q_a_proj", hidden * q_rank), ("self_attn.q_b_proj", q_rank * heads * (nope + rope)))
            if q_rank
            else (("self_attn.q_proj", hidden * heads * (nope + rope)),)
        )  # fmt: skip
        return (
            *query,
            ("self_attn.kv_a_proj_with_mqa", hidden * (rank + rope)),
            ("self_attn.kv_b_proj", rank * heads * (nope + value)),
            ("self_attn.o_proj", heads * value * hidden),
        )

    def _state_layers(self, layers: int) -> tuple[int, ...]:
        """Layers that keep a fixed state per sequence instead of KV per token."""
        key = self._family.state_interval
        if not key:
            return ()
        kinds = self._config.get("layer_types")
        if isinstance(kinds, list) and len(kinds) == layers:
            return tuple(i for i, kind in enumerate(kinds) if str(kind) == "linear_attention")
        every = self._count(key, 4) or 1
        return tuple(i for i in range(layers) if (i + 1) % every)

    def _state_widths(self) -> tuple[int, int, int, int]:
        """Of a state layer: all keys, all values, value heads, and what its convolution looks back."""
        keys = self._count("linear_num_key_heads", 16) * self._count("linear_key_head_dim", 128)
        num = self._count("linear_num_value_heads", 32)
        values = num * self._count("linear_value_head_dim", 128)
        return keys, values, num, self._count("linear_conv_kernel_dim", 4)

    def _state(self, hidden: int) -> Pieces:
        """Modules of one layer of the gated delta rule."""
        keys, values, num, kernel = self._state_widths()
        return (
            ("linear_attn.in_proj_qkvz", hidden * 2 * (keys + values)),
            ("linear_attn.in_proj_ba", hidden * 2 * num),
            ("linear_attn.conv1d", (2 * keys + values) * kernel),
            ("linear_attn.out_proj", values * hidden),
        )

    def _state_bytes(self) -> int:
        """What one layer keeps of one sequence: a matrix per head in 32 bit, and the convolution's last inputs."""
        if not self._family.state_interval:
            return 0
        keys, values, _, kernel = self._state_widths()
        matrix = self._count("linear_key_head_dim", 128) * values * 4
        return matrix + (2 * keys + values) * (kernel - 1) * 2

    def _mlp(self, hidden: int, width: int, where: str) -> Pieces:
        """Modules of one gated (or plain) MLP of this width."""
        bias = 1 if self._family.has_all_bias else 0
        names = ("gate_proj", "up_proj", "down_proj") if self._family.gated else ("fc1", "fc2")
        return tuple(
            (f"{where}.{name}", hidden * width + bias * (hidden if name in {"down_proj", "fc2"} else width))
            for name in names
        )  # fmt: skip

    def _parts(
        self,
        hidden: int,
        attention: Pieces,
        moe_layers: tuple[int, ...],
        state_layers: tuple[int, ...],
    ) -> tuple[WeightPart, ...]:
        family, layers = self._family, self._count("num_hidden_layers")
        experts, _ = self._num_experts()
        attending = tuple(i for i in range(layers) if i not in set(state_layers))
        dense_layers = tuple(i for i in range(layers) if i not in set(moe_layers))
        width = self._count(family.dense_width, self._count("intermediate_size", 0))
        expert = self._count(family.expert_width, 0) if family.is_moe else 0
        one = self._mlp(hidden, expert, "mlp.experts.0")
        routed = tuple((name, params * experts) for name, params in one)
        shared = self._mlp(hidden, self._shared_width(expert), "mlp.shared_experts")
        embedding = self._count("vocab_size") * hidden
        is_tied = bool(self._config.get("tie_word_embeddings", family.is_tied))
        norms = (family.norms_per_layer * layers + 1) * hidden
        vision = self._vision()
        return (
            self._part("attention", attention, attending),
            self._part("state", self._state(hidden) if state_layers else (), state_layers),
            self._part("mlp", self._mlp(hidden, width, "mlp"), dense_layers),
            self._part("experts", routed, moe_layers),
            self._part("shared", shared, moe_layers),
            _plain("router", hidden * experts * len(moe_layers)),
            _plain("norms", norms),
            _plain("embedding", embedding),
            # Checkpoints leave the output head in 16 bit, whatever the rest is.
            _plain("head", 0 if is_tied else embedding),
            _plain("vision", vision),
        )

    def _part(self, name: str, pieces: Pieces, layers: tuple[int, ...]) -> WeightPart:
        """Sum modules over layers, each in the format the checkpoint stores it in."""
        params, num_bytes = 0, 0.0
        by_format: dict[Format, int] = {}
        for layer in layers:
            for module, count in pieces:
                found = self._scheme.format_of(f"model.layers.{layer}.{module}")
                params += count
                num_bytes += count * found.bytes_per_weight
                by_format[found] = by_format.get(found, 0) + count
        most = max(by_format, key=lambda f: by_format[f], default=BF16)
        return WeightPart(name, params, int(num_bytes), most.name)

    def _moe_layers(self, layers: int) -> tuple[int, ...]:
        if not self._family.is_moe:
            return ()
        listed = self._config.get("moe_layers")
        if isinstance(listed, list) and listed:
            return tuple(i for i in listed if isinstance(i, int) and 0 <= i < layers)
        first = self._count("first_k_dense_replace", 0)
        step = self._count(self._family.moe_step, 1) or 1
        only_mlp = self._config.get("mlp_only_layers") or ()
        return tuple(
            i for i in range(layers) if i >= first and (i + 1) % step == 0 and i not in only_mlp
        )

    def _num_experts(self) -> tuple[int, int]:
        """Routed experts of a layer, and how many a token meets."""
        if not self._family.is_moe:
            return 0, 0
        active = self._count("num_experts_per_tok", self._count("experts_per_token", 0))
        if not active:
            raise PlanError(f"model {clean(self._name)}: config.json has no num_experts_per_tok")
        return self._count(self._family.num_experts), active

    def _shared_width(self, expert_width: int) -> int:
        key = self._family.shared
        if key.startswith("="):
            return int(key[1:]) * expert_width
        number = self._count(key, 0) if key else 0
        return number if key.endswith("_size") else number * expert_width

    def _window(self, layers: int) -> tuple[int, int]:
        """How far window layers look, and how many there are."""
        family, window = self._family, self._count(self._family.window_key, 0)
        if not window or self._config.get("use_sliding_window") is False:
            return 0, 0
        kinds = self._config.get("layer_types")
        if isinstance(kinds, list):
            count = sum(1 for kind in kinds if str(kind).startswith(("sliding", "chunked")))
            return (window, count) if count else (0, 0)
        every = self._count("sliding_window_pattern", family.window_every)
        if every > 1:
            return window, layers - layers // every
        return (window, layers) if family is FAMILIES["mistral"] else (0, 0)

    def _vision(self) -> int:
        """Parameters of an image tower, as of a plain vision transformer; engines load it beside the language model."""
        vision = self._config.get("vision_config")
        if not isinstance(vision, Mapping):
            return 0
        width, depth = vision.get("hidden_size"), vision.get("num_hidden_layers")
        mlp = vision.get("intermediate_size")
        if not (isinstance(width, int) and isinstance(depth, int) and isinstance(mlp, int)):
            return 0
        return depth * (4 * width * width + 2 * width * mlp)


def _plain(name: str, num_params: int) -> WeightPart:
    """A part that quantisation leaves in 16 bit."""
    return WeightPart(name, num_params, num_params * 2)

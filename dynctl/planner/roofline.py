"""Seconds of one prefill and of one decode step of an engine: arithmetic and memory traffic, communication, and floors.

Formulas are those of a roofline: each group of weights takes the longer of reading and multiplying; experts are read as
far as tokens hit them. Constants come from `calibration`.
Not here: queues, pools, percentiles (`estimate`).
Pure.
"""

import math
from dataclasses import dataclass, field

from dynctl.core.model import Model, WeightPart
from dynctl.core.plan import Parallelism
from dynctl.planner.calibration import Calibration, Constants, shipped
from dynctl.planner.peaks import GpuSpec

STAGE_LATENCY_S = 10e-6


@dataclass(frozen=True, slots=True)
class GroupLink:
    """How the GPUs of one engine reach each other: the worst pair decides."""

    bytes_s: float
    latency_s: float
    """Factor-free extra latency of one all-reduce beside what NVLink needs."""
    label: str


def group_link(spec: GpuSpec, num_nvlinks: int, label: str | None) -> GroupLink:
    """The link of a tensor-parallel group whose worst pair has this many NVLinks, or only a PCIe path."""
    if num_nvlinks and spec.link_bytes_s:
        full = max(spec.num_nvlinks, num_nvlinks)
        return GroupLink(spec.link_bytes_s * num_nvlinks / full, 0.0, f"NV{num_nvlinks}")
    share = (
        0.8
        if num_nvlinks
        else {"PIX": 0.8, "PXB": 0.7, "PHB": 0.5, "NODE": 0.45}.get(label or "", 0.35)
    )
    return GroupLink(spec.pcie_bytes_s * share, 20e-6, label or "unknown")


@dataclass(frozen=True, slots=True)
class Product:
    """Matrix products of all layers on one GPU that share a format."""

    num_bytes: float
    num_params: float
    flops: float
    eta: str
    """Which constant says what share of `flops` is reached."""


@dataclass(frozen=True, slots=True)
class Load:
    """What one rank of an engine holds and does, prepared so that a step is priced in microseconds."""

    products: tuple[Product, ...]
    head: Product
    experts: Product | None
    num_experts: int
    num_active: int
    attention_per_pair: float
    """FLOP per pair of tokens that meet in attention."""
    attention_flops: float
    kv_per_token: float
    """Bytes of full-attention layers; window layers apart."""
    kv_window: float
    window_tokens: int
    state_bytes: float
    """What layers without KV keep of one sequence; every step reads and writes it."""
    has_latent: bool
    memory_bytes_s: float
    hidden_size: int
    num_layers: int
    num_moe_layers: int
    parallelism: Parallelism
    expert_ranks: int
    window_share: float
    link: GroupLink


def _format_flops(spec: GpuSpec, fmt: str) -> tuple[float, str]:
    """The peak products of this weight format run at, and the constant of what is reached."""
    eight = spec.fp8_flops
    if fmt == "nvfp4" and spec.fp4_flops:
        return spec.fp4_flops, "eta_gemm4"
    if fmt == "mxfp4" and spec.fp4_flops and eight:
        # gpt-oss kernels on Blackwell multiply 4-bit weights by 8-bit activations.
        return eight, "eta_gemm8"
    if fmt in {"fp8", "fp8-block"} and eight:
        return eight, "eta_gemm8"
    return spec.bf16_flops, "eta_gemm16"


def load_of(model: Model, spec: GpuSpec, parallelism: Parallelism, link: GroupLink) -> Load:
    """Prepare an engine: which bytes and products fall on one rank."""
    tp, ep = parallelism.tp, parallelism.ep
    expert_ranks = max(ep, tp * parallelism.dp) if ep > 1 else tp
    parts = model.parts or _lump(model)

    def product(part: WeightPart, ranks: float, eta: str | None = None) -> Product:
        flops, own = _format_flops(spec, part.format)
        return Product(part.num_bytes / ranks, part.num_params / ranks, flops, eta or own)

    by_name = {part.name: part for part in parts}
    names = ("attention", "state", "mlp", "shared", "router")
    dense = [by_name[name] for name in names if name in by_name]
    head = by_name.get("head") or by_name.get("embedding") or WeightPart("head", 0, 0)
    routed = by_name.get("experts")
    keeping = max(1, model.num_layers - model.num_state_layers)
    window_layers = model.num_window_layers if model.window_tokens else 0
    share = 1.0 if model.is_mla else max(1 / tp, 1 / max(1, model.num_kv_heads))
    kv = model.kv_bytes_per_token * share / keeping
    qk, value = model.qk_size or model.head_size, model.v_size or model.head_size
    return Load(
        products=tuple(product(part, tp) for part in dense),
        head=product(head, tp),
        experts=product(routed, expert_ranks, "eta_expert_gemm") if routed else None,
        num_experts=model.num_experts,
        num_active=model.num_experts_per_token,
        attention_per_pair=2 * model.num_heads / tp * (qk + value) * keeping,
        attention_flops=spec.bf16_flops,
        kv_per_token=kv * (keeping - window_layers),
        kv_window=kv * window_layers,
        window_tokens=model.window_tokens,
        window_share=window_layers / keeping,
        state_bytes=model.state_bytes_per_sequence / tp,
        has_latent=model.is_mla,
        memory_bytes_s=spec.memory_bytes_s,
        hidden_size=model.hidden_size,
        num_layers=model.num_layers,
        num_moe_layers=model.num_moe_layers,
        parallelism=parallelism,
        expert_ranks=expert_ranks,
        link=link,
    )


def _lump(model: Model) -> tuple[WeightPart, ...]:
    """Parts of a model of which only totals are known."""
    fmt = "bf16" if model.dtype_bytes >= 1.5 else "fp8"
    num_bytes = model.weight_bytes - model.embedding_weight_bytes - model.expert_weight_bytes
    head = model.vocab_size * model.hidden_size
    return (
        WeightPart("mlp", int(num_bytes / model.dtype_bytes), num_bytes, fmt),
        WeightPart("head", head, head * 2),
    )


def step_s(
    load: Load, c: Constants, decoding: float, context: float, new: float = 0.0, past: float = 0.0
) -> float:
    """Seconds of one step of one rank: `decoding` sequences at `context`, and `new` prompt tokens after `past` ones."""
    tokens = decoding + new
    outputs = decoding + (1.0 if new else 0.0)
    total = _join(load.head, load, c, outputs)
    for product in load.products:
        total += _join(product, load, c, tokens)
    if load.experts is not None:
        total += _experts_s(load, c, tokens)
    if decoding:
        bandwidth = load.memory_bytes_s * (c.eta_latent if load.has_latent else c.eta_kv)
        inside = min(context, load.window_tokens) if load.window_tokens else 0.0
        kept = context * load.kv_per_token + inside * load.kv_window + 2 * load.state_bytes
        total += decoding * kept / bandwidth
    if new:
        total += attention_s(load, c, new, past)
    return total + _communication_s(load, c, tokens) + _floor_s(load, c, decoding)


def _join(product: Product, load: Load, c: Constants, tokens: float) -> float:
    if not product.num_params:
        return 0.0
    reading = product.num_bytes / (load.memory_bytes_s * c.eta_weights)
    working = 2 * product.num_params * tokens / (product.flops * getattr(c, product.eta))
    return float((reading**c.overlap + working**c.overlap) ** (1 / c.overlap))


def _experts_s(load: Load, c: Constants, tokens: float) -> float:
    """Read the experts that are hit, or multiply by them; where data-parallel ranks share them, all their tokens meet."""
    product = load.experts
    assert product is not None
    everyone = tokens * load.expert_ranks / load.parallelism.tp
    chance = load.num_active / load.num_experts
    hit = max(chance, 1.0 - math.pow(1.0 - chance, everyone * c.spread))
    is_four = product.num_bytes < 0.75 * product.num_params
    eta = c.eta_experts4 if is_four else c.eta_experts
    reading = product.num_bytes * hit / (load.memory_bytes_s * eta)
    eta = c.eta_expert_gemm4 if is_four else c.eta_expert_gemm
    working = 2 * product.num_params * chance * everyone / (product.flops * eta)
    ep = load.parallelism.ep
    busiest = 1 + c.imbalance * (1 - 1 / ep) + c.slicing * (1 - ep / load.expert_ranks)
    return busiest * float((reading**c.overlap + working**c.overlap) ** (1 / c.overlap))


def attention_s(load: Load, c: Constants, new: float, past: float) -> float:
    """Causal attention of a prompt; window layers meet at most a window."""
    pairs = new * (past + new / 2)
    if load.window_share:
        seen = min(past + new / 2, load.window_tokens)
        pairs = (1 - load.window_share) * pairs + load.window_share * new * seen
    return load.attention_per_pair * pairs / (load.attention_flops * c.eta_attention)


def _communication_s(load: Load, c: Constants, tokens: float) -> float:
    """Two all-reduces a layer; expert dispatch and combine where ranks hold different tokens; sends between stages."""
    parallelism = load.parallelism
    tp, pp, dp = parallelism.tp, parallelism.pp, parallelism.dp
    volume = tokens * load.hidden_size * 2
    speed = load.link.bytes_s * c.eta_link
    total = 0.0
    if tp > 1:
        wire = 2 * (tp - 1) / tp * volume / speed
        total += 2 * load.num_layers * (_latency_s(load, c, tp) + wire)
    if dp > 1 and load.expert_ranks > tp:
        wire = (dp - 1) * volume / speed / max(1, tp)
        begin = c.gather_us * 1e-6 * (1 + 0.25 * math.log2(dp * tp)) + load.link.latency_s
        total += 2 * load.num_moe_layers * (begin + wire)
    if pp > 1:
        total += (pp - 1) * (STAGE_LATENCY_S + volume / load.link.bytes_s)
    return total


def _latency_s(load: Load, c: Constants, ranks: int) -> float:
    return c.reduce_us * 1e-6 * (1 + 0.25 * math.log2(ranks)) + load.link.latency_s


def _floor_s(load: Load, c: Constants, decoding: float) -> float:
    dense = load.num_layers - load.num_moe_layers
    layers = dense * c.layer_us + load.num_moe_layers * c.moe_layer_us
    layers += load.num_layers * c.latent_us if load.has_latent else 0.0
    return (layers + c.step_us + decoding * c.sequence_us) * 1e-6


@dataclass(frozen=True, slots=True)
class Engine:
    """One engine as the roofline sees it."""

    model: Model
    spec: GpuSpec
    parallelism: Parallelism
    link: GroupLink
    kind: str = "vllm"
    """Whose constants apply: `vllm`, `sglang` or `trtllm`."""
    constants: Constants | None = None
    """None: those of the calibration for this engine and GPU."""
    calibration: Calibration = field(default_factory=shipped, repr=False, compare=False)
    _load: Load = field(init=False, repr=False, compare=False)
    _c: Constants = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        found = self.constants or self.calibration.constants(self.kind, self.spec, self.model)
        object.__setattr__(self, "_c", found)
        object.__setattr__(
            self, "_load", load_of(self.model, self.spec, self.parallelism, self.link)
        )

    @property
    def load(self) -> Load:
        """What one rank holds and does."""
        return self._load

    @property
    def used_constants(self) -> Constants:
        """The constants this engine is priced with."""
        return self._c

    @property
    def kv_bytes_per_token(self) -> int:
        """KV of one token that moves from prefill to decode."""
        return self.model.kv_bytes_per_token

    @property
    def host_s(self) -> float:
        """HTTP, tokenizing and scheduling of one request before its first token."""
        return self._c.host_ms * 1e-3

    @property
    def source(self) -> str:
        """Where the constants come from."""
        if self.constants is not None:
            return "roofline with given constants"
        return self.calibration.source(self.kind, self.spec, self.model)

    def band(self, figure: str) -> tuple[float, float]:
        """Factors to the ends of the 90 % band: of what was fitted with this model, or of what was left out."""
        return self.calibration.band(figure, self.model, self.kind, self.spec)

    def prefill_s(self, new_tokens: float, past_tokens: float = 0.0) -> float:
        """Time to compute `new_tokens` of a prompt after `past_tokens` that are cached; at least one token."""
        return step_s(self._load, self._c, 0.0, 0.0, max(1.0, new_tokens), past_tokens)

    def decode_s(self, sequences: float, context_tokens: float) -> float:
        """Time of one step that gives each of `sequences` one token, on one attention rank."""
        batch = max(1.0, sequences / self.batches)
        return step_s(self._load, self._c, batch, context_tokens)

    def mixed_s(self, sequences: float, context_tokens: float, new: float, past: float) -> float:
        """Time of a step that also computes a prompt, or a piece of one."""
        batch = max(0.0, sequences / self.batches)
        return step_s(self._load, self._c, batch, context_tokens, max(1.0, new), past)

    @property
    def stages(self) -> int:
        """Prompts a pipeline works on at once."""
        return self.parallelism.pp

    @property
    def batches(self) -> int:
        """Steps under way at once that share the running sequences."""
        return self.parallelism.dp * self.parallelism.pp

"""Seconds of one prefill and of one decode step of an engine: the larger of arithmetic and memory traffic, plus
communication and a floor per layer.

Constants are set by hand from published end-to-end rows and physically bounded; they are not calibrated to any one
machine, hence the bands of `estimate`.
Not here: queues, pools, percentiles.
Pure.
"""

import math
from dataclasses import dataclass

from dynctl.core.model import Model
from dynctl.core.plan import Parallelism
from dynctl.planner.memory import kv_bytes_per_token_per_gpu
from dynctl.planner.peaks import GpuSpec

ETA_GEMM_16 = 0.65
ETA_GEMM_8 = 0.6
ETA_ATTENTION = 0.5
ETA_EXPERT_GEMM = 0.4
ETA_WEIGHTS = 0.8
ETA_KV = 0.8
ETA_EXPERTS = 0.75
EXPERT_IMBALANCE = 1.2
LAYER_FLOOR_S = 20e-6
MOE_LAYER_FLOOR_S = 60e-6
SEQUENCE_FLOOR_S = 8e-6
NVLINK_LATENCY_S = 15e-6
PCIE_LATENCY_S = 35e-6
ETA_ALL_REDUCE = 0.4
HOST_S = 0.04
"""HTTP, tokenizing and scheduling of one request in vLLM, before its first token."""


@dataclass(frozen=True, slots=True)
class GroupLink:
    """How the GPUs of one engine reach each other: the worst pair decides."""

    bytes_s: float
    latency_s: float
    label: str


def group_link(spec: GpuSpec, num_nvlinks: int, label: str | None) -> GroupLink:
    """The link of a tensor-parallel group whose worst pair has this many NVLinks, or only a PCIe path."""
    if num_nvlinks and spec.link_bytes_s:
        full = max(spec.num_nvlinks, num_nvlinks)
        return GroupLink(
            spec.link_bytes_s * num_nvlinks / full, NVLINK_LATENCY_S, f"NV{num_nvlinks}"
        )
    share = {"PIX": 0.8, "PXB": 0.7, "PHB": 0.5, "NODE": 0.45}.get(label or "", 0.35)
    return GroupLink(spec.pcie_bytes_s * share, PCIE_LATENCY_S, label or "unknown")


@dataclass(frozen=True, slots=True)
class Engine:
    """One engine as the roofline sees it."""

    model: Model
    spec: GpuSpec
    parallelism: Parallelism
    link: GroupLink

    @property
    def kv_bytes_per_token(self) -> int:
        """KV of one token that moves from prefill to decode."""
        return self.model.kv_bytes_per_token

    @property
    def is_moe(self) -> bool:
        """Whether experts make the figures less certain."""
        return self.model.num_experts > 0

    @property
    def host_s(self) -> float:
        """HTTP, tokenizing and scheduling of one request before its first token."""
        return HOST_S

    def prefill_s(self, new_tokens: float, past_tokens: float = 0.0) -> float:
        """Time to compute `new_tokens` of a prompt after `past_tokens` that are cached; at least one token."""
        new = max(1.0, new_tokens)
        return self._weights_s(new) + self._attention_s(new, past_tokens) + self._rest_s(new)

    def decode_s(self, sequences: float, context_tokens: float) -> float:
        """Time of one step that gives each of `sequences` one token, on one attention rank."""
        batch = max(1.0, sequences / self.parallelism.dp)
        kv = kv_bytes_per_token_per_gpu(self.model, self.parallelism)
        reading = batch * context_tokens * kv / (self.spec.memory_bytes_s * ETA_KV)
        return self._weights_s(batch) + reading + self._rest_s(batch) + batch * SEQUENCE_FLOOR_S

    def _flops(self) -> float:
        """Arithmetic per second the dense parts reach."""
        is_8_bit = self.model.dtype_bytes < 1.5 and self.spec.fp8_flops is not None
        if is_8_bit and self.spec.fp8_flops is not None:
            return self.spec.fp8_flops * ETA_GEMM_8
        return self.spec.bf16_flops * ETA_GEMM_16

    def _weights_s(self, tokens: float) -> float:
        """Matrix products of all layers: dense parts once, experts as far as tokens hit them."""
        model, tp = self.model, self.parallelism.tp * self.parallelism.pp
        bandwidth = self.spec.memory_bytes_s
        routed_active = self._active_expert_params()
        # The embedding table is only looked up; the head is a product like the others.
        head = model.vocab_size * model.hidden_size
        dense_params = (
            model.num_active_params - routed_active - model.embedding_weight_bytes / 2 + head
        )
        dense_bytes = (
            model.weight_bytes - model.expert_weight_bytes - model.embedding_weight_bytes + head * 2
        )
        dense = max(
            dense_bytes / tp / (bandwidth * ETA_WEIGHTS),
            2 * dense_params * tokens / tp / self._flops(),
        )
        if not model.num_experts:
            return dense
        ranks = self.parallelism.num_gpus if self.parallelism.ep > 1 else tp
        everyone = tokens * (self.parallelism.dp if self.parallelism.ep > 1 else 1)
        chance = model.num_experts_per_token / model.num_experts
        hit = 1.0 - math.pow(1.0 - chance, everyone)
        expert_flops = self._flops() / ETA_GEMM_16 * ETA_EXPERT_GEMM
        experts = max(
            model.expert_weight_bytes * hit / ranks / (bandwidth * ETA_EXPERTS),
            2 * routed_active * everyone / ranks / expert_flops,
        )
        return dense + experts * EXPERT_IMBALANCE

    def _active_expert_params(self) -> float:
        model = self.model
        if not model.num_experts:
            return 0.0
        idle = model.num_params - model.num_active_params
        per_expert = idle / max(1, model.num_experts - model.num_experts_per_token)
        return per_expert * model.num_experts_per_token

    def _attention_s(self, new: float, past: float) -> float:
        model, tp = self.model, self.parallelism.tp * self.parallelism.pp
        work = 4 * model.num_heads * model.head_size * new * (past + new / 2) * model.num_layers
        return work / tp / (self.spec.bf16_flops * ETA_ATTENTION)

    def _rest_s(self, tokens: float) -> float:
        """All-reduces (two a layer), sends between pipeline stages, and the floor of kernel launches."""
        model, tp, pp = self.model, self.parallelism.tp, self.parallelism.pp
        volume = tokens * model.hidden_size * 2
        moe = model.num_moe_layers
        floor = (model.num_layers - moe) * LAYER_FLOOR_S + moe * MOE_LAYER_FLOOR_S
        if tp > 1:
            wire = 2 * (tp - 1) / tp * volume / (self.link.bytes_s * ETA_ALL_REDUCE)
            floor += 2 * model.num_layers * (self.link.latency_s + wire)
        if pp > 1:
            floor += (pp - 1) * (10e-6 + volume / self.link.bytes_s)
        return floor

"""Whether a prefill and a decode engine of different shape may hand over KV, by the connector's rules.

Source: compatibility matrix of vLLM's NixlConnector (docs/features/nixl_connector_compatibility.md, November 2026):
tensor-parallel sizes may differ for dense, MoE and MLA models; attention backend, KV dtype and versions must agree.
Failures of uneven ratios in older builds: vllm-project/vllm#50765 and #43523.
Not here: how fast KV moves (`transfer`).
Pure.
"""

from dynctl.core.model import Model
from dynctl.core.plan import Parallelism
from dynctl.planner.peaks import find_spec
from dynctl.planner.placement import GpuKind

RULE = "the connector takes different tensor-parallel sizes where one divides the other (vLLM NixlConnector matrix)"


def pair_fault(
    model: Model, prefill: GpuKind, p: Parallelism, decode: GpuKind, d: Parallelism
) -> str:
    """Say why two engines do not fit together; empty: they do."""
    if max(p.tp, d.tp) % min(p.tp, d.tp):
        return f"tp {p.tp} and tp {d.tp}: neither divides the other"
    if p.pp != d.pp:
        return f"pp {p.pp} and pp {d.pp} differ: not proven"
    if p.tp > d.tp and not model.is_mla and model.num_kv_heads % p.tp:
        return f"prefill tp {p.tp} copies KV heads that decode tp {d.tp} does not"
    if _backend(prefill) != _backend(decode):
        return "their default attention backends differ, and both sides must agree"
    return ""


def _backend(kind: GpuKind) -> str:
    """Equal for kinds whose default attention backend is the same."""
    spec = find_spec(kind.name)
    if spec is None:
        return kind.name
    if spec.generation.startswith("blackwell"):
        return "blackwell"
    return "volta" if spec.generation == "volta" else "ampere to hopper"


def leaning(kind: GpuKind) -> float:
    """Arithmetic per byte of memory traffic: kinds with more of it are better at prefill than at decode."""
    spec = find_spec(kind.name)
    return spec.bf16_flops / spec.memory_bytes_s if spec else 0.0

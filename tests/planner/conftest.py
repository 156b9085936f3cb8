"""Builders of clusters, models and inventories with good defaults."""

import sys
import types
from pathlib import Path

import pytest

from dynctl.core.hardware import Gpu, GpuState, Host, Nic, Topology
from dynctl.core.inventory import DeploymentWish, EngineSpec, HostEntry, Inventory
from dynctl.core.machine import GpuHealth
from dynctl.core.units import GIB
from dynctl.planner.grouping import nvlink_islands
from dynctl.planner.model import read_model

sys.path.insert(
    0, str(Path(__file__).parent)
)  # planning_cases is shared by tests of this directory

GPUS = {
    "h100": ("NVIDIA H100 80GB HBM3", 80 * GIB),
    "h200": ("NVIDIA H200", 141 * GIB),
    "a100": ("NVIDIA A100-SXM4-80GB", 80 * GIB),
    "a100-40": ("NVIDIA A100-SXM4-40GB", 40 * GIB),
    "l40s": ("NVIDIA L40S", 45 * GIB),
    "a6000": ("NVIDIA RTX A6000", 48 * GIB),
    "4090": ("NVIDIA GeForce RTX 4090", 24 * GIB),
    "v100": ("Tesla V100-SXM2-32GB", 32 * GIB),
    "b200": ("NVIDIA B200", 180 * GIB),
    "gb200": ("NVIDIA GB200", 185 * GIB),
    "unknown": ("Acme Accelerator 1", 64 * GIB),
}
CUBE_MESH = """X NV1 NV1 NV2 NV2 SYS SYS SYS
NV1 X NV2 NV1 SYS NV2 SYS SYS
NV1 NV2 X NV2 SYS SYS NV1 SYS
NV2 NV1 NV2 X SYS SYS SYS NV1
NV2 SYS SYS SYS X NV1 NV1 NV2
SYS NV2 SYS SYS NV1 X NV2 NV1
SYS SYS NV1 SYS NV1 NV2 X NV2
SYS SYS SYS NV1 NV2 NV1 NV2 X"""
LLAMA = {"model_type": "llama", "num_key_value_heads": 8, "vocab_size": 128256, "max_position_embeddings": 131072}  # fmt: skip
CONFIGS = {
    "llama-8b": {**LLAMA, "hidden_size": 4096, "num_hidden_layers": 32, "num_attention_heads": 32, "intermediate_size": 14336},
    "llama-70b": {**LLAMA, "hidden_size": 8192, "num_hidden_layers": 80, "num_attention_heads": 64, "intermediate_size": 28672},
    "qwen3-32b-fp8": {
        "model_type": "qwen3", "hidden_size": 5120, "num_hidden_layers": 64, "num_attention_heads": 64,
        "num_key_value_heads": 8, "head_dim": 128, "intermediate_size": 25600, "vocab_size": 151936,
        "max_position_embeddings": 40960,
        "quantization_config": {"quant_method": "fp8", "weight_block_size": [128, 128]},
    },
    "qwen3-235b-fp8": {
        "model_type": "qwen3_moe", "hidden_size": 4096, "num_hidden_layers": 94, "num_attention_heads": 64,
        "num_key_value_heads": 4, "head_dim": 128, "intermediate_size": 12288, "moe_intermediate_size": 1536,
        "num_experts": 128, "num_experts_per_tok": 8, "vocab_size": 151936, "max_position_embeddings": 40960,
        "quantization_config": {"quant_method": "fp8", "weight_block_size": [128, 128]},
    },
    "deepseek-v3": {
        "model_type": "deepseek_v3", "hidden_size": 7168, "num_hidden_layers": 61, "num_attention_heads": 128,
        "num_key_value_heads": 128, "intermediate_size": 18432, "moe_intermediate_size": 2048,
        "n_routed_experts": 256, "n_shared_experts": 1, "num_experts_per_tok": 8, "first_k_dense_replace": 3,
        "kv_lora_rank": 512, "q_lora_rank": 1536, "qk_nope_head_dim": 128, "qk_rope_head_dim": 64,
        "v_head_dim": 128, "vocab_size": 129280, "max_position_embeddings": 163840,
        "quantization_config": {"quant_method": "fp8", "weight_block_size": [128, 128]},
    },
}  # fmt: skip


def model(name):
    return read_model(CONFIGS[name], name)


def host(name, count=0, kind="h100", link="NV18", states=None, nics=False, clique=None, **change):
    """`link` is one label for every pair, or a whole matrix as text."""
    rows = [line.split() for line in link.split("\n")] if " " in link else None
    links = tuple(
        tuple("X" if a == b else rows[a][b] if rows else link for b in range(count))
        for a in range(count)
    )
    product, memory = GPUS[kind]
    gpus = tuple(
        Gpu(
            index=i,
            uuid=f"GPU-{name}-{i}",
            name=product,
            memory_bytes=memory,
            numa_node=i * 2 // count,
            state=(states or {}).get(i, GpuState.FREE),
            health=GpuHealth(fabric_clique=clique),
        )
        for i in range(count)
    )
    rdma = (
        tuple(
            Nic(f"mlx5_{i}", "infiniband", "up", 400 * 10**9, i * 2 // count) for i in range(count)
        )
        if nics
        else ()
    )
    number = sum(ord(c) for c in name) % 250
    facts = {
        "address": name,
        "data_address": f"10.0.0.{number}",
        "machine_id": f"machine-{name}",
        "gpu_nics": tuple((i, (f"mlx5_{i}",)) for i in range(count)) if nics else (),
        "nics": (*rdma, Nic("eth0", "ethernet", "up", 25 * 10**9)),
        "memory_bytes": 64 * GIB,
        **change,
    }
    return Host(
        name,
        gpus=gpus,
        gpu_links=links,
        nvlink_islands=nvlink_islands(links),
        **facts,
    )


def wish(model_name="llama-8b", kind="vllm", name="chat", **change):
    engine = change.pop("engine", None) or EngineSpec(kind)
    return DeploymentWish(name, f"/models/{model_name}", engine, **change)


def cluster(hosts, *wishes, cluster_name="lab", **change):
    """Topology, inventory and models, ready for make_plan."""
    entries = tuple(HostEntry(h.name, h.address, cpu_slots=h.cpu_slots) for h in hosts)
    found = {
        w.name: model(w.model.rpartition("/")[2])
        if w.engine.kind == "vllm" and w.model.rpartition("/")[2] in CONFIGS
        else None
        for w in wishes
    }
    return Topology(tuple(hosts)), Inventory(cluster_name, entries, tuple(wishes), **change), found


@pytest.fixture(scope="session")
def build():
    return types.SimpleNamespace(
        host=host, wish=wish, cluster=cluster, model=model, cube_mesh=CUBE_MESH, configs=CONFIGS
    )

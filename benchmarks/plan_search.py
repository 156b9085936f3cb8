"""How long a plan takes on one core: 64 hosts of 8 GPUs, and 1,000 GPUs with 50 models. Limits: 3 s and 10 s.

Run: python benchmarks/plan_search.py
"""

import sys
import time
from dataclasses import replace

from dynctl.core.hardware import Gpu, Host, Nic, Topology
from dynctl.core.inventory import DeploymentWish, EngineSpec, HostEntry, Inventory
from dynctl.core.units import GIB
from dynctl.core.workload import Slo, Workload
from dynctl.planner.grouping import nvlink_islands
from dynctl.planner.model import read_model
from dynctl.planner.search import make_plan

LLAMA_70B = {
    "model_type": "llama", "hidden_size": 8192, "num_hidden_layers": 80, "num_attention_heads": 64,
    "num_key_value_heads": 8, "intermediate_size": 28672, "vocab_size": 128256, "max_position_embeddings": 131072,
}  # fmt: skip
LLAMA_8B = {
    "model_type": "llama", "hidden_size": 4096, "num_hidden_layers": 32, "num_attention_heads": 32,
    "num_key_value_heads": 8, "intermediate_size": 14336, "vocab_size": 128256, "max_position_embeddings": 131072,
}  # fmt: skip
KINDS = {"h100": ("NVIDIA H100 80GB HBM3", 80), "a100": ("NVIDIA A100-SXM4-80GB", 80), "h200": ("NVIDIA H200", 141)}  # fmt: skip
LINKS = tuple(tuple("X" if a == b else "NV18" for b in range(8)) for a in range(8))


def host(number, kind):
    product, gib = KINDS[kind]
    name = f"gpu-{number:03}"
    return Host(
        name,
        name,
        f"10.0.{number // 250}.{number % 250}",
        gpus=tuple(Gpu(i, f"GPU-{name}-{i}", product, gib * GIB, numa_node=i // 4) for i in range(8)),
        gpu_links=LINKS,
        nvlink_islands=nvlink_islands(LINKS),
        gpu_nics=tuple((i, (f"mlx5_{i}",)) for i in range(8)),
        nics=tuple(Nic(f"mlx5_{i}", "infiniband", "up", 400 * 10**9) for i in range(8)),
        machine_id=name,
    )  # fmt: skip


def wish(name, work, port, slo):
    made = DeploymentWish(name, f"/models/{name}", EngineSpec("vllm"), workload=work, slo=slo)
    return replace(made, router=replace(made.router, listen=f"127.0.0.1:{port}"))


def timed(label, limit_s, hosts, wishes, models):
    entries = tuple(HostEntry(h.name, h.address) for h in hosts)
    inventory = Inventory("bench", entries, tuple(wishes))
    start = time.process_time()
    plan = make_plan(Topology(tuple(hosts)), inventory, models)
    took = time.process_time() - start
    gpus = sum(len(r.gpus) for _, _, r in plan.replicas())
    short = [w for w in plan.warnings if "cut short" in w]
    note = "  best so far" if short else ""
    print(f"{label:<44}{took:7.2f} s  (limit {limit_s:g} s)  {gpus} GPUs used{note}")
    return took <= limit_s


def main():
    large = read_model(LLAMA_70B, "70b")
    small = read_model(LLAMA_8B, "8b")
    slo = Slo(3000, 40)
    fleet = [host(i, "h100") for i in range(64)]
    mixed = [host(i, ("h100", "a100", "h200")[i % 3]) for i in range(64)]
    many = [host(i, ("h100", "a100", "h200")[i % 3]) for i in range(125)]
    models = {f"m{i}": (large, small)[i % 2] for i in range(50)}
    wishes = [
        wish(name, Workload(2048, 256, 2.0), 8000 + i, Slo(3000, 100))
        for i, name in enumerate(models)
    ]
    tight = [wish(name, Workload(4096, 256, 1.0), 8000 + i, slo) for i, name in enumerate(models)]
    work = Workload(4096, 256, 40.0)
    results = [
        timed("64 × 8 H100, 70B, tight goals", 3, fleet, [wish("m0", work, 8000, slo)], {"m0": large}),
        timed("64 × 8 of three kinds, 70B, tight goals", 3, mixed, [wish("m0", work, 8000, slo)], {"m0": large}),
        timed("1,000 GPUs of three kinds, 50 models", 10, many, wishes, models),
        timed("1,000 GPUs of three kinds, 50 models, tight", 10, many, tight, models),
    ]  # fmt: skip
    sys.exit(0 if all(results) else 1)


if __name__ == "__main__":
    main()

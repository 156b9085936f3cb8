"""Clusters, models and workloads of the reviewed cases, and a plan's story as text."""

from dynctl.core.hardware import GpuState, Topology
from dynctl.core.inventory import Inventory
from dynctl.core.units import format_number
from dynctl.core.workload import Slo, Workload
from dynctl.errors import PlanError
from dynctl.planner.drawing import estimate_rows, memory_rows, parallelism_text
from dynctl.planner.search import make_plan
from dynctl.planner.why import tell

MODELS = {
    "8b": "llama-8b",
    "32b-fp8": "qwen3-32b-fp8",
    "70b": "llama-70b",
    "235b-moe": "qwen3-235b-fp8",
    "671b-mla": "deepseek-v3",
}
PAIRS = "X NV4 SYS SYS\nNV4 X SYS SYS\nSYS SYS X NV4\nSYS SYS NV4 X"
L40S = "\n".join(
    " ".join(
        "X" if a == b else "PIX" if a // 2 == b // 2 else "NODE" if a // 4 == b // 4 else "SYS"
        for b in range(8)
    )
    for a in range(8)
)
CHAT = Workload(isl_tokens=2048, osl_tokens=256, rate_rps=4.0)
BUSY = Workload(isl_tokens=2048, osl_tokens=256, rate_rps=24.0, shared_prefix_ratio=0.3)
LONG = Workload(isl_tokens=8192, osl_tokens=256, rate_rps=12.0)
GOALS = Slo(2000, 50)
RACK = "1f0f5a3e-6f2b-4c1d-9c57-3d0a8a6e2b11/1"
"""The NVLink clique of all trays of a GB200 rack."""


def one_h100(b):
    return [b.host("box", 1)], CHAT


def two_4090(b):
    return [b.host("desk", 2, "4090", "PHB")], Workload(1024, 128, 1.0)


def eight_l40s(b):
    return [b.host("l40s", 8, "l40s", L40S)], CHAT


def v100_cube_mesh(b):
    return [b.host("dgx1", 8, "v100", b.cube_mesh)], Workload(1024, 128, 2.0)


def a6000_pairs(b):
    return [b.host("ws", 4, "a6000", PAIRS)], Workload(1024, 128, 2.0)


def hgx_a100(b):
    return [b.host("a100", 8, "a100", "NV12", nics=True)], CHAT


def hgx_h100(b):
    return [b.host("h100", 8, nics=True)], CHAT


def hgx_h200(b):
    return [b.host("h200", 8, "h200", nics=True)], CHAT


def hgx_b200(b):
    return [b.host("b200", 8, "b200", nics=True)], CHAT


def mixed_a100_h100(b):
    hosts = [b.host(f"a-{i}", 8, "a100", "NV12", nics=True) for i in (1, 2)]
    return [*hosts, *(b.host(f"h-{i}", 8, nics=True) for i in (1, 2)), b.host("head")], BUSY


def eight_h100_fast(b):
    return [b.host(f"gpu-{i:02}", 8, nics=True) for i in range(1, 9)] + [b.host("head")], LONG


def eight_h100_slow(b):
    return [b.host(f"gpu-{i:02}", 8) for i in range(1, 9)] + [b.host("head")], LONG


def gb200_rack(b):
    trays = [b.host(f"tray-{i:02}", 4, "gb200", nics=True, clique=RACK) for i in range(1, 19)]
    return trays, BUSY


def sick_and_busy(b):
    states = {0: GpuState.BUSY, 1: GpuState.BUSY, 5: GpuState.LOST, 7: GpuState.MIG}
    return [b.host("h-1", 8, states=states), b.host("h-2", 8, states={3: GpuState.UNKNOWN})], CHAT


def a100_40_quads(b):
    return [b.host(f"q-{i}", 4, "a100-40", "NV4", nics=True) for i in (1, 2, 3, 4)], CHAT


CLUSTERS = (
    *(one_h100, two_4090, eight_l40s, v100_cube_mesh, a6000_pairs, hgx_a100, hgx_h100, hgx_h200),
    *(hgx_b200, mixed_a100_h100, eight_h100_fast, eight_h100_slow, gb200_rack, sick_and_busy),
    a100_40_quads,
)


def ground(b, make_cluster, model):
    hosts, work = make_cluster(b)
    wish = b.wish(MODELS[model], workload=work, slo=GOALS)
    return b.cluster(hosts, wish)


def story(topology: Topology, inventory: Inventory, models) -> str:
    """The plan with its reasons, or the refusal, as lines."""
    trails: dict = {}
    try:
        plan = make_plan(topology, inventory, models, trails)
    except PlanError as error:
        return f"refused: {error.message}\n  next: {error.hint}\n"
    lines = []
    for planned in plan.deployments:
        lines += [f"verdict: {planned.verdict}", *(f"  - {reason}" for reason in planned.reasons)]
        for pool in planned.pools:
            lines.append(f"{pool.role.value} {parallelism_text(pool.parallelism)}")
            for replica in pool.replicas:
                gpus = ",".join(str(gpu.index) for gpu in replica.gpus)
                nics = f"  nics {','.join(replica.nics)}" if replica.nics else ""
                lines.append(f"  {replica.id}  {replica.host_name}  gpus {gpus}{nics}")
        lines += ["memory: " + "  ".join(row) for row in memory_rows(planned)]
        limit = planned.max_model_len_tokens
        lines.append(f"context: {limit.value} ({limit.source})" if limit else "context: open")
        lines += ["estimate: " + "  ".join(row[:4]) for row in estimate_rows(planned)]
        lines.append(f"router: {planned.router.host_name}")
    for each in tell(plan, topology, inventory, models, trails, {}):
        lines.append(f"facts: {each.num_for} of 6")
        lines += [
            f"  {'?' if f.speaks_for is None else 'yes' if f.speaks_for else 'no'} {f.name}: {f.text}"
            for f in each.facts
        ]
        lines.append("considered:")
        lines += [
            f"  {c.name}: {c.num_gpus} GPUs, TTFT {format_number(c.ttft_p99_ms)} ms, ITL {format_number(c.itl_p99_ms)} ms, "
            f"{format_number(c.rate_rps)} req/s: {c.outcome}"
            for c in each.considered
        ]
        lines += [f"does not fit: {text}" for text in each.misfits]
        lines += [
            f"ratio {r.num_prefill}:{r.num_decode}  {format_number(r.rate_rps)} req/s  TTFT {format_number(r.ttft_p99_ms)} ms  "
            f"ITL {format_number(r.itl_p99_ms)} ms{'  chosen' if r.is_chosen else ''}"
            for r in each.ratio
        ]
        lines += [*([each.ratio_note] if each.ratio_note else []), *each.transfer]
    lines += [f"warning: {warning}" for warning in plan.warnings]
    return "\n".join(lines) + "\n"

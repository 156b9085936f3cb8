"""Measured points of public origin: reading them, telling doubtful ones, splitting them by point. IO: reads CSV files."""

import csv
import hashlib
from dataclasses import dataclass, replace
from pathlib import Path

from dynctl.core.model import Model
from dynctl.core.plan import Parallelism, Role
from dynctl.core.workload import Workload
from dynctl.planner.checkpoint import shipped_config
from dynctl.planner.closed_loop import Loop
from dynctl.planner.model import read_model
from dynctl.planner.peaks import spec_named
from dynctl.planner.pricing import Query, engine_of, keeps_small_cache, loop_of, memory_of
from dynctl.planner.roofline import Load

HERE = Path(__file__).parent
POINTS = HERE / "points.csv"
FIELDS = ("model", "gpu", "engine", "dense", "experts", "tp", "dp", "etp", "ep", "isl", "osl", "concurrency", "ttft_ms", "tpot_ms", "runs")  # fmt: skip


@dataclass(slots=True)
class Point:
    """One setting that was measured, with the geometric mean of its runs."""

    model: str
    gpu: str
    engine: str
    dense: str
    experts: str
    tp: int
    dp: int
    etp: int
    ep: int
    isl: int
    osl: int
    concurrency: float
    ttft_ms: float
    tpot_ms: float
    runs: int = 1
    query: Query | None = None
    """What `dynctl estimate` would be asked for this setting."""
    load: Load | None = None
    loop: Loop | None = None

    @property
    def key(self) -> str:
        return "|".join(str(getattr(self, name)) for name in FIELDS[:12])

    @property
    def is_moe(self) -> bool:
        return self.query.model.num_experts > 0

    @property
    def family(self) -> str:
        return "moe" if self.is_moe else "dense"

    @property
    def is_held(self) -> bool:
        """Every third point, by a hash of its setting: re-runs of one point never stand on both sides."""
        return int(hashlib.sha256(self.key.encode()).hexdigest()[:8], 16) % 3 == 2

    @property
    def tokens_s(self) -> float:
        return self.concurrency * 1e3 * self.osl / (self.ttft_ms + self.tpot_ms * (self.osl - 1))


def shaped(model: Model, dense: str, experts: str) -> Model:
    """The model as if its checkpoint were stored in these formats."""
    sizes = {
        "bf16": 2.0,
        "fp8": 1.0,
        "fp8-block": 1.0,
        "nvfp4": 0.5625,
        "mxfp4": 0.53125,
        "int4": 0.53,
    }
    parts = tuple(
        replace(p, format=fmt, num_bytes=int(p.num_params * sizes[fmt]))
        if (
            fmt := {"experts": experts, "attention": dense, "mlp": dense, "shared": dense}.get(
                p.name
            )
        )
        else p
        for p in model.parts
    )
    return replace(model, parts=parts, weight_bytes=sum(p.num_bytes for p in parts),
                   expert_weight_bytes=sum(p.num_bytes for p in parts if p.name == "experts"))  # fmt: skip


def plain_shape(name: str) -> Model:
    """A shipped model without its quantisation."""
    config = {k: v for k, v in shipped_config(name).items() if k != "quantization_config"}
    return read_model(config, name)


def prepare(point: Point, max_num_seqs: int = 0) -> Point:
    spec = spec_named(point.gpu)
    assert spec is not None, point.gpu
    # An fp8 checkpoint with NVFP4 rows keeps attention of DeepSeek and Kimi in 16 or 8 bit; the row's own label counts.
    shape = shaped(plain_shape(point.model), point.dense, point.experts)
    if keeps_small_cache(shape, point.engine):
        shape = replace(shape, kv_bytes_per_token=shape.kv_bytes_per_token // 2)
    point.query = Query(
        shape,
        spec,
        Parallelism(tp=point.tp, dp=point.dp, ep=point.ep),
        Role.AGGREGATED,
        Workload(point.isl, point.osl),
        point.concurrency,
        point.engine,
        max_num_seqs=max_num_seqs,
    )
    point.load = engine_of(point.query).load
    point.loop = loop_of(point.query, memory_of(point.query))
    return point


def read_points() -> list[Point]:
    lines = [line for line in POINTS.read_text().splitlines() if not line.startswith("#")]
    kinds = Point.__annotations__
    convert = {int: int, float: float, str: str}
    return [
        prepare(Point(**{k: convert[kinds[k]](v) for k, v in row.items()}))
        for row in csv.DictReader(lines)
    ]


MODELS = {
    "meta-llama/Llama-3.1-8B-Instruct": "llama-3.1-8b", "nvidia/Llama-3.1-8B-Instruct-FP8": "llama-3.1-8b",
    "meta-llama/Llama-3.1-70B": "llama-3.1-70b", "nvidia/Llama-3.3-70B-Instruct-FP8": "llama-3.1-70b",
    "meta-llama/Llama-3.1-405B-FP8": "llama-3.1-405b", "Qwen/Qwen3-4B": "qwen3-4b", "Qwen/Qwen3-8B": "qwen3-8b",
    "Qwen/Qwen3-8B-FP8": "qwen3-8b", "Qwen/Qwen3-14B": "qwen3-14b", "Qwen/Qwen3-14B-FP8": "qwen3-14b",
    "Qwen/Qwen3-32B": "qwen3-32b", "Qwen/Qwen3-32B-FP8": "qwen3-32b", "nvidia/Qwen3-32B-NVFP4": "qwen3-32b",
    "Qwen/Qwen3-30B-A3B": "qwen3-30b-a3b", "Qwen/Qwen3-235B-A22B": "qwen3-235b-a22b",
    "Qwen/Qwen3-235B-A22B-FP8": "qwen3-235b-a22b", "nvidia/Qwen3-235B-A22B-FP8": "qwen3-235b-a22b",
    "deepseek-ai/DeepSeek-V3": "deepseek-v3", "deepseek-ai/DeepSeek-R1": "deepseek-v3",
    "nvidia/DeepSeek-R1-NVFP4": "deepseek-v3", "moonshotai/Kimi-K2.5": "kimi-k2", "openai/gpt-oss-120b": "gpt-oss-120b",
    "MiniMaxAI/MiniMax-M2.5": "minimax-m2",
}  # fmt: skip
"""Names of measured rows to shipped shapes."""

"""`dynctl estimate`: price one layout without hosts. IO: files, terminal."""

from dataclasses import asdict
from enum import StrEnum
from typing import Annotated

import typer

from dynctl.cli.kept import read_calibration
from dynctl.cli.options import Output, OutputOption, finite
from dynctl.cli.output import emit, emit_json, table
from dynctl.core.model import Model
from dynctl.core.units import format_number
from dynctl.errors import DynctlError, ExitCode, PlanError, UsageError
from dynctl.planner.peaks import GpuSpec
from dynctl.planner.pricing import Priced, Query

MAX_SIZE = 1024
"""GPUs along one axis."""
MAX_TOKENS = 10_000_000


class EstimateRole(StrEnum):
    """What the engine does for a request."""

    AGGREGATED = "aggregated"
    PREFILL = "prefill"
    DECODE = "decode"


class PciePath(StrEnum):
    """Between two GPUs without NVLink, the nearest first."""

    PIX = "PIX"
    PXB = "PXB"
    PHB = "PHB"
    NODE = "NODE"
    SYS = "SYS"


class EngineName(StrEnum):
    """Whose constants apply."""

    VLLM = "vllm"
    SGLANG = "sglang"
    TRTLLM = "trtllm"


class KvDtype(StrEnum):
    """How the KV cache is stored."""

    AUTO = "auto"
    BF16 = "bf16"
    FP8 = "fp8"


class Weights(StrEnum):
    """How weights are stored."""

    AUTO = "auto"
    BF16 = "bf16"
    FP8 = "fp8"
    FP8_BLOCK = "fp8-block"
    INT8 = "int8"
    INT4 = "int4"
    NVFP4 = "nvfp4"
    MXFP4 = "mxfp4"


def goal(value: float | None) -> float | None:
    """Refuse a goal that nothing can be held to.

    Raises:
        BadParameter: as typer's own refusals.
    """
    if value is not None and not 0 < value <= 1e9:
        raise typer.BadParameter(f"{value:g} is no goal: it is above 0 and at most 1e9")
    return value


TensorSize = Annotated[int, typer.Option("--tp", min=1, max=MAX_SIZE, help="Tensor-parallel size.")]
PipelineSize = Annotated[int, typer.Option("--pp", min=1, max=MAX_SIZE, help="Pipeline stages.")]
DataSize = Annotated[
    int, typer.Option("--dp", min=1, max=MAX_SIZE, help="Attention data-parallel ranks.")
]
ExpertSize = Annotated[int, typer.Option("--ep", min=1, max=MAX_SIZE, help="Expert-parallel size.")]
Concurrency = Annotated[
    float | None,
    typer.Option("--concurrency", callback=finite, help="Users that each wait for their answer."),
]
Rate = Annotated[
    float | None,
    typer.Option("--rate", callback=finite, help="Requests per second, arriving at random."),
]
Prefix = Annotated[
    float,
    typer.Option(
        "--prefix", min=0, max=1, callback=finite, help="Share of prompts that is cached."
    ),
]
IslSpread = Annotated[
    float,
    typer.Option(
        "--isl-cv",
        min=0,
        max=10,
        callback=finite,
        help="Spread of prompt lengths over their mean.",
    ),
]
TtftGoal = Annotated[float | None, typer.Option("--ttft", callback=goal, help="Goal, ms at p99.")]
ItlGoal = Annotated[float | None, typer.Option("--itl", callback=goal, help="Goal, ms at p99.")]
Utilization = Annotated[
    float,
    typer.Option(
        "--utilization",
        min=0.05,
        max=1,
        callback=finite,
        help="Share of memory the engine may use.",
    ),
]
Link = Annotated[
    PciePath | None,
    typer.Option("--link", case_sensitive=False, help="Worst PCIe path of the group."),
]
KvDtypeOption = Annotated[
    KvDtype,
    typer.Option(
        "--kv-dtype", help="How the KV cache is stored; auto: as the checkpoint declares."
    ),
]


def command(  # noqa: PLR0917 - an option each
    model: Annotated[
        str,
        typer.Option(
            "--model",
            help="A directory, a config.json, or a published name, as Qwen/Qwen3-32B-FP8.",
        ),
    ] = "",
    gpu: Annotated[str, typer.Option("--gpu", help="Such as h100-sxm, or a product name.")] = "",
    tp: TensorSize = 1,
    pp: PipelineSize = 1,
    dp: DataSize = 1,
    ep: ExpertSize = 1,
    role: Annotated[
        EstimateRole, typer.Option("--role", help="What the engine does.")
    ] = EstimateRole.AGGREGATED,
    isl: Annotated[int, typer.Option("--isl", min=1, max=MAX_TOKENS, help="Prompt tokens.")] = 1024,
    osl: Annotated[int, typer.Option("--osl", min=1, max=MAX_TOKENS, help="Answer tokens.")] = 128,
    concurrency: Concurrency = None,
    rate: Rate = None,
    prefix: Prefix = 0.0,
    isl_cv: IslSpread = 0.0,
    ttft: TtftGoal = None,
    itl: ItlGoal = None,
    engine: Annotated[
        EngineName, typer.Option("--engine", help="Whose constants apply.")
    ] = EngineName.VLLM,
    weights: Annotated[
        Weights,
        typer.Option("--weights", help="How weights are stored; auto: as the name or files say."),
    ] = Weights.AUTO,
    kv_dtype: KvDtypeOption = KvDtype.AUTO,
    utilization: Utilization = 0.9,
    link: Link = None,
    names: Annotated[bool, typer.Option("--list", help="List shipped models and GPUs.")] = False,
    output: OutputOption = Output.TABLE,
) -> None:
    """Price one layout without hosts: TTFT, time per token, throughput, memory, each with a 90 % band.

    Exit 4 when the layout cannot be: the reason says by how much.

    Example: dynctl estimate --model llama-3.1-70b --gpu h100-sxm --tp 8 --isl 2048 --osl 256 --concurrency 32
    """
    from dynctl.core.plan import Parallelism, Role
    from dynctl.core.workload import Slo, Workload
    from dynctl.planner.pricing import price_engine

    if names:
        _list()
        return
    if not model or not gpu:
        raise UsageError("--model and --gpu are needed", "see dynctl estimate --list")
    _check_load(concurrency, rate)
    query = Query(
        model=_open(model, weights, kv_dtype, engine),
        spec=find_gpu(gpu),
        parallelism=Parallelism(tp, pp, dp, ep),
        role=Role(role.value),
        workload=Workload(isl, osl, rate or 1.0, prefix, isl_cv),
        concurrency=concurrency,
        engine=engine.value,
        utilization=utilization,
        link=None if link is None else link.value,
        slo=Slo(ttft, itl),
        calibration=read_calibration(),
    )
    _print(query, price_engine(query), output)


def _check_load(concurrency: float | None, rate: float | None) -> None:
    """Refuse what is no load.

    Raises:
        UsageError: saying what to write.
    """
    if (concurrency is None) == (rate is None):
        raise UsageError(
            "one of --concurrency and --rate is needed, and only one",
            "--concurrency 32 for users that wait for answers, --rate 4 for requests a second",
        )
    asked = concurrency if concurrency is not None else rate
    if not asked or not 0 < asked <= 1e6:
        raise UsageError(
            f"{asked:g} is no load: --concurrency and --rate are above 0 and at most 1e6",
            "write --concurrency 32, or --rate 4",
        )


def _open(name: str, weights: Weights, kv_dtype: KvDtype, engine: EngineName) -> Model:
    from dynctl.planner.pricing import keeps_small_cache

    stored = "" if weights is Weights.AUTO else weights.value
    found = read_named(name, kv_bytes(kv_dtype), stored)
    if kv_dtype is KvDtype.AUTO and keeps_small_cache(found, engine.value):
        return read_named(name, 1.0, stored)
    return found


def read_named(name: str, kv_dtype_bytes: float | None, weights: str = "") -> Model:
    """Read the model that --model names.

    Raises:
        UsageError: when there is none, or its files cannot be read.
    """
    from dynctl.planner.checkpoint import open_model

    try:
        return open_model(name, kv_dtype_bytes, weights=weights)
    except PlanError as error:
        raise UsageError(f"--model: {error.message}", error.hint) from error


def kv_bytes(dtype: KvDtype) -> float | None:
    """Bytes of one KV value; None: as the checkpoint declares."""
    return {KvDtype.AUTO: None, KvDtype.BF16: 2.0, KvDtype.FP8: 1.0}[dtype]


def find_gpu(gpu: str) -> GpuSpec:
    """The figures of a GPU by name; DynctlError (exit 2) when there are none."""
    from dynctl.core.text import clean
    from dynctl.planner.names import alike
    from dynctl.planner.peaks import SPECS, other_maker, spec_named

    maker = other_maker(gpu)
    if maker:
        raise DynctlError(
            f"{clean(gpu, 60)} is made by {maker}: dynctl finds, plans and starts engines on NVIDIA GPUs only",
            "name an NVIDIA GPU, as h100-sxm",
            code=ExitCode.USAGE,
        )
    found = spec_named(gpu)
    if found is None:
        names = [spec.name for spec in SPECS]
        like = alike(gpu, names)
        raise DynctlError(
            f"no figures for GPU {clean(gpu, 60)}",
            (f"did you mean {' or '.join(like)}? " if like else "") + f"known: {', '.join(names)}",
            code=ExitCode.USAGE,
        )
    return found


def _list() -> None:
    from dynctl.planner.checkpoint import shipped_names
    from dynctl.planner.peaks import SPECS

    emit("models  " + "  ".join(shipped_names()))
    emit("GPUs    " + "  ".join(spec.name for spec in SPECS))


def _print(query: Query, priced: Priced, output: Output) -> None:
    if output is Output.JSON:
        answer = {
            "schema": "dynctl.estimate/1",
            "model": query.model.name,
            "model_source": query.model.source,
            "gpu": query.spec.name,
            "parallelism": asdict(query.parallelism),
            "role": query.role.value,
            "engine": query.engine,
            "feasible": priced.feasible,
        }
        if priced.feasible:
            answer |= {
                key: value for key, value in asdict(priced).items() if value not in (None, "")
            }
        else:
            answer |= {"reason": priced.reason, "hint": priced.hint}
        emit_json(answer)
    elif priced.feasible:
        _tell(priced)
    if not priced.feasible:
        raise DynctlError(priced.reason, priced.hint, code=ExitCode.REFUSED)


def _tell(priced: Priced) -> None:
    """A table of the figures; where they come from stands below, since many share it."""
    from dynctl.planner.pricing import summary_rows

    found = summary_rows(priced)
    sources = list(dict.fromkeys(figure.source for _, figure in found))
    rows = [
        [name, *map(format_number, (f.low, f.expected, f.high)), str(sources.index(f.source) + 1)]
        for name, f in found
    ]
    table(["FIGURE", "LOW", "LIKELY", "HIGH", "HOW"], rows, right=["LOW", "LIKELY", "HIGH"])
    for number, source in enumerate(sources, 1):
        emit(f"{number}  {source}")
    if priced.note:
        emit(f"note: {priced.note}")

"""`dynctl calibrate`: fit the estimate's constants to bench results. IO: files, terminal."""

import time
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any

import typer

from dynctl.cli.estimate import (
    MAX_SIZE,
    DataSize,
    EngineName,
    ExpertSize,
    KvDtype,
    PipelineSize,
    TensorSize,
    find_gpu,
    kv_bytes,
    read_named,
)
from dynctl.cli.kept import CALIBRATION_PATH, read_calibration
from dynctl.cli.options import finite
from dynctl.cli.output import emit, say
from dynctl.core.units import format_number
from dynctl.errors import DynctlError, ExitCode, UsageError
from dynctl.files import reason
from dynctl.planner.calibrating import Run
from dynctl.planner.calibration import Calibration
from dynctl.planner.pricing import Query

MAX_RESULT_BYTES = 64 * 1024**2


def command(
    *,
    results: Annotated[
        list[Path] | None, typer.Argument(help="result.json files of dynctl bench, of one engine.")
    ] = None,
    model: Annotated[
        str, typer.Option("--model", help="A directory, config.json or shipped name.")
    ],
    gpu: Annotated[str, typer.Option("--gpu", help="What the engine ran on, such as h100-sxm.")],
    tp: TensorSize = 1,
    pp: PipelineSize = 1,
    dp: DataSize = 1,
    ep: ExpertSize = 1,
    replicas: Annotated[
        int,
        typer.Option("--replicas", min=1, max=MAX_SIZE, help="Equal engines that shared the load."),
    ] = 1,
    engine: Annotated[
        EngineName, typer.Option("--engine", help="Which engine ran.")
    ] = EngineName.VLLM,
    kv_dtype: Annotated[
        KvDtype,
        typer.Option(
            "--kv-dtype", help="How the KV cache is stored; auto: as the checkpoint declares."
        ),
    ] = KvDtype.AUTO,
    kv_capacity: Annotated[
        int | None,
        typer.Option(
            "--kv-capacity",
            min=1,
            max=10**12,
            help="Tokens of KV cache the engine logged or dynctl status shows.",
        ),
    ] = None,
    utilization: Annotated[
        float,
        typer.Option(
            "--utilization",
            min=0.05,
            max=1,
            callback=finite,
            help="Share of memory it was given.",
        ),
    ] = 0.9,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Fit and tell; keep nothing.")] = False,
) -> None:
    """Fit the estimate's constants to bench results of this engine and GPU, or its memory to the cache it reports.

    Four factors are fitted: memory, arithmetic, floors and host. Runs with 1 user and with many say most. What is
    found is kept in .dynctl/calibration.json; later plans cite it.

    Example: dynctl calibrate c1/result.json c64/result.json --model llama-3.1-8b --gpu h100-sxm
    """
    from dynctl.core.plan import Parallelism, Role
    from dynctl.core.workload import Workload
    from dynctl.files import write_atomic
    from dynctl.planner.calibration import own_text

    if not results and kv_capacity is None:
        raise UsageError(
            "nothing to fit to", "give result.json files of dynctl bench, or --kv-capacity"
        )
    query = Query(
        read_named(model, kv_bytes(kv_dtype)),
        find_gpu(gpu),
        Parallelism(tp, pp, dp, ep),
        Role.AGGREGATED,
        Workload(),
        engine=engine.value,
        utilization=utilization,
        calibration=read_calibration(),
    )
    found = query.calibration
    if results:
        found = _timed(found, query, [_run(path, replicas) for path in results])
    if kv_capacity is not None:
        found = _weighed(found, query, kv_capacity)
    if dry_run:
        return
    CALIBRATION_PATH.parent.mkdir(exist_ok=True)
    write_atomic(CALIBRATION_PATH, own_text(found).encode(), 0o644)
    say(f"kept as {CALIBRATION_PATH}; next: dynctl plan")


def _timed(known: Calibration, query: Query, runs: list[Run]) -> Calibration:
    """Fit constants to runs, and tell how much nearer they come."""
    from dynctl.planner.calibrating import calibrate, joined

    found = calibrate(runs, query.model, query.spec, query.parallelism, query.engine, known)
    emit("  ".join(f"{name} ×{format_number(factor)}" for name, factor in found.by_group.items()))
    emit(
        f"median error of TPOT {100 * found.tpot_before:.1f} % → {100 * found.tpot_after:.1f} %, "
        f"of TTFT {100 * found.ttft_before:.1f} % → {100 * found.ttft_after:.1f} %"
    )
    names = ", ".join(run.origin for run in runs)
    origin = f"{len(runs)} bench results of {query.model.name}: {names}"
    return joined(known, f"{query.engine}/{query.spec.name}", found, origin)


def _weighed(known: Calibration, query: Query, tokens: int) -> Calibration:
    """Correct the memory sheet by the KV cache an engine reports."""
    from dataclasses import replace

    from dynctl.core.units import format_bytes
    from dynctl.planner.memory import Beside, extra_bytes, sheet
    from dynctl.planner.pricing import room_of

    room = replace(room_of(query), context_tokens=0, beside=None)
    extra = extra_bytes(query.model, query.parallelism, room, tokens)
    modelled = sheet(query.model, query.parallelism, room).kv_capacity_tokens
    emit(
        f"KV cache {modelled} tokens modelled, {tokens} reported: {format_bytes(abs(extra))} "
        f"{'more' if extra > 0 else 'less'} beside weights and KV on each GPU"
    )
    if not abs(extra) < room.total_bytes // 4:
        raise DynctlError(
            "the engine's KV cache differs by more than a quarter of the GPU: model, sizes or --utilization are not its own",
            "give what the engine was started with",
            code=ExitCode.USAGE,
        )
    origin = f"the {tokens} tokens an engine of {query.model.name} reported"
    beside = Beside(room.total_bytes, extra, origin)
    return replace(known, beside={**known.beside, f"{query.engine}/{query.spec.name}": beside})


def _run(path: Path, replicas: int) -> Run:
    """Read what matters of a result; users in flight follow from Little's law."""
    found = _json(path)
    try:
        metrics, requests = found["metrics"], found["requests"]
        isl, osl = found["lengths"]["isl_mean"], found["lengths"]["osl_got_mean"]
        users = requests["completed_rps"] * metrics["e2e_ms"]["mean"] / 1e3 / replicas
        values = (
            isl,
            osl,
            users,
            metrics["ttft_ms"]["mean"] / 1e3,
            metrics["tpot_ms"]["mean"] / 1e3,
        )
        are_usable = all(0 < float(value) < 1e9 for value in values)
        cached = float((found.get("kv") or {}).get("cached_ratio") or 0.0)
        day = _day((found.get("facts") or {}).get("started_unix_s"))
    except (KeyError, TypeError, ValueError) as error:
        raise DynctlError(
            f"{path} is no result of dynctl bench that can be used: {error}",
            "give result.json files of runs that ended",
            code=ExitCode.USAGE,
        ) from error
    if not are_usable:
        raise DynctlError(
            f"{path}: a figure is missing or not positive: lengths {isl} and {osl}, {format_number(users)} users",
            "give result.json files of runs that ended",
            code=ExitCode.USAGE,
        )
    if found.get("client_limited"):
        raise DynctlError(
            f"{path}: the load generator was the limit, so the figures are not the engine's",
            "run it from a faster machine, or with fewer users",
            code=ExitCode.USAGE,
        )
    name = f"{path} {day}".strip()
    return Run(
        name, float(isl), float(osl), max(1.0, users), values[3], values[4], min(0.99, cached)
    )


def _day(started_unix_s: object) -> str:
    """The date a run began, in UTC; empty where the result does not tell."""
    if not isinstance(started_unix_s, int | float) or not 0 < started_unix_s < 1e11:
        return ""
    return time.strftime("%Y-%m-%d", time.gmtime(started_unix_s))


def _json(path: Path) -> Mapping[str, Any]:
    import json

    try:
        content = path.read_bytes()
        found = json.loads(content) if len(content) <= MAX_RESULT_BYTES else None
    except (OSError, ValueError, RecursionError) as error:
        why = reason(error) if isinstance(error, OSError) else error
        raise DynctlError(
            f"{path} cannot be read: {why}",
            "give result.json files of dynctl bench",
            code=ExitCode.USAGE,
        ) from error
    if not isinstance(found, Mapping):
        raise DynctlError(
            f"{path} holds no result", "give result.json files of dynctl bench", code=ExitCode.USAGE
        )
    return found

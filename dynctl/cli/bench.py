"""`dynctl bench`: drive load against a deployment, replay traces, compare what was stored. IO: HTTP, files, terminal."""

from typing import TYPE_CHECKING

import typer

from dynctl.cli import bench_export, bench_replay
from dynctl.cli.bench_driving import Router, find_router, finish, get_ready, interrupts
from dynctl.cli.bench_options import (
    Api,
    ApiKeyEnv,
    BlockSize,
    DeploymentName,
    Duration,
    LoadText,
    ModelName,
    NumGpus,
    OutDirectory,
    RepeatTimes,
    Seed,
    SloText,
    Url,
    Warmup,
    WorkloadText,
    asked_of,
    check_url,
    make_directory,
    parse_slo,
    positive,
    seed_or_new,
)
from dynctl.cli.bench_results import compare, show
from dynctl.cli.bench_series import check_series, finish_series, gpus_of, play_repeat, play_sweep
from dynctl.cli.options import DEFAULT_INVENTORY, InventoryPath, Local, Output, OutputOption, Yes
from dynctl.cli.output import say, wait_for
from dynctl.core.text import clean

if TYPE_CHECKING:
    from dynctl.bench.record import Record
    from dynctl.bench.repeat import Repeat
    from dynctl.bench.report import Report
    from dynctl.bench.sweep import Sweep

app = typer.Typer(no_args_is_help=True, rich_markup_mode=None)


@app.callback()
def group() -> None:
    """Drive load against a deployment, report what it did, and compare what was stored."""


@app.command("run")
def run(  # noqa: PLR0917 - one parameter per option
    url: Url = None,
    inventory: InventoryPath = DEFAULT_INVENTORY,
    local: Local = False,
    deployment: DeploymentName = None,
    workload: WorkloadText = "synthetic:isl=1024,osl=128",
    load: LoadText = "poisson:4",
    duration: Duration = "30s",
    warmup: Warmup = "2s",
    repeat: RepeatTimes = 1,
    slo: SloText = None,
    seed: Seed = None,
    out: OutDirectory = None,
    output: OutputOption = Output.TABLE,
    model: ModelName = "auto",
    api: Api = "chat",
    api_key_env: ApiKeyEnv = None,
    block_size: BlockSize = 16,
    gpus: NumGpus = None,
    yes: Yes = False,
) -> None:
    """Drive load against a deployment and report what it did.

    Latency, throughput, goodput, KV hit rate, what the router itself added, and advice. The mixed workload (short and long
    prompts and answers) is shown by kind of request as well.

    Several loads are played one after the other, --duration each, and end in the knee: the highest that meets the goals
    of --slo, also per GPU. --load sweep finds it: it doubles poisson:1 until goals are missed and then halves the gap, at
    most 12 loads (sweep:concurrency, or sweep:poisson:8 to begin there). --repeat N says how far runs differ.

    Every figure's definition is in result.json. Exit 4 when fewer than two requests succeeded, 6 when a goal was
    missed (of several loads: by all) or the load generator was the limit, 130 when interrupted (the partial result is
    still written).

    Example: dynctl bench run --workload prefix:groups=8,len=1024 --load poisson:8 --duration 60s --slo ttft=500,itl=40
    """
    from dynctl.bench.arrivals import parse_duration, parse_load
    from dynctl.bench.run import Wish
    from dynctl.bench.sweep import parse_course
    from dynctl.bench.workload import parse_workload

    course = parse_course(load)
    wish = Wish(
        workload=parse_workload(workload),
        load=parse_load(load) if course is None else course.first,
        duration_s=positive(parse_duration(duration, "--duration"), "--duration"),
        warmup_s=parse_duration(warmup, "--warmup"),
        seed=seed_or_new(seed),
        slo=parse_slo(slo),
        block_size_tokens=block_size,
    )
    check_series(course, repeat, gpus, wish)
    asked = asked_of(api, api_key_env, model, yes=yes)
    check_url(url)
    make_directory(out)

    async def main() -> "tuple[Report, tuple[Record, ...]] | Repeat | Sweep":
        router = Router(url) if url else await find_router(inventory, deployment, local=local)
        async with get_ready(router, asked, wish.workload) as ready:
            name, played = clean(ready.target.model), course or wish.load
            say(f"bench {router.url} {name}: {wish.workload.text}, {played}, {wish.duration_s:g} s")
            with interrupts() as stop:
                if course is not None:
                    num_gpus = gpus or gpus_of(router, inventory, local=local)
                    return await play_sweep(ready, wish, course, num_gpus, stop, out)
                if repeat > 1:
                    return await play_repeat(ready, wish, repeat, stop, out)
                return await ready.play(wish, stop)

    found = wait_for(main())
    if isinstance(found, tuple):
        finish(*found, out, output)
    else:
        finish_series(found, out, output)


app.command("replay")(bench_replay.command)
app.command("show")(show)
app.command("compare")(compare)
app.command("export")(bench_export.command)

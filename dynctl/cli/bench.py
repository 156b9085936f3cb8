"""`dynctl bench`: drive load against a deployment, replay traces, compare what was stored. IO: HTTP, files, terminal."""

from typing import TYPE_CHECKING

import typer

from dynctl.cli import bench_replay
from dynctl.cli.bench_driving import Router, find_router, finish, get_ready, interrupts
from dynctl.cli.bench_options import (
    Api,
    ApiKeyEnv,
    BlockSize,
    DeploymentName,
    Duration,
    LoadText,
    ModelName,
    OutDirectory,
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
from dynctl.cli.options import DEFAULT_INVENTORY, InventoryPath, Local, Output, OutputOption, Yes
from dynctl.cli.output import say, wait_for
from dynctl.core.text import clean

if TYPE_CHECKING:
    from dynctl.bench.record import Record
    from dynctl.bench.report import Report

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
    slo: SloText = None,
    seed: Seed = None,
    out: OutDirectory = None,
    output: OutputOption = Output.TABLE,
    model: ModelName = "auto",
    api: Api = "chat",
    api_key_env: ApiKeyEnv = None,
    block_size: BlockSize = 16,
    yes: Yes = False,
) -> None:
    """Drive load against a deployment and report what it did.

    Latency, throughput, goodput, KV hit rate, and advice.

    Every figure's definition is in result.json. Exit 4 when fewer than two requests succeeded, 6 when a goal was
    missed or the load generator was the limit, 130 when interrupted (the partial result is still written).

    Example: dynctl bench run --workload prefix:groups=8,len=1024 --load poisson:8 --duration 60s --slo ttft=500,itl=40
    """
    from dynctl.bench.arrivals import parse_duration, parse_load
    from dynctl.bench.run import Wish
    from dynctl.bench.workload import parse_workload

    wish = Wish(
        workload=parse_workload(workload),
        load=parse_load(load),
        duration_s=positive(parse_duration(duration, "--duration"), "--duration"),
        warmup_s=parse_duration(warmup, "--warmup"),
        seed=seed_or_new(seed),
        slo=parse_slo(slo),
        block_size_tokens=block_size,
    )
    asked = asked_of(api, api_key_env, model, yes=yes)
    check_url(url)
    make_directory(out)

    async def main() -> "tuple[Report, tuple[Record, ...]]":
        router = Router(url) if url else await find_router(inventory, deployment, local=local)
        async with get_ready(router, asked, wish.workload) as ready:
            say(
                f"bench {router.url} {clean(ready.target.model)}: {wish.workload.text}, {wish.load}, {wish.duration_s:g} s"
            )
            with interrupts() as stop:
                return await ready.play(wish, stop)

    finish(*wait_for(main()), out, output)


app.command("replay")(bench_replay.command)
app.command("show")(show)
app.command("compare")(compare)

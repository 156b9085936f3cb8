"""`dynctl bench replay`: send a recorded workload again, at its own times. IO: HTTP, files, terminal."""

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from dynctl.cli.bench_driving import Router, find_router, finish, get_ready, interrupts
from dynctl.cli.bench_options import (
    MAX_BLOCK_TOKENS,
    Api,
    ApiKeyEnv,
    BlockSize,
    DeploymentName,
    ModelName,
    OutDirectory,
    Seed,
    SloText,
    asked_of,
    check_url,
    make_directory,
    parse_slo,
    seed_or_new,
)
from dynctl.cli.bench_trial import check_arms, find_arms, play, show_trial
from dynctl.cli.options import (
    DEFAULT_INVENTORY,
    AdminSocket,
    InventoryPath,
    Local,
    Output,
    OutputOption,
    Yes,
    finite,
)
from dynctl.cli.output import say, wait_for
from dynctl.core.text import clean
from dynctl.errors import UsageError
from dynctl.files import reason

if TYPE_CHECKING:
    from dynctl.bench.record import Record
    from dynctl.bench.replay import Replay
    from dynctl.bench.report import Report
    from dynctl.bench.trial import Trial


TraceFile = Annotated[Path, typer.Argument(help="JSON lines; what plan --trace takes.")]
Speed = Annotated[
    float,
    typer.Option(
        "--speed",
        min=0.001,
        max=1e6,
        callback=finite,
        help="So many times as fast as recorded.",
    ),
]
FirstPart = Annotated[
    str | None, typer.Option("--duration", help="Only what was recorded within so long.")
]
Urls = Annotated[
    list[str] | None,
    typer.Option("--url", help="Server to drive; two: they are the arms. Default: the router."),
]
Ab = Annotated[
    str | None,
    typer.Option("--ab", help="Two policies of the router to try in turn, as kv,prefix."),
]
Rounds = Annotated[
    int, typer.Option("--rounds", min=1, max=1000, help="How often each arm plays the trace.")
]
BlockTokens = Annotated[
    int,
    typer.Option(
        "--block-tokens", min=1, max=MAX_BLOCK_TOKENS, help="What one of hash_ids stands for."
    ),
]


def command(  # noqa: PLR0917 - one parameter per option
    trace: TraceFile,
    url: Urls = None,
    inventory: InventoryPath = DEFAULT_INVENTORY,
    local: Local = False,
    deployment: DeploymentName = None,
    speed: Speed = 1.0,
    duration: FirstPart = None,
    block_tokens: BlockTokens = 512,
    ab: Ab = None,
    rounds: Rounds = 2,
    admin_socket: AdminSocket = None,
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
    """Send a recorded workload again, at its own times.

    A line is one request: timestamp (ms) or timestamp_s; then input_length and output_length in tokens with hash_ids
    (as Mooncake's traces have) or session; or prompt or messages with max_tokens or output. Prompts of lengths are made
    up, with equal text for equal hash_ids and nothing in common with a replay of another --seed; recorded texts get a
    first line that names the seed.

    Requests leave when they are due, however slow the answers; how late this client was is in the result. The trace's
    own hit rate (one unlimited cache) stands beside the achieved one: bench show --definitions.

    With --ab, or two --url, two arms play it in turn (A B, B A, …), each time with prompts no cache has seen, and the end
    is a verdict on the second: improved, no change, worse or inconclusive. Routers get their policy back. Whatever the
    verdict, exit 0: a goal of --slo is then judged in each turn's own result only.

    Example: dynctl bench replay trace.jsonl --speed 2 --duration 10m --ab least_loaded,kv
    """
    from dynctl.bench.run import Wish

    played = read(trace, speed, duration, block_tokens)
    wish = Wish(
        workload=played,
        load=played.load,
        duration_s=played.duration_s,
        seed=seed_or_new(seed),
        slo=parse_slo(slo),
        block_size_tokens=block_size,
    )
    asked = asked_of(api, api_key_env, model, yes=yes)
    urls = url or []
    for each in urls:
        check_url(each)
    are_two = check_arms(ab, urls, admin_socket, local=local)
    make_directory(out)
    where = (inventory, deployment)

    async def two() -> "Trial":
        arms = await find_arms(ab, urls, admin_socket, *where, local=local)
        return await play(arms, asked, wish, rounds, out)

    async def main() -> "tuple[Report, tuple[Record, ...]]":
        router = Router(urls[0]) if urls else await find_router(*where, local=local)
        async with get_ready(router, asked, played) as ready:
            say(
                f"replay {trace} on {router.url} {clean(ready.target.model)}: "
                f"{len(played.trace.calls)} requests in {wish.duration_s:.0f} s"
            )
            with interrupts() as stop:
                return await ready.play(wish, stop)

    if are_two:
        code = show_trial(wait_for(two()), out, output)
        if code:
            raise typer.Exit(code)
        return
    finish(*wait_for(main()), out, output)


def read(path: Path, speed: float, duration: str | None, block_tokens: int) -> "Replay":
    """Read a trace, or the first part of it.

    Raises:
        UsageError: when the file cannot be read, or a line is no request: with file, line and column.
    """
    from dataclasses import replace

    from dynctl.bench.arrivals import parse_duration
    from dynctl.bench.replay import Replay, first_part
    from dynctl.planner.trace_lines import read_trace

    until_s = None if duration is None else parse_duration(duration, "--duration")
    try:
        with path.open(encoding="utf-8") as lines:
            trace = read_trace(lines, str(path), block_tokens=block_tokens, keep_texts=True)
    except (OSError, UnicodeDecodeError) as error:
        cause = reason(error) if isinstance(error, OSError) else "this is no UTF-8 text"
        raise UsageError(
            f"cannot read {path}: {cause}", "give a file of JSON lines, a request each"
        ) from error
    trace = replace(trace, name=path.name)
    if until_s is not None:
        trace = first_part(trace, until_s)
    if not trace.calls:
        raise UsageError(f"--duration {duration} holds no request of {path}")
    return Replay(trace, speed)

"""Options that `dynctl bench run` and `replay` share, and what is refused of them. IO: files, environment."""

import os
import secrets
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import typer

from dynctl.core.workload import Slo
from dynctl.errors import UsageError
from dynctl.files import make_writable, reason

MAX_SEED = 10**12
MAX_BLOCK_TOKENS = 1_000_000
SLO_KEYS = {
    "ttft": "ttft_ms",
    "ttft_ms": "ttft_ms",
    "itl": "itl_ms",
    "itl_ms": "itl_ms",
    "tpot_ms": "itl_ms",
}

Url = Annotated[
    str | None, typer.Option("--url", help="Server to drive; default: the deployment's router.")
]
DeploymentName = Annotated[
    str | None, typer.Option("--deployment", help="Which deployment, when there are several.")
]
WorkloadText = Annotated[
    str,
    typer.Option(
        "--workload",
        help="synthetic:isl=…,osl=… | mixed | prefix:groups=…,len=…,suffix=…,osl=… | multiturn:chats=…,turns=…,…",
    ),
]
LoadText = Annotated[
    str,
    typer.Option(
        "--load",
        help="poisson:R or constant:R (requests/s), or concurrency:N; several, poisson:1,2,4, or sweep: up to which the goals hold.",
    ),
]
RepeatTimes = Annotated[
    int,
    typer.Option(
        "--repeat", min=1, max=1000, help="So many runs, each figure with its spread between them."
    ),
]
NumGpus = Annotated[
    int | None,
    typer.Option(
        "--gpus",
        min=1,
        max=100_000,
        help="With several loads, for figures per GPU; default: those of the deployment's plan.",
    ),
]
Duration = Annotated[str, typer.Option("--duration", help="How long is measured.")]
Warmup = Annotated[str, typer.Option("--warmup", help="Same load before that, not measured.")]
SloText = Annotated[
    str | None,
    typer.Option("--slo", help="Goals at p99 in ms, e.g. ttft=500,itl=40; missed: exit 6."),
]
Seed = Annotated[
    int | None,
    typer.Option(
        "--seed",
        min=0,
        max=MAX_SEED,
        help="Same seed, same requests, which the server may then have cached; default: a new one.",
    ),
]
OutDirectory = Annotated[
    Path | None, typer.Option("--out", help="Directory for result.json and requests.jsonl.")
]
ModelName = Annotated[str, typer.Option("--model", help="Model to ask for; auto: the only one.")]
Api = Annotated[str, typer.Option("--api", help="chat or completions.")]
ApiKeyEnv = Annotated[
    str | None, typer.Option("--api-key-env", help="Environment variable that holds the API key.")
]
BlockSize = Annotated[
    int,
    typer.Option(
        "--block-size",
        min=1,
        max=MAX_BLOCK_TOKENS,
        help="KV block size in tokens, for the ideal hit rate.",
    ),
]


@dataclass(frozen=True, slots=True)
class Asked:
    """How the server is spoken to."""

    api: str
    key: str | None
    model: str | None
    yes: bool

    def __repr__(self) -> str:
        return f"Asked({self.api}, {self.model})"


def check_url(url: str | None) -> None:
    """Refuse what is no address, and one that holds a password, without showing it.

    Raises:
        UsageError: saying what to write.
    """
    from urllib.parse import urlsplit

    if url is None:
        return
    has_user = False
    try:
        parts = urlsplit(url)
        has_user = "@" in parts.netloc
        is_right = parts.scheme in {"http", "https"} and parts.hostname and parts.port != 0
    except ValueError:
        is_right = False
    if has_user or ("@" in url and not is_right):
        # Said without the address: it would show the password.
        raise UsageError(
            "--url holds a user or password before its @, which would be shown and written down",
            "leave that out; a key is read from an environment variable: --api-key-env NAME",
        )
    if not is_right:
        raise UsageError(f"--url {url!r} is no address of a server", "write http://HOST:PORT")


def make_directory(out: Path | None) -> None:
    """Nobody shall drive load for an hour and find then that its result cannot be written."""
    if out is None:
        return
    try:
        make_writable(out)
    except OSError as error:
        raise UsageError(
            f"--out {out}: cannot write there: {reason(error)}", "name another directory"
        ) from error


def asked_of(api: str, api_key_env: str | None, model: str, *, yes: bool) -> Asked:
    """Put together how the server is spoken to.

    Raises:
        UsageError: for an unknown API, or a variable that holds no key.
    """
    return Asked(_known_api(api), _api_key(api_key_env), None if model == "auto" else model, yes)


def seed_or_new(seed: int | None) -> int:
    """The seed asked for, or one that no server has seen."""
    return secrets.randbelow(1_000_000) if seed is None else seed


def _known_api(api: str) -> str:
    if api not in {"chat", "completions"}:
        raise UsageError(f"--api {api!r} is unknown", "use chat or completions")
    return api


def parse_slo(text: str | None) -> Slo:
    """Read `ttft=500,itl=40`, in milliseconds.

    Raises:
        UsageError: for an unknown key or a value that is no positive number.
    """
    goals: dict[str, float] = {}
    for item in text.split(",") if text else ():
        key, _, value = item.strip().partition("=")
        try:
            number = float(value)
        except ValueError:
            number = 0.0
        if key not in SLO_KEYS or not 0 < number < 1e9:
            raise UsageError(f"--slo {text!r}: cannot read {item!r}", "write ttft=500,itl=40 (ms)")
        goals[SLO_KEYS[key]] = number
    return Slo(**goals)


def positive(value: float, flag: str) -> float:
    """Refuse what is not.

    Raises:
        UsageError: naming the flag.
    """
    if value <= 0:
        raise UsageError(f"{flag} must be more than nothing")
    return value


def _api_key(env: str | None) -> str | None:
    if env is None:
        return None
    key = os.environ.get(env)
    if not key:
        raise UsageError(f"--api-key-env {env}: no such environment variable, or empty")
    return key

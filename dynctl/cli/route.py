"""`dynctl route`: a router alone, in front of engines that already run. IO: sockets, files."""

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from dynctl.core.text import clean
from dynctl.core.units import whole
from dynctl.errors import UsageError
from dynctl.files import make_writable, reason

if TYPE_CHECKING:
    from dynctl.router.config import ApiKeyHash, EngineTarget, RouterConfig

_MIN_KEY_CHARS = 8
_KEYS_HINT = "give a file with one NAME=KEY a line"
_KEY_OPTIONS = {"priority": "priority", "route-key": "route_key"}
_ENGINE_KEYS = {
    "role": "role",
    "kv-events": "kv_events",
    "kv-replay": "kv_replay",
    "topic": "topic",
    "id": "id",
    "ranks": "ranks",
}


EngineOption = Annotated[
    list[str],
    typer.Option(
        "--engine",
        metavar="URL[,KEY=VALUE…]",
        help="A running engine: http://HOST:PORT or unix:/PATH, then role=prefill|decode|aggregated, "
        "kv-events=ZMQ, kv-replay=ZMQ, topic=TEXT, id=NAME, ranks=N (data-parallel ranks: each gets its own requests, "
        "and its events come from the next port, or from _dpN after a Unix socket with inproc in its path). "
        "Repeat for each engine.",
    ),
]
ListenOption = Annotated[
    str, typer.Option("--listen", metavar="HOST:PORT", help="Where clients connect.")
]
PolicyOption = Annotated[
    str, typer.Option("--policy", help="kv, prefix, least_loaded, round_robin or random.")
]
TokenizerOption = Annotated[
    Path | None,
    typer.Option(
        "--tokenizer",
        help="Directory with the model's tokenizer.json; without it prompts are matched by their text, not by what "
        "engines say they hold.",
    ),
]
ModelOption = Annotated[
    list[str] | None,
    typer.Option(
        "--model", help="Name clients ask for, instead of the names the engines serve; repeatable."
    ),
]
KeysOption = Annotated[
    Path | None,
    typer.Option(
        "--api-keys",
        help="File with one NAME=KEY a line, then perhaps priority=high|normal|low (the most urgent class it may ask for) and "
        "route-key=NAME, with spaces between; clients must send one of the keys.",
    ),
]
CertOption = Annotated[
    Path | None, typer.Option("--tls-cert", help="Certificate chain for clients (PEM).")
]
KeyOption = Annotated[Path | None, typer.Option("--tls-key", help="Its key (PEM).")]
InsecureOption = Annotated[
    bool,
    typer.Option("--insecure-listen", help="Listen beyond loopback without API keys and TLS."),
]
RouteKeyOption = Annotated[
    str | None,
    typer.Option(
        "--route-key-field",
        metavar="FIELD",
        help="Field of a request's body, as user or metadata.team, that names its route key where no header does.",
    ),
]
SettingOption = Annotated[
    list[str] | None,
    typer.Option("--set", metavar="NAME=NUMBER", help="A router setting; repeatable."),
]
WorkersOption = Annotated[
    int,
    typer.Option(
        "--workers", min=1, max=1024, help="Processes that share the port, the index and the load."
    ),
]
AdminOption = Annotated[
    Path | None,
    typer.Option(
        "--admin-socket",
        help="Unix socket that explain, policy and doctor skew ask by the same flag.",
    ),
]
DecisionLogOption = Annotated[
    str | None,
    typer.Option(
        "--decision-log",
        metavar="DIR",
        help="Write decisions there, for explain once they are forgotten: of every decision_log_every-th request (1), in all "
        "decision_log_max_bytes (64 MiB), no prompts.",
    ),
]


def command(
    *,
    engine: EngineOption,
    listen: ListenOption = "127.0.0.1:8000",
    policy: PolicyOption = "kv",
    tokenizer: TokenizerOption = None,
    model: ModelOption = None,
    api_keys: KeysOption = None,
    tls_cert: CertOption = None,
    tls_key: KeyOption = None,
    insecure_listen: InsecureOption = False,
    route_key_field: RouteKeyOption = None,
    setting: SettingOption = None,
    workers: WorkersOption = 1,
    admin_socket: AdminOption = None,
    decision_log: DecisionLogOption = None,
) -> None:
    """Run a KV-aware router alone, in front of engines that already run.

    Needs no inventory and no agent. Stops on Ctrl-C after running requests have ended; a second Ctrl-C cuts them.
    """
    import logging

    import uvloop

    from dynctl.cli.output import say
    from dynctl.router.run import Sockets, run_router

    config = build_config(
        engines=engine,
        listen=listen,
        policy=policy,
        tokenizer=tokenizer,
        models=model or [],
        api_keys=api_keys,
        tls=(tls_cert, tls_key),
        insecure_listen=insecure_listen,
        route_key_field=route_key_field or "",
        settings=setting or [],
        workers=workers,
        decision_log=decision_log,
    )
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(levelname)s %(message)s")

    def started(port: int) -> None:
        scheme = "https" if config.server_tls else "http"
        say(f"routing {len(config.engines)} engines with policy {policy}")
        say(f"listening on {scheme}://{config.listen.rpartition(':')[0]}:{port}/v1")

    uvloop.run(run_router(config, Sockets(str(admin_socket) if admin_socket else None), started))


def build_config(
    *,
    engines: list[str],
    listen: str,
    policy: str,
    tokenizer: Path | None,
    models: list[str],
    api_keys: Path | None,
    tls: tuple[Path | None, Path | None],
    insecure_listen: bool,
    settings: list[str],
    route_key_field: str = "",
    workers: int = 1,
    decision_log: str | None = None,
) -> "RouterConfig":
    """Make the same configuration the agent would, from flags.

    Raises:
        UsageError: when flags do not make sense.
    """
    from dynctl.router.config import RouterConfig, TlsFiles, check_config, make_settings
    from dynctl.router.sources.route import parse_url

    targets = tuple(parse_engine(text, number) for number, text in enumerate(engines))
    for target in targets:
        parse_url(target.url)
    cert, key = tls
    if (cert is None) != (key is None):
        raise UsageError("--tls-cert and --tls-key belong together")
    return check_config(
        RouterConfig(
            listen=listen,
            served_names=tuple(models),
            policy=policy,
            tokenizer=str(tokenizer) if tokenizer else None,
            block_hash_seed="route",
            engines=targets,
            api_keys=_read_keys(api_keys) if api_keys else (),
            route_key_field=route_key_field,
            server_tls=TlsFiles(str(cert), str(key)) if cert else None,
            allow_insecure_listen=insecure_listen,
            workers=workers,
            decision_log="" if decision_log is None else _log_directory(decision_log),
            settings=make_settings(dict(_parse_setting(text) for text in settings)),
        )
    )


def parse_engine(text: str, number: int) -> "EngineTarget":
    """Read `URL[,key=value…]`; engines without an id are named by their position.

    Raises:
        UsageError: when a key is unknown or given twice.
    """
    from dynctl.router.config import EngineTarget

    url, *pairs = text.split(",")
    fields = {"id": f"engine-{number}"}
    seen = set()
    for pair in pairs:
        key, has_value, value = pair.partition("=")
        if key not in _ENGINE_KEYS or not has_value:
            raise UsageError(
                f"--engine {text}: no option {pair!r}", f"options are {', '.join(_ENGINE_KEYS)}"
            )
        if key in seen:
            raise UsageError(f"--engine {text}: {key} is given twice")
        seen.add(key)
        fields[_ENGINE_KEYS[key]] = value
    if fields.get("role") == "both":
        fields["role"] = "aggregated"
    told = fields.pop("ranks", "1")
    ranks = whole(told)
    if ranks is None:
        raise UsageError(f"--engine {text}: {told!r} ranks", "write ranks=2")
    return EngineTarget(url=url, **fields, ranks=ranks)


def _log_directory(given: str) -> str:
    """Make the decision log's directory and write there once, so that a mistake shows before requests come."""
    if not given:
        raise UsageError("--decision-log names no directory", "leave it out, or give a path")
    path = Path(given).absolute()
    try:
        make_writable(path, 0o700)
    except OSError as error:
        raise UsageError(
            f"--decision-log {clean(given)}: cannot write there: {reason(error)}",
            "give a directory that this user may write to",
        ) from error
    return str(path)


def _parse_setting(text: str) -> tuple[str, float]:
    name, _, value = text.partition("=")
    try:
        return name, float(value)
    except ValueError as error:
        raise UsageError(
            f"--set {text}: {value!r} is no number", "write --set queue_timeout_s=5"
        ) from error


def _read_keys(path: Path) -> "tuple[ApiKeyHash, ...]":
    """Read keys and keep only their hashes."""
    try:
        lines = path.read_text(encoding="utf-8").splitlines()
    except (OSError, UnicodeDecodeError) as error:
        cause = reason(error) if isinstance(error, OSError) else "this is no UTF-8 text"
        raise UsageError(f"--api-keys: cannot read {path}: {cause}", _KEYS_HINT) from error
    keys = []
    for number, line in enumerate(lines, 1):
        if not line.strip() or line.startswith("#"):
            continue
        keys.append(_read_key(line, f"{path}:{number}"))
    if not keys:
        raise UsageError(f"{path} holds no key", _KEYS_HINT)
    return tuple(keys)


def _read_key(line: str, where: str) -> "ApiKeyHash":
    """Read `NAME=KEY [OPTION=VALUE …]`; no message repeats what may be the key."""
    import hashlib

    from dynctl.router.config import ApiKeyHash

    first, *others = line.split()
    name, _, key = first.partition("=")
    if not name or len(key) < _MIN_KEY_CHARS:
        raise UsageError(
            f"{where}: not NAME=KEY with a key of at least {_MIN_KEY_CHARS} characters"
        )
    fields = {}
    for option in others:
        what, _, value = option.partition("=")
        if what not in _KEY_OPTIONS or not value:
            raise UsageError(
                f"{where}: the key of {name} is followed by something else",
                f"options are {', '.join(_KEY_OPTIONS)}, each with =VALUE; a key has no spaces",
            )
        fields[_KEY_OPTIONS[what]] = value
    return ApiKeyHash(name, hashlib.sha256(key.encode()).hexdigest(), **fields)

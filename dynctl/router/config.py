"""What one router is told: a JSON file the agent writes, or the same made from `dynctl route`'s flags.

Not here: reading files, opening sockets. Unknown keys are refused, so that a misspelt setting never passes silently.
Pure.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from typing import Any

import msgspec

from dynctl.core.addresses import is_loopback
from dynctl.core.kv_links import LINK_CLASSES, MEASURED, NOMINAL, EnginePlace, LinkRate
from dynctl.core.route_keys import MAX_ROUTE_KEY_CHARS, is_body_field, is_route_key
from dynctl.core.router_settings import Settings, make_settings
from dynctl.core.units import whole
from dynctl.errors import UsageError
from dynctl.kv.ranks import COUNTED, MAX_RANKS, can_count, endpoint_of
from dynctl.router.sources.split import worker_ids
from dynctl.router.turns import CLASSES

__all__ = [
    "ApiKeyHash",
    "EngineTarget",
    "RelayTarget",
    "RouterConfig",
    "Settings",
    "TlsFiles",
    "check_config",
    "make_settings",
    "parse_config",
    "split_listen",
]

MAX_WORKERS = 64
ROLES = ("prefill", "decode", "aggregated")


@dataclass(frozen=True, slots=True)
class EngineTarget:
    """An engine reached directly, without a relay."""

    id: str
    url: str
    """`http://host:port` or `unix:/path/to.sock`."""
    role: str = "aggregated"
    kv_events: str | None = None
    """ZMQ endpoint of its KV events; None: the engine is routed by load only."""
    kv_replay: str | None = None
    topic: str = ""
    """Topic prefix to subscribe to; empty takes all."""
    ranks: int = 1
    """Data-parallel ranks: the events of each come from a place of its own, derived from those above."""

    @property
    def event_places(self) -> tuple[tuple[str, str | None], ...]:
        """Where events and replays of each rank are; none where nobody tells the engine's events."""
        if self.kv_events is None:
            return ()
        return tuple(
            (
                endpoint_of(self.kv_events, rank),
                self.kv_replay and endpoint_of(self.kv_replay, rank),
            )
            for rank in range(self.ranks)
        )


@dataclass(frozen=True, slots=True)
class RelayTarget:
    """A host's relay: its engines, their HTTP and their KV deltas over one mutual-TLS port."""

    host_name: str
    """Must be in the relay's certificate."""
    address: str
    port: int


@dataclass(frozen=True, slots=True)
class TlsFiles:
    """Certificate files; `ca` checks the other side."""

    cert: str
    key: str
    ca: str = ""


@dataclass(frozen=True, slots=True)
class ApiKeyHash:
    """A client's key: a name for books and logs, and the SHA-256 of the key in hex; the key itself is never stored."""

    name: str
    sha256: str
    priority: str = "high"
    """The most urgent class its requests may ask for: high, normal or low."""
    route_key: str = ""
    """Of its requests, where these do not name one themselves; empty: the key's name."""


@dataclass(frozen=True, slots=True)
class RouterConfig:
    """One router in front of one deployment."""

    listen: str
    """`host:port`; port 0 takes a free one."""
    deployment: str = ""
    """Engines of other deployments in a relay's table are left alone; empty takes all."""
    served_names: tuple[str, ...] = ()
    """Model names clients may ask for; empty: the names the engines serve."""
    policy: str = "kv"
    tokenizer: str | None = None
    """Directory with tokenizer.json and the chat template; None: routing without the prefix index."""
    block_hash_seed: str = ""
    """The relays hash with the same."""
    engines: tuple[EngineTarget, ...] = ()
    relays: tuple[RelayTarget, ...] = ()
    tls: TlsFiles | None = None
    """Our certificate towards relays."""
    api_keys: tuple[ApiKeyHash, ...] = ()
    """Empty: no key is asked for."""
    route_key_field: str = ""
    """Of a request's body, as `user` or `metadata.team`: whose text is the request's route key; empty: none is looked at."""
    server_tls: TlsFiles | None = None
    allow_insecure_listen: bool = False
    """Accept a listen address beyond loopback without API keys and TLS."""
    workers: int = 1
    """Processes on the port."""
    places: tuple[EnginePlace, ...] = ()
    """Of engines that hand KV over; of others nobody knows what joins them."""
    link_rates: tuple[LinkRate, ...] = ()
    """Of links between those places, as far as they are known; of others the settings' assumption holds until learned."""
    decision_log: str = ""
    """Directory for decisions beyond those remembered; empty: none are written."""
    settings: Settings = field(default_factory=Settings)

    @property
    def host_port(self) -> tuple[str, int]:
        """The listen address in two parts; an IPv6 host stands in brackets."""
        return split_listen(self.listen)


def split_listen(listen: str) -> tuple[str, int]:
    """Split `host:port`.

    Raises:
        UsageError: when there is no port between 0 and 65535.
    """
    host, _, text = listen.rpartition(":")
    port = whole(text)
    if not host or port is None or port > 65535:
        raise UsageError(f"listen address {listen!r} is no HOST:PORT", "write 127.0.0.1:8000")
    return host.strip("[]"), port


def parse_config(content: bytes) -> RouterConfig:
    """Read a router's JSON configuration and check that it makes sense.

    Raises:
        UsageError: when it is no such JSON, names an unknown key, or would open an unprotected entrance.
    """
    try:
        document = msgspec.json.decode(content, type=dict[str, Any])
        settings = msgspec.convert(document.pop("settings", {}), dict[str, float])
        _refuse_unknown_keys(document)
        config = msgspec.convert(document, RouterConfig)
    except msgspec.MsgspecError as error:
        raise UsageError(f"router configuration: {error}") from error
    return check_config(replace(config, settings=make_settings(settings)))


def check_config(config: RouterConfig) -> RouterConfig:
    """Return the configuration if it is sound.

    Raises:
        UsageError: when it names no engine, an engine twice, an unknown role, or opens an unprotected entrance.
    """
    host, _ = config.host_port
    if not is_loopback(host) and not config.allow_insecure_listen:
        missing = [
            what
            for what, has in (
                ("API keys", config.api_keys),
                ("TLS", config.server_tls),
            )
            if not has
        ]
        if missing:
            raise UsageError(
                f"listening on {host} lets other machines in without {' and '.join(missing)}",
                "listen on 127.0.0.1, or give API keys and a certificate, or allow it explicitly",
            )
    if not 1 <= config.workers <= MAX_WORKERS:
        raise UsageError(f"{config.workers} workers", f"give 1 to {MAX_WORKERS}")
    if not config.engines and not config.relays:
        raise UsageError("the router has no engine to send to", "give at least one engine or relay")
    for engine in config.engines:
        _check_ranks(engine)
    ids = [name for engine in config.engines for name in worker_ids(engine.id, engine.ranks)]
    if len(set(ids)) != len(ids):
        raise UsageError(f"two engines share an id: {', '.join(sorted(ids))}")
    _refuse_shared_places(config.engines)
    for engine in config.engines:
        if engine.role not in ROLES:
            raise UsageError(
                f"engine {engine.id}: no role {engine.role!r}", f"roles are {', '.join(ROLES)}"
            )
    for key in config.api_keys:
        if key.priority not in CLASSES:
            raise UsageError(
                f"API key {key.name}: no priority {key.priority!r}",
                f"priorities are {', '.join(CLASSES)}",
            )
        if key.route_key and not is_route_key(key.route_key):
            raise UsageError(
                f"API key {key.name}: {key.route_key!r} is no route key",
                f"at most {MAX_ROUTE_KEY_CHARS} printable characters",
            )
    if config.route_key_field and not is_body_field(config.route_key_field):
        raise UsageError(
            f"no body has a field {config.route_key_field!r}", "write user, or metadata.team"
        )
    _check_rates(config.link_rates)
    if config.relays and config.tls is None:
        raise UsageError("relays are reached over mutual TLS, and there is no tls section")
    return config


def _check_ranks(engine: EngineTarget) -> None:
    """Refuse a number of ranks whose places cannot be derived from that of the first."""
    if not 1 <= engine.ranks <= MAX_RANKS:
        raise UsageError(f"engine {engine.id}: {engine.ranks} ranks", f"give 1 to {MAX_RANKS}")
    for what, place in (("kv-events", engine.kv_events), ("kv-replay", engine.kv_replay)):
        if place is None and (what == "kv-replay" or engine.ranks == 1):
            continue
        if place is None or not can_count(place, engine.ranks):
            raise UsageError(
                f"engine {engine.id}: {what} {place or 'is missing'} for {engine.ranks} ranks",
                "each rank has the next port: write tcp://HOST:PORT; "
                f"or a Unix socket with {COUNTED!r} in its path, to which vLLM adds _dpN",
            )


def _check_rates(rates: Sequence[LinkRate]) -> None:
    """Refuse what no link is like, and two rates of one."""
    for rate in rates:
        where = f"link rate from {rate.source_host} to {rate.target_host}"
        if rate.link not in LINK_CLASSES:
            raise UsageError(
                f"{where}: no link {rate.link!r}", f"links are {', '.join(LINK_CLASSES)}"
            )
        if rate.basis not in {MEASURED, NOMINAL}:
            raise UsageError(f"{where}: no basis {rate.basis!r}", f"it is {MEASURED} or {NOMINAL}")
        if not (0.0 < rate.ms_per_token < math.inf and 0.0 <= rate.latency_ms < math.inf):
            raise UsageError(
                f"{where}: {rate.ms_per_token:g} ms a token after {rate.latency_ms:g} ms",
                "both are finite, a token takes more than 0 and nothing less",
            )
    if len({rate.route for rate in rates}) != len(rates):
        raise UsageError("two link rates are of the same hosts and class", "give one of each")


def _refuse_shared_places(engines: Sequence[EngineTarget]) -> None:
    """Refuse two streams at one place: what one of them says would count for both (K12)."""
    taken: dict[str, str] = {}
    for engine in engines:
        places = [(engine.url, f"engine {engine.id} url")]
        for rank, (events_at, replay_at) in enumerate(engine.event_places):
            of_rank = f" of rank {rank}" if engine.ranks > 1 else ""
            places.append((events_at, f"engine {engine.id} kv-events{of_rank}"))
            places.append((replay_at or "", f"engine {engine.id} kv-replay{of_rank}"))
        for place, user in places:
            other = taken.setdefault(place, user) if place else user
            if other != user:
                raise UsageError(
                    f"{other} and {user} share {place}", "each has an address of its own"
                )


_NESTED: dict[str, type] = {
    "engines": EngineTarget,
    "relays": RelayTarget,
    "places": EnginePlace,
    "link_rates": LinkRate,
    "api_keys": ApiKeyHash,
    "tls": TlsFiles,
    "server_tls": TlsFiles,
}


def _refuse_unknown_keys(document: Mapping[str, Any]) -> None:
    """Look on every level: msgspec lets dataclasses have keys they do not know.

    Raises:
        UsageError: when there is one.
    """
    _refuse_others("router configuration", RouterConfig, document)
    for name, kind in _NESTED.items():
        section = document.get(name)
        for entry in section if isinstance(section, list) else [section]:
            if isinstance(entry, dict):
                _refuse_others(f"router configuration: {name}", kind, entry)


def _refuse_others(where: str, kind: type, entry: Mapping[str, Any]) -> None:
    known = {one.name for one in fields(kind)}
    if unknown := sorted(set(entry) - known):
        raise UsageError(
            f"{where} has no key {', '.join(unknown)}", f"keys are {', '.join(sorted(known))}"
        )

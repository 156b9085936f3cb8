"""The checked parts of the file to the nouns of `core`, and the checks that need several parts. IO: none of its own; names may come from `~/.ssh/config`."""

import re
from collections.abc import Sequence
from dataclasses import dataclass

from dynctl.core.addresses import is_loopback
from dynctl.core.engine_flags import flag_faults
from dynctl.core.inventory import (
    ApiKey,
    DeploymentWish,
    EngineSpec,
    HostEntry,
    Limits,
    PoolWish,
    RouterWish,
)
from dynctl.core.plan import Parallelism, Role
from dynctl.core.route_keys import MAX_ROUTE_KEY_CHARS, is_body_field, is_route_key
from dynctl.core.router_settings import NAMES, fault_of
from dynctl.core.text import is_name
from dynctl.core.workload import Slo, Workload
from dynctl.inventory.interpolate import is_secret_reference
from dynctl.inventory.names import is_pattern, matching
from dynctl.inventory.problems import NAME_HINT, shown, suggest
from dynctl.inventory.schema import ApiKeyPart, DeploymentPart, EnginePart, PoolPart, SloPart
from dynctl.inventory.values import Loc, Values

_FLAG = re.compile(r"^[A-Za-z0-9][A-Za-z0-9._-]*$")
_ENV_NAME = re.compile(r"^[A-Za-z_][A-Za-z0-9_]*$")
_URL = re.compile(r"^https?://[^\s/?#@]+(/[^\s?#]*)?$")
_LISTEN = re.compile(r"^(\[[0-9A-Fa-f:.]+\]|[A-Za-z0-9._-]+):([0-9]{1,5})$")


@dataclass(frozen=True, slots=True)
class PlugIns:
    """What there is to be named."""

    engines: Sequence[str]
    policies: Sequence[str]


def deployments_of(
    parts: Sequence[tuple[Loc, DeploymentPart]],
    hosts: Sequence[HostEntry] | None,
    plugins: PlugIns,
    has_keys: bool,
    values: Values,
) -> tuple[DeploymentWish, ...]:
    """Make the deployments; `hosts` None skips what refers to hosts, since some of them are not known."""
    made: list[DeploymentWish] = []
    firsts: dict[str, Loc] = {}
    entrances: dict[tuple[str | None, str], str] = {}
    for loc, part in parts:
        wish = _deployment(part)
        if not is_name(part.name):
            values.report(
                (*loc, "name"), f"{shown(part.name)} is no name for a deployment", NAME_HINT
            )
        elif part.name in firsts:
            line = values.spot(firsts[part.name]).line
            values.report(
                (*loc, "name"), f"the deployment {part.name!r} is here twice; first on line {line}"
            )
        firsts.setdefault(part.name, loc)
        _check_engine(wish, part, loc, plugins.engines, values)
        _check_pools(wish, loc, values)
        _check_router(wish, loc, plugins.policies, has_keys, values)
        _check_slo(part.slo, loc, values)
        if hosts is not None:
            _check_hosts(wish, loc, hosts, values)
        entrance = (wish.router.host, wish.router.listen)
        if entrance in entrances and not wish.router.listen.endswith(":0"):
            text = f"{part.name} and {entrances[entrance]} both listen on {wish.router.listen}"
            values.report(
                (*loc, "router", "listen"), text, "give one of them router.listen with another port"
            )
        entrances.setdefault(entrance, part.name)
        made.append(wish)
    return tuple(made)


def api_keys_of(parts: Sequence[tuple[Loc, ApiKeyPart]], values: Values) -> tuple[ApiKey, ...]:
    """Make the API keys; a key that stands in the file itself is refused."""
    names: set[str] = set()
    for loc, part in parts:
        if not is_name(part.name):
            values.report((*loc, "name"), f"{shown(part.name)} is no name for a key", NAME_HINT)
        if part.name in names:
            values.report((*loc, "name"), f"the API key {part.name!r} is here twice")
        if part.route_key is not None and not is_route_key(part.route_key):
            text = f"a route key has 1 to {MAX_ROUTE_KEY_CHARS} printable characters"
            values.report((*loc, "route_key"), text)
        names.add(part.name)
        if not is_secret_reference(part.key):
            values.report_secret(
                (*loc, "key"),
                "an API key never stands in the inventory itself",
                "write ${env:NAME}, ${file:PATH} or ${cmd:PROGRAM …}",
            )
    return tuple(
        ApiKey(part.name, part.key, part.priority, part.route_key or "") for _, part in parts
    )


def _deployment(part: DeploymentPart) -> DeploymentWish:
    router, limits, workload = part.router, part.limits, part.workload
    return DeploymentWish(
        name=part.name,
        model=part.model,
        engine=_engine(part.engine),
        served_name=part.served_name,
        revision=part.revision,
        tokenizer=part.tokenizer,
        pools=tuple(_pool(pool) for pool in part.pools),
        workload=Workload(
            workload.isl_tokens,
            workload.osl_tokens,
            workload.rate_rps,
            workload.shared_prefix_ratio,
            workload.isl_cv,
            workload.num_prefixes,
        ),
        slo=Slo(part.slo.ttft_ms, part.slo.itl_ms or part.slo.tpot_ms),
        shape=tuple(sorted(part.shape.items())),
        limits=Limits(
            limits.max_model_len_tokens,
            limits.max_num_seqs,
            limits.gpu_memory_utilization,
            limits.block_size_tokens,
            limits.max_num_batched_tokens,
        ),
        router=RouterWish(
            router.host,
            router.listen,
            router.policy,
            router.allow_insecure_listen,
            router.tls_cert,
            router.tls_key,
            router.route_key_field or "",
            tuple(sorted(router.settings.items())),
        ),
    )


def _engine(part: str | EnginePart) -> EngineSpec:
    if isinstance(part, str):
        return EngineSpec(kind=part)
    return EngineSpec(
        kind=part.kind,
        python=part.python,
        args=tuple(part.args.items()),
        env=tuple(part.env.items()),
        urls=tuple(part.urls),
        allow_old_version=part.allow_old_version,
        device=part.device,
        start_deadline_s=part.start_deadline_s,
    )


def _pool(part: PoolPart) -> PoolWish:
    parallelism = Parallelism(part.tp, part.pp, part.dp, part.ep)
    return PoolWish(Role(part.role), part.replicas, parallelism, tuple(part.hosts), part.nodes)


def _check_engine(
    wish: DeploymentWish, part: DeploymentPart, loc: Loc, kinds: Sequence[str], values: Values
) -> None:
    engine, here = wish.engine, (*loc, "engine")
    kind_at = here if isinstance(part.engine, str) else (*here, "kind")
    if engine.kind not in kinds:
        values.report(
            kind_at, f"no engine is called {shown(engine.kind)}", suggest(engine.kind, kinds)
        )
    for index, url in enumerate(engine.urls):
        at = (*here, "urls", index)
        if "@" in url:
            values.report_secret(at, "a URL with a login or password is not allowed here")
        elif not _URL.match(url):
            values.report(at, f"{shown(url)} is no http://host:port")
    if engine.urls and engine.kind != "external":
        values.report((*here, "urls"), f"urls are for kind external, not {engine.kind}")
    for name, _ in engine.args:
        if not _FLAG.match(name):
            text = f"the flag {shown(name)} is written without dashes"
            values.report_key((*here, "args", name), text)
    for name, _ in engine.env:
        if not _ENV_NAME.match(name):
            text = f"{shown(name)} is no name for a variable"
            values.report_key((*here, "env", name), text)
    for fault in flag_faults(engine, wish.limits):
        values.report((*here, *fault.key), fault.text, fault.hint)
    if engine.kind == "external":
        _check_external(wish, loc, values)
    if engine.kind == "vllm":
        _check_vllm(wish, loc, values)


def _check_external(wish: DeploymentWish, loc: Loc, values: Values) -> None:
    urls = wish.engine.urls
    if not urls:
        values.report_key(
            (*loc, "engine"), "an external engine needs urls", "urls: [http://host:8000]"
        )
    elif wish.pools and sum(pool.replicas for pool in wish.pools) != len(urls):
        text = f"the pools have another number of replicas than there are urls ({len(urls)})"
        values.report_key((*loc, "pools"), text)


def _check_vllm(wish: DeploymentWish, loc: Loc, values: Values) -> None:
    if not wish.model.startswith(("/", "~/")):
        values.report(
            (*loc, "model"),
            f"model {shown(wish.model)} must be a directory on the hosts, absolute or from ~/",
            "download it there first; hosts need no internet afterwards",
        )
    if wish.engine.python is None:
        values.report_key(
            (*loc, "engine"),
            "vllm needs python: the interpreter of its environment on the hosts",
            "engine: {kind: vllm, python: /opt/vllm/bin/python}",
        )
    elif not wish.engine.python.startswith(("/", "~/")):
        values.report(
            (*loc, "engine", "python"),
            f"python {shown(wish.engine.python)} must be a path on the hosts, absolute or from ~/",
        )


def _check_pools(wish: DeploymentWish, loc: Loc, values: Values) -> None:
    """Prefill and decode serve together or not at all."""
    roles = [pool.role for pool in wish.pools]
    for index, role in enumerate(roles):
        other = {Role.PREFILL: Role.DECODE, Role.DECODE: Role.PREFILL}.get(role)
        if other is not None and other not in roles:
            values.report(
                (*loc, "pools", index, "role"),
                f"a {role.value} pool without a {other.value} pool serves nothing",
                f"add a pool with role: {other.value}, or make it role: aggregated",
            )


def _check_router(
    wish: DeploymentWish, loc: Loc, policies: Sequence[str], has_keys: bool, values: Values
) -> None:
    router, here = wish.router, (*loc, "router")
    if router.policy not in policies:
        text = f"no routing policy is called {shown(router.policy)}"
        values.report((*here, "policy"), text, suggest(router.policy, policies))
    if router.route_key_field and not is_body_field(router.route_key_field):
        text = f"no body has a field {shown(router.route_key_field)}"
        values.report((*here, "route_key_field"), text, "write user, or metadata.team")
    for name, value in router.settings:
        if fault := fault_of(name, value):
            hint = suggest(name, NAMES) or "dynctl config schema lists them with their defaults"
            known = name in NAMES
            values.report_key((*here, "settings", name), fault, "" if known else hint)
    match = _LISTEN.match(router.listen)
    if match is None or int(match[2]) > 65535:
        values.report(
            (*here, "listen"), f"{shown(router.listen)} is no HOST:PORT", "127.0.0.1:8000 is one"
        )
        return
    if (router.tls_cert is None) != (router.tls_key is None):
        values.report_key(here, "tls_cert and tls_key belong together; one of them is missing")
    has_tls = router.tls_cert is not None
    if not is_loopback(match[1].strip("[]")) and not router.allow_insecure_listen:
        missing = [
            what for what, is_there in (("api_keys", has_keys), ("TLS", has_tls)) if not is_there
        ]
        if missing:
            values.report(
                (*here, "listen"),
                f"{router.listen} is open to others without {' and '.join(missing)}",
                "add api_keys, tls_cert and tls_key; or listen on 127.0.0.1; or set allow_insecure_listen: true",
            )


def _check_slo(slo: SloPart, loc: Loc, values: Values) -> None:
    if slo.itl_ms is not None and slo.tpot_ms is not None:
        values.report_key(
            (*loc, "slo", "tpot_ms"), "itl_ms and tpot_ms are the same goal", "keep one"
        )


def _check_hosts(
    wish: DeploymentWish, loc: Loc, hosts: Sequence[HostEntry], values: Values
) -> None:
    names = [entry.name for entry in hosts]
    groups = list(dict.fromkeys(group for entry in hosts for group in entry.groups))
    if wish.router.host is not None and wish.router.host not in names:
        text = f"no host is called {shown(wish.router.host)}"
        values.report((*loc, "router", "host"), text, suggest(wish.router.host, names))
    for index, pool in enumerate(wish.pools):
        for position, wanted in enumerate(pool.hosts):
            if wanted in names or wanted in groups:
                continue
            if is_pattern(wanted) and matching(wanted, names):
                continue
            at = (*loc, "pools", index, "hosts", position)
            values.report(
                at,
                f"no host or group is called {shown(wanted)}",
                suggest(wanted, [*names, *groups]),
            )

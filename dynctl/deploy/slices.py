"""The plan, cut into what each host shall run. Pure: equal plans give equal slices."""

import hashlib
from collections.abc import Mapping
from dataclasses import dataclass, replace

import msgspec

from dynctl.agents.protocol import (
    MEMBER_CERTIFICATE,
    EngineWish,
    Gang,
    HostSlice,
    Peer,
    RelayWish,
    RouterUnit,
    spec_digest,
)
from dynctl.core.addresses import is_loopback
from dynctl.core.hardware import Topology
from dynctl.core.inventory import DeploymentWish, Inventory
from dynctl.core.plan import Plan, PlannedDeployment, PlannedHost, Pool, Replica, Role, Sourced
from dynctl.deploy.engine_places import engine_places, kv_bytes_per_token
from dynctl.deploy.link_rates import link_rates
from dynctl.deploy.places import Place
from dynctl.router.config import (
    ApiKeyHash,
    RelayTarget,
    RouterConfig,
    TlsFiles,
    split_listen,
)

TOKENIZER_FILES = (
    "tokenizer.json",
    "tokenizer_config.json",
    "chat_template.jinja",
    "special_tokens_map.json",
)
"""What a router needs of a model's directory."""


@dataclass(frozen=True, slots=True)
class Ground:
    """What slices rest on besides plan and inventory."""

    places: Mapping[str, Place]
    """By host name."""
    bundles: Mapping[str, str]
    """Bundle digest by host name."""
    api_keys: tuple[ApiKeyHash, ...] = ()
    topology: Topology | None = None


def make_slices(plan: Plan, inventory: Inventory, ground: Ground) -> dict[str, HostSlice]:
    """Cut a plan into one slice per host; generation and fence are filled in when it is applied."""
    hosts = {host.name: host for host in plan.hosts}
    wishes = {wish.name: wish for wish in inventory.deployments}
    engines: dict[str, list[EngineWish]] = {name: [] for name in hosts}
    for planned, pool, replica in plan.replicas():
        for name, engine in _engines(
            plan, planned, pool, replica, wishes[planned.name], ground.places
        ):
            engines[name].append(engine)
    routers: dict[str, list[RouterUnit]] = {name: [] for name in hosts}
    for planned in plan.deployments:
        unit = _router(plan, planned, wishes[planned.name], ground)
        routers[planned.router.host_name].append(unit)
    return {
        name: HostSlice(
            cluster=plan.cluster,
            host_name=name,
            generation=0,
            plan_digest=plan.digest,
            bundle=ground.bundles[name],
            relay=_relay(plan, host) if engines[name] else None,
            engines=tuple(engines[name]),
            routers=tuple(routers[name]),
        )
        for name, host in hosts.items()
    }


def block_hash_seed(cluster: str, deployment: str) -> str:
    """Seed of a deployment's block hashes. Not a secret: a collision costs time, never an answer."""
    return hashlib.sha256(f"dynctl block hash {cluster} {deployment}".encode()).hexdigest()[:32]


def tokenizer_source(planned: PlannedDeployment, wish: DeploymentWish) -> str | None:
    """Host from which tokenizer files must be copied to the router's; None when they are there already."""
    if wish.engine.kind in {"sim", "external"} or wish.tokenizer is not None:
        return None
    hosts = [replica.host_name for replica in _replicas(planned)]
    return None if planned.router.host_name in hosts else hosts[0]


def tls_names(slice_: HostSlice) -> list[str]:
    """Which certificate pairs a host needs: for its relay, for routers, and to ask about members of gangs."""
    has_members = any(engine.gang for engine in slice_.engines)
    needs = (("host", slice_.relay), ("router", slice_.routers), (MEMBER_CERTIFICATE, has_members))
    return [name for name, needed in needs if needed]


def _engines(
    plan: Plan,
    planned: PlannedDeployment,
    pool: Pool,
    replica: Replica,
    wish: DeploymentWish,
    places: Mapping[str, Place],
) -> list[tuple[str, EngineWish]]:
    """An engine as the host wishes for it, or the parts of one that is over several hosts as each of theirs does."""
    parts = [
        (member.host_name, _engine(plan, planned, pool, replica, wish, places, rank))
        for rank, member in enumerate(replica.members)
    ]
    if len(parts) == 1:
        return parts
    hosts = {host.name: host for host in plan.hosts}
    place = f"{hosts[replica.host_name].data_address} {replica.rendezvous_port}"
    peers = [
        Peer(part.id, name, hosts[name].data_address, hosts[name].relay_port)
        for name, part in parts
    ]
    ways = (f"{peer.host_name} {peer.address} {peer.port}" for peer in peers)
    digests = " ".join([place, *ways, *(spec_digest(part) for _, part in parts)])
    return [
        (
            name,
            replace(
                part,
                gang=Gang(
                    id=replica.id,
                    rank=rank,
                    nodes=len(parts),
                    master_address=hosts[replica.host_name].data_address,
                    master_port=replica.rendezvous_port or 0,
                    peers=tuple(peers[:1] if rank else peers[1:]),
                    digest=hashlib.sha256(digests.encode()).hexdigest()[:16],
                ),
            ),
        )
        for rank, (name, part) in enumerate(parts)
    ]


def _engine(
    plan: Plan,
    planned: PlannedDeployment,
    pool: Pool,
    replica: Replica,
    wish: DeploymentWish,
    places: Mapping[str, Place],
    rank: int,
) -> EngineWish:
    member = replica.members[rank]
    spec, place = wish.engine, places[member.host_name]
    urls = dict(zip((r.id for r in _replicas(planned)), spec.urls, strict=False))
    host = next(h for h in plan.hosts if h.name == member.host_name)
    return EngineWish(
        id=replica.member_id(rank),
        deployment=planned.name,
        role=replica.role.value,
        kind=planned.engine_kind,
        model=place.path(planned.model),
        served_name=served_name(wish),
        python=None if spec.python is None else place.path(spec.python),
        device=spec.device,
        gpus=member.gpus,
        tp=pool.parallelism.tp,
        pp=pool.parallelism.pp,
        dp=pool.parallelism.dp,
        ep=pool.parallelism.ep,
        data_address=host.data_address,
        side_channel_port=replica.side_channel_port,
        nics=replica.nics,
        max_model_len_tokens=_whole(planned.max_model_len_tokens),
        max_num_seqs=_whole(planned.max_num_seqs),
        max_num_batched_tokens=_whole(pool.max_num_batched_tokens),
        block_size_tokens=_whole(planned.block_size_tokens),
        gpu_memory_utilization=_told(planned.gpu_memory_utilization),
        args=spec.args,
        env=tuple((name, _reference(planned.name, name, value)) for name, value in spec.env),
        kv_transfer=replica.role is not Role.AGGREGATED,
        allow_old_version=spec.allow_old_version,
        start_deadline_s=spec.start_deadline_s,
        url=urls.get(replica.id, ""),
        tokenizer=None if wish.tokenizer is None else place.path(wish.tokenizer),
        revision=wish.revision,
        block_hash_seed=block_hash_seed(plan.cluster, planned.name),
    )


def is_reference(value: str) -> bool:
    """Whether an environment value of the inventory is read elsewhere when it is used."""
    return "$" in value


def secret_name(deployment: str, name: str) -> str:
    """Name of the file that carries a secret environment value on a host."""
    return f"{deployment}.{name}"


def _reference(deployment: str, name: str, value: str) -> str:
    return f"${{file:{secret_name(deployment, name)}}}" if is_reference(value) else value


def served_name(wish: DeploymentWish) -> str:
    """The model name clients ask for: as written, else the last part of the model's path."""
    return wish.served_name or wish.model.rstrip("/").rsplit("/", 1)[-1]


def _router(
    plan: Plan, planned: PlannedDeployment, wish: DeploymentWish, ground: Ground
) -> RouterUnit:
    place = ground.places[planned.router.host_name]
    used = {replica.host_name for replica in _replicas(planned)}
    relays = tuple(
        RelayTarget(host.name, _relay_address(plan, host), host.relay_port)
        for host in plan.hosts
        if host.name in used
    )
    tls = TlsFiles(
        cert=place.tls("router.crt"), key=place.tls("router.key"), ca=place.tls("ca.crt")
    )
    router = wish.router
    server_tls = None
    if router.tls_cert and router.tls_key:
        cert, key = (place.tls(f"server-{planned.name}.{suffix}") for suffix in ("crt", "key"))
        server_tls = TlsFiles(cert=cert, key=key)
    settings = {"kv_bytes_per_token": kv_bytes_per_token(planned, wish)} | dict(router.settings)
    bytes_per_token = int(settings["kv_bytes_per_token"])
    config = RouterConfig(
        listen=planned.router.listen,
        deployment=planned.name,
        served_names=(served_name(wish),),
        policy=planned.router.policy,
        tokenizer=_tokenizer(planned, wish, ground),
        block_hash_seed=block_hash_seed(plan.cluster, planned.name),
        relays=relays,
        tls=tls,
        api_keys=ground.api_keys,
        route_key_field=router.route_key_field,
        server_tls=server_tls,
        allow_insecure_listen=router.allow_insecure_listen,
        places=engine_places(planned, ground.topology),
        link_rates=link_rates(planned, ground.topology, bytes_per_token),
        decision_log=place.decisions(f"{planned.name}-router"),
    )
    content = msgspec.to_builtins(config)
    content["settings"] = settings
    return RouterUnit(f"{planned.name}-router", planned.name, content, planned.router.listen)


def _tokenizer(planned: PlannedDeployment, wish: DeploymentWish, ground: Ground) -> str | None:
    host_name = planned.router.host_name
    place = ground.places[host_name]
    if wish.tokenizer is not None:
        return place.path(wish.tokenizer)
    if wish.engine.kind == "sim":
        return f"{place.bundle_path(ground.bundles[host_name])}/dynctl/sim/model"
    if wish.engine.kind == "external":
        return None
    if tokenizer_source(planned, wish):
        return place.tokenizer(planned.name)
    return place.path(planned.model)


def _relay(plan: Plan, host: PlannedHost) -> RelayWish:
    return RelayWish(_relay_address(plan, host), host.relay_port)


def _relay_address(plan: Plan, host: PlannedHost) -> str:
    """A relay that only routers of its own host use stays on loopback; other hosts ask it about members of gangs."""
    if any(len(r.members) > 1 and host.name in _hosts_of(r) for _, _, r in plan.replicas()):
        return host.data_address
    users = {
        planned.router.host_name
        for planned in plan.deployments
        if any(replica.host_name == host.name for replica in _replicas(planned))
    }
    return "127.0.0.1" if users <= {host.name} else host.data_address


def _hosts_of(replica: Replica) -> set[str]:
    return {member.host_name for member in replica.members}


def _replicas(planned: PlannedDeployment) -> tuple[Replica, ...]:
    return tuple(replica for pool in planned.pools for replica in pool.replicas)


def _told(figure: Sourced | None) -> float | None:
    """What an engine is started with; None: it decides by itself."""
    return figure.value if figure is not None and figure.is_told else None


def _whole(figure: Sourced | None) -> int | None:
    value = _told(figure)
    return None if value is None else int(value)


def routed_by_text(inventory: Inventory, plan: Plan) -> list[tuple[str, str]]:
    """Deployments whose router has no tokenizer, with its host: adopted servers do not hand theirs out."""
    unknown = {
        wish.name
        for wish in inventory.deployments
        if wish.engine.kind == "external" and wish.tokenizer is None
    }
    return [(d.name, d.router.host_name) for d in plan.deployments if d.name in unknown]


def listens_openly(slice_: HostSlice) -> list[str]:
    """Addresses of this host that other machines can reach, for the operator to know: routers and NIXL ports."""
    routers = [
        unit.listen for unit in slice_.routers if not is_loopback(split_listen(unit.listen)[0])
    ]
    nixl = [
        f"{engine.data_address}:{port} (NIXL side channel of {engine.id}, unauthenticated)"
        for engine in slice_.engines
        if not is_loopback(engine.data_address)
        for port in engine.side_channel_ports
    ]
    meetings = [
        f"{gang.master_address}:{gang.master_port} (where parts of {engine.id} meet, unauthenticated"
        + (", on all its addresses)" if engine.kind == "vllm" else ")")
        for engine in slice_.engines
        if (gang := engine.gang) is not None and not gang.rank
    ]
    between = [
        f"{engine.data_address}, ports as the kernel gives them (between parts of {engine.gang.id}, unauthenticated)"
        for engine in slice_.engines
        if engine.gang is not None and engine.kind == "vllm"
        if not is_loopback(engine.data_address)
    ]
    return routers + nixl + meetings + between

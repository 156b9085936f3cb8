"""Engines that need no GPU: simulated ones, CPU engines on slots, servers that already run.

Not here: GPU engines (`search`).
Pure.
"""

from collections.abc import Mapping, Sequence
from dataclasses import fields
from enum import StrEnum
from urllib.parse import urlsplit

from dynctl.core.engine_flags import cpu_kv_gib
from dynctl.core.hardware import Host
from dynctl.core.inventory import DeploymentWish, HostEntry, PoolWish
from dynctl.core.model import Model
from dynctl.core.plan import (
    Member,
    MemorySheet,
    Parallelism,
    Pool,
    Replica,
    Role,
    Sourced,
)
from dynctl.core.text import clean
from dynctl.core.units import GIB, format_bytes
from dynctl.errors import PlanError, UsageError
from dynctl.planner.limits import declared, simulated_batched_tokens
from dynctl.planner.memory import (
    CPU_KV_BYTES,
    cpu_sheet,
    rank_tokens,
    unspreadable,
    unstartable,
)
from dynctl.planner.options import needed_tokens
from dynctl.planner.placement import Allocation, matches
from dynctl.sim.options import SimOptions

_SIM_FLAGS = "correct engine.args; dynctl sim engine --help lists them"


class Need(StrEnum):
    """What an engine kind must find on a host."""

    GPUS = "gpus"
    CPU_SLOTS = "cpu slots"
    NOTHING = "nothing"
    URL = "url"


def need_of(wish: DeploymentWish) -> Need:
    """What the engine of a deployment needs.

    Raises:
        PlanError: for a kind that is not known.
    """
    engine = wish.engine
    if engine.kind == "sim":
        return Need.NOTHING
    if engine.kind == "external":
        return Need.URL
    if engine.kind == "vllm":
        return Need.CPU_SLOTS if engine.device == "cpu" else Need.GPUS
    raise PlanError(
        f"deployment {wish.name}: nothing is known of what engine {engine.kind} needs",
        "engine kinds: sim, vllm, external",
    )


def plan_free_engines(
    wish: DeploymentWish,
    model: Model | None,
    allocation: Allocation,
    entries: Mapping[str, HostEntry],
    need: Need,
) -> tuple[list[Pool], list[str]]:
    """Place replicas that need no GPU; return pools and reasons.

    Raises:
        PlanError: when slots or URLs are missing, a slot's memory is too small, or a flag of simulated engines no number.
    """
    if need is Need.URL:
        return _external(wish, allocation), ["engines that already run are adopted where they are"]
    if need is Need.NOTHING:
        sim_options(wish.engine.args)
    pools: list[Pool] = []
    reasons: list[str] = []
    if not wish.pools:
        reasons.append(
            "one aggregated engine: write pools: for more, or for prefill and decode apart"
        )
    for number, pool in enumerate(wish.pools or (PoolWish(Role.AGGREGATED, 1),)):
        pools.append(_pool(wish, model, allocation, entries, need, number, pool, pools))
    reasons.append(
        "simulated engines: they answer like vLLM and compute nothing"
        if need is Need.NOTHING
        else "CPU engines on slots the inventory declares"
    )
    return pools, reasons


def _pool(
    wish: DeploymentWish,
    model: Model | None,
    allocation: Allocation,
    entries: Mapping[str, HostEntry],
    need: Need,
    number: int,
    pool: PoolWish,
    before: Sequence[Pool],
) -> Pool:
    where = f"deployment {wish.name}: pool {number + 1} ({pool.role.value})"
    if pool.replicas < 1:
        raise PlanError(f"{where} asks for {pool.replicas} replicas", "ask for at least one")
    is_cpu = need is Need.CPU_SLOTS
    if fault := unstartable(model, pool.parallelism, is_cpu=is_cpu):
        raise PlanError(f"{where}: {fault[0]}", fault[1])
    hosts = [h for h in allocation.hosts if matches(entries.get(h.name), h.name, pool.hosts)]
    if not hosts:
        raise PlanError(
            f"{where}: no described host matches {', '.join(pool.hosts)}", "see dynctl discover"
        )
    if is_cpu and not any(host.cpu_slots for host in hosts):
        raise PlanError(
            f"{where}: engine {wish.engine.kind} on device cpu needs CPU slots and no host declares any",
            "set cpu_slots on a host in the inventory",
        )
    if fault := unspreadable(pool):
        raise PlanError(f"{where}: {fault[0]}", fault[1])
    chosen = _place(wish, allocation, where, pool, hosts, is_cpu=is_cpu)
    start = sum(len(p.replicas) for p in before if p.role is pool.role)
    memory = (
        _slot_sheet(wish, model, where, [h for mine in chosen for h in mine], pool.parallelism)
        if is_cpu and model is not None
        else None
    )
    replicas = tuple(
        Replica(
            id=f"{wish.name}-{pool.role.value}-{start + i}",
            role=pool.role,
            host_name=mine[0].name,
            side_channel_port=None
            if pool.role is Role.AGGREGATED
            else allocation.side_channel_port(mine[0], pool.parallelism.num_gpus),
            others=tuple(Member(host.name) for host in mine[1:]),
            rendezvous_port=allocation.rendezvous_port(mine[0]) if len(mine) > 1 else None,
        )
        for i, mine in enumerate(chosen)
    )
    return Pool(pool.role, pool.parallelism, replicas, memory, _batched(wish, is_cpu=is_cpu))


def _place(
    wish: DeploymentWish,
    allocation: Allocation,
    where: str,
    pool: PoolWish,
    hosts: Sequence[Host],
    *,
    is_cpu: bool,
) -> list[list[Host]]:
    """Choose the hosts of each replica, of most one.

    Raises:
        PlanError: when there are not enough.
    """
    if len(hosts) < pool.nodes:
        raise PlanError(
            f"{where} asks for engines over {pool.nodes} hosts each and may use {len(hosts)}",
            "name more hosts",
        )
    usable = hosts if is_cpu else _preferred(hosts)
    able = usable if len(usable) >= pool.nodes else hosts
    chosen: list[list[Host]] = []
    for i in range(pool.replicas):
        mine: list[Host] = []
        for _ in range(pool.nodes):
            others = [host for host in able if host not in mine]
            host = allocation.take_slot(others, wish.name, pool.role, must_have_slot=is_cpu)
            if host is None:
                total = sum(h.cpu_slots for h in hosts)
                raise PlanError(
                    f"{where} asks for {pool.replicas} replicas; after {i} the {total} CPU slots of its hosts are taken",
                    "raise cpu_slots, or ask for fewer replicas",
                )
            mine.append(host)
        chosen.append(mine)
    return chosen


def _batched(wish: DeploymentWish, *, is_cpu: bool) -> Sourced | None:
    """Tokens of one step: as declared; a simulated engine's default is known besides."""
    if is_cpu:
        return declared(wish, "max_num_batched_tokens")
    return simulated_batched_tokens(wish)


def _preferred(hosts: Sequence[Host]) -> list[Host]:
    """Simulated engines go where slots are declared, else to hosts with GPUs as real ones would, else anywhere."""
    for able in ([h for h in hosts if h.cpu_slots], [h for h in hosts if h.gpus]):
        if able:
            return able
    return list(hosts)


def kv_space_bytes(wish: DeploymentWish) -> int:
    """KV space a CPU engine is told to use: as its environment says (in GiB), else 1 GiB."""
    space = cpu_kv_gib(wish.engine)
    return CPU_KV_BYTES if space is None else space * GIB


def _slot_sheet(
    wish: DeploymentWish,
    model: Model,
    where: str,
    hosts: Sequence[Host],
    parallelism: Parallelism,
) -> MemorySheet:
    """The sheet of the smallest slot.

    Raises:
        PlanError: when the model does not fit a slot.
    """
    found = cpu_room(wish, model, hosts, parallelism)
    if rank_tokens(found, parallelism) < needed_tokens(wish):
        needs = found.reserve_bytes + found.weight_bytes + found.activation_bytes
        needs += needed_tokens(wish) * model.kv_bytes_per_token
        raise PlanError(
            f"{where}: {model.name} needs {format_bytes(needs)} per {'rank' if parallelism.dp > 1 else 'engine'}, the smallest "
            f"slot has {format_bytes(found.total_bytes)} and {format_bytes(max(0, found.kv_bytes))} of it for KV",
            "lower cpu_slots, raise VLLM_CPU_KVCACHE_SPACE, or shorten limits.max_model_len_tokens",
        )
    return found


def cpu_room(
    wish: DeploymentWish, model: Model, hosts: Sequence[Host], parallelism: Parallelism
) -> MemorySheet:
    """The sheet of the smallest slot of some hosts, of which each data-parallel rank has its share."""
    slots = [host.memory_bytes // max(1, host.cpu_slots) for host in hosts]
    dp = parallelism.dp
    return cpu_sheet(model, min(slots) // dp, kv_space_bytes(wish), dp)


def _external(wish: DeploymentWish, allocation: Allocation) -> list[Pool]:
    """One replica per URL, watched from the host it runs on when that is one of ours, else from the router's."""
    if not wish.engine.urls:
        raise PlanError(
            f"deployment {wish.name}: engine external needs urls of servers that run",
            "add engine.urls",
        )
    for pool in wish.pools:
        if fault := unstartable(None, Parallelism(dp=pool.parallelism.dp)):
            raise PlanError(f"deployment {wish.name}: {fault[0]}", fault[1])
    asked = [(pool.role, pool.parallelism.dp) for pool in wish.pools for _ in range(pool.replicas)]
    asked = asked or [(Role.AGGREGATED, 1)] * len(wish.engine.urls)
    if len(asked) != len(wish.engine.urls):
        raise PlanError(
            f"deployment {wish.name}: pools ask for {len(asked)} replicas and engine.urls names {len(wish.engine.urls)}",
            "give as many urls as replicas",
        )
    home = {host.name: host for host in allocation.hosts}
    fallback = home.get(wish.router.host or "") or allocation.router_host(allocation.hosts)
    replicas: dict[tuple[Role, int], list[Replica]] = {}
    for url, (role, dp) in zip(wish.engine.urls, asked, strict=True):
        name = urlsplit(url).hostname or ""
        host = next(
            (h for h in allocation.hosts if name in {h.name, h.address, h.data_address}), fallback
        )
        number = sum(len(found) for (other, _), found in replicas.items() if other is role)
        mine = replicas.setdefault((role, dp), [])
        mine.append(Replica(f"{wish.name}-{role.value}-{number}", role, host.name))
    # Of their sizes only the ranks matter to others: each has a cache of its own.
    return [Pool(role, Parallelism(dp=dp), tuple(found)) for (role, dp), found in replicas.items()]


def sim_options(args: Sequence[tuple[str, str]]) -> SimOptions:
    """The simulated engine's options from flags.

    Raises:
        PlanError: for a number that is none, or means nothing.
    """
    defaults = SimOptions()
    given = {name.replace("-", "_"): text for name, text in args}
    values: dict[str, object] = {}
    for each in fields(SimOptions):
        kind = type(getattr(defaults, each.name))
        if each.name in given and kind in {int, float}:
            try:
                values[each.name] = kind(given[each.name])
            except ValueError as error:
                raise PlanError(
                    f"engine flag {each.name.replace('_', '-')} is {clean(given[each.name], 40)!r}, which is no number",
                    _SIM_FLAGS,
                ) from error
    found = SimOptions(**values)  # type: ignore[arg-type]
    try:
        found.check_numbers()
    except UsageError as error:
        said = error.message.removeprefix("--")
        raise PlanError(f"engine flag {said}: {error.hint}", _SIM_FLAGS) from error
    return found

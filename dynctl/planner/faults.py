"""What of a plan does not fit the cluster and the inventory, and where in its file that stands.

Not here: what to expect of a plan that fits (`check`), the file's text (`text`).
Pure.
"""

from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TypeVar

from dynctl.core.addresses import is_loopback
from dynctl.core.hardware import GpuState, Host
from dynctl.core.inventory import DeploymentWish, Inventory, PoolWish
from dynctl.core.model import Model
from dynctl.core.plan import (
    Member,
    MemorySheet,
    Parallelism,
    Plan,
    PlannedDeployment,
    Pool,
    Replica,
    Role,
)
from dynctl.core.text import is_name
from dynctl.core.units import format_bytes, whole
from dynctl.errors import PlanError, UsageError
from dynctl.inventory.problems import shown, suggest
from dynctl.planner.calibration import Calibration
from dynctl.planner.engines import Need, cpu_room, need_of
from dynctl.planner.limits import room_of
from dynctl.planner.memory import legal_tp, rank_tokens, sheet, unspreadable, unstartable
from dynctl.planner.options import needed_tokens
from dynctl.planner.placement import kind_of, natural, port_space, replica_groups
from dynctl.planner.transfer import Fabric
from dynctl.router.config import split_listen

T = TypeVar("T")

_MAX_SHOWN = 20

Loc = tuple[int | str, ...]
"""Keys and positions on the way to a value of plan.yaml, as `("hosts", 0, "name")`."""


@dataclass(frozen=True, slots=True)
class Fault:
    """One thing that does not fit, and where it stands."""

    loc: Loc
    text: str
    hint: str = ""


class PlanFaultsError(PlanError):
    """Raised when a plan does not fit the cluster; carries everything that does not."""

    HINT = "correct the plan, or make a new one with dynctl plan"

    def __init__(self, faults: tuple[Fault, ...]) -> None:
        self.faults = faults
        texts = list(dict.fromkeys(fault.text for fault in faults))
        shown = texts[:_MAX_SHOWN]
        more = len(texts) - len(shown)
        text = "\n".join(f"  - {t}" for t in shown) + (f"\n  … and {more} more" if more else "")
        super().__init__(f"the plan does not fit the cluster:\n{text}", self.HINT)


@dataclass(frozen=True, slots=True)
class Ground:
    """A plan and everything it is held against."""

    plan: Plan
    hosts: Mapping[str, Host]
    wishes: Mapping[str, DeploymentWish]
    models: Mapping[str, Model | None]
    inventory: Inventory
    fabric: Fabric
    is_edited: bool
    """Its digest is not that of its content."""
    policies: Sequence[str] | None
    """How routers can choose; None: not known here."""
    calibration: Calibration


def faults_of(ground: Ground) -> Iterator[Fault]:
    """Find everything that does not fit."""
    yield from _host_faults(ground)
    yield from _name_faults(ground)
    yield from _gpu_faults(ground)
    yield from _kind_faults(ground)
    yield from _port_faults(ground)
    for loc, deployment in _numbered(ground.plan.deployments, ("deployments",)):
        yield from _router_faults(ground, loc, deployment)
        yield from _deployment_faults(ground, loc, deployment)


def _numbered(items: Sequence[T], loc: Loc) -> Iterator[tuple[Loc, T]]:
    return (((*loc, index), item) for index, item in enumerate(items))


def _replicas(plan: Plan) -> Iterator[tuple[Loc, Pool, Replica]]:
    for at, deployment in _numbered(plan.deployments, ("deployments",)):
        for here, pool in _numbered(deployment.pools, (*at, "pools")):
            for loc, replica in _numbered(pool.replicas, (*here, "replicas")):
                yield loc, pool, replica


def _members(plan: Plan) -> Iterator[tuple[Loc, Replica, Member]]:
    """Every part of every replica, most of which have one."""
    for loc, _, replica in _replicas(plan):
        yield loc, replica, replica.members[0]
        for here, member in _numbered(replica.others, (*loc, "others")):
            yield here, replica, member


def _twice(uses: Iterable[tuple[Loc, str]], what: str) -> Iterator[Fault]:
    """Name every use of a thing after the first."""
    found = list(uses)
    count = Counter(name for _, name in found)
    seen: set[str] = set()
    for loc, name in found:
        if name in seen:
            yield Fault(loc, f"{what} {name} is used {count[name]} times")
        seen.add(name)


def _host_faults(ground: Ground) -> Iterator[Fault]:
    plan, inventory = ground.plan, ground.inventory
    if plan.cluster != inventory.cluster:
        text = f"the plan is for cluster {plan.cluster}, the inventory for {inventory.cluster}"
        yield Fault(("cluster",), text)
    yield from _twice(
        (((*loc, "name"), host.name) for loc, host in _numbered(plan.hosts, ("hosts",))), "host"
    )
    for loc, planned in _numbered(plan.hosts, ("hosts",)):
        host = ground.hosts.get(planned.name)
        if host is None:
            known = suggest(planned.name, sorted(ground.hosts, key=natural))
            text = f"host {planned.name} is not among the described hosts"
            yield Fault((*loc, "name"), text, known)
            continue
        if planned.machine_id != host.machine_id:
            text = f"host {planned.name} is another machine now (machine id {host.machine_id or 'unknown'})"
            yield Fault((*loc, "machine_id"), text)
        if planned.data_address != host.data_address:
            yield Fault(
                (*loc, "data_address"),
                f"host {planned.name} has data address {host.data_address} now, "
                f"the plan says {planned.data_address}",
            )
    listed = [planned.name for planned in plan.hosts]
    used = [
        ((*loc, "router", "host"), d.router.host_name)
        for loc, d in _numbered(plan.deployments, ("deployments",))
    ]
    used += [((*loc, "host"), member.host_name) for loc, _, member in _members(plan)]
    for loc, name in used:
        if name not in listed:
            yield Fault(
                loc, f"host {name} is used but not listed under hosts", suggest(name, listed)
            )


def _name_faults(ground: Ground) -> Iterator[Fault]:
    plan = ground.plan
    yield from _twice((((*loc, "id"), r.id) for loc, _, r in _replicas(plan)), "replica id")
    taken = {"agent", "relay", *(f"{deployment.name}-router" for deployment in plan.deployments)}
    for loc, _, replica in _replicas(plan):
        if replica.id in taken:
            yield Fault((*loc, "id"), f"replica id {replica.id} is what another unit is called")
        if not is_name(replica.id):
            yield Fault(
                (*loc, "id"),
                f"replica id {replica.id!r} is no name: letters, digits, dot, dash, underscore",
            )
    names = [((*loc, "name"), d.name) for loc, d in _numbered(plan.deployments, ("deployments",))]
    yield from _twice(names, "deployment")
    for loc, name in names:
        if name not in ground.wishes:
            text = f"deployment {name} is not in the inventory"
            yield Fault(loc, text, suggest(name, list(ground.wishes)))
    for name in sorted(set(ground.wishes) - {name for _, name in names}):
        yield Fault(("deployments",), f"deployment {name} of the inventory is missing")


def _gpu_faults(ground: Ground) -> Iterator[Fault]:
    gpus = [
        ((*at, "uuid"), gpu.uuid)
        for loc, _, member in _members(ground.plan)
        for at, gpu in _numbered(member.gpus, (*loc, "gpus"))
    ]
    yield from _twice(gpus, "GPU")
    for loc, replica, member in _members(ground.plan):
        host = ground.hosts.get(member.host_name)
        known = {gpu.uuid: gpu for gpu in host.gpus} if host else {}
        for at, planned in _numbered(member.gpus, (*loc, "gpus")):
            gpu = known.get(planned.uuid)
            if host is not None and gpu is None:
                text = f"{replica.id}: {host.name} has no GPU {planned.uuid}"
                yield Fault((*at, "uuid"), text)
            elif gpu is not None and gpu.state is not GpuState.FREE:
                held = f", held by {gpu.holders}" if gpu.holders else ""
                where = f"GPU {gpu.index} of {member.host_name}"
                yield Fault((*at, "uuid"), f"{replica.id}: {where} is {gpu.state.value}{held}")


def _kind_faults(ground: Ground) -> Iterator[Fault]:
    known = {gpu.uuid: gpu for host in ground.hosts.values() for gpu in host.gpus}
    for loc, _, replica in _replicas(ground.plan):
        uuids = [gpu.uuid for member in replica.members for gpu in member.gpus]
        if len({kind_of(known[uuid]) for uuid in uuids if uuid in known}) > 1:
            yield Fault((*loc, "gpus"), f"{replica.id}: GPUs of different kinds in one engine")


def _port_faults(ground: Ground) -> Iterator[Fault]:
    """Ports of hosts that share an address must not meet."""
    plan = ground.plan
    address = {planned.name: port_space(planned.data_address) for planned in plan.hosts}
    uses: dict[tuple[str, int], list[tuple[Loc, str]]] = {}

    def use(loc: Loc, host_name: str, port: int, who: str) -> None:
        uses.setdefault((address.get(host_name, host_name), port), []).append((loc, who))

    for loc, planned in _numbered(plan.hosts, ("hosts",)):
        use((*loc, "relay_port"), planned.name, planned.relay_port, f"relay of {planned.name}")
    for loc, pool, replica in _replicas(plan):
        if (first := replica.side_channel_port) is not None:
            for port in range(first, first + pool.parallelism.num_gpus):
                at = (*loc, "side_channel_port")
                use(at, replica.host_name, port, f"side channel of {replica.id}")
        if replica.rendezvous_port is not None:
            at = (*loc, "rendezvous_port")
            use(at, replica.host_name, replica.rendezvous_port, f"rendezvous of {replica.id}")
    for loc, deployment in _numbered(plan.deployments, ("deployments",)):
        router = deployment.router
        if listened := whole(router.listen.rpartition(":")[2]):
            at = (*loc, "router", "listen")
            use(at, router.host_name, listened, f"router of {deployment.name}")
    for (where, number), users in sorted(uses.items()):
        if len(users) > 1:
            names = " and ".join(dict.fromkeys(who for _, who in users))
            yield Fault(users[-1][0], f"port {number} of {where} is given to {names}")


def _router_faults(ground: Ground, loc: Loc, planned: PlannedDeployment) -> Iterator[Fault]:
    router, wish = planned.router, ground.wishes.get(planned.name)
    if ground.policies is not None and router.policy not in ground.policies:
        text = f"no routing policy is called {shown(router.policy)}"
        yield Fault((*loc, "router", "policy"), text, suggest(router.policy, ground.policies))
    at = (*loc, "router", "listen")
    try:
        host, _ = split_listen(router.listen)
    except UsageError as error:
        yield Fault(at, error.message, error.hint or "")
        return
    if wish is None or is_loopback(host) or wish.router.allow_insecure_listen:
        return
    needs = (("api_keys", ground.inventory.api_keys), ("TLS", wish.router.tls_cert))
    if missing := [what for what, is_there in needs if not is_there]:
        text = f"{router.listen} is open to others without {' and '.join(missing)}"
        hint = "listen on 127.0.0.1, or give the inventory what is missing, or allow_insecure_listen: true"
        yield Fault(at, text, hint)


def _deployment_faults(ground: Ground, loc: Loc, planned: PlannedDeployment) -> Iterator[Fault]:
    wish = ground.wishes.get(planned.name)
    if wish is None:
        return
    if (planned.model, planned.engine_kind) != (wish.model, wish.engine.kind):
        key = "model" if planned.model != wish.model else "engine"
        yield Fault(
            (*loc, key),
            f"{planned.name}: the inventory asks for {wish.model} on {wish.engine.kind}, "
            f"the plan has {planned.model} on {planned.engine_kind}",
        )
        return
    roles = {pool.role for pool in planned.pools if pool.replicas}
    if not roles:
        yield Fault((*loc, "pools"), f"{planned.name}: no replica")
    if (Role.PREFILL in roles) != (Role.DECODE in roles):
        text = f"{planned.name}: prefill and decode replicas need each other"
        yield Fault((*loc, "pools"), text)
    need = need_of(wish)
    model = ground.models.get(planned.name)
    seqs = planned.max_num_seqs
    for at, pool in _numbered(planned.pools, (*loc, "pools")):
        step = pool.max_num_batched_tokens
        if step is not None and seqs is not None and step.value < seqs.value:
            yield Fault(
                (*at, "max_num_batched_tokens", "value"),
                f"{planned.name}: {step.value:g} tokens a step are fewer than its {seqs.value:g} sequences, "
                "of which each takes one",
            )
        for here, replica in _numbered(pool.replicas, (*at, "replicas")):
            yield from _replica_faults(ground, here, wish, pool, replica, need)
        # Of servers that run only their ranks matter: each is a worker to the router.
        asked = pool.parallelism if need is not Need.URL else Parallelism(dp=pool.parallelism.dp)
        if fault := unstartable(model, asked, is_cpu=need is Need.CPU_SLOTS):
            yield Fault((*at, "parallelism"), f"{planned.name}: {fault[0]}", fault[1])
        if need is Need.GPUS and model is not None:
            if not legal_tp(model, pool.parallelism.tp):
                yield Fault(
                    (*at, "parallelism", "tp"),
                    f"{planned.name}: tp {pool.parallelism.tp} does not divide the {model.num_heads} heads of {model.name}",
                )
            yield from _memory_faults(ground, (*at, "parallelism"), wish, pool, model)
            yield from _length_faults(ground, loc, planned, pool, model)


def _replica_faults(
    ground: Ground, loc: Loc, wish: DeploymentWish, pool: Pool, replica: Replica, need: Need
) -> Iterator[Fault]:
    yield from _spread_faults(loc, pool, replica, need)
    size = pool.parallelism.num_gpus // len(replica.members)
    for number, member in enumerate(replica.members):
        here = (*loc, "others", number - 1) if number else loc
        if need is Need.GPUS and len(member.gpus) != size:
            share = f" over {len(replica.members)} hosts" if replica.others else ""
            text = f"{replica.id}: {len(member.gpus)} GPUs for parallelism of {pool.parallelism.num_gpus}{share}"
            yield Fault((*here, "gpus"), text)
        if need is not Need.GPUS and member.gpus:
            text = f"{replica.id}: engine {wish.engine.kind} takes no GPUs"
            yield Fault((*here, "gpus"), text)
        host = ground.hosts.get(member.host_name)
        if need is Need.CPU_SLOTS and host is not None and not host.cpu_slots:
            yield Fault((*here, "host"), f"{replica.id}: {host.name} declares no cpu_slots")
    takes_port = pool.role is not Role.AGGREGATED and need is not Need.URL
    if takes_port and replica.side_channel_port is None:
        yield Fault(loc, f"{replica.id}: a {pool.role.value} engine needs a side_channel_port")


def _spread_faults(loc: Loc, pool: Pool, replica: Replica, need: Need) -> Iterator[Fault]:
    """What is wrong with an engine that is over several hosts."""
    if not replica.others:
        if replica.rendezvous_port is not None:
            text = f"{replica.id}: a rendezvous_port, and no others to meet there"
            yield Fault((*loc, "rendezvous_port"), text)
        return
    if replica.rendezvous_port is None:
        yield Fault(loc, f"{replica.id}: an engine over several hosts needs a rendezvous_port")
    names = [(loc, replica.host_name)]
    names += [((*at, "host"), m.host_name) for at, m in _numbered(replica.others, (*loc, "others"))]
    yield from _twice(names, f"{replica.id}: host")
    wished = PoolWish(pool.role, 1, pool.parallelism, nodes=len(replica.members))
    if fault := unspreadable(wished, is_url=need is Need.URL):
        yield Fault((*loc, "others"), f"{replica.id}: {fault[0]}", fault[1])


def _memory_faults(
    ground: Ground, loc: Loc, wish: DeploymentWish, pool: Pool, model: Model
) -> Iterator[Fault]:
    found = sheet_of(ground, wish, pool, model)
    if found is not None and rank_tokens(found, pool.parallelism) < needed_tokens(wish):
        yield Fault(
            loc,
            f"{wish.name}: {model.name} with tp {pool.parallelism.tp} leaves room for "
            f"{rank_tokens(found, pool.parallelism)} KV tokens per {_holder(pool)} ({format_bytes(max(0, found.kv_bytes))} per GPU), {needed_tokens(wish)} are needed",
        )


def _length_faults(
    ground: Ground, loc: Loc, planned: PlannedDeployment, pool: Pool, model: Model
) -> Iterator[Fault]:
    """Engines refuse to start when their longest request does not fit into their cache."""
    longest = planned.max_model_len_tokens
    found = sheet_of(ground, ground.wishes[planned.name], pool, model)
    if longest is None or found is None:
        return
    room = rank_tokens(found, pool.parallelism)
    if longest.value > room >= needed_tokens(ground.wishes[planned.name]):
        yield Fault(
            (*loc, "max_model_len_tokens", "value"),
            f"{planned.name}: a request of {int(longest.value)} tokens does not fit: a {pool.role.value} {_holder(pool)} with "
            f"tp {pool.parallelism.tp} has room for {room} KV tokens",
        )


def _holder(pool: Pool) -> str:
    """What a request lies in."""
    return "rank" if pool.parallelism.dp > 1 else "engine"


def sheet_of(
    ground: Ground, wish: DeploymentWish, pool: Pool, model: Model | None
) -> MemorySheet | None:
    """The memory of the pool's engines on their hosts as they are now; None where it is not known."""
    if model is None:
        return None
    need = need_of(wish)
    if need is Need.CPU_SLOTS:
        names = [m.host_name for r in pool.replicas for m in r.members]
        hosts = [ground.hosts[name] for name in names if name in ground.hosts]
        return cpu_room(wish, model, hosts, pool.parallelism) if hosts else None
    if need is not Need.GPUS:
        return None
    groups = replica_groups(pool, ground.hosts).values()
    kinds = [kind_of(gpu) for group in groups for gpu in group.gpus]
    if not kinds:
        return None
    smallest = min(kinds, key=lambda kind: (kind.memory_bytes, kind.name))
    batched = pool.max_num_batched_tokens
    tokens = None if batched is None else int(batched.value)
    return sheet(model, pool.parallelism, room_of(wish, smallest, ground.calibration, tokens))

"""All that checks may look at, gathered before they run, and small questions about it. Pure."""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from enum import StrEnum

from dynctl.agents.protocol import AgentStatus
from dynctl.core.audit import HostAudit
from dynctl.core.hardware import Gpu, Host, Nic, Topology
from dynctl.core.inventory import DeploymentWish, HostEntry, Inventory
from dynctl.core.machine import EngineSoftware
from dynctl.core.plan import Plan, PlannedDeployment, PlannedHost, Pool, Replica, Role


class Need(StrEnum):
    """Kinds of evidence a check cannot do without."""

    PLAN = "plan"
    AGENTS = "agents"
    AUDIT = "audit"
    GPUS = "gpus"
    RDMA = "rdma"
    PEERS = "peers"
    LINKS = "links"
    SSH = "ssh"


WHY_NOT = {
    Need.PLAN: "there is no plan yet",
    Need.AGENTS: "no agent was asked",
    Need.AUDIT: "no host could be looked at closely",
    Need.GPUS: "there are no GPUs",
    Need.RDMA: "there are no RDMA devices",
    Need.PEERS: "there is one host only",
    Need.LINKS: "no link was measured: dynctl linktest",
    Need.SSH: "no host is reached by SSH",
}


@dataclass(frozen=True, slots=True)
class LocalFile:
    """A file of the operator with its mode."""

    path: str
    mode: int
    kind: str
    """`inventory`, `secret` (a file the inventory takes one from), `ssh key` or `state`."""
    has_secret: bool = True
    """Holds or may hold a secret in clear text."""


@dataclass(frozen=True, slots=True)
class SshDifference:
    """A setting that OpenSSH's client would use otherwise than dynctl does."""

    host_name: str
    keyword: str
    ours: str
    theirs: str
    argv: tuple[str, ...]
    """How ssh was asked."""


@dataclass(frozen=True, slots=True)
class CacheFinding:
    """What a router says keeps hits away on one engine, or is wrong with itself."""

    host_name: str
    """Where the router runs."""
    router: str
    engine: str
    """Empty: the router itself."""
    cause: str
    text: str
    hint: str


@dataclass(frozen=True, slots=True)
class Evidence:
    """Facts about a cluster, its plan and what runs; None and absent keys mean not known."""

    inventory: Inventory
    topology: Topology
    now_unix_s: float
    plan: Plan | None = None
    audits: Mapping[str, HostAudit] = field(default_factory=dict)
    agents: Mapping[str, AgentStatus] | None = None
    """Status by host of the agents that answered; None: nobody was asked."""
    silent_agents: Mapping[str, str] = field(default_factory=dict)
    """Reachable hosts whose agent does not answer, with the cause."""
    cache_findings: tuple[CacheFinding, ...] = ()
    """Of all routers that answered."""
    bundles: Mapping[str, str] = field(default_factory=dict)
    """Digest of the bundle this dynctl would put on a host."""
    roots: Mapping[str, str] = field(default_factory=dict)
    """The directory of this cluster on each host."""
    identities: Mapping[str, str | None] = field(default_factory=dict)
    """Host key fingerprint by host."""
    local_files: tuple[LocalFile, ...] = ()
    ssh_differences: tuple[SshDifference, ...] = ()
    local_packages: Mapping[str, str] = field(default_factory=dict)
    """Versions of packages on the operator's machine."""
    python: str = "python3"
    """The interpreter that runs dynctl here."""
    state_dir: str = ".dynctl"
    """The operator's own directory for this cluster."""

    def has(self, need: Need) -> bool:
        """Tell whether there is evidence of a kind."""
        hosts = self.topology.hosts
        answers = {
            Need.PLAN: self.plan is not None,
            Need.AGENTS: self.agents is not None,
            Need.AUDIT: bool(self.audits),
            Need.GPUS: any(
                host.gpus or any(w.code.startswith("gpu-") for w in host.warnings) for host in hosts
            ),
            Need.RDMA: any(nic.kind != "ethernet" for host in hosts for nic in host.nics),
            Need.PEERS: len(hosts) > 1,
            Need.LINKS: bool(self.topology.links),
            Need.SSH: any(not entry.is_local for entry in self.inventory.hosts),
        }
        return answers[need]

    def audited(self) -> Iterator[tuple[Host, HostAudit]]:
        """Hosts that were looked at closely."""
        for host in self.topology.hosts:
            if host.name in self.audits:
                yield host, self.audits[host.name]

    def host(self, name: str) -> Host | None:
        """Return a host that was described."""
        return next((host for host in self.topology.hosts if host.name == name), None)

    def gpus(self) -> Iterator[tuple[Host, Gpu]]:
        """Every GPU that is really there."""
        for host in self.topology.hosts:
            for gpu in host.gpus:
                if not gpu.is_simulated:
                    yield host, gpu

    def replicas(self) -> tuple[tuple[PlannedDeployment, Pool, Replica], ...]:
        """The plan's replicas; none without a plan."""
        return self.plan.replicas() if self.plan else ()

    def replicas_on(self, host_name: str) -> list[Replica]:
        """The plan's replicas on one host."""
        return [
            replica
            for _, _, replica in self.replicas()
            if any(member.host_name == host_name for member in replica.members)
        ]

    def uses_gpu(self, gpu: Gpu) -> list[str]:
        """Ids of the planned replicas on a GPU."""
        return [
            replica.member_id(rank)
            for _, _, replica in self.replicas()
            for rank, member in enumerate(replica.members)
            if any(planned.uuid == gpu.uuid for planned in member.gpus)
        ]

    def uses_nic(self, host_name: str, nic: Nic) -> bool:
        """Tell whether a planned replica moves KV blocks over an RDMA port; a device without a port is its first."""
        named = {tuple(name.split(":")) for r in self.replicas_on(host_name) for name in r.nics}
        port = nic.port or 1
        return (nic.device, str(port)) in named or (port == 1 and (nic.device,) in named)

    def is_split(self, host_name: str) -> bool:
        """Tell whether a host is planned to hand real KV blocks to or take them from another engine."""
        return any(
            replica.role is not Role.AGGREGATED and planned.engine_kind != "sim"
            for planned, _, replica in self.replicas()
            if replica.host_name == host_name
        )

    def is_spread(self, host_name: str) -> bool:
        """Tell whether a host is planned to run a part of a real engine that is over several hosts."""
        return any(
            len(replica.members) > 1 and planned.engine_kind != "sim"
            for planned, _, replica in self.replicas()
            if any(member.host_name == host_name for member in replica.members)
        )

    def transfers_between_hosts(self) -> list[tuple[str, str]]:
        """Pairs of hosts, prefill first, that KV blocks travel between."""
        pairs = set()
        for deployment in self.plan.deployments if self.plan else ():
            by_role: dict[Role, set[str]] = {}
            for pool in deployment.pools:
                by_role.setdefault(pool.role, set()).update(r.host_name for r in pool.replicas)
            pairs |= {
                (a, b)
                for a in by_role.get(Role.PREFILL, ())
                for b in by_role.get(Role.DECODE, ())
                if a != b
            }
        return sorted(pairs)

    def planned_host(self, name: str) -> PlannedHost | None:
        """Return a host of the plan."""
        return next((h for h in self.plan.hosts if h.name == name), None) if self.plan else None

    def data_address(self, host: Host) -> str:
        """Where other hosts reach this one: as planned, else as discovered."""
        planned = self.planned_host(host.name)
        return planned.data_address if planned else host.data_address

    def address_of(self, host_name: str) -> str:
        """The data address of a host; one that could not be described is reached by its name."""
        host = self.host(host_name)
        return self.data_address(host) if host else host_name

    def entry(self, host: Host) -> HostEntry:
        """Return the host's lines of the inventory."""
        return self.inventory.host(host.name)

    def wish(self, name: str) -> DeploymentWish | None:
        """Return what the inventory says of a deployment."""
        return next((d for d in self.inventory.deployments if d.name == name), None)

    def engines(self) -> Iterator[tuple[Host, DeploymentWish, EngineSoftware]]:
        """What the engines of deployments would run on, on the hosts that run them or may run them."""
        for host in self.topology.hosts:
            for wish in self.inventory.deployments:
                if wish.engine.kind != "vllm" or not self.may_run(host, wish):
                    continue
                for software in host.software.engines:
                    if software.python == wish.engine.python:
                        yield host, wish, software

    def may_run(self, host: Host, wish: DeploymentWish) -> bool:
        """Tell whether a host runs a deployment's engines by the plan, or could without one."""
        if self.plan is None:
            return bool(host.gpus) or host.cpu_slots > 0
        return any(
            planned.name == wish.name and member.host_name == host.name
            for planned, _, replica in self.replicas()
            for member in replica.members
        )

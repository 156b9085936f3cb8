"""Which ports the plan gives to what, and who listens on them. Pure."""

from dataclasses import dataclass

from dynctl.checks.evidence import Evidence
from dynctl.core.addresses import is_any, is_loopback
from dynctl.core.audit import Listener
from dynctl.core.hardware import Host, Nic
from dynctl.core.inventory import DeploymentWish
from dynctl.core.plan import Plan
from dynctl.router.config import split_listen

UCX_PORTS = range(30000, 32700)
"""Where NIXL's TCP transport of our engines listens; see `agents.engines.vllm.UCX_TCP_PORTS`."""


@dataclass(frozen=True, slots=True)
class PlannedPort:
    """One TCP port that something of ours shall listen on."""

    host_name: str
    address: str
    port: int
    what: str
    """`relay`, `router of chat`, `side channel of chat-prefill-0`."""


def planned_ports(plan: Plan | None) -> list[PlannedPort]:
    """Every port of a plan, in plan order; none without a plan."""
    if plan is None:
        return []
    used = {m.host_name for _, _, replica in plan.replicas() for m in replica.members}
    addresses = {host.name: host.data_address for host in plan.hosts}
    ports = [
        PlannedPort(host.name, host.data_address, host.relay_port, "relay")
        for host in plan.hosts
        if host.name in used
    ]
    for deployment in plan.deployments:
        address, port = split_listen(deployment.router.listen)
        what = f"router of {deployment.name}"
        ports.append(PlannedPort(deployment.router.host_name, address, port, what))
    for _, pool, replica in plan.replicas():
        if replica.side_channel_port is not None:
            ports += [
                PlannedPort(
                    replica.host_name,
                    addresses[replica.host_name],
                    replica.side_channel_port + rank,
                    f"side channel of {replica.id}",
                )
                for rank in range(pool.parallelism.dp)
            ]
        if replica.rendezvous_port is not None:
            address = addresses[replica.host_name]
            what = f"rendezvous of {replica.id}"
            ports.append(PlannedPort(replica.host_name, address, replica.rendezvous_port, what))
    return [port for port in ports if port.port]


def entrance(evidence: Evidence, wish: DeploymentWish) -> tuple[str | None, str]:
    """The host a router is planned on, and HOST:PORT by which that host itself connects to it."""
    planned = evidence.plan.deployments if evidence.plan else ()
    host_name = next((d.router.host_name for d in planned if d.name == wish.name), None)
    address, port = split_listen(wish.router.listen)
    address = "127.0.0.1" if is_any(address) else address
    return host_name, f"[{address}]:{port}" if ":" in address else f"{address}:{port}"


def waits_for_manager(host: Host, nic: Nic) -> bool:
    """Tell whether an InfiniBand port has link and waits for a subnet manager."""
    if nic.state != "down":
        return False
    said = {w.text.partition(" ")[0] for w in host.warnings if w.code == "port-init"}
    return nic.name in said or nic.physical in ("linkup", "link_up")


def is_open(listener: Listener) -> bool:
    """Tell whether other machines may reach a listener."""
    return not is_loopback(listener.address)


def is_planned(evidence: Evidence, host_name: str, listener: Listener) -> bool:
    """Tell whether the plan gives this port to something on the host, or it is NIXL's own or one between parts of an engine."""
    ports = {p.port for p in planned_ports(evidence.plan) if p.host_name == host_name}
    is_transfer = listener.port in UCX_PORTS and evidence.is_split(host_name)
    # Those are given by the kernel, on the data address alone.
    is_between = evidence.is_spread(host_name) and (
        listener.address == evidence.address_of(host_name)
    )
    return listener.port in ports or is_transfer or is_between

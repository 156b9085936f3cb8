"""`up` in three stages: compare, check, change. IO: ssh, HTTP, files."""

from dataclasses import dataclass

from dynctl.agents.client import AgentClient
from dynctl.agents.protocol import MEMBER_CERTIFICATE, AgentStatus
from dynctl.core.hardware import Topology
from dynctl.core.inventory import Inventory
from dynctl.core.plan import Plan
from dynctl.deploy.apply import Work, apply, wait_ready
from dynctl.deploy.diff import diff
from dynctl.deploy.goals import (
    copied_paths,
    make_goals,
    secret_paths,
    server_tls_paths,
    tokenizer_paths,
)
from dynctl.deploy.lock import hold_locks
from dynctl.deploy.observe import observe, seats_of
from dynctl.deploy.preflight import Problem, preflight
from dynctl.deploy.reach import reach_agents
from dynctl.deploy.steps import HostState, Step, Tell
from dynctl.errors import DeployError, ExitCode
from dynctl.inventory.duplicates import refuse_duplicates
from dynctl.remote.fleet import Fleet
from dynctl.remote.outcomes import raise_any_failure

FILE_PATHS = (
    "tls/ca.crt",
    *(
        f"tls/{name}.{end}"
        for name in ("host", "router", MEMBER_CERTIFICATE)
        for end in ("crt", "key")
    ),
)


@dataclass(frozen=True, slots=True)
class Comparison:
    """What a plan asks for against what is there; nothing was changed to find out."""

    work: Work
    steps: tuple[Step, ...]

    @property
    def num_disruptive(self) -> int:
        """Steps that stop something that runs."""
        return sum(step.is_disruptive for step in self.steps)


def refuse_missing(plan: Plan, topology: Topology) -> None:
    """End when hosts of the plan could not be described: why counts, not that the plan does not fit then.

    Raises:
        DeployError: exit 7 when trust is the cause, else 4; names each host and why.
    """
    missing = [f for f in topology.failures if f.name in {host.name for host in plan.hosts}]
    if not missing:
        return
    causes = "\n  ".join(f"{f.name}: {f.cause.removeprefix(f.name + ': ')}" for f in missing)
    raise DeployError(
        f"hosts of the plan cannot be used, nothing was changed:\n  {causes}",
        "correct it, or plan again without them: dynctl plan, then dynctl up",
        code=ExitCode.TRUST
        if any(f.exit_code == ExitCode.TRUST for f in missing)
        else ExitCode.REFUSED,
    )


async def compare(
    inventory: Inventory, plan: Plan, topology: Topology, fleet: Fleet, tell: Tell
) -> Comparison:
    """Find out what `up` would do.

    Raises:
        DynctlError: names every host that could not be looked at; exits with the worst of their codes.
    """
    refuse_duplicates(
        inventory, {h.name: (h.machine_id, fleet.remote(h.name).identity) for h in topology.hosts}
    )
    seats = seats_of(inventory, fleet, topology.hosts)
    sources, copies = tokenizer_paths(plan, inventory), copied_paths(plan, inventory)
    managed = [*FILE_PATHS, *secret_paths(inventory), *server_tls_paths(inventory)]
    files = {name: [*managed, *sources.get(name, ()), *copies.get(name, ())] for name in seats}
    found = await observe(inventory, fleet, seats, files)
    raise_any_failure(found)
    states = {name: state for name, state in found.items() if isinstance(state, HostState)}
    digests = {name: dict(states[name].files) for name in sources}
    goals = make_goals(plan, inventory, topology, seats, digests)
    return Comparison(Work(inventory, fleet, seats, goals, states, tell), diff(goals.hosts, states))


async def check(comparison: Comparison, topology: Topology) -> list[Problem]:
    """Look for what would stop the steps, on all hosts at once."""
    work = comparison.work
    return await preflight(work.fleet, work.goals.hosts, work.states, work.seats, topology)


async def change(comparison: Comparison) -> dict[str, AgentStatus]:
    """Take the steps, every host locked, and wait until all is ready.

    Raises:
        DynctlError: exit 5 when somebody else holds a lock; a host's own error when its lock could not be asked; 3 on partial failure, 6 when a unit stays unready.
    """
    work = comparison.work
    names = {*work.goals.hosts, *(step.host_name for step in comparison.steps)}
    seats = {name: work.seats[name] for name in names}
    async with hold_locks(work.fleet, seats, "dynctl up") as held:
        raise_any_failure(held)  # nothing was changed, and nothing may be without all locks
        # The locks gave the same number on every host, so that each agent gets its own host's.
        [fence] = {fence for fence in held.values() if isinstance(fence, int)}
        return await apply(work, comparison.steps, fence)


async def confirm_ready(comparison: Comparison) -> dict[str, AgentStatus]:
    """With nothing to change, make sure that what should run is ready.

    Raises:
        DeployError: exit 6 when it does not become ready.
    """
    work = comparison.work
    async with reach_agents(work.inventory, work.fleet, sorted(work.goals.hosts)) as clients:
        raise_any_failure(clients)
        ready = {
            name: client for name, client in clients.items() if isinstance(client, AgentClient)
        }
        return await wait_ready(ready, work.goals, work.tell)

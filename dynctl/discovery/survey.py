"""All that a plan is made from, in one call: the hosts and the models on them. IO: hosts, through a Fleet."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from dynctl import registry
from dynctl.core.hardware import Topology
from dynctl.core.inventory import Inventory
from dynctl.core.model import Model
from dynctl.core.plan import Plan
from dynctl.discovery.discover import Fan, discover
from dynctl.discovery.models import read_models
from dynctl.errors import DynctlError, ExitCode
from dynctl.planner.calibration import Calibration
from dynctl.planner.check import check_plan
from dynctl.planner.search import make_plan


@dataclass(frozen=True, slots=True)
class Survey:
    """The cluster as it is now, against what is wished."""

    inventory: Inventory
    topology: Topology
    models: Mapping[str, Model | None]
    configs: Mapping[str, bytes] = field(default_factory=dict)
    """The models' config.json by deployment, as they are."""

    def plan(self, calibration: Calibration | None = None) -> Plan:
        """Make a plan; see `make_plan`."""
        return make_plan(self.topology, self.inventory, self.models, calibration=calibration)

    def check(self, plan: Plan, calibration: Calibration | None = None) -> Plan:
        """Check a plan that was made before and estimate it anew; see `check_plan`."""
        policies = registry.names("dynctl.router.policies")
        return check_plan(plan, self.topology, self.inventory, self.models, policies, calibration)


async def survey(
    inventory: Inventory,
    fleet: Fan,
    own_pids: Mapping[str, frozenset[int]] | None = None,
) -> Survey:
    """Describe every host of the inventory and read the models from those that may run them.

    Raises:
        DynctlError: when no host can be described (exit 4, or 7 on trust), or a model cannot be read.
    """
    topology = await discover(inventory.hosts, fleet, own_pids, engine_pythons(inventory))
    if not topology.hosts:
        raise_unreachable(topology)
    configs: dict[str, bytes] = {}
    models = await read_models(inventory, topology, fleet, configs)
    return Survey(inventory, topology, models, configs)


def engine_pythons(inventory: Inventory) -> tuple[str, ...]:
    """The engines' own interpreters, whose packages are worth knowing."""
    wanted = (wish.engine.python for wish in inventory.deployments)
    return tuple(dict.fromkeys(python for python in wanted if python))


def raise_unreachable(topology: Topology) -> None:
    """End with every host's cause, when none could be described.

    Raises:
        DynctlError: exit 7 when a host key or certificate is the cause, else 4.
    """
    codes = [failure.exit_code for failure in topology.failures]
    code = ExitCode.TRUST if ExitCode.TRUST in codes else ExitCode.REFUSED
    raise DynctlError(
        "no host could be described:\n" + causes(topology),
        next((f.hint for f in topology.failures if f.hint), None),
        code=code,
    )


def raise_incomplete(topology: Topology, what: str) -> None:
    """End a command that `what` could not be done to some hosts for; nothing when there are none.

    Raises:
        DynctlError: exit 7 when trust is the cause everywhere, else 3; as `raise_unreachable` when no host is left.
    """
    if not topology.failures:
        return
    if not topology.hosts:
        raise_unreachable(topology)
    total = len(topology.hosts) + len(topology.failures)
    is_trust = all(failure.exit_code == ExitCode.TRUST for failure in topology.failures)
    raise DynctlError(
        f"{len(topology.failures)} of {total} hosts could not be {what}:\n{causes(topology)}",
        next((f.hint for f in topology.failures if f.hint), None),
        code=ExitCode.TRUST if is_trust else ExitCode.PARTIAL,
    )


def causes(topology: Topology) -> str:
    """One line per failed host, the host's name first, once."""
    lines: Sequence[str] = [
        f"  {f.name}: {f.cause.removeprefix(f.name + ': ')}" for f in topology.failures
    ]
    return "\n".join(lines)

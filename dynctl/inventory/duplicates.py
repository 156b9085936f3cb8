"""Two entries that turn out to be one machine, seen once hosts have been asked. Pure."""

from collections.abc import Mapping

from dynctl.core.inventory import Inventory
from dynctl.errors import InventoryError

Identity = tuple[str, str | None]
"""Machine id, and the host key's fingerprint (`Remote.identity`): cloned images share the first, not the second."""


def same_machines(identities: Mapping[str, Identity]) -> tuple[tuple[str, ...], ...]:
    """Return the groups of host names that are one machine; hosts without a machine id are in none."""
    groups: dict[Identity, list[str]] = {}
    for name, identity in identities.items():
        if identity[0]:
            groups.setdefault(identity, []).append(name)
    return tuple(tuple(names) for names in groups.values() if len(names) > 1)


def refuse_duplicates(inventory: Inventory, identities: Mapping[str, Identity]) -> None:
    """Refuse an inventory that lists a machine twice, by name, address or port.

    Raises:
        InventoryError: naming the entries, and the machine id they share.
    """
    found = same_machines(identities)
    if found:
        lines = [f"{' and '.join(names)} (machine id {identities[names[0]][0]})" for names in found]
        raise InventoryError(
            f"{inventory.path} lists a machine twice: {'; '.join(lines)}",
            "keep one entry for each machine; its GPUs would be planned twice",
        )

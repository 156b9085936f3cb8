"""inventory.yaml to `Inventory`: the one entrance. IO: files, the environment."""

from dynctl.inventory.local import local_inventory

__all__ = ["local_inventory"]

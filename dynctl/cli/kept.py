"""What is kept beside an inventory: the plan, and what was measured of links. IO: files."""

from pathlib import Path

from dynctl.core.inventory import Inventory
from dynctl.core.links import LinkBook
from dynctl.core.plan import Plan
from dynctl.errors import InventoryError


def plan_path(inventory: Inventory) -> Path:
    """Where a cluster's plan lies: beside the inventory, or in the state directory when there is no file."""
    path = Path(inventory.path)
    if path.suffix:
        return path.with_name("plan.yaml")
    return Path(".dynctl") / inventory.cluster / "plan.yaml"


def plan_text(path: Path) -> str | None:
    """Read a plan as it is written; None when there is none.

    Raises:
        InventoryError: when it cannot be read.
    """
    try:
        return path.read_text(encoding="utf-8")
    except FileNotFoundError:
        return None
    except (OSError, UnicodeDecodeError) as error:
        raise InventoryError(f"{path}: {error}", "make a new one: dynctl plan") from error


def read_plan(inventory: Inventory) -> Plan | None:
    """Read the plan that lies by the inventory; None when none was made.

    Raises:
        InventoryError: when it cannot be read.
    """
    from dynctl.planner.text import from_yaml

    path = plan_path(inventory)
    text = plan_text(path)
    return None if text is None else from_yaml(text, str(path))


def book_path(inventory: Inventory) -> Path:
    """Where the measurements of a cluster are kept."""
    from dynctl.deploy.places import state_dir

    return state_dir(inventory) / "links.json"


def read_book(inventory: Inventory) -> LinkBook:
    """Read the measurements that are kept; an empty book when nothing was ever measured.

    Raises:
        DynctlError: when the file is damaged.
    """
    from dynctl import store

    path = book_path(inventory)
    return store.load(path, LinkBook) if path.exists() else LinkBook()

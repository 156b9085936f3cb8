"""What is kept: the plan and what was measured of links beside an inventory, calibrations where we stand. IO: files."""

from pathlib import Path
from typing import TYPE_CHECKING

from dynctl.core.inventory import Inventory
from dynctl.core.links import LinkBook
from dynctl.core.plan import Plan
from dynctl.errors import DynctlError, InventoryError
from dynctl.files import reason

if TYPE_CHECKING:
    from dynctl.planner.calibration import Calibration

CALIBRATION_PATH = Path(".dynctl") / "calibration.json"
"""What `dynctl calibrate` found; it holds for engines and GPUs, whatever cluster they are in."""


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
    except OSError as error:
        raise InventoryError(
            f"{path} cannot be read: {reason(error)}", "make a new one: dynctl plan"
        ) from error
    except UnicodeDecodeError as error:
        raise InventoryError(f"{path} is no UTF-8 text", "make a new one: dynctl plan") from error


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


def read_calibration() -> "Calibration":
    """The shipped calibration with what `dynctl calibrate` has kept put over it.

    Raises:
        DynctlError: when what is kept cannot be read, or is damaged.
    """
    from dynctl.planner.calibration import shipped, with_own

    try:
        text = CALIBRATION_PATH.read_text("utf-8")
    except FileNotFoundError:
        return shipped()
    except (OSError, UnicodeDecodeError) as error:
        why = reason(error) if isinstance(error, OSError) else "it is no UTF-8 text"
        raise DynctlError(
            f"{CALIBRATION_PATH} cannot be read: {why}", "calibrate again, or remove it"
        ) from error
    return with_own(shipped(), text, str(CALIBRATION_PATH))

"""What is kept beside an inventory, and what is said when it cannot be read."""

import pytest

from dynctl.cli.kept import plan_path, plan_text, read_plan
from dynctl.core.inventory import Inventory
from dynctl.errors import InventoryError


def test_the_plan_lies_beside_the_inventory_or_with_the_clusters_state(tmp_path):
    inventory = Inventory("lab", (), path=str(tmp_path / "inventory.yaml"))

    assert plan_path(inventory) == tmp_path / "plan.yaml"
    assert plan_path(Inventory("lab", (), path="")).parts == (".dynctl", "lab", "plan.yaml")
    assert read_plan(inventory) is None


@pytest.mark.parametrize("content", [b"\xff\xfe\x00", None])
def test_a_plan_that_cannot_be_read_is_named_with_the_next_step(tmp_path, content):
    path = tmp_path / "plan.yaml"
    path.mkdir() if content is None else path.write_bytes(content)

    with pytest.raises(InventoryError, match=r"plan\.yaml") as refused:
        plan_text(path)

    assert refused.value.hint == "make a new one: dynctl plan"

"""Every plug-in can be loaded by its file's name."""

import pytest

from dynctl import registry
from dynctl.errors import DynctlError

SEAMS = [
    ("dynctl.discovery.probes", "PROBE"),
    ("dynctl.agents.engines", "ENGINE"),
    ("dynctl.router.policies", "POLICY"),
    ("dynctl.tui.panels", "rows"),
]


@pytest.mark.parametrize(("package", "attribute"), SEAMS)
def test_every_plug_in_of_a_seam_loads(package, attribute):
    found = registry.load_all(package, attribute)

    assert found
    assert all(plug_in is not None for plug_in in found.values())


def test_an_unknown_plug_in_is_refused_with_the_known_names():
    with pytest.raises(DynctlError) as caught:
        registry.load("dynctl.router.policies", "nope", "POLICY")

    assert "kv" in caught.value.hint

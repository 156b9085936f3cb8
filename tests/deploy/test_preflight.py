"""What is looked for on a host before its units are started."""

from dataclasses import replace

from dynctl.deploy.preflight import _paths
from dynctl.deploy.slices import make_slices


def test_a_tokenizer_that_is_named_must_be_on_the_routers_host(plan, inventory, ground):
    wish = replace(inventory.deployments[0], tokenizer="/models/other")
    slices = make_slices(plan, replace(inventory, deployments=(wish,)), ground)
    wanted = ("/models/other/tokenizer.json", "the router's")

    assert _paths(slices["a"], {"chat-router"}, "/r/a") == [wanted]
    assert _paths(slices["b"], {"chat-router"}, "/r/b") == []
    assert _paths(slices["a"], set(), "/r/a") == []


def test_a_tokenizer_that_up_brings_along_is_not_looked_for(plan, inventory, ground):
    slices = make_slices(plan, inventory, ground)

    assert _paths(slices["a"], {"chat-router"}, "/r/a") == []

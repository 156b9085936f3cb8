from dataclasses import replace

import pytest

from dynctl.core.hardware import HostFailure, Topology
from dynctl.core.inventory import EngineSpec
from dynctl.core.plan import RouterPlan
from dynctl.deploy.goals import copied_paths, tokenizer_paths
from dynctl.deploy.slices import TOKENIZER_FILES
from dynctl.deploy.up import refuse_missing
from dynctl.errors import DeployError, ExitCode


def test_the_tokenizers_of_every_router_on_a_host_are_looked_at(plan, inventory):
    (planned,), (wish,) = plan.deployments, inventory.deployments
    router = RouterPlan("c", "127.0.0.1:8000", "kv")
    names = ("chat", "code")
    plan = replace(
        plan,
        deployments=tuple(
            replace(planned, name=name, model=f"/models/{name}", router=router) for name in names
        ),
    )
    wishes = tuple(
        replace(wish, name=name, model=f"/models/{name}", engine=EngineSpec(kind="vllm"))
        for name in names
    )
    inventory = replace(inventory, deployments=wishes)

    wanted = {f"tokenizers/{name}/{file}" for name in names for file in TOKENIZER_FILES}
    assert {host: set(paths) for host, paths in copied_paths(plan, inventory).items()} == {
        "c": wanted
    }
    assert set(tokenizer_paths(plan, inventory)) == {"a"}


def test_a_router_beside_an_engine_needs_no_copy_of_its_tokenizer(plan, inventory):
    (wish,) = inventory.deployments
    inventory = replace(inventory, deployments=(replace(wish, engine=EngineSpec(kind="vllm")),))

    assert copied_paths(plan, inventory) == {}


def test_hosts_of_the_plan_that_cannot_be_reached_are_named_with_why(plan):
    lost = HostFailure("a", "a: no answer from 10.0.0.1 port 22", ExitCode.REFUSED)
    beside = HostFailure("z", "z: refused", ExitCode.TRUST)

    refuse_missing(plan, Topology((), failures=(beside,)))
    with pytest.raises(DeployError) as caught:
        refuse_missing(plan, Topology((), failures=(lost, beside)))

    assert caught.value.message.endswith(
        "nothing was changed:\n  a: no answer from 10.0.0.1 port 22"
    )
    assert caught.value.exit_code is ExitCode.REFUSED
    with pytest.raises(DeployError) as caught:
        refuse_missing(plan, Topology((), failures=(replace(lost, exit_code=ExitCode.TRUST),)))
    assert caught.value.exit_code is ExitCode.TRUST

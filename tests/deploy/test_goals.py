from dataclasses import replace

from dynctl.core.inventory import EngineSpec
from dynctl.core.plan import RouterPlan
from dynctl.deploy.goals import copied_paths, tokenizer_paths
from dynctl.deploy.slices import TOKENIZER_FILES


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

"""A small cluster: two GPU-less hosts, one prefill and two decode engines, a router."""

import pytest

from dynctl.core.inventory import DeploymentWish, EngineSpec, HostEntry, Inventory
from dynctl.core.plan import (
    Parallelism,
    Plan,
    PlannedDeployment,
    PlannedHost,
    Pool,
    Replica,
    Role,
    RouterPlan,
)
from dynctl.deploy.places import Place
from dynctl.deploy.slices import Ground


@pytest.fixture
def inventory(tmp_path):
    hosts = (HostEntry("a", "a.example"), HostEntry("b", "b.example"))
    wish = DeploymentWish(name="chat", model="sim", engine=EngineSpec(kind="sim"))
    return Inventory("prod", hosts, (wish,), path=str(tmp_path / "inventory.yaml"))


@pytest.fixture
def plan():
    prefill = Pool(
        Role.PREFILL,
        Parallelism(),
        (Replica("chat-prefill-0", Role.PREFILL, "a", side_channel_port=18801),),
    )
    decode = Pool(
        Role.DECODE,
        Parallelism(),
        (
            Replica("chat-decode-0", Role.DECODE, "a", side_channel_port=18802),
            Replica("chat-decode-1", Role.DECODE, "b", side_channel_port=18801),
        ),
    )
    chat = PlannedDeployment(
        "chat", "sim", "sim", (prefill, decode), RouterPlan("a", "127.0.0.1:8000", "kv")
    )
    hosts = (PlannedHost("a", "m1", "10.0.0.1", 18800), PlannedHost("b", "m2", "10.0.0.2", 18800))
    return Plan("prod", hosts, (chat,), digest="d1")


@pytest.fixture
def ground():
    return Ground(
        {name: Place(name, f"/r/{name}") for name in "ab"}, {"a": "bundle1", "b": "bundle1"}
    )

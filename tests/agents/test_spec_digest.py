"""Specifications by their content: what runs since before an upgrade is known again after it."""

from dataclasses import replace

from dynctl.agents.protocol import EngineWish, RelayWish, RouterUnit, spec_digest

_OLD = EngineWish(
    id="chat-decode-0",
    deployment="chat",
    role="decode",
    kind="sim",
    model="sim",
    env=(("A", "1"),),
    args=(("seed", "1"),),
    kv_transfer=True,
    side_channel_port=5600,
)


def test_digests_are_those_of_agents_that_run_already():
    # Computed by the code of November 29, before engines had `ep`: any other digest restarts every engine at an upgrade.
    assert spec_digest(_OLD) == "ea7fa294cb80c8c3"
    assert spec_digest(RelayWish("127.0.0.1", 7000)) == "2ba3fd0b55e6091e"
    router = RouterUnit("r", "d", {"b": 1, "a": {"z": 1.5, "c": [1]}}, "127.0.0.1:8000")
    assert spec_digest(router) == "198cf75bb49eaadf"


def test_a_later_field_that_is_used_changes_the_digest():
    assert spec_digest(replace(_OLD, ep=2)) != spec_digest(_OLD)
    assert spec_digest(replace(_OLD, ep=2)) != spec_digest(replace(_OLD, ep=4))

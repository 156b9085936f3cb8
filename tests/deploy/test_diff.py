import dataclasses

from dynctl.agents.protocol import RELAY_ID, AgentStatus, spec_digest
from dynctl.core.deployment import EngineState, UnitStatus
from dynctl.deploy.diff import diff, undone, unit_changes
from dynctl.deploy.slices import make_slices
from dynctl.deploy.steps import HostGoal, HostState, StepKind


def goal(slice_):
    return HostGoal(slice_, "bundle1", "/r/x/bundles/bundle1", "none", (("tls/ca.crt", "c1"),))


def as_wished(slice_, **changes):
    """The state after every step was taken."""
    units = [
        UnitStatus(
            e.id, "engine", EngineState.READY, spec_digest=spec_digest(e), bundle=slice_.bundle
        )
        for e in slice_.engines
    ]
    units += [
        UnitStatus(
            r.id,
            "router",
            EngineState.READY,
            spec_digest=spec_digest(r),
            url=f"http://{r.listen}",
            bundle=slice_.bundle,
        )
        for r in slice_.routers
    ]
    if slice_.relay:
        units.append(
            UnitStatus(
                RELAY_ID,
                "relay",
                EngineState.READY,
                spec_digest=spec_digest(slice_.relay),
                bundle=slice_.bundle,
            )
        )
    status = AgentStatus(
        "0", "prod", slice_.host_name, 1, 1, "d1", slice_.bundle, "boot", 1, 0.0, tuple(units)
    )
    launch = (("scope", "none"), ("bundle_path", "/r/x/bundles/bundle1"))
    state = HostState(slice_.host_name, ("bundle1",), (("tls/ca.crt", "c1"),), launch, status)
    return dataclasses.replace(state, **changes)


def test_a_drained_engine_is_left_down_and_only_told_of_a_changed_wish(plan, inventory, ground):
    slice_ = make_slices(plan, inventory, ground)["a"]
    state = as_wished(slice_)

    def held(**change):
        units = tuple(
            dataclasses.replace(u, state=EngineState.STOPPED, is_held=True, **change)
            if u.kind == "engine"
            else u
            for u in state.status.units
        )
        return dataclasses.replace(state, status=dataclasses.replace(state.status, units=units))

    assert unit_changes(slice_, held()) == []
    changed = held(spec_digest="other")
    assert ("~chat-decode-0 (changed; stays drained)", False) in unit_changes(slice_, changed)
    assert undone(slice_, changed) == []


def test_where_only_the_agent_died_units_are_said_to_be_taken_over(plan, inventory, ground):
    slice_ = make_slices(plan, inventory, ground)["b"]
    steps = diff({"b": goal(slice_)}, {"b": as_wished(slice_, status=None)})

    assert [(s.kind, s.is_disruptive) for s in steps] == [
        (StepKind.AGENT, False),
        (StepKind.SLICE, False),
    ]
    assert steps[-1].detail == "+chat-decode-1, +relay; what still runs of it is taken over"


def test_a_fresh_cluster_gets_every_step_in_order(plan, inventory, ground):
    slices = make_slices(plan, inventory, ground)

    steps = diff({n: goal(s) for n, s in slices.items()}, {n: HostState(n) for n in slices})

    kinds = [s.kind for s in steps if s.host_name == "a"]
    assert kinds == [StepKind.BUNDLE, StepKind.FILES, StepKind.AGENT, StepKind.SLICE]
    assert not any(s.is_disruptive for s in steps)


def test_a_cluster_as_wished_gives_no_steps(plan, inventory, ground):
    slices = make_slices(plan, inventory, ground)

    assert (
        diff({n: goal(s) for n, s in slices.items()}, {n: as_wished(s) for n, s in slices.items()})
        == ()
    )


def test_a_changed_engine_is_a_disruptive_restart_of_that_one_alone(plan, inventory, ground):
    slice_ = make_slices(plan, inventory, ground)["a"]
    changed = dataclasses.replace(slice_.engines[1], max_num_seqs=7)
    wish = dataclasses.replace(slice_, engines=(slice_.engines[0], changed))

    assert unit_changes(wish, as_wished(slice_)) == [("~chat-decode-0 (changed)", True)]


def test_another_start_deadline_is_handed_on_and_stops_nothing(plan, inventory, ground):
    slice_ = make_slices(plan, inventory, ground)["a"]
    patient = dataclasses.replace(slice_.engines[1], start_deadline_s=7200.0)
    wish = dataclasses.replace(slice_, engines=(slice_.engines[0], patient))

    (step,) = diff({"a": goal(wish)}, {"a": as_wished(slice_)})
    assert (step.kind, step.is_disruptive) == (StepKind.SLICE, False)
    assert step.detail == "~chat-decode-0 (start deadline; stays as it is)"

    state = as_wished(slice_)
    units = tuple(
        dataclasses.replace(u, start_deadline_s=7200.0) if u.id == patient.id else u
        for u in state.status.units
    )
    taken = dataclasses.replace(state, status=dataclasses.replace(state.status, units=units))
    assert diff({"a": goal(wish)}, {"a": taken}) == ()


def test_an_engine_no_longer_wished_is_removed(plan, inventory, ground):
    slice_ = make_slices(plan, inventory, ground)["a"]
    wish = dataclasses.replace(slice_, engines=slice_.engines[:1])

    assert unit_changes(wish, as_wished(slice_)) == [("-chat-decode-0", True)]


def test_a_failed_unit_is_started_again(plan, inventory, ground):
    slice_ = make_slices(plan, inventory, ground)["b"]
    state = as_wished(slice_)
    failed = tuple(
        dataclasses.replace(u, state=EngineState.FAILED)
        for u in state.status.units
        if u.id != RELAY_ID
    )
    relay = tuple(u for u in state.status.units if u.id == RELAY_ID)
    state = dataclasses.replace(
        state, status=dataclasses.replace(state.status, units=failed + relay)
    )

    assert unit_changes(slice_, state) == [("~chat-decode-1 (was failed)", True)]


def test_another_bundle_restarts_the_agent_and_no_engine(plan, inventory, ground):
    slice_ = make_slices(plan, inventory, ground)["a"]
    new = dataclasses.replace(goal(slice_), bundle="bundle2", bundle_path="/r/x/bundles/bundle2")
    new = dataclasses.replace(new, slice=dataclasses.replace(slice_, bundle="bundle2"))

    steps = diff({"a": new}, {"a": as_wished(slice_)})

    assert [s.kind for s in steps] == [StepKind.BUNDLE, StepKind.AGENT, StepKind.SLICE]
    assert not any(s.is_disruptive for s in steps)
    assert steps[-1].detail == (
        "~chat-router (new code; hands its port over), ~relay (new code; hands its port over)"
    )


def test_a_changed_router_hands_its_port_over_unless_it_moves(plan, inventory, ground):
    slice_ = make_slices(plan, inventory, ground)["a"]
    (router,) = slice_.routers
    other = dataclasses.replace(router, config=router.config | {"policy": "random"})
    moved = dataclasses.replace(other, listen="127.0.0.1:8001")

    assert unit_changes(dataclasses.replace(slice_, routers=(other,)), as_wished(slice_)) == [
        ("~chat-router (changed; hands its port over)", False)
    ]
    assert unit_changes(dataclasses.replace(slice_, routers=(moved,)), as_wished(slice_)) == [
        ("~chat-router (changed)", True)
    ]


def test_a_host_the_plan_no_longer_names_is_retired(plan, inventory, ground):
    slices = make_slices(plan, inventory, ground)

    steps = diff({"a": goal(slices["a"])}, {n: as_wished(s) for n, s in slices.items()})

    assert [(s.host_name, s.kind) for s in steps] == [("b", StepKind.RETIRE)]

"""What an operator reads when hosts failed."""

import pytest

from dynctl.errors import ConnectError, DynctlError, ExitCode, TrustError
from dynctl.remote.outcomes import raise_any_failure, raise_host_failures

LOST = ConnectError("a: no route", "check the network")
AWAY = ConnectError("b: no answer", "check the network")
CHANGED = TrustError("c: its key has changed", "look why")


def said(run, *args):
    with pytest.raises(DynctlError) as caught:
        run(*args)
    return caught.value.message, caught.value.hint, caught.value.exit_code


def test_a_next_step_for_all_stands_below_and_others_beside_their_hosts():
    text = "2 of 3 hosts failed; shown: x\n  a: no route\n  b: no answer"
    both = {"a": LOST, "x": None, "b": AWAY}
    assert said(raise_host_failures, both, "shown") == (text, LOST.hint, ExitCode.PARTIAL)

    text = (
        "a: no route\n  b: no answer\n    check the network\n  c: its key has changed\n    look why"
    )
    assert said(raise_any_failure, {"a": LOST, "b": AWAY, "c": CHANGED}) == (
        text,
        None,
        ExitCode.TRUST,
    )


def test_one_failure_alone_is_told_as_it_is():
    with pytest.raises(TrustError) as caught:
        raise_host_failures({"c": CHANGED}, "shown")
    assert caught.value is CHANGED


def test_no_failure_is_none():
    raise_host_failures({"a": None, "b": 3}, "shown")
    raise_any_failure({})

"""What facts of a host come to."""

from dynctl.core.hardware import Host, HostWarning


def test_a_host_says_why_the_agent_cannot_run_there():
    bare = Host("a", "a", "10.0.0.1")
    named = Host(
        "a", "a", "10.0.0.1", warnings=(HostWarning("no-python", "no Python (/x is none)"),)
    )

    assert Host("a", "a", "10.0.0.1", python="/usr/bin/python3").python_problem == ""
    assert bare.python_problem.startswith("no Python ≥ 3.11 found")
    assert named.python_problem == "no Python (/x is none)"

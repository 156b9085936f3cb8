"""Commands that ask the routers of a cluster: all that answer are asked, and those that do not are named."""

import json
from types import SimpleNamespace

import pytest

from dynctl.cli import explain
from dynctl.cli.main import run
from dynctl.deploy.reach import NotHereError
from dynctl.errors import ConnectError, DeployError, ExitCode, TrustError

LOST = ConnectError("h2: no route to host", "check the network")


class Agent:
    """A host with some routers, all of which change policy as told, unless they fail."""

    def __init__(self, *routers, error=None):
        self.routers, self.error, self.posted = routers, error, []

    async def status(self):
        units = [SimpleNamespace(kind="router", id=r, deployment=r[0]) for r in self.routers]
        return SimpleNamespace(units=(SimpleNamespace(kind="relay", id="relay"), *units))

    async def ask_router(self, unit_id, target, method="GET"):
        if self.error is not None:
            raise self.error
        if method == "POST":
            self.posted.append((unit_id, target))
        answers = {"/policy": {"policy": "prefix"}, "/skew": {"pools": {}}}
        return json.dumps(answers.get(target, [] if "decisions" in target else None)).encode()


def test_a_change_reaches_all_that_answer_and_names_the_rest(cluster):
    hosts = {
        "h1": Agent("a-router"),
        "h2": LOST,
        "h3": Agent("b-router", error=DeployError("it does not answer")),
        "h4": Agent("c-router"),
        "h5": NotHereError("h5: no agent of cluster c here"),
        "h6": Agent(),
    }

    code, out, err = cluster(hosts, "policy", "prefix", "-o", "json")

    assert code == ExitCode.PARTIAL
    for name, router in (("h1", "a-router"), ("h4", "c-router")):
        assert hosts[name].posted == [(router, "/policy?name=prefix")]
    assert [row["router"] for row in json.loads(out)["routers"]] == ["a-router", "c-router"]
    assert "2 of 4 hosts failed; changed: h1, h4" in err
    assert "h2: no route to host" in err
    assert "h3: b-router: it does not answer" in err
    assert "h5" not in err


def test_a_change_that_an_older_router_refuses_is_told_with_the_way_to_bring_it_up_to_date(cluster):
    refused = DeployError("a-router answered 400 to /policy: that is no policy's name")

    _, _, err = cluster({"h1": Agent("a-router", error=refused)}, "policy", "--stickiness", "2")

    assert "answered 400 to /policy: that is no policy's name" in err
    assert "older version" in err
    assert "older version" not in cluster({"h1": Agent("a-router", error=refused)}, "policy")[2]


@pytest.mark.parametrize("words", [["--admin-socket", "a.sock"], ["-i", "there.yaml"], ["--local"]])
def test_a_decision_log_is_not_read_where_routers_are_to_be_asked(tmp_path, capsys, words):
    assert run(["explain", "--from", str(tmp_path), *words]) == ExitCode.USAGE
    assert "asks no router" in capsys.readouterr().err


def test_a_decision_log_without_decisions_says_so_and_what_belongs_there(tmp_path, capsys):
    assert run(["explain", "--from", str(tmp_path)]) == ExitCode.ERROR
    said = capsys.readouterr().err
    assert f"{tmp_path} holds no decision\n" in said
    assert "--decision-log" in said


def test_decisions_made_at_once_are_shown_prefill_first():
    made = [
        {"request_id": "r", "unix_s": unix_s, "leg": leg}
        for unix_s, leg in ((2.0, "decode"), (1.0, "decode"), (1.0, "prefill"))
    ]
    in_order = [(one["unix_s"], one["leg"]) for one in explain._of_one_request(made)]
    assert in_order == [(1.0, "prefill"), (1.0, "decode"), (2.0, "decode")]


def test_all_is_well_where_hosts_without_anything_of_the_cluster_are_all_that_is_missing(cluster):
    hosts = {
        "h1": Agent("a-router", "b-router"),
        "h2": NotHereError("h2: none here"),
        "h3": Agent(),
    }

    assert cluster(hosts, "policy", "prefix", "--deployment", "b")[0] == ExitCode.OK
    assert hosts["h1"].posted == [("b-router", "/policy?name=prefix")]


def test_where_no_router_answers_the_cause_is_told_with_its_own_code(cluster):
    code, _, err = cluster({"h1": Agent(), "h2": TrustError("h2: its key changed")}, "policy")

    assert code == ExitCode.TRUST
    assert "h2: its key changed" in err
    code, _, err = cluster({"h1": Agent()}, "policy")
    assert code == ExitCode.REFUSED
    assert "no router of cluster c runs on any host that answers" in err


@pytest.mark.parametrize("words", [["policy"], ["explain"], ["doctor", "skew"]])
def test_a_host_that_is_not_asked_is_named_by_whatever_asks(cluster, words):
    code, _, err = cluster({"h1": Agent("a-router"), "h2": LOST}, *words)

    assert code == ExitCode.PARTIAL
    assert "1 of 2 hosts failed; answered: h1" in err
    assert "h2: no route to host" in err


def test_a_request_that_answering_routers_do_not_remember_may_be_another_ones(cluster):
    code, _, err = cluster({"h1": Agent("a-router"), "h2": LOST}, "explain", "f00")

    assert code == ExitCode.PARTIAL
    assert "no router that answers remembers request f00" in err
    code, _, err = cluster({"h1": Agent("a-router")}, "explain", "f00")
    assert code == ExitCode.ERROR
    assert "no router remembers request f00" in err

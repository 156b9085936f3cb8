"""One simulated engine over several nodes: it answers when all have come, and hangs when one is lost."""

import subprocess
import sys

import httpx
import pytest

from dynctl.errors import UsageError
from dynctl.sim.options import parse_args


@pytest.fixture
def node(free_ports):
    """Starts the nodes of one engine of three; ends those that are left."""
    port = str(free_ports())
    started = []

    def start(rank):
        argv = [sys.executable, "-m", "dynctl.sim", "--model", "m", "--headless"]
        argv += ["--nnodes", "3", "--node-rank", str(rank), "--master-port", port]
        started.append(process := subprocess.Popen(argv, stdout=subprocess.PIPE, text=True))
        return process

    start.flags = ("--nnodes", "3", "--master-port", port)
    yield start
    for process in started:
        process.kill()
        process.wait()
        process.stdout.close()


def hangs(client):
    try:
        client.post("/v1/completions", json={"model": "tiny", "prompt": [8] * 9})
    except httpx.ReadTimeout:
        return True
    return False


def test_it_answers_once_every_node_has_come_and_makes_no_step_without_one(
    node, start_engine, until
):
    nodes = [node(2), node(1)]
    engine = start_engine("spread", *node.flags)

    assert engine.ready.startswith("ready ")
    assert [one.stdout.readline() for one in nodes] == [
        "ready node 2 of 3\n",
        "ready node 1 of 3\n",
    ]
    assert engine.complete([5, 6, 7]).status_code == 200

    nodes[0].kill()
    nodes[0].wait()
    with engine.client(engine.socket) as impatient:
        impatient.timeout = httpx.Timeout(0.5)
        until(lambda: hangs(impatient), "no token comes any more")
    assert engine.http.get("/health").status_code == 200
    # Nobody tells the others.
    assert nodes[1].poll() is None
    nodes[1].terminate()
    assert nodes[1].wait(60) == 0


def test_rank_0_listens_at_no_http_address_before_all_have_come(node, tmp_path_factory):
    folder = tmp_path_factory.mktemp("n")
    socket = folder / "http"
    argv = [sys.executable, "-m", "dynctl.sim", "--model", "m", "--uds", str(socket), *node.flags]
    with subprocess.Popen(argv, stdout=subprocess.PIPE, text=True) as engine:
        first, second = node(1), None
        try:
            # A node that leaves before the others have come may come again.
            first.kill()
            first.wait()
            assert not socket.exists()
            second = node(1)
            node(2)
            assert engine.stdout.readline() == f"ready {socket}\n"
            assert second.stdout.readline() == "ready node 1 of 3\n"
        finally:
            engine.terminate()
            assert engine.wait(60) == 0


@pytest.mark.parametrize(
    ("flags", "why"),
    [
        (("--nnodes", "2", "--node-rank", "2", "--headless"), "--node-rank 2"),
        (("--nnodes", "2", "--node-rank", "1"), "--headless is for every node but rank 0"),
        (("--headless",), "--headless is for every node but rank 0"),
        (("--nnodes", "2", "--data-parallel-size", "2"), "one data-parallel rank"),
    ],
)
def test_places_that_make_no_sense_are_refused(flags, why):
    with pytest.raises(UsageError, match=why):
        parse_args(["--uds", "/tmp/x", *flags])

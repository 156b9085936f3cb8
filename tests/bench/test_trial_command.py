"""`bench replay --ab` with simulated engines behind a real router: policies in turn, and given back."""

import asyncio
import json
import os
import signal
import subprocess
import sys
import threading

import pytest

from dynctl.cli import bench_trial
from dynctl.cli.main import run
from dynctl.errors import ExitCode


@pytest.fixture
def trace(tmp_path):
    def store(blocks_of, num=60):
        path = tmp_path / "trace.jsonl"
        lines = [
            {
                "timestamp": 40 * i,
                "input_length": 64 * len(ids),
                "output_length": 2,
                "hash_ids": ids,
            }
            for i, ids in enumerate(map(blocks_of, range(num)))
        ]
        path.write_text("".join(json.dumps(line) + "\n" for line in lines))
        return str(path)

    return store


def multi_turn(number):
    """Ten chats of six turns, each prompt beginning with all of the one before."""
    chat, turn = number % 10, number // 10
    return [1000 * chat + at for at in range(2 * turn + 2)]


def single_turn(number):
    return [3 * number, 3 * number + 1, 3 * number + 2]


def replay(routed, path, *more):
    url, socket, _ = routed
    return run(
        ["bench", "replay", path, "--url", url, "--admin-socket", socket, "--block-tokens", "64",
         "--ab", "least_loaded,kv", "--rounds", "1", "--yes", *more]
    )  # fmt: skip


def figures(capsys):
    found = json.loads(capsys.readouterr().out)
    return found, {change["figure"]: change for change in found["changes"]}


def test_kv_finds_more_on_chats_and_every_turn_starts_cold(routed, trace, tmp_path, capsys):
    out = tmp_path / "out"
    assert replay(routed, trace(multi_turn), "-o", "json", "--out", str(out)) == 0
    found, changes = figures(capsys)
    hits = changes["hit_rate"]

    assert found["schema"] == "dynctl.bench.trial/1"
    assert found["order"] == ["least_loaded", "kv"]
    # Usually 0.38 and 0.68; a machine that stands still sends turns before the ones they continue have ended.
    assert hits["after"] > hits["before"] + 0.05
    assert hits["change"] == pytest.approx(hits["after"] - hits["before"])
    assert found["outcome"] in {"improved", "no change", "worse", "inconclusive"}
    assert found["advice"]
    assert json.loads((out / "trial.json").read_text()) == found
    assert run(["bench", "show", str(out), "-o", "json"]) == 0
    assert json.loads(capsys.readouterr().out) == found
    assert run(["bench", "show", str(out)]) == 0
    assert f"verdict: {found['outcome']}" in capsys.readouterr().out
    assert run(["bench", "show", str(out), "--definitions"]) == 0
    assert "cold start" in capsys.readouterr().out
    assert run(["bench", "compare", str(out / "turn-1"), str(out / "turn-2")]) == 0
    first = json.loads((out / "turn-2" / "requests.jsonl").read_text().splitlines()[0])
    assert first["cached_tokens"] <= 16, "no more than the chat template"


def test_single_turns_have_no_hits_under_either(routed, trace, capsys):
    assert replay(routed, trace(single_turn), "-o", "json") == 0
    found, changes = figures(capsys)

    assert found["recorded"]["ideal_ratio"] == 0
    assert changes["hit_rate"]["verdict"] == "same"
    assert changes["hit_rate"]["after"] < 0.1


def test_the_table_ends_in_verdict_and_advice_and_the_policy_is_given_back(routed, trace, capsys):
    assert replay(routed, trace(single_turn, 12), "--rounds", "2") == 0
    out, err = capsys.readouterr()

    assert out.splitlines()[-2].startswith("verdict: ")
    assert out.splitlines()[-1].startswith("advice: ")
    assert [line.split()[1] for line in err.splitlines() if line.startswith("policy ")] == [
        "least_loaded", "kv", "kv", "least_loaded", "prefix",
    ]  # fmt: skip
    assert routed[2].desk.policy_name == "prefix"


def test_an_interrupt_gives_the_policy_back_and_exits_130(routed, trace, capsys, until):
    def interrupt():
        until(lambda: routed[2].desk.policy_name == "kv", "the second arm plays")
        os.kill(os.getpid(), signal.SIGINT)

    interrupting = threading.Thread(target=interrupt)
    interrupting.start()
    code = replay(routed, trace(single_turn, 100))
    interrupting.join()

    assert code == ExitCode.INTERRUPTED
    assert routed[2].desk.policy_name == "prefix"
    assert "no round came to its end" in capsys.readouterr().err


TWICE_INTERRUPTED = """
import asyncio, signal
from dynctl.cli.bench_driving import interrupts
from dynctl.cli.output import wait_for

async def main():
    with interrupts() as stop:
        try:
            signal.raise_signal(signal.SIGTERM)
            await stop.wait()
            signal.raise_signal(signal.SIGTERM)
            await asyncio.Event().wait()
        finally:
            signal.raise_signal(signal.SIGTERM)
            await asyncio.sleep(0)
            print("the policy is given back")

try:
    wait_for(main())
except KeyboardInterrupt:
    print("ended as by Ctrl-C")
"""


def test_who_insists_on_ending_still_has_the_policy_given_back():
    command = [sys.executable, "-c", TWICE_INTERRUPTED]
    ended = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)

    assert ended.stdout.splitlines() == ["the policy is given back", "ended as by Ctrl-C"]
    assert ended.returncode == 0


def test_two_addresses_are_two_arms(served, trace, capsys):
    one, other = served(ttft_s=0.0), served(ttft_s=0.0)
    path = trace(single_turn, 12)

    assert run(["bench", "replay", path, "--url", one.url, "--url", other.url, "-o", "json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["arms"] == [one.url, other.url]
    assert len(one.bodies) == len(other.bodies) > 24


def test_show_tells_what_a_directory_got_last(served, trace, tmp_path, capsys):
    server, out = served(ttft_s=0.0), str(tmp_path / "out")
    replay_there = ["bench", "replay", trace(single_turn, 12), "--url", server.url, "--out", out]

    assert run([*replay_there, "--url", server.url]) == 0
    assert run(replay_there) == 0
    capsys.readouterr()
    assert run(["bench", "show", out, "-o", "json"]) == 0
    assert json.loads(capsys.readouterr().out)["schema"] == "dynctl.bench/1"


def test_a_turn_without_answers_ends_the_trial(served, trace, tmp_path, capsys):
    one, other = served(ttft_s=0.0), served(ttft_s=0.0)
    other.faults = [""] * 5 + ["503"] * 1000
    command = ["bench", "replay", trace(single_turn, 12), "--url", one.url, "--url", other.url]
    earlier = tmp_path / "trial.json"
    earlier.write_text("{}")

    assert run([*command, "--out", str(tmp_path)]) == ExitCode.REFUSED
    assert not earlier.exists(), "its turns are no longer there"
    said = f"{other.url}: 0 of 12 requests were answered (http 503)"
    assert said in capsys.readouterr().err


@pytest.mark.parametrize(
    ("args", "said"),
    [(["--ab", "kv"], "is not two policies"), (["--ab", "kv,best"], "'best'"),
     (["--url", "http://127.0.0.1:2", "--ab", "kv,prefix"], "exclude each other"),
     (["--admin-socket", "/x"], "add --ab"), (["--ab", "kv,prefix", "-i", "no.yaml"], "no.yaml does not exist"), (["--url", "http://h:2", "--url", "http://h:3"], "there are two arms")],
)  # fmt: skip
def test_arms_that_make_no_sense_are_refused(trace, capsys, args, said):
    command = ["bench", "replay", trace(single_turn), "--url", "http://127.0.0.1:1", *args]

    assert run(command) == ExitCode.USAGE
    assert said in capsys.readouterr().err


def test_the_inventory_that_lies_here_is_not_taken_for_that_of_any_address(
    trace, tmp_path, monkeypatch, capsys
):
    (tmp_path / "inventory.yaml").write_text("cluster: another\nhosts: [local]\n")
    monkeypatch.chdir(tmp_path)
    address = ["--url", "http://127.0.0.1:1", "--ab", "kv,prefix"]

    assert run(["bench", "replay", trace(single_turn), *address]) == ExitCode.USAGE
    assert "add --admin-socket PATH" in capsys.readouterr().err
    assert run(["bench", "replay", trace(single_turn), *address, "-i", "inventory.yaml"]) not in {
        ExitCode.OK, ExitCode.USAGE,
    }  # fmt: skip


class Told:
    """Routers that differ, or forget how to answer once they were changed."""

    flags = ("-i", "my cluster.yaml")

    def __init__(self, *policies, fails=False):
        self.policies, self.fails = policies, fails

    async def ask(self, changes=()):
        if changes and self.fails:
            raise bench_trial.DynctlError("h1: gone")
        return bench_trial.Answers({f"r{i}": [{"policy": p}] for i, p in enumerate(self.policies)})


def test_routers_that_differ_are_refused_since_one_policy_cannot_be_given_back_to_all():
    async def main():
        async with bench_trial.policy_kept(Told("kv", "prefix")):
            pass

    with pytest.raises(bench_trial.UsageError, match="different policies: kv, prefix"):
        asyncio.run(main())


def test_a_policy_that_cannot_be_given_back_is_said_with_the_command_that_does(capsys):
    async def main():
        async with bench_trial.policy_kept(Told("kv", fails=True)):
            pass

    asyncio.run(main())
    assert (
        "could not be given back: h1: gone\n  dynctl policy kv -i 'my cluster.yaml'\n"
        in capsys.readouterr().err
    )
    assert bench_trial.OneRouter("/a b").flags == ("--admin-socket", "/a b")

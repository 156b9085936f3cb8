"""Every engine kind's whole argv and environment, one case per file under cases/KIND/."""

import json
import os
from pathlib import Path

import msgspec
import pytest

from dynctl import registry
from dynctl.agents.launch import Places, cache_facts, extra_flags
from dynctl.agents.protocol import EngineWish

CASES = Path(__file__).with_name("cases")
KINDS = registry.names("dynctl.agents.engines")
PLACES = Places(
    root="/srv/dynctl",
    directory="/srv/dynctl/run/0a1b2c3d4e",
    python="/usr/bin/python3",
    incarnation="0a1b2c3d4e",
    internal_port=21000,
    interface="eth1",
)


def engine(kind):
    return registry.load("dynctl.agents.engines", kind, "ENGINE")


def wish_of(case: dict) -> EngineWish:
    return msgspec.convert(case["wish"], EngineWish)


@pytest.mark.parametrize(
    "path", sorted(CASES.glob("*/*.json")), ids=lambda p: f"{p.parent.name}/{p.stem}"
)
def test_launch_is_exactly_as_written(path):
    case = json.loads(path.read_text())
    kind = engine(path.parent.name)

    problems = kind.problems(wish_of(case))
    got = {"problems": list(problems)}
    if not problems:
        launch = kind.launch(wish_of(case), PLACES)
        got |= msgspec.to_builtins(launch, builtin_types=())
        got["env"] = dict(launch.env)

    if os.environ.get("UPDATE_CASES"):
        path.write_text(
            json.dumps(case | {"expected": json.loads(json.dumps(got))}, indent=1) + "\n"
        )
    assert json.loads(json.dumps(got)) == case["expected"]


@pytest.mark.parametrize("kind", KINDS)
def test_every_kind_has_a_good_and_a_refused_case(kind):
    expected = [json.loads(p.read_text())["expected"] for p in (CASES / kind).glob("*.json")]

    assert any(not e["problems"] for e in expected)
    assert any(e["problems"] for e in expected)


@pytest.mark.parametrize("kind", KINDS)
def test_same_wish_gives_the_same_launch(kind):
    path = next(
        p
        for p in (CASES / kind).glob("*.json")
        if not json.loads(p.read_text())["expected"]["problems"]
    )
    wish = wish_of(json.loads(path.read_text()))

    assert engine(kind).launch(wish, PLACES) == engine(kind).launch(wish, PLACES)


def test_socket_paths_of_one_start_fit_the_kernel_limit():
    at = PLACES.endpoints("t")

    for path in (at.socket, at.kv_events, at.kv_replay):
        assert len(path.removeprefix("ipc://")) < 107


def test_value_that_begins_with_a_dash_stays_with_its_flag():
    assert extra_flags((("a", "-1"), ("b", ""), ("c", "x y"))) == ("--a=-1", "--b", "--c", "x y")


def test_cache_facts_come_from_the_labels():
    line = 'vllm:cache_config_info{block_size="128",engine="0",kv_cache_size_tokens="2097152",num_gpu_blocks="16384"} 1.0'

    facts = cache_facts(line)

    assert (facts.block_size_tokens, facts.kv_capacity_tokens) == (128, 2097152)


def test_capacity_is_blocks_times_size_where_the_engine_does_not_say():
    line = 'vllm:cache_config_info{block_size="16",kv_cache_size_tokens="None",num_gpu_blocks="10"} 1.0'

    assert cache_facts(line).kv_capacity_tokens == 160
    assert cache_facts("").block_size_tokens == 0
    for absurd in ("9" * 26, "9" * 5000, "²"):
        assert cache_facts(line.replace('"10"', f'"{absurd}"')).kv_capacity_tokens == 0

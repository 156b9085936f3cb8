"""Which engines may hand KV blocks to each other, as their agents tell it."""

from dataclasses import replace

import msgspec
import pytest

from dynctl.agents.kv_identity import kv_identity
from dynctl.agents.launch import Capabilities
from dynctl.agents.protocol import EngineWish
from dynctl.agents.root import Facts
from dynctl.core.deployment import EngineInfo, EngineState, may_exchange_kv
from dynctl.core.plan import PlannedGpu

VLLM = Capabilities(version_floor=(0, 33, 0))
FACTS = Facts(block_size_tokens=16, kv_capacity_tokens=1000, version="0.33.1")
WISH = EngineWish(
    *("chat-prefill-0", "chat", "prefill", "vllm", "/home/a/models/m"),
    python="/home/a/vllm/bin/python",
    revision="r1",
    block_size_tokens=16,
    args=(("kv-cache-dtype", "fp8"), ("dtype", "bfloat16")),
    env=(("VLLM_KV_CACHE_LAYOUT", "HND"),),
)


def identity(wish=WISH, can=VLLM, facts=FACTS, home="/home/a"):
    return kv_identity(wish, can, facts.version, facts.block_size_tokens, home)


@pytest.mark.parametrize(
    "other",
    [
        {"model": "/home/a/models/other"},
        {"revision": "r2"},
        {"revision": None},
        {"args": (("kv-cache-dtype", "auto"), ("dtype", "bfloat16"))},
        {"args": (*WISH.args, ("quantization", "awq"))},
        {"args": (*WISH.args, ("never-heard-of", ""))},
        {"env": ()},
        {"pp": 2},
        {"max_model_len_tokens": 131_072},
        {"python": "/home/a/vllm-nightly/bin/python"},
        {"kind": "other"},
    ],
    ids=lambda other: "-".join(other),
)
def test_what_changes_a_block_makes_another_kind(other):
    assert identity(replace(WISH, **other)) != identity()


@pytest.mark.parametrize(
    "other",
    [
        {"id": "chat-decode-3", "role": "decode"},
        {"gpus": (PlannedGpu(0, "GPU-1"),), "tp": 8, "nics": ("mlx5_0",)},
        {"max_num_seqs": 7, "max_num_batched_tokens": 99, "gpu_memory_utilization": 0.5},
        {"side_channel_port": 5600, "data_address": "10.0.0.9"},
        {"args": (("dtype", "bfloat16"), ("kv_cache_dtype", "fp8"), ("max-num-seqs", "8"))},
        {"start_deadline_s": 5.0},
    ],
    ids=lambda other: "-".join(other),
)
def test_role_place_and_load_do_not(other):
    assert identity(replace(WISH, **other)) == identity()


def test_versions_and_block_sizes_are_the_engines_own():
    assert identity(facts=replace(FACTS, version="0.34.0")) != identity()
    assert identity(facts=replace(FACTS, block_size_tokens=32)) != identity()
    assert identity(facts=replace(FACTS, kv_capacity_tokens=5)) == identity()


def test_homes_may_lie_elsewhere():
    there = replace(WISH, model="/root/models/m", python="/root/vllm/bin/python")
    assert identity(there, home="/root/") == identity()
    assert identity(there, home="") != identity()


def test_nothing_is_said_of_what_is_not_known():
    assert identity(facts=replace(FACTS, version="")) == ""
    assert identity(can=Capabilities(is_process=False)) == ""
    assert identity(facts=replace(FACTS, block_size_tokens=0)) == ""
    assert identity(can=Capabilities(), facts=replace(FACTS, version="")) != ""


def info(kv_identity="", tp=0):
    told = *("e", "i", EngineState.READY, "decode", "d", "vllm", "m"), 16
    return EngineInfo(*told, kv_identity=kv_identity, tp=tp)


@pytest.mark.parametrize(
    ("one", "other", "may"),
    [
        (info("1:a"), info("1:a"), True),
        (info("1:a"), info("1:b"), False),
        (info("1:a"), info(), True),
        (info(), info(), True),
        (info("1:a"), info("2:b"), True),
        (info("1:a", 4), info("1:a", 2), True),
        (info("1:a", 3), info("1:a", 2), False),
        (info("1:a", 3), info("1:a"), True),
        (info("", 4), info("", 6), False),
    ],
)
def test_equal_ones_may_exchange_blocks_and_unknown_ones_as_before(one, other, may):
    assert may_exchange_kv(one, other) is may
    assert may_exchange_kv(other, one) is may


def test_agents_and_routers_of_before_and_after_read_each_other():
    new = msgspec.to_builtins(info("1:a", 2))
    old = {name: value for name, value in new.items() if name not in ("kv_identity", "tp")}

    assert msgspec.convert(old, EngineInfo) == info()
    assert msgspec.convert(new | {"of_a_later_version": 1}, EngineInfo) == info("1:a", 2)
    facts = msgspec.convert({"block_size_tokens": 16}, Facts)
    assert facts == Facts(block_size_tokens=16, version="")

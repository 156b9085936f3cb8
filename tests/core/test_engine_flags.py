"""Numbers in engine flags and in texts from anywhere, read as who gets them reads them."""

import pytest

from dynctl.core.engine_flags import (
    count_of,
    cpu_kv_gib,
    flag_faults,
    kv_value_bytes_of,
    memory_share_of,
)
from dynctl.core.inventory import EngineSpec, Limits
from dynctl.core.units import engine_count, whole

NO_NUMBERS = ["", "²", "٣", "½", "x", "-1", "+1", "1_000", " 1", "1.0", "9" * 5000]


def vllm(*args, **change):
    return EngineSpec("vllm", args=args, **change)


@pytest.mark.parametrize("text", NO_NUMBERS)
def test_what_int_would_choke_on_or_nobody_meant_is_no_number(text):
    assert whole(text) is None
    assert engine_count(text) is None


def test_whole_numbers_are_read_up_to_18_digits():
    assert (whole("0"), whole("007"), whole("9" * 18)) == (0, 7, 10**18 - 1)


@pytest.mark.parametrize(
    ("text", "tokens"),
    [("8192", 8192), ("8k", 8000), ("8K", 8192), ("25.6k", 25_600), ("1M", 2**20), ("2m", 2 * 10**6), ("1.5K", None), ("4k ", None), ("1.5", None)],
)  # fmt: skip
def test_tokens_are_read_as_vllm_reads_them(text, tokens):
    assert engine_count(text) == tokens
    assert count_of(vllm(("max-model-len", text)), "max-model-len") == tokens


def test_the_last_of_a_flag_counts_however_its_name_is_written():
    engine = vllm(("max-num-seqs", "8"), ("max_num_seqs", "16"))

    assert count_of(engine, "max-num-seqs") == 16
    assert count_of(engine, "block-size") is None
    assert memory_share_of(vllm(("gpu_memory_utilization", "9e-1"))) == 0.9


@pytest.mark.parametrize(
    ("text", "num_bytes"),
    [("auto", None), ("fp8", 1), ("fp8_e4m3", 1), ("bfloat16", 2), ("int8_per_token_head", 1)],
)
def test_a_kv_cache_is_as_wide_as_its_flag_says_else_as_the_checkpoint_declares(text, num_bytes):
    assert kv_value_bytes_of(vllm(("kv-cache-dtype", text))) == num_bytes
    assert kv_value_bytes_of(vllm()) is None


@pytest.mark.parametrize(
    ("args", "limits", "said"),
    [
        ([("max-num-seqs", "²")], Limits(), "max-num-seqs '²' is no whole number"),
        ([("max-num-seqs", "8k")], Limits(), "is no whole number"),
        ([("max-num-seqs", "0")], Limits(), "is no whole number"),
        ([("gpu-memory-utilization", "nan")], Limits(), "is no share"),
        ([("gpu-memory-utilization", "²")], Limits(), "is no share"),
        ([("block-size", "32")], Limits(block_size_tokens=16), "block-size is 32, and limits.block_size_tokens 16"),
        ([("max-model-len", "auto")], Limits(max_model_len_tokens=16), "max-model-len is auto, and limits"),
        ([("gpu-memory-utilization", "0.8")], Limits(gpu_memory_utilization=0.7), "is 0.8, and limits"),
    ],
)  # fmt: skip
def test_a_flag_the_engine_could_not_read_or_would_take_instead_is_a_fault(args, limits, said):
    (fault,) = flag_faults(vllm(*args), limits)

    assert fault.key == ("args", args[0][0])
    assert said in fault.text
    assert fault.hint


def test_no_engine_is_advised_a_number_it_cannot_read():
    args = (("max-model-len", "8k"),)

    (fault,) = flag_faults(EngineSpec("sim", args=args), Limits())
    assert fault.hint == "write it in digits alone, as 64"
    assert not list(flag_faults(vllm(*args), Limits()))


@pytest.mark.parametrize(
    ("args", "limits"),
    [([("max-model-len", "auto")], Limits()), ([("max-model-len", "-1")], Limits()), ([("max-model-len", "16k")], Limits(max_model_len_tokens=16000)),
     ([("gpu-memory-utilization", ".5")], Limits()), ([("seed", "²")], Limits())],
)  # fmt: skip
def test_what_the_engine_takes_is_no_fault(args, limits):
    assert list(flag_faults(vllm(*args), limits)) == []


@pytest.mark.parametrize("text", ["²", "2.5", "0", "${env:SPACE}", "nan", "9" * 400])
def test_the_kv_space_of_a_cpu_engine_is_a_whole_number_of_gib(text):
    env = (("VLLM_CPU_KVCACHE_SPACE", text),)

    (fault,) = flag_faults(vllm(device="cpu", env=env), Limits())
    assert fault.key == ("env", "VLLM_CPU_KVCACHE_SPACE")
    assert not list(flag_faults(vllm(env=env), Limits())), "it is for CPUs"
    assert cpu_kv_gib(vllm(device="cpu", env=(("VLLM_CPU_KVCACHE_SPACE", "4"),))) == 4

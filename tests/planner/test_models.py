"""Shapes that ship with dynctl against the counts their makers publish, and how checkpoints store weights."""

import json

import pytest

from dynctl.errors import PlanError
from dynctl.planner.checkpoint import open_model, shipped_config, shipped_names
from dynctl.planner.model import read_model
from dynctl.planner.names import FORMATS

# Billions of parameters, as the safetensors headers of the published checkpoints sum up; models whose checkpoint also
# holds layers for speculative decoding (DeepSeek, GLM, MiniMax) as their makers count without them.
PUBLISHED = {
    "llama-3.1-8b": 8.030, "llama-3.1-70b": 70.554, "llama-3.1-405b": 405.853, "llama-3.2-1b": 1.236,
    "llama-3.2-3b": 3.213, "llama-4-scout": 108.642, "llama-4-maverick": 401.584, "qwen2.5-0.5b": 0.494,
    "qwen2.5-7b": 7.616, "qwen2.5-32b": 32.764, "qwen2.5-72b": 72.706, "qwen3-0.6b": 0.596, "qwen3-4b": 4.022,
    "qwen3-8b": 8.191, "qwen3-14b": 14.768, "qwen3-32b": 32.762, "qwen3-30b-a3b": 30.532, "qwen3-235b-a22b": 235.094,
    "qwen3-coder-480b-a35b": 480.155, "mistral-7b-v0.3": 7.248, "mistral-nemo-12b": 12.248, "mistral-small-24b": 23.572,
    "mixtral-8x7b": 46.703, "mixtral-8x22b": 140.630, "deepseek-v3": 671.026, "kimi-k2": 1026.41, "gpt-oss-20b": 20.915,
    "gpt-oss-120b": 116.829, "gemma-2-2b": 2.614, "gemma-2-9b": 9.242, "gemma-2-27b": 27.227, "gemma-3-4b": 4.300,
    "gemma-3-12b": 12.187, "gemma-3-27b": 27.432, "phi-2": 2.780, "phi-3-mini": 3.821, "phi-4": 14.660,
    "phi-3.5-moe": 41.873, "glm-4.5": 352.8, "glm-4.5-air": 106.85, "minimax-m2": 228.7, "llama-2-7b": 6.738,
    "llama-2-13b": 13.016, "llama-2-70b": 68.977, "codellama-34b": 33.744, "tinyllama-1.1b": 1.100, "yi-6b": 6.061,
    "yi-34b": 34.389, "qwen2.5-1.5b": 1.544, "qwen2.5-3b": 3.086, "qwen2.5-14b": 14.770, "qwen2-57b-a14b": 57.409,
    "qwen3-1.7b": 1.7206, "ministral-8b": 8.020, "mistral-small-22b": 22.247, "mistral-large-123b": 122.610,
    "deepseek-v2": 235.741, "deepseek-v2-lite": 15.706, "kimi-k2.5": 1026.41, "gemma-3-1b": 1.000,
    "phi-3-medium": 13.960, "phi-4-mini": 3.836, "glm-4-9b": 9.400, "glm-4-32b": 32.566,
    "qwen3-next-80b-a3b": 79.674,
}  # fmt: skip
ACTIVE = {"llama-4-scout": 17, "mixtral-8x7b": 12.9, "qwen3-235b-a22b": 22.2, "deepseek-v3": 37.5, "kimi-k2": 32.9, "gpt-oss-120b": 5.7, "glm-4.5": 33.6}  # fmt: skip


@pytest.mark.parametrize(("name", "billions"), PUBLISHED.items())
def test_parameter_counts_are_the_published_ones(name, billions):
    found = open_model(name)

    assert found.num_params / 1e9 == pytest.approx(billions, rel=0.005)
    assert sum(p.num_bytes for p in found.parts) == found.weight_bytes


@pytest.mark.parametrize(("name", "billions"), ACTIVE.items())
def test_active_parameters_are_the_published_ones(name, billions):
    assert open_model(name).num_active_params / 1e9 == pytest.approx(billions, rel=0.06)


def test_window_layers_forget_and_full_layers_do_not():
    oss, gemma = open_model("gpt-oss-120b"), open_model("gemma-3-27b")

    assert (oss.window_tokens, oss.num_window_layers) == (128, 18)
    assert (gemma.window_tokens, gemma.num_window_layers) == (1024, 52)
    assert oss.kv_bytes(100) == pytest.approx(100 * 73_728)
    assert oss.kv_bytes(100_000) == pytest.approx(73_728 * (100_000 + 128) / 2)


def test_layers_with_a_state_keep_it_instead_of_tokens():
    """36 of 48 layers: 32 heads of 128 x 128 in 32 bit, and three inputs of 8,192 channels in 16 bit."""
    found = open_model("qwen3-next-80b-a3b")

    assert (found.num_state_layers, found.kv_bytes_per_token) == (36, 12 * 2 * 2 * 256 * 2)
    assert found.state_bytes_per_sequence == 36 * (32 * 128 * 128 * 4 + 3 * 8192 * 2)
    assert found.kv_bytes(1000) == 1000 * found.kv_bytes_per_token + found.state_bytes_per_sequence


def quantised(name, **quant):
    return read_model({**shipped_config(name), "quantization_config": quant}, name)


def test_an_ignore_list_leaves_modules_in_16_bit():
    """Source: the entries NVIDIA's Kimi and DeepSeek NVFP4 checkpoints have, a glob per layer under a wrapper's prefix."""
    spared = [f"language_model.model.layers.{i}.self_attn*" for i in range(61)]
    group = {"group_0": {"weights": {"num_bits": 4, "type": "float", "group_size": 16}}}

    found = quantised("kimi-k2", quant_method="modelopt", config_groups=group, ignore=spared)

    assert found.part("attention").format == "bf16"
    assert found.part("experts").format == "nvfp4"
    assert found.part("experts").num_bytes == pytest.approx(
        found.part("experts").num_params * 0.5625, rel=1e-6
    )


@pytest.mark.parametrize(
    ("entry", "spared"),
    [
        ("re:.*self_attn.*", 32),
        ("model.layers.3.self_attn", 1),
        ("model.layers.1*.self_attn", 11),
        ("self_attn", 32),
        ("model.layers.31.mlp", 0),
    ],
)
def test_each_way_to_name_a_module_is_understood(entry, spared):
    found = quantised("llama-3.1-8b", quant_method="fp8", modules_to_not_convert=[entry]).part("attention")  # fmt: skip

    assert found.num_bytes == found.num_params * (32 + spared) // 32


@pytest.mark.parametrize(
    ("quant", "fmt", "width"),
    [
        ({"quant_method": "fp8", "weight_block_size": [128, 128]}, "fp8-block", 1.0002),
        ({"quant_method": "modelopt", "quant_algo": "NVFP4"}, "nvfp4", 0.5625),
        ({"quant_method": "awq", "bits": 4, "group_size": 128}, "int4", 0.5195),
        ({"quant_method": "gptq", "bits": 4, "group_size": 32}, "int4", 0.578),
        ({"quant_method": "compressed-tensors", "config_groups": {"a": {"weights": {"num_bits": 4, "type": "int", "group_size": 32}}}}, "int4", 0.5625),
        ({"quant_method": "compressed-tensors", "config_groups": {"a": {"weights": {"num_bits": 4, "type": "int", "group_size": 32, "symmetric": False}}}}, "int4", 0.578),
        ({"quant_method": "compressed-tensors", "config_groups": {"a": {"weights": {"num_bits": 8, "type": "float"}}}}, "fp8", 1.0),
        ({"quantization": {"quant_algo": "FP8"}}, "fp8", 1.0),
    ],
)  # fmt: skip
def test_formats_have_their_width(quant, fmt, width):
    part = quantised("llama-3.1-8b", **quant).part("mlp")

    assert part.format == fmt
    assert part.num_bytes / part.num_params == pytest.approx(width, rel=0.002)


def test_gpt_oss_quantises_only_its_experts():
    found = open_model("gpt-oss-120b")

    assert found.part("experts").format == "mxfp4"
    assert found.part("attention").format == "bf16"
    # The published checkpoint is 65.2 GB.
    assert found.weight_bytes / 1e9 == pytest.approx(65.2, rel=0.01)


def test_a_directory_is_weighed_by_its_index(tmp_path):
    (tmp_path / "config.json").write_text(json.dumps(shipped_config("llama-3.1-8b")))
    (tmp_path / "model.safetensors.index.json").write_text(
        '{"metadata": {"total_size": 16060522496}}'
    )

    found = open_model(str(tmp_path))

    assert found.weight_bytes == 16_060_522_496
    assert found.source == "safetensors index"
    assert found.margin < 0.001


def test_an_unknown_architecture_says_what_to_declare_and_is_then_read(tmp_path):
    config = {"model_type": "novel", "num_hidden_layers": 32, "hidden_size": 4096, "num_attention_heads": 32, "intermediate_size": 14336}  # fmt: skip
    with pytest.raises(PlanError) as caught:
        read_model(config, "m")
    assert "vocab_size" in (caught.value.hint or "")

    found = read_model(config, "m", shape={"vocab_size": 128256, "num_key_value_heads": 8})

    assert found.num_params / 1e9 == pytest.approx(8.03, rel=0.005)
    assert found.source == "declared"
    assert found.margin > 0


def test_files_alone_give_a_weight_with_a_margin(tmp_path):
    (tmp_path / "a.safetensors").write_bytes(b"x" * 4096)

    found = open_model(str(tmp_path), shape={"num_hidden_layers": 2, "hidden_size": 64})

    assert (found.weight_bytes, found.source) == (4096, "file sizes")
    assert found.margin >= 0.1
    with pytest.raises(PlanError, match="hidden_size"):
        open_model(str(tmp_path), shape={"num_hidden_layers": 2})


@pytest.mark.parametrize("content", ["", "[]", "{", '"x"', "[" * 100_000])
def test_damaged_files_are_named(tmp_path, content):
    (tmp_path / "config.json").write_text(content)

    with pytest.raises(PlanError, match=r"config\.json"):
        open_model(str(tmp_path))


# Gigabytes as the safetensors indexes of these checkpoints sum up.
NAMES = [
    ("meta-llama/Llama-3.1-8B-Instruct", "llama-3.1-8b", 16.06),
    ("meta-llama/Meta-Llama-3-8B", "llama-3.1-8b", 16.06),
    ("nvidia/Llama-3.3-70B-Instruct-FP8", "llama-3.1-70b", 72.7),
    ("hugging-quants/Meta-Llama-3.1-405B-Instruct-AWQ-INT4", "llama-3.1-405b", 217),
    ("RedHatAI/Meta-Llama-3.1-8B-Instruct-quantized.w4a16", "llama-3.1-8b", 5.7),
    ("RedHatAI/Meta-Llama-3.1-70B-Instruct-quantized.w8a8", "llama-3.1-70b", 72.7),
    ("RedHatAI/Llama-3.3-70B-Instruct-FP8-dynamic", "llama-3.1-70b", 72.7),
    ("TheBloke/Mixtral-8x7B-Instruct-v0.1-GPTQ", "mixtral-8x7b", 24.5),
    ("unsloth/Llama-3.2-3B-Instruct-bnb-4bit", "llama-3.2-3b", 2.25),
    ("Qwen/Qwen3-235B-A22B-Instruct-2507-FP8", "qwen3-235b-a22b-fp8", 236.4),
    ("Qwen/Qwen3_32B", "qwen3-32b", 65.5),
    ("nvidia/Qwen3-32B-NVFP4", "qwen3-32b", 20.7),
    ("Qwen/Qwen2.5-72B-Instruct-GPTQ-Int4", "qwen2.5-72b", 41.6),
    ("Qwen/QwQ-32B", "qwen2.5-32b", 65.5),
    ("deepseek-ai/DeepSeek-R1-Distill-Llama-70B", "llama-3.1-70b", 141.1),
    ("deepseek-ai/DeepSeek-V3.1", "deepseek-v3", 673),
    ("nvidia/DeepSeek-R1-0528-FP4-v2", "deepseek-r1", 397),
    ("moonshotai/Kimi-K2-Thinking", "kimi-k2.5", 594),
    ("moonshotai/Kimi-K2-Instruct", "kimi-k2", 1029),
    ("openai/gpt-oss-120b", "gpt-oss-120b", 65.2),
    ("google/gemma-3-27b-it", "gemma-3-27b", 54.8),
    ("microsoft/Phi-3.5-MoE-instruct", "phi-3.5-moe", 83.7),
    ("microsoft/Phi-4-mini-instruct", "phi-4-mini", 7.67),
    ("microsoft/phi-4", "phi-4", 29.3),
    ("zai-org/GLM-4.5-Air-FP8", "glm-4.5-air", 108),
    ("zai-org/GLM-4.6", "glm-4.5", 706),
    ("mistralai/Mistral-Small-3.2-24B-Instruct-2506", "mistral-small-24b", 47.1),
    ("mistralai/Mistral-7B-Instruct-v0.3", "mistral-7b-v0.3", 14.5),
    ("meta-llama/Llama-4-Maverick-17B-128E-Instruct-FP8", "llama-4-maverick", 404),
    ("MiniMaxAI/MiniMax-M2.5", "minimax-m2", 230),
]  # fmt: skip


@pytest.mark.parametrize(("name", "shape", "gigabytes"), NAMES)
def test_published_names_mean_their_shape_and_format(name, shape, gigabytes):
    found = open_model(name, None)

    assert found.name == shape
    assert found.weight_bytes / 1e9 == pytest.approx(gigabytes, rel=0.02)


@pytest.mark.parametrize(
    "name",
    [
        "nvidia/Llama-3_3-Nemotron-Super-49B-v1", "deepseek-ai/DeepSeek-V3.2-Exp", "meta-llama/Llama-3.2-11B-Vision",
        "google/gemma-3n-E4B-it", "mistralai/Mistral-Large-3-675B-Instruct-2512", "zai-org/GLM-4.5V", "openai/gpt-2",
    ],
)  # fmt: skip
def test_other_architectures_of_a_known_family_are_not_taken_for_it(name):
    with pytest.raises(PlanError, match="no shape of that name"):
        open_model(name)


def test_formats_of_single_machines_are_refused_by_name():
    with pytest.raises(PlanError, match="gguf"):
        open_model("bartowski/Llama-3.2-3B-Instruct-GGUF")


def test_every_shape_is_meant_by_its_own_name():
    assert {open_model(name).name for name in shipped_names()} == set(shipped_names())


def test_a_near_miss_is_told_first():
    with pytest.raises(PlanError) as caught:
        open_model("Qwen/Qwen3-23B")

    assert (caught.value.hint or "").startswith("did you mean qwen3-32b")


@pytest.mark.parametrize("weights", FORMATS)
def test_weights_may_be_asked_in_another_format(weights, tmp_path):
    (tmp_path / "config.json").write_text(json.dumps(shipped_config("llama-3.1-8b")))
    (tmp_path / "a.safetensors").write_bytes(b"x" * 4096)

    named = open_model("llama-3.1-8b", weights=weights)

    assert named.part("mlp").format == weights
    for where in (tmp_path, tmp_path / "config.json"):
        assert open_model(str(where), weights=weights).weight_bytes == named.weight_bytes


def test_mla_in_4_bit_keeps_attention_as_it_was():
    found = open_model("nvidia/DeepSeek-R1-NVFP4", None)

    assert (found.part("attention").format, found.part("experts").format) == ("bf16", "nvfp4")
    assert found.kv_bytes_per_token == 35_136


def test_a_wrong_name_lists_the_right_ones():
    with pytest.raises(PlanError) as caught:
        open_model("no-such-model")

    assert set(shipped_names()) <= set((caught.value.hint or "").replace(",", "").split())


@pytest.mark.parametrize(
    ("quant", "kv_bytes"),
    [
        ({"quant_method": "modelopt", "quant_algo": "FP8", "kv_cache_quant_algo": "FP8"}, 65_536),
        ({"quant_method": "compressed-tensors", "config_groups": {"a": {"weights": {"num_bits": 8, "type": "float"}}}, "kv_cache_scheme": {"num_bits": 8}}, 65_536),
        ({"quant_method": "fp8"}, 131_072),
    ],
)  # fmt: skip
def test_the_cache_is_as_wide_as_the_checkpoint_declares(quant, kv_bytes):
    config = {**shipped_config("llama-3.1-8b"), "quantization_config": quant}

    assert read_model(config, "m", None).kv_bytes_per_token == kv_bytes

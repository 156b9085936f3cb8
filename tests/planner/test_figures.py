"""Shapes, memory, peaks and the roofline against public figures."""

import math

import pytest

from dynctl.core.plan import Parallelism
from dynctl.core.units import GIB
from dynctl.core.workload import Slo, Workload
from dynctl.errors import PlanError
from dynctl.planner.estimate import DeclaredPace, Layout, Side, max_rate_rps, serve
from dynctl.planner.memory import Room, legal_tp, sheet, weight_bytes_per_gpu
from dynctl.planner.model import read_model
from dynctl.planner.peaks import SPECS, find_spec
from dynctl.planner.roofline import Engine, group_link


@pytest.mark.parametrize(
    ("name", "billions", "kv_bytes"),
    [
        ("llama-8b", 8.03, 131_072),
        ("llama-70b", 70.6, 327_680),
        ("qwen3-32b-fp8", 32.8, 262_144),
        ("qwen3-235b-fp8", 235, 192_512),
        ("deepseek-v3", 671, 70_272),
    ],
)
def test_published_sizes_are_reproduced(build, name, billions, kv_bytes):
    """Source: the models' own cards; KV in 16 bit over all layers."""
    model = build.model(name)

    assert model.num_params / 1e9 == pytest.approx(billions, rel=0.005)
    assert model.kv_bytes_per_token == kv_bytes


def test_tied_embeddings_and_mixtral_are_counted(build):
    llama = build.configs["llama-8b"]
    mixtral = {
        **llama, "model_type": "mixtral", "num_local_experts": 8, "num_experts_per_tok": 2, "vocab_size": 32000
    }  # fmt: skip

    tied = read_model({**llama, "tie_word_embeddings": True}, "tied")
    found = read_model(mixtral, "mixtral")

    assert build.model("llama-8b").num_params - tied.num_params == 128256 * 4096
    assert found.num_params / 1e9 == pytest.approx(46.7, rel=0.005)
    assert found.num_active_params / 1e9 == pytest.approx(12.9, rel=0.005)


@pytest.mark.parametrize(
    ("quant", "bytes_per_weight"),
    [
        ({"quant_method": "fp8"}, 1.0),
        ({"quant_method": "awq", "bits": 4}, 0.53),
        ({"quant_method": "gptq", "bits": 8}, 1.03),
        ({"quant_method": "modelopt", "quant_algo": "NVFP4"}, 0.5625),
        ({"quant_method": "compressed-tensors", "config_groups": {"group_0": {"weights": {"num_bits": 8}}}}, 1.0),
    ],
)  # fmt: skip
def test_quantised_weights_are_smaller_and_embeddings_stay(build, quant, bytes_per_weight):
    plain = build.model("llama-8b")

    found = read_model({**build.configs["llama-8b"], "quantization_config": quant}, "q")

    layers = (plain.weight_bytes - plain.embedding_weight_bytes) / 2
    assert found.weight_bytes - found.embedding_weight_bytes == pytest.approx(layers * bytes_per_weight, rel=0.03)  # fmt: skip


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"model_type": "mamba"}, "mamba is unknown"),
        ({"quantization_config": {"quant_method": "exl2"}}, "quantisation exl2 is unknown"),
        ({"hidden_size": None}, "no usable hidden_size"),
        ({"hidden_size": "big"}, "no usable hidden_size"),
        ({"num_hidden_layers": 0}, "num_hidden_layers is 0"),
        ({"intermediate_size": -5}, "no usable intermediate_size"),
        ({"model_type": "\x1b[31mevil" + "x" * 10**6}, "unknown"),
    ],
)
def test_what_cannot_be_read_is_named(build, change, said):
    with pytest.raises(PlanError, match=said) as caught:
        read_model({**build.configs["llama-8b"], **change}, "m")

    assert "\x1b" not in caught.value.message
    assert len(caught.value.message) < 1000


def test_peaks_are_dense_figures():
    """A sparse figure taken for a dense one doubles every prediction."""
    for spec in SPECS:
        assert spec.fp8_flops is None or spec.fp8_flops == pytest.approx(
            2 * spec.bf16_flops, rel=0.02
        )
        assert spec.bf16_flops / spec.memory_bytes_s < 450


@pytest.mark.parametrize(
    ("product", "name"),
    [
        ("NVIDIA H100 80GB HBM3", "h100-sxm"),
        ("NVIDIA H100 PCIe", "h100-pcie"),
        ("NVIDIA H100 NVL", "h100-nvl"),
        ("NVIDIA H200", "h200-sxm"),
        ("NVIDIA B200", "b200-sxm"),
        ("NVIDIA GB200", "gb200"),
        ("NVIDIA A100-SXM4-40GB", "a100-sxm-40"),
        ("NVIDIA A100-SXM4-80GB", "a100-sxm-80"),
        ("NVIDIA A100 80GB PCIe", "a100-pcie-80"),
        ("NVIDIA A100-PCIE-40GB", "a100-pcie-40"),
        ("NVIDIA L40S", "l40s"),
        ("NVIDIA L40", "l40"),
        ("NVIDIA L4", "l4"),
        ("NVIDIA A10G", "a10g"),
        ("NVIDIA RTX A6000", "a6000"),
        ("NVIDIA GeForce RTX 4090", "rtx-4090"),
        ("NVIDIA RTX PRO 6000 Blackwell Server Edition", "rtx-pro-6000"),
        ("Tesla V100-SXM2-32GB", "v100-sxm"),
    ],
)
def test_products_find_their_figures(product, name):
    assert find_spec(product).name == name


@pytest.mark.parametrize("product", ["NVIDIA TITAN V", "Acme 1", "", "NVIDIA GeForce RTX 2080"])
def test_unknown_products_find_none(product):
    assert find_spec(product) is None


def test_a_sheet_adds_up_and_tensor_parallelism_divides_it(build):
    model = build.model("llama-70b")

    four = sheet(model, Parallelism(4), Room(80 * GIB))

    parts = four.reserve_bytes + four.weight_bytes + four.activation_bytes + four.kv_bytes
    assert parts == four.total_bytes == 80 * GIB
    assert weight_bytes_per_gpu(model, Parallelism(4)) == pytest.approx(
        model.weight_bytes / 4, rel=0.01
    )
    assert four.kv_capacity_tokens == pytest.approx(four.kv_bytes / (327_680 / 4), rel=0.001)
    assert four.kv_capacity_tokens % 16 == 0
    assert sheet(model, Parallelism(1), Room(80 * GIB)).kv_capacity_tokens == 0


def test_kv_heads_are_copied_and_a_latent_is_never_divided(build):
    gqa, mla = build.model("qwen3-235b-fp8"), build.model("deepseek-v3")

    tokens = {tp: sheet(gqa, Parallelism(tp), Room(141 * GIB)) for tp in (4, 8)}
    latent = sheet(mla, Parallelism(8), Room(141 * GIB))

    per_token = {tp: s.kv_bytes / s.kv_capacity_tokens for tp, s in tokens.items()}
    assert per_token[4] == pytest.approx(per_token[8], rel=0.01)
    assert latent.kv_bytes / latent.kv_capacity_tokens == pytest.approx(70_272, rel=0.01)


def test_legal_sizes_divide_the_heads(build):
    model = build.model("llama-70b")

    assert [tp for tp in range(1, 17) if legal_tp(model, tp)] == [1, 2, 4, 8, 16]


def engine(build, name, kind="NVIDIA H100 80GB HBM3", tp=1):
    spec = find_spec(kind)
    return Engine(
        build.model(name), spec, Parallelism(tp), group_link(spec, spec.num_nvlinks, None)
    )


def test_decoding_one_stream_is_bound_by_reading_the_weights(build):
    """Public single-stream figures: Llama 8B on one H100 about 6 to 8 ms a token, 70B on four 15 to 20 ms."""
    assert 0.005 < engine(build, "llama-8b").decode_s(1, 1000) < 0.009
    assert 0.012 < engine(build, "llama-70b", tp=4).decode_s(1, 1000) < 0.022


def test_more_of_anything_takes_longer_and_more_gpus_less(build):
    one = engine(build, "llama-70b", tp=2)

    assert one.prefill_s(2000) > one.prefill_s(1000) > one.prefill_s(500)
    assert one.prefill_s(500, 4000) > one.prefill_s(500)
    assert one.decode_s(64, 4000) > one.decode_s(8, 4000) > one.decode_s(8, 500)
    assert engine(build, "llama-70b", tp=4).prefill_s(4000) < one.prefill_s(4000)


def test_fp8_is_never_slower_than_bf16(build):
    fp8 = build.model("qwen3-32b-fp8")
    config = {k: v for k, v in build.configs["qwen3-32b-fp8"].items() if "quant" not in k}
    bf16 = read_model(config, "bf16")
    for spec in SPECS:
        link = group_link(spec, spec.num_nvlinks, "SYS")
        small, large = (Engine(m, spec, Parallelism(2), link) for m in (fp8, bf16))
        for batch in (1, 16, 256):
            assert small.decode_s(batch, 1000) <= large.decode_s(batch, 1000)
        assert small.prefill_s(2000) <= large.prefill_s(2000)


def test_pcie_makes_tensor_parallelism_slower_than_nvlink(build):
    spec = find_spec("NVIDIA A100-SXM4-80GB")
    model = build.model("llama-70b")
    nvlink, pcie = (
        Engine(model, spec, Parallelism(4), group_link(spec, count, "SYS")) for count in (12, 0)
    )

    assert pcie.prefill_s(4000) > 1.5 * nvlink.prefill_s(4000)


PACE = DeclaredPace(prefill_base_s=0.0, prefill_s_per_token=1e-4, step_s=0.01)


def test_the_highest_rate_is_where_goals_begin_to_fail():
    layout = Layout(Side(PACE, 2, 64))
    work, slo = Workload(1000, 100), Slo(ttft_ms=1000)

    rate = max_rate_rps(layout, work, slo)

    assert serve(layout, work, rate * 0.99).ttft_p99_s <= 1.0
    beyond = serve(layout, work, rate * 1.02)
    assert beyond.ttft_p99_s > 1.0 or not beyond.is_stable


def test_shared_prefixes_raise_the_rate_and_more_replicas_too():
    one = Layout(Side(PACE, 1, 64))

    cold = max_rate_rps(one, Workload(1000, 100), Slo())
    warm = max_rate_rps(one, Workload(1000, 100, shared_prefix_ratio=0.5), Slo())
    two = max_rate_rps(Layout(Side(PACE, 2, 64)), Workload(1000, 100), Slo())

    assert warm > 1.3 * cold
    assert two == pytest.approx(2 * cold, rel=0.02)


def test_moving_the_cache_over_a_slow_link_costs_first_token_time():
    pace = DeclaredPace(0.0, 1e-4, 0.01, kv_bytes_per_token=327_680)
    side = Side(pace, 2, 64)
    work = Workload(4096, 100, 1.0)

    fast = serve(Layout(side, side, 50e9), work, 1.0)
    slow = serve(Layout(side, side, 2.5e9), work, 1.0)

    assert slow.transfer_s - fast.transfer_s >= 4096 * 327_680 / 0.8 * (1 / 2.5e9 - 1 / 50e9)  # fmt: skip


@pytest.mark.parametrize("rate", [0.001, 1.0, 7.9, 8.0, 50.0, 1e6])
def test_no_rate_gives_infinite_or_undefined_steady_figures(rate):
    for layout in (Layout(Side(PACE, 1, 8)), Layout(Side(PACE, 1, 8), Side(PACE, 1, 8), 1e9)):
        served = serve(layout, Workload(1000, 100), rate)

        assert math.isfinite(served.itl_s)
        assert not served.is_stable or math.isfinite(served.ttft_p99_s)


@pytest.mark.parametrize(
    ("product", "figures_of"),
    [
        ("NVIDIA H100 80GB HBM3", "h100-sxm"),
        ("NVIDIA A100-SXM4-40GB", "a100-sxm-40"),
        ("NVIDIA GH200 480GB", "gh200"),
        ("Tesla V100-SXM2-16GB", "v100-sxm-16"),
        ("NVIDIA RTX A1000", None),
        ("NVIDIA RTX A4000", None),
        ("h1000", None),
    ],
)
def test_a_product_whose_number_goes_on_is_another_one(product, figures_of):
    found = find_spec(product)

    assert (found and found.name) == figures_of

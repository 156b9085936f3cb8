"""Metric families compared with what vLLM 0.32 showed, and counted against what was sent."""

import re
from pathlib import Path

import pytest

CAPTURES = Path(__file__).parent / "captures"
LEFT_OUT = {
    "vllm:estimated_flops_per_gpu_total",
    "vllm:estimated_read_bytes_per_gpu_total",
    "vllm:estimated_write_bytes_per_gpu_total",
    "vllm:admission_rejections_total",
}


def families(text):
    """Return name → (type, label names, bucket bounds)."""
    out = {}
    for line in text.splitlines():
        if match := re.match(r"# TYPE (vllm:\S+) (\S+)", line):
            name = match[1]
            out[name] = (match[2], set(), [])
        elif line.startswith("vllm:"):
            labels = dict(re.findall(r'(\w+)="((?:[^"\\]|\\.)*)"', line))
            _, names, bounds = out[name]
            if bound := labels.pop("le", None):
                bounds.append(bound)
            names |= set(labels)
    return {name: family for name, family in out.items() if not name.endswith("_created")}


@pytest.fixture(scope="module")
def engines(start_engine):
    return {
        "agg": start_engine("agg"),
        "pd_decode": start_engine("pd", "--side-channel", "127.0.0.1:0"),
    }


@pytest.mark.parametrize("capture", ["agg", "pd_decode"])
def test_families_have_the_types_labels_and_bounds_of_the_real_engine(engines, capture):
    real = families((CAPTURES / f"metrics_sample_{capture}.txt").read_text())
    ours = families(engines[capture].http.get("/metrics").text)
    config = "vllm:cache_config_info"

    assert set(ours) == set(real) - LEFT_OUT
    assert ours.pop(config)[1] <= real.pop(config)[1]
    assert ours == {name: family for name, family in real.items() if name not in LEFT_OUT}


def test_counters_tell_what_was_sent(start_engine):
    engine = start_engine("count", "--block-size", "32", "--num-blocks", "300")
    for _ in range(2):
        engine.complete(list(range(100)), 10)
    got = engine.metrics()

    assert got["vllm:prompt_tokens_total"] == 200
    assert got["vllm:generation_tokens_total"] == 20
    assert got["vllm:prefix_cache_queries_total"] == 200
    assert got["vllm:prefix_cache_hits_total"] == 96
    assert got['vllm:prompt_tokens_by_source_total{source="local_cache_hit"}'] == 96
    assert got['vllm:prompt_tokens_by_source_total{source="local_compute"}'] == 104
    assert got['vllm:request_success_total{finished_reason="length"}'] == 2
    assert got["vllm:time_to_first_token_seconds_count"] == 2
    assert got["vllm:inter_token_latency_seconds_count"] == 18
    assert got['vllm:inter_token_latency_seconds_bucket{le="+Inf"}'] == 18
    assert got["vllm:inter_token_latency_seconds_sum"] >= 18 * 0.002 * 0.5
    assert got["vllm:e2e_request_latency_seconds_count"] == 2
    assert got["vllm:num_requests_running"] == got["vllm:kv_cache_usage_perc"] == 0
    assert got["process_resident_memory_bytes"] > 1e6
    info = next(name for name in got if name.startswith("vllm:cache_config_info"))
    assert 'block_size="32"' in info
    assert 'num_gpu_blocks="300"' in info

"""The scrape parser on real vLLM scrapes and on hostile lines."""

import string
from pathlib import Path

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from dynctl.agents.relay.metrics import RelayMetrics
from dynctl.core.exposition import (
    engine_sample,
    histogram,
    histogram_names,
    parse,
    relay_sample,
    router_sample,
    total,
)
from dynctl.core.snapshot import EngineSample
from dynctl.errors import ProbeError

CAPTURES = Path(__file__).parent / "captures"


def test_engine_sample_of_an_aggregated_engine():
    sample = engine_sample((CAPTURES / "vllm_aggregated.txt").read_text(), "chat-0", "i1")

    assert (sample.id, sample.incarnation) == ("chat-0", "i1")
    assert sample.running == 0.0
    assert sample.waiting == 0.0
    assert sample.kv_usage_ratio == 0.0
    assert sample.prompt_tokens_total == 47618.0
    assert sample.generation_tokens_total == 2868.0
    assert sample.prefix_queries_tokens_total == 47618.0
    assert sample.prefix_hits_tokens_total == 10240.0
    assert sample.preemptions_total == 0.0
    assert sample.ttft_s.bounds[:2] == (0.001, 0.005)
    assert sample.ttft_s.bounds[-1] == 2560.0
    assert sample.ttft_s.counts[:4] == (0.0, 3.0, 11.0, 24.0)
    assert sample.ttft_s.counts[-1] == 63.0
    assert sample.ttft_s.total == pytest.approx(4.566778)
    assert sample.itl_s.counts[-1] == 2805.0
    assert (sample.transfer_s, sample.transfer_bytes_total) == (None, None)


def test_engine_sample_of_a_decode_engine_sees_transferred_tokens():
    sample = engine_sample((CAPTURES / "vllm_decode.txt").read_text(), "d", "i")

    assert sample.external_queries_tokens_total > 0
    assert 0 < sample.external_hits_tokens_total <= sample.external_queries_tokens_total
    assert sample.transfer_s.counts[-1] == 6.0
    assert sample.transfer_s.total == pytest.approx(0.336931)
    assert sample.transfer_bytes_total == 6 * 2**20
    assert sample.transfers_failed_total == 0.0


def test_missing_families_are_none_not_zero():
    sample = engine_sample('vllm:num_requests_running{engine="0"} 2\n', "e", "i")

    assert sample.running == 2.0
    assert sample.waiting is None
    assert sample.kv_usage_ratio is None
    assert sample.ttft_s is None


def test_data_parallel_ranks_add_up_and_usage_is_averaged():
    text = (
        'vllm:num_requests_running{engine="0"} 2\nvllm:num_requests_running{engine="1"} 3\n'
        'vllm:kv_cache_usage_perc{engine="0"} 0.2\nvllm:kv_cache_usage_perc{engine="1"} 0.6\n'
    )
    sample = engine_sample(text, "e", "i")

    assert sample.running == 5.0
    assert sample.kv_usage_ratio == pytest.approx(0.4)


def test_a_renamed_metric_is_still_found_but_the_new_name_wins():
    old = engine_sample("vllm:gpu_cache_usage_perc 0.5\n", "e", "i")
    both = engine_sample("vllm:gpu_cache_usage_perc 0.5\nvllm:kv_cache_usage_perc 0.7\n", "e", "i")

    assert old.kv_usage_ratio == 0.5
    assert both.kv_usage_ratio == 0.7


def test_not_a_number_counts_as_missing():
    assert engine_sample("vllm:kv_cache_usage_perc NaN\n", "e", "i").kv_usage_ratio is None


def test_router_sample_adds_label_sets():
    text = """# HELP dynctl_router_requests_total Requests.
# TYPE dynctl_router_requests_total counter
dynctl_router_requests_total{status="200",model="m"} 40
dynctl_router_requests_total{status="503",model="m"} 2
dynctl_router_errors_total{kind="no_engine"} 2
dynctl_router_inflight 3
dynctl_router_queued 1
dynctl_router_prompt_tokens_total 1000
dynctl_router_predicted_hit_tokens_total 250
dynctl_router_output_tokens_total 512
dynctl_router_ttft_seconds_bucket{model="a",le="0.1"} 1
dynctl_router_ttft_seconds_bucket{model="a",le="+Inf"} 2
dynctl_router_ttft_seconds_sum{model="a"} 0.5
dynctl_router_ttft_seconds_bucket{model="b",le="0.1"} 5
dynctl_router_ttft_seconds_bucket{model="b",le="+Inf"} 5
dynctl_router_ttft_seconds_sum{model="b"} 0.25
"""
    sample = router_sample(text, "r-0", "chat")

    assert (sample.requests_total, sample.errors_total) == (42.0, 2.0)
    assert (sample.inflight, sample.queued) == (3.0, 1.0)
    assert (sample.prompt_tokens_total, sample.predicted_hit_tokens_total) == (1000.0, 250.0)
    assert sample.output_tokens_total == 512.0
    assert sample.ttft_s.bounds == (0.1,)
    assert sample.ttft_s.counts == (6.0, 7.0)
    assert sample.ttft_s.total == 0.75
    assert sample.itl_s is None


def test_labels_with_escapes_braces_spaces_and_time_stamps():
    line = r'm{a="x \"y\" } z",b="1\\2\n", } 3.5 1700000000 # {trace="1"} 2'
    (sample,) = parse(f"# c\n\n{line}\nother 1\n", {"m"})["m"]

    assert sample.labels == {"a": 'x "y" } z', "b": "1\\2\n"}
    assert sample.value == 3.5


def test_name_followed_by_space_before_brace_and_empty_braces():
    scrape = parse('m {} 1\nn{} 2\nplain 3\nexemplar 4 # {a="1"} 5', {"n", "plain", "exemplar"})

    assert {name: samples[0].value for name, samples in scrape.items()} == {
        "n": 2,
        "plain": 3,
        "exemplar": 4,
    }


def test_info_labels_are_readable():
    (config,) = parse((CAPTURES / "vllm_aggregated.txt").read_text(), {"vllm:cache_config_info"})[
        "vllm:cache_config_info"
    ]

    assert config.labels["block_size"] == "128"


@pytest.mark.parametrize("line", ["m{a=1} 2", 'm{a="1" 2', 'm{a="1"}', "m x", "m ", 'm{a="1} 2'])
def test_a_malformed_wanted_line_names_itself(line):
    with pytest.raises(ProbeError, match="line 2 of m"):
        parse(f"ok 1\n{line}\n", {"m"})


def test_a_malformed_unwanted_line_costs_nothing():
    assert parse("m{a=1} 2\nok 1\n", {"ok"})["ok"][0].value == 1.0


@pytest.mark.parametrize(
    "text",
    [
        'h_bucket{le="1"} 2\n',
        'h_bucket{le="x"} 2\n',
        "h_bucket 2\n",
        'h_bucket{le="1"} 3\nh_bucket{le="+Inf"} 2\n',
        'h_bucket{m="a",le="1"} 1\nh_bucket{m="a",le="+Inf"} 1\nh_bucket{m="b",le="+Inf"} 4\n',
    ],
)
def test_impossible_histograms_are_refused(text):
    with pytest.raises(ProbeError, match="h"):
        histogram(parse(text, histogram_names("h")), "h")


def test_samples_survive_the_wire():
    sample = engine_sample((CAPTURES / "vllm_aggregated.txt").read_text(), "e", "i")

    assert msgspec.json.decode(msgspec.json.encode(sample), type=EngineSample) == sample


def test_total_of_nothing_is_none():
    assert total({}, "a", "b") is None


names = st.text(string.ascii_letters, min_size=1, max_size=8)


@given(st.dictionaries(names, st.text(max_size=20), max_size=4), st.floats(allow_nan=False))
def test_any_label_value_survives_escaping(labels, value):
    def escape(text):
        return text.replace("\\", "\\\\").replace('"', '\\"').replace("\n", "\\n")

    body = ",".join(f'{name}="{escape(text)}"' for name, text in labels.items())
    (sample,) = parse(f"m{{{body}}} {value!r}\n", {"m"})["m"]

    assert sample.labels == labels
    assert sample.value == value


def test_router_sample_reads_labels_that_have_fields_of_their_own():
    text = """dynctl_router_hit_tokens{part="hit"} 640
dynctl_router_hit_tokens{part="cold"} 190
dynctl_router_hit_tokens{part="of_a_newer_router"} 5
dynctl_router_kv_moved_tokens_total{link="rdma"} 1234
dynctl_router_kv_bytes_per_token 131072
dynctl_router_index_engines{state="known"} 3
dynctl_router_index_engines{state="reading"} 1
dynctl_router_index_blocks 412000
dynctl_router_findings{engine="e-0",cause="topic"} 1
dynctl_router_findings{engine="",cause="slow_decisions"} 1
"""
    sample = router_sample(text, "r", "chat")
    assert (sample.hit_tokens_total, sample.cold_tokens_total) == (640, 190)
    assert sample.eviction_tokens_total is None
    assert sample.moved_rdma_tokens_total == 1234
    assert sample.kv_bytes_per_token == 131072
    assert (sample.caches_known, sample.caches_reading, sample.caches_untold) == (3, 1, None)
    assert sample.index_blocks == 412000
    assert sample.findings == (("e-0", "topic"), ("", "slow_decisions"))


def test_relay_sample_reads_the_lag_of_kv_events():
    metrics = RelayMetrics()
    for lag_s in (0.0015, 0.0015, 0.03):
        metrics.lag(lag_s)
    sample = relay_sample(metrics.exposition({}).decode(), "relay", "i1")

    assert (sample.id, sample.incarnation) == ("relay", "i1")
    assert sample.kv_lag_s.counts[-1] == 3.0
    assert sample.kv_lag_s.counts[1] == 2.0
    assert relay_sample("", "relay", "i1").kv_lag_s is None

"""When an engine's own figures say that its cache is empty (K9), and when they do not."""

from pathlib import Path

import pytest

from dynctl.kv.emptied import CacheFigures, CacheWatch, read_figures

CAPTURES = Path(__file__).parents[1] / "sim" / "captures"
SCRAPE = """\
vllm:engine_sleep_state{{engine="0",sleep_state="awake"}} {awake}
vllm:engine_sleep_state{{engine="0",sleep_state="weights_offloaded"}} {offloaded}
vllm:engine_sleep_state{{engine="0",sleep_state="discard_all"}} {discarded}
"""


def figures(usage, requests=0.0, hits=None):
    return CacheFigures(is_asleep=False, usage_ratio=usage, num_requests=requests, hit_tokens=hits)


def looks(*steps):
    """What a watch says at each of some looks: (seconds, usage, requests, hit tokens)."""
    watch = CacheWatch()
    return [watch.is_empty(figures(*facts), at_s) for at_s, *facts in steps]


def test_a_captured_engine_whose_gauge_is_0_beside_a_full_cache_is_not_taken_for_empty():
    text = (CAPTURES / "metrics_sample_agg.txt").read_text()
    seen = read_figures(text)

    assert 'prefix_cache_hits_total{engine="0",model_name="tiny"} 10240.0' in text
    assert seen == (False, 0.0, 0.0, 10240.0)
    busy = seen._replace(usage_ratio=0.4, num_requests=3.0)
    watch = CacheWatch()
    assert not any(watch.is_empty(f, at_s) for at_s, f in enumerate([busy, seen, busy, seen]))


@pytest.mark.parametrize(
    ("awake", "offloaded", "discarded", "is_asleep"),
    [(1, 0, 0, False), (0, 1, 0, True), (0, 0, 1, True), (0, 0, 0, False)],
)
def test_an_engine_that_sleeps_has_no_cache_and_one_that_pauses_has(
    awake, offloaded, discarded, is_asleep
):
    seen = read_figures(SCRAPE.format(awake=awake, offloaded=offloaded, discarded=discarded))

    assert CacheWatch().is_empty(seen, 0.0) == is_asleep


def test_one_of_several_ranks_that_sleeps_is_enough():
    awake = SCRAPE.format(awake=1, offloaded=0, discarded=0)
    asleep = SCRAPE.format(awake=0, offloaded=1, discarded=0).replace('"0"', '"1"')

    assert read_figures(awake + asleep).is_asleep


def test_a_gauge_that_counts_what_is_cached_says_by_0_that_nothing_is():
    assert looks((0, 0.5, 0), (301, 0.5, 0), (302, 0.0, 0)) == [False, False, True]
    assert looks((0, 0.5, 0), (301, 0.5, 0), (302, 0.0, 1)) == [False, False, False]


def test_blocks_kept_for_another_engine_to_fetch_are_no_cache_that_is_counted():
    assert looks((0, 0.5, 0), (299, 0.5, 0), (300, 0.0, 0)) == [False] * 3
    # Something ran in between: the gauge need not have stood.
    assert looks((0, 0.5, 0), (200, 0.5, 2), (400, 0.5, 0), (402, 0.0, 0)) == [False] * 4


def test_a_gauge_that_is_0_before_and_after_a_hit_counts_no_cache_whatever_it_seemed_to():
    # Blocks that waited for more than 300 s to be fetched, then were.
    held = [(0, 0.5, 0, 64), (301, 0.5, 0, 64), (302, 0.0, 0, 64)]
    refuted = looks(*held, (307, 0.0, 0, 128), (312, 0.5, 0, 128), (700, 0.5, 0, 128), (705, 0, 0))

    assert refuted == [False, False, True, False, False, False, False]
    # It was seen before there was anything to unlearn.
    assert not any(looks((-10, 0.0, 0, 0), (-5, 0.0, 0, 64), *held))


def test_hits_of_what_was_dropped_since_do_not_refute_a_gauge():
    held = [(0, 0.5, 0, 64), (301, 0.5, 0, 64), (302, 0.0, 0, 64)]

    assert looks(*held, (307, 0.0, 0, 64))[2:] == [True, True]
    assert looks(*held, (307, 0.5, 1, 128), (312, 0.0, 0, 192))[2:] == [True, False, True]


def test_figures_that_are_not_there_say_nothing():
    assert read_figures("# nothing\n") == (False, None, None, None)
    assert not CacheWatch().is_empty(read_figures(""), 0.0)

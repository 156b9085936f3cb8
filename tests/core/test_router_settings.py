import pytest

from dynctl.core.router_settings import DEFAULTS, make_settings
from dynctl.errors import UsageError


@pytest.mark.parametrize("name", ["default_slots", "engine_poll_s", "itl_ms", "prefill_tokens_s"])
def test_what_nothing_could_be_served_without_is_more_than_zero(name):
    with pytest.raises(UsageError, match=f"the router setting {name} is more than 0"):
        make_settings({name: 0})


def test_zero_says_none_elsewhere():
    assert make_settings({"probe_s": 0, "warm_prefixes": 0}).probe_s == 0
    assert make_settings({}) == DEFAULTS

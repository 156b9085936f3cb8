"""A misspelt key is refused wherever it stands, and pools towards relays keep their connections."""

import json

import pytest

from dynctl.core.kv_links import LinkRate
from dynctl.errors import UsageError
from dynctl.router.config import make_settings, parse_config
from dynctl.router.sources.route import limits

ENGINE = {"id": "e0", "url": "http://127.0.0.1:1"}
RELAY = {"host_name": "h", "address": "127.0.0.1", "port": 1}
TLS = {"cert": "c", "key": "k"}
SOUND = {
    "listen": "127.0.0.1:0",
    "engines": [ENGINE],
    "relays": [RELAY],
    "tls": TLS,
    "server_tls": TLS,
    "api_keys": [{"name": "n", "sha256": "00"}],
}
RATE = {"source_host": "a", "target_host": "b", "link": "tcp", "ms_per_token": 0.1}


def test_a_sound_configuration_is_read():
    config = parse_config(json.dumps(SOUND).encode())
    assert config.engines[0].url == "http://127.0.0.1:1"
    assert config.relays[0].host_name == "h"
    assert config.tls.cert == config.server_tls.cert == "c"
    assert config.api_keys[0].name == "n"


@pytest.mark.parametrize("section", ["engines", "relays", "tls", "server_tls", "api_keys"])
def test_an_unknown_key_inside_a_section_is_refused(section):
    entry = SOUND[section]
    wrong = [{**entry[0], "kv_event": "x"}] if isinstance(entry, list) else {**entry, "kv_event": 1}
    with pytest.raises(UsageError) as refused:
        parse_config(json.dumps({**SOUND, section: wrong}).encode())
    assert f"{section} has no key kv_event" in refused.value.message


def test_an_unknown_key_at_the_top_is_refused():
    with pytest.raises(UsageError, match="router configuration has no key polcy"):
        parse_config(json.dumps({**SOUND, "polcy": "kv"}).encode())


def test_rates_of_links_are_read_and_a_configuration_without_them_too():
    assert parse_config(json.dumps(SOUND).encode()).link_rates == ()
    other = {**RATE, "target_host": "c", "latency_ms": 0.4, "basis": "nominal"}
    config = parse_config(json.dumps({**SOUND, "link_rates": [RATE, other]}).encode())
    assert config.link_rates == (
        LinkRate("a", "b", "tcp", 0.1, 0.0, "measured"),
        LinkRate("a", "c", "tcp", 0.1, 0.4, "nominal"),
    )


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        ({"link": "wifi"}, "no link 'wifi'"),
        ({"basis": "guessed"}, "no basis 'guessed'"),
        ({"ms_per_token": 0}, "from a to b: 0 ms a token"),
        ({"latency_ms": -1}, "after -1 ms"),
        ({"rate": 1}, "link_rates has no key rate"),
    ],
)
def test_rates_that_no_link_has_are_refused(wrong, message):
    with pytest.raises(UsageError, match=message):
        parse_config(json.dumps({**SOUND, "link_rates": [{**RATE, **wrong}]}).encode())


def test_two_rates_of_one_link_are_refused():
    twice = [RATE, {**RATE, "ms_per_token": 0.2}]
    with pytest.raises(UsageError, match="two link rates"):
        parse_config(json.dumps({**SOUND, "link_rates": twice}).encode())


@pytest.mark.parametrize("content", [b"[]", b"{", b"null", b"{}", b'{"listen": 8000}'])
def test_what_is_no_configuration_is_refused(content):
    with pytest.raises(UsageError, match="router configuration"):
        parse_config(content)


def test_settings_are_checked_and_the_others_keep_their_defaults():
    config = parse_config(json.dumps({**SOUND, "settings": {"drain_s": 7}}).encode())
    assert config.settings == make_settings({"drain_s": 7})
    for wrong in ({"drain": 7}, {"drain_s": "long"}, {"drain_s": -1}, [7]):
        with pytest.raises(UsageError):
            parse_config(json.dumps({**SOUND, "settings": wrong}).encode())


@pytest.mark.parametrize("section", ["engines", "tls"])
def test_a_section_of_the_wrong_kind_is_refused(section):
    with pytest.raises(UsageError):
        parse_config(json.dumps({**SOUND, section: 5}).encode())


def test_connections_to_relays_are_kept_longer_than_those_to_engines():
    assert limits(2.0).idle_timeout_s == 4.0
    assert limits(2.0, is_relay=True).idle_timeout_s == 30.0
    assert limits(2.0, is_relay=True).connect_timeout_s == 2.0


@pytest.mark.parametrize("what", ["url", "kv_events", "kv_replay", "id"])
def test_two_engines_at_one_place_are_refused_by_both_names(what):
    """Row K12: what one of them says would count for both."""
    one = {
        "id": "e0",
        "url": "http://127.0.0.1:1",
        "kv_events": "tcp://a:1",
        "kv_replay": "tcp://a:2",
    }
    other = {
        "id": "e1",
        "url": "http://127.0.0.1:2",
        "kv_events": "tcp://b:1",
        "kv_replay": "tcp://b:2",
    }
    assert parse_config(json.dumps(SOUND | {"engines": [one, other]}).encode())
    other[what] = one[what]
    with pytest.raises(UsageError, match="e0"):
        parse_config(json.dumps(SOUND | {"engines": [one, other]}).encode())


@pytest.mark.parametrize("host", ["127.0.0.1", "127.8.9.10", "localhost", "[::1]", "::1"])
def test_loopback_needs_neither_keys_nor_tls(host):
    bare = {"listen": f"{host}:0", "engines": [ENGINE]}
    assert parse_config(json.dumps(bare).encode()).engines[0].id == "e0"


@pytest.mark.parametrize(
    "host",
    [
        "127.example.com",
        "127.0.0.1.evil.org",
        "127.0.0.1%.evil.org",
        "localhost.evil.org",
        "127.0.0.999",
        "0.0.0.0",
        "[::]",
        "10.0.0.1",
        "gpu-01",
    ],
)
def test_a_name_that_only_looks_like_loopback_opens_nothing_unprotected(host):
    bare = {"listen": f"{host}:0", "engines": [ENGINE]}
    with pytest.raises(UsageError, match="without API keys and TLS"):
        parse_config(json.dumps(bare).encode())
    assert parse_config(json.dumps({**bare, "allow_insecure_listen": True}).encode())

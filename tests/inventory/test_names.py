import pytest
from hypothesis import given
from hypothesis import strategies as st

from dynctl.inventory.names import expand_range, is_address, is_user, parse_host, ssh_aliases


@pytest.mark.parametrize(
    ("text", "names"),
    [
        ("gpu", ["gpu"]),
        ("gpu-[08-11]", ["gpu-08", "gpu-09", "gpu-10", "gpu-11"]),
        ("gpu-[8-11]", ["gpu-8", "gpu-9", "gpu-10", "gpu-11"]),
        ("r[1-2]n[1,3]", ["r1n1", "r1n3", "r2n1", "r2n3"]),
        ("g[007]", ["g007"]),
    ],
)
def test_ranges_expand_in_order_with_their_width(text, names):
    assert expand_range(text) == names


@pytest.mark.parametrize(
    "text", ["g[]", "g[a]", "g[2-1]", "g[1-99999]", "g[1-2000]h[1-3]", "g[1--2]"]
)
def test_what_is_no_range_is_an_error(text):
    with pytest.raises(ValueError, match=r"range|hosts"):
        expand_range(text)


@given(st.integers(0, 2000), st.integers(0, 50))
def test_a_range_has_as_many_names_as_numbers_and_all_differ(first, count):
    names = expand_range(f"n[{first:04d}-{first + count:04d}]")

    assert len(set(names)) == count + 1
    assert {len(name) for name in names} == {5}


def test_short_host_forms():
    assert parse_host("gpu") == ("gpu", None, None)
    assert parse_host("ops@gpu-1.example.net:2222") == ("gpu-1.example.net", "ops", 2222)


@pytest.mark.parametrize(
    "text", ["", "a b", "a:b", "@a", "a:0", "a:99999", "a@b@c", "fd00::1", "a/b"]
)
def test_what_is_no_host_is_an_error(text):
    with pytest.raises(ValueError, match=r"host|port"):
        parse_host(text)


@pytest.mark.parametrize("text", ["-l", "$(id)", "a;b", "a b", "", "~root", "a\\b", "a'b"])
def test_hostile_login_names_are_refused(text):
    """S6: OpenSSH and shells have read such names as options or commands."""
    assert not is_user(text)


@pytest.mark.parametrize(
    "text", ["-oProxyCommand=id", "a b", "$(id)", "a;b", "", "a\nb", "[::1]", "a/b"]
)
def test_hostile_addresses_are_refused(text):
    assert not is_address(text)


@pytest.mark.parametrize("text", ["gpu-1.example.net", "10.0.0.1", "fd00::1", "fe80::1%eth0"])
def test_addresses_are_names_ipv4_and_ipv6(text):
    assert is_address(text)


def test_aliases_leave_out_patterns_and_survive_broken_lines(tmp_path, monkeypatch):
    monkeypatch.setenv("HOME", str(tmp_path))
    config = tmp_path / "config"
    config.write_text("Host a b* !c d\nMatch host x\nHost 'unclosed\nInclude config\nHOST e a\n")

    assert ssh_aliases(config) == ["a", "d", "e"]

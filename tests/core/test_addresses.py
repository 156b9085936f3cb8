"""Addresses are judged by what they are, never by how they begin."""

import pytest

from dynctl.core.addresses import is_any, is_loopback, is_public


@pytest.mark.parametrize(
    ("text", "kinds"),
    [
        ("127.0.0.1", "loopback"),
        ("127.1.2.3", "loopback"),
        ("::1", "loopback"),
        ("localhost", "loopback"),
        ("::1%lo", "loopback"),
        ("127.example.com", ""),
        ("127.0.0.1.evil.org", ""),
        ("127.0.0.1%.evil.org", ""),
        ("localhost.evil.org", ""),
        ("0.0.0.0", "any"),
        ("::", "any"),
        ("*", "any"),
        ("10.0.0.1", ""),
        ("fe80::1%eth0", ""),
        ("8.8.8.8", "public"),
        ("2001:4860::1", "public"),
        ("gpu-01", ""),
        ("", ""),
    ],
)
def test_an_address_is_of_one_kind_or_none(text, kinds):
    found = {"loopback": is_loopback(text), "any": is_any(text), "public": is_public(text)}

    assert [kind for kind, holds in found.items() if holds] == ([kinds] if kinds else [])

"""Interfaces by their addresses, as the kernel tells them."""

import ipaddress

import pytest

from dynctl.agents.host import interfaces
from dynctl.errors import DynctlError


def test_the_loopback_interface_has_every_loopback_address():
    assert interfaces.addresses()[ipaddress.ip_address("127.0.0.1")] == "lo"
    assert interfaces.name_of("127.0.0.1") == "lo"
    assert interfaces.name_of("127.0.0.77") == "lo"


def test_an_address_of_another_host_is_refused():
    with pytest.raises(DynctlError, match=r"192\.0\.2\.1 is not one of this host's"):
        interfaces.name_of("192.0.2.1")
    with pytest.raises(DynctlError, match="no IP address"):
        interfaces.name_of("gpu-1")

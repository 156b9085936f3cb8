"""What kind of address a text names. Names other than `localhost` are of no kind: only a resolver knows theirs. Pure."""

import ipaddress


def is_loopback(text: str) -> bool:
    """Tell whether only the machine itself reaches an address."""
    address = _address(text)
    return text == "localhost" or (address is not None and address.is_loopback)


def is_any(text: str) -> bool:
    """Tell whether a listen address means every address of the machine."""
    address = _address(text)
    return text == "*" or (address is not None and address.is_unspecified)


def is_public(text: str) -> bool:
    """Tell whether an address is routed on the internet."""
    address = _address(text)
    return address is not None and address.is_global


def _address(text: str) -> ipaddress.IPv4Address | ipaddress.IPv6Address | None:
    """The address; only of IPv6 may it have a scope (`fe80::1%eth0`): `127.0.0.1%.example.com` is a name."""
    try:
        return ipaddress.ip_address(text)
    except ValueError:
        return None

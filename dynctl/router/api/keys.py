"""API keys: only their SHA-256 is known; compared in constant time, before a body is read. Pure."""

import hashlib
import hmac
from collections.abc import Sequence

from dynctl.router.config import ApiKeyHash
from dynctl.router.turns import CLASSES


class Keys:
    """The keys clients may come with; none configured lets everybody in."""

    def __init__(self, keys: Sequence[ApiKeyHash]) -> None:
        self._keys = tuple((key.name, key.sha256.lower().encode()) for key in keys)
        self._facts = {
            key.sha256.lower(): (CLASSES.index(key.priority), key.route_key or key.name)
            for key in keys
        }
        """For those who were let in; that needs no constant time."""

    @property
    def is_open(self) -> bool:
        """Whether no key is asked for."""
        return not self._keys

    def owner(self, authorization: bytes | None) -> str | None:
        """Name the key in an `Authorization: Bearer` field; None when it is none of ours.

        All keys are compared, so that the time taken tells nothing about which one was near.
        """
        if not self._keys:
            return ""
        scheme, _, key = (authorization or b"").strip().partition(b" ")
        digest = hashlib.sha256(key.strip()).hexdigest().encode()
        found = None
        for name, known in self._keys:
            if hmac.compare_digest(known, digest):
                found = name
        return found if scheme.lower() == b"bearer" else None

    def top(self, authorization: bytes | None) -> int:
        """The level of the most urgent class a client may ask for."""
        return self._of(authorization)[0]

    def route_key(self, authorization: bytes | None) -> str:
        """The route key of a client's requests; empty where no key is asked for."""
        return self._of(authorization)[1]

    def route_keys(self) -> set[str]:
        """The route keys of all clients."""
        return {route_key for _, route_key in self._facts.values()}

    def _of(self, authorization: bytes | None) -> tuple[int, str]:
        if not self._keys:
            return 0, ""
        _, _, key = (authorization or b"").strip().partition(b" ")
        return self._facts.get(hashlib.sha256(key.strip()).hexdigest(), (0, ""))

"""Reads a batch of KV events written as engines write nearly all of theirs, in one step: in a compiled wheel.

There this module is `plain_batch.c`: it makes the events themselves, and no Python integer per token. What it reads means what
`events.decode` says it does; whatever is unusual or wrong in any way it leaves to that. From sources nothing is read here.
Pure.
"""

from dynctl.core.kv import KvEvent


def read(payload: bytes) -> tuple[float, tuple[KvEvent, ...], int] | None:
    """Time, events and rank of a batch in the usual form; None where it is another."""
    del payload
    return None

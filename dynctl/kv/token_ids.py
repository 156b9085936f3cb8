"""Reads an event's token ids from msgpack, as an array: nobody looks at them one by one, they are hashed.

A compiled wheel has the same in C beside this (`token_ids.c`), where no Python integer is made per token: that was half of
what an event cost (docs/decisions/0005-data-path.md). Not here: what the ids are hashed to (`hashing`). Pure.
"""

from array import array
from typing import Annotated

import msgspec

_Token = Annotated[int, msgspec.Meta(ge=0, le=2**32 - 1)]
_decode = msgspec.msgpack.Decoder(list[_Token]).decode


def read(packed: bytes | msgspec.Raw) -> "array[int]":
    """Read a msgpack array of integers of 32 bits.

    Raises:
        ValueError: when it is none, or one of them is negative or too large.
    """
    try:
        return array("I", _decode(packed))
    except msgspec.DecodeError as error:
        raise ValueError(str(error)) from error

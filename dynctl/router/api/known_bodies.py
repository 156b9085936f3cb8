"""A client's next body mostly differs from one before in the text of its prompt alone: it is not parsed again.

Not here: what a request must be (`requests`). Pure.
"""

from typing import Final

from dynctl.router.api.requests import CHAT, ApiRequest, parse_request
from dynctl.router.config import Settings

_MAX_SHAPES: Final = 4
_MAX_LEARNED: Final = 16
"""A client whose bodies differ in more than the text, as those of a conversation do, is read anew each time."""

_MAX_BYTES: Final = 1024
"""Of a body that is learned from: longer ones cost more than to be parsed, and there are many clients."""

_TEXT: Final = bytes(byte for byte in range(0x20, 0x100) if byte not in b'"\\')
"""What a string of JSON holds as it is."""


class KnownBodies:
    """What one client's bodies look like."""

    __slots__ = ("_num_learned", "_shapes")

    def __init__(self) -> None:
        self._shapes: list[_Shape] = []
        self._num_learned = 0

    def read(self, endpoint: str, content: bytes, settings: Settings) -> ApiRequest:
        """Read and check a request's body.

        Raises:
            RefusedError: as `parse_request`.
        """
        for shape in self._shapes:
            found = shape.read(endpoint, content)
            if found is not None:
                return found
        request = parse_request(endpoint, content, settings)
        if len(content) <= _MAX_BYTES and self._num_learned < _MAX_LEARNED:
            self._num_learned += 1
            learned = _learn(content, request)
            if learned is not None:
                self._shapes = [learned, *self._shapes[: _MAX_SHAPES - 1]]
        return request


class _Shape:
    """A body that was sound, without the text of its prompt.

    What begins and ends like it, and has between them only what a string holds as it is, parses to the same but for that text;
    nothing that is checked depends on the text.
    """

    __slots__ = (
        "_before",
        "_behind",
        "_encoded_before",
        "_encoded_behind",
        "_num_chars",
        "_request",
    )

    def __init__(
        self,
        request: ApiRequest,
        around: tuple[bytes, bytes],
        encoded_around: tuple[bytes, bytes],
        num_chars: int,
    ) -> None:
        """What stands around the text, in the body and in the same encoded anew."""
        self._before, self._behind = around
        self._encoded_before, self._encoded_behind = encoded_around
        self._request = request.again(b"", 0)
        self._num_chars = num_chars
        """Of the prompt, without that text."""

    def read(self, endpoint: str, content: bytes) -> ApiRequest | None:
        """The request a body is, where it differs in the text alone."""
        before, behind, request = self._before, self._behind, self._request
        end = len(content) - len(behind)
        if end < len(before) or not content.startswith(before) or not content.endswith(behind):
            return None
        text = content[len(before) : end]
        if endpoint != request.endpoint or text.translate(None, _TEXT):
            return None
        try:
            num_chars = len(text.decode())
        except UnicodeDecodeError:
            return None
        encoded = self._encoded_before + text + self._encoded_behind
        return request.again(encoded, self._num_chars + num_chars)


def _around(content: bytes, text: bytes) -> tuple[bytes, bytes] | None:
    """What stands before and behind the string `text`, quotes included; None unless exactly one string is it.

    Without escapes every second quote ends a string: what a string holds is never taken for what stands between two.
    """
    if b"\\" in content:
        return None
    parts = content.split(b'"')
    strings = parts[1::2]
    if strings.count(text) != 1:
        return None
    place = 2 * strings.index(text) + 1
    return b'"'.join([*parts[:place], b""]), b'"'.join([b"", *parts[place + 1 :]])


def _learn(content: bytes, request: ApiRequest) -> _Shape | None:
    """The shape of a body whose prompt, or last message, is one string, equal to no other there; None for any other."""
    body = request.body
    value = body["messages"][-1].get("content") if request.endpoint == CHAT else body["prompt"]
    if not isinstance(value, str):
        return None
    text = value.encode()
    around, encoded_around = _around(content, text), _around(request.encoded, text)
    if around is None or encoded_around is None:
        return None
    return _Shape(request, around, encoded_around, request.num_chars - len(value))

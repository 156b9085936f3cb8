"""Routing by text where nobody can tokenise: prompts are cut into blocks of bytes, and engines are believed to hold
the prompts they computed, least recently used ones dropped at the engine's capacity.

An approximation: what an engine evicted for other reasons is not seen. Where there is a tokenizer that counts as the
engine does, and somebody tells the engine's own events, those are better, and this is not used. An engine that nobody
tells of is held to have what it computed in the same way, by tokens. Not here: choosing. Pure.
"""

from array import array
from collections import OrderedDict

import msgspec

from dynctl.kv.hashing import PromptBlocks
from dynctl.router.api.requests import CHAT, ApiRequest
from dynctl.router.prefix_index import PrefixIndex, Source
from dynctl.router.prompt import TEXT_MARK, Prompt
from dynctl.router.workers import Worker

_BYTES_PER_ID = 4
"""About a token of English text, so that counts and blocks are of the usual size."""

TEXT_RANK = -1
"""Beside an engine's ranks in the index."""

_DEFAULT_BLOCKS = 8192
_encode = msgspec.json.Encoder().encode


def pseudo_ids(request: ApiRequest) -> "array[int] | None":
    """A prompt's text as numbers, one for four bytes; None where it has none.

    Prompts that begin with the same messages begin with the same numbers, but for the last few.
    """
    if request.endpoint == CHAT:
        # The list's own end is left out: a longer conversation goes on there.
        data = _encode([request.body.get("tools"), request.body["messages"]])[:-2]
    else:
        text = request.prompt_text
        if text is None:
            return None
        data = text.encode()
    ids = array("I", (TEXT_MARK,))
    ids.frombytes(data[: len(data) // _BYTES_PER_ID * _BYTES_PER_ID])
    return ids


def spelled(request: ApiRequest) -> "array[int] | None":
    """The same beside a tokenizer, for engines that count otherwise; None also where the client sent tokens or several prompts."""
    if request.prompt_ids is not None or request.num_sequences > 1:
        return None
    return pseudo_ids(request)


class TextHolders:
    """What each engine has computed, as blocks in the index."""

    def __init__(self, index: PrefixIndex) -> None:
        self._index = index
        self._held: dict[Source, OrderedDict[int, None]] = {}

    def served(self, worker: Worker, prompt: Prompt) -> None:
        """Believe that an engine holds a prompt's blocks from now on."""
        size = worker.block_size
        blocks = prompt.text_blocks(size) if worker.is_stranger else prompt.blocks(size)
        if blocks is not None:
            num_blocks = blocks.num_blocks if worker.is_stranger else prompt.num_cacheable(size)
            self._hold(worker.key, blocks, num_blocks, worker.capacity_tokens)

    def _hold(
        self, engine: tuple[str, str], blocks: PromptBlocks, num_blocks: int, capacity_tokens: int
    ) -> None:
        source = Source(*engine, TEXT_RANK)
        held = self._held.get(source)
        if held is None or not self._index.holds(source):
            for other in [s for s in self._held if s.engine_id == source.engine_id]:
                del self._held[other]
            held = self._held[source] = OrderedDict()
            self._index.begin(source)
        hashes = blocks.hashes()[:num_blocks]
        self._index.store(source, [block for block in hashes if block not in held])
        # The deepest first: it is evicted first.
        for block in reversed(hashes):
            held[block] = None
            held.move_to_end(block)
        limit = capacity_tokens * _BYTES_PER_ID // blocks.stride_bytes or _DEFAULT_BLOCKS
        gone = []
        while len(held) > limit:
            gone.append(held.popitem(last=False)[0])
        if gone:
            self._index.remove(source, gone)

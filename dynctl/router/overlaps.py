"""What the index knows of a prompt on each engine, and what it is told to expect once the prompt is sent to one.

Not here: choosing (`placement`), the index itself (`prefix_index`). Pure.
"""

import math
from collections.abc import Iterable, Mapping, Sequence

from dynctl.kv.hashing import PromptBlocks
from dynctl.router.forks import Forks
from dynctl.router.hits import Outlook
from dynctl.router.hot import HotPrefixes
from dynctl.router.loading import Held, Loadable, credit
from dynctl.router.prefix_index import PrefixIndex, Tier
from dynctl.router.prompt import Prompt
from dynctl.router.worker_table import View
from dynctl.router.workers import Worker

_USUAL_BLOCK = 16


class Overlaps:
    """Questions to one index."""

    def __init__(self, index: PrefixIndex) -> None:
        self._index = index
        self._forks = Forks()
        self.hot = HotPrefixes()

    def of(
        self,
        prompt: Prompt,
        view: View,
        workers: Sequence[Worker],
        now_s: float,
        *,
        may_load: bool = True,
    ) -> Held:
        """Tokens expected cached on each of some engines of a view; 0 where nothing can be known.

        Without `may_load` only what is on devices counts.
        """
        index = self._index
        overlaps = [0] * len(view.workers)
        slower_bits = index.slower_bits
        depths: dict[int, dict[int, int]] = {}
        """Of what could be loaded: tokens by medium and position."""
        if prompt.is_known:
            for size in view.block_sizes(index):
                blocks = prompt.blocks(size)
                assert blocks is not None
                tiers = index.tiers(blocks, prompt.num_cacheable(size))
                tiers.sort()
                if prompt.popularity is None:
                    prompt.popularity = self._popularity(blocks, tiers, len(view.workers), now_s)
                for depth, bits, _ in tiers:
                    tokens = depth * size
                    if slower_bits and bits & slower_bits:
                        if may_load:
                            self._note_slower(view, bits, depth, size, depths)
                        bits &= ~slower_bits  # noqa: PLW2901 - what is left is on devices
                    for position in view.positions_of(bits, size, index):
                        overlaps[position] = tokens
            if view.strangers:
                self._add_strangers(prompt, view, overlaps)
            for engine_id, trust in index.doubts.items():
                position = view.positions.get(engine_id, -1)
                if position >= 0:
                    overlaps[position] = int(overlaps[position] * trust)
                    for by_position in depths.values():
                        by_position[position] = int(by_position.get(position, 0) * trust)
        loadable = _add_credits(view, depths, overlaps) if depths else None
        if workers is view.workers:
            return Held(overlaps, loadable)
        places = [view.positions[worker.id] for worker in workers]
        return Held(
            [overlaps[place] for place in places],
            None if loadable is None else [loadable[place] for place in places],
        )

    def _note_slower(
        self, view: View, bits: int, depth: int, size: int, depths: dict[int, dict[int, int]]
    ) -> None:
        """Note how deep a prompt is held in slower media."""
        index = self._index
        for medium, of_medium in index.slower.items():
            positions = view.positions_of(bits & of_medium, size, index)
            if positions:
                depths.setdefault(medium, {}).update(dict.fromkeys(positions, depth * size))

    def _add_strangers(self, prompt: Prompt, view: View, overlaps: list[int]) -> None:
        """Fill in the engines that count tokens otherwise: by how much of the text they were sent before."""
        index = self._index
        for size in {worker.block_size for worker in view.strangers}:
            blocks = prompt.text_blocks(size)
            if blocks is None or not blocks.num_blocks:
                continue
            strangers = {worker.id for worker in view.strangers if worker.block_size == size}
            limit = prompt.num_cacheable(size) * size
            for depth, bits, _ in sorted(index.tiers(blocks, blocks.num_blocks)):
                tokens = min(depth * prompt.num_tokens // blocks.num_blocks, limit)
                for engine_id in strangers.intersection(index.engines_of(bits)):
                    overlaps[view.positions[engine_id]] = tokens

    def _popularity(
        self, blocks: PromptBlocks, tiers: Sequence[Tier], num_engines: int, now_s: float
    ) -> float:
        if not tiers:
            return math.inf
        depth, _, block = tiers[-1]
        popularity = self._forks.popularity(block, num_engines, now_s)
        if popularity:
            self.hot.began(block, blocks.data[: depth * blocks.stride_bytes], now_s)
        return popularity

    def expect(self, prompt: Prompt, worker: Worker, overlap: int) -> None:
        """Let the next request with this prefix see it before the engine's events do."""
        blocks = _names(prompt, worker)
        if blocks is not None:
            self._index.expect(worker.id, blocks, blocks.num_blocks, overlap // worker.block_size)

    def unexpect(self, prompt: Prompt, worker: Worker, overlap: int) -> None:
        """Take that back."""
        blocks = _names(prompt, worker)
        if blocks is not None:
            self._index.unexpect(worker.id, blocks, blocks.num_blocks, overlap // worker.block_size)

    def outlook(self, prompt: Prompt, worker: Worker, held: int, predicted: int) -> Outlook | None:
        """Say what was known when the prompt was placed; None without tokens."""
        # An engine that never said its block size is looked at too: that is one of the faults to be found.
        size = worker.block_size or _USUAL_BLOCK
        blocks = prompt.blocks(size)
        if blocks is None:
            return None
        num_blocks, num_tokens = prompt.num_cacheable(size), prompt.num_tokens
        return Outlook(
            worker, blocks, num_blocks, size, held, predicted, num_tokens, prompt.is_text
        )


def _add_credits(
    view: View, depths: Mapping[int, Mapping[int, int]], overlaps: list[int]
) -> list[Loadable | None] | None:
    """Count what could be loaded as what it saves; return it, None where there is nothing."""
    found: list[Loadable | None] = [None] * len(overlaps)
    workers = view.workers
    for position, held in _by_position(depths):
        worker = workers[position]
        load = worker.cached_load or worker.load()
        tokens, found[position] = credit(
            overlaps[position],
            held,
            worker.loads,
            load.prefill_ms_per_token,
            load.uncached_ms_per_token,
        )
        overlaps[position] += tokens
    return found if any(found) else None


def _by_position(
    depths: Mapping[int, Mapping[int, int]],
) -> Iterable[tuple[int, Sequence[tuple[int, int]]]]:
    """Say for each engine what its media hold, the fastest first."""
    if len(depths) == 1:
        [(medium, by_position)] = depths.items()
        return [(position, ((medium, depth),)) for position, depth in by_position.items()]
    rows: dict[int, list[tuple[int, int]]] = {}
    for medium in sorted(depths):
        for position, depth in depths[medium].items():
            rows.setdefault(position, []).append((medium, depth))
    return rows.items()


def _names(prompt: Prompt, worker: Worker) -> PromptBlocks | None:
    """The prompt in blocks by the names that this engine's have in the index."""
    size = worker.block_size
    return prompt.text_blocks(size) if worker.is_stranger else prompt.blocks(size)

"""What an engine's events say of its cache as a whole."""

import pytest

from dynctl.core.kv import AllBlocksCleared, BlockRemoved, BlockStored, device_block_size


def stored(size, **change):
    return BlockStored((1,), None, tuple(range(size)), size, **change)


@pytest.mark.parametrize(
    ("events", "size"),
    [
        ([], 0),
        ([AllBlocksCleared(), BlockRemoved((1,))], 0),
        ([stored(16)], 16),
        ([stored(16, medium="GPU")], 16),
        ([stored(256, medium="cpu")], 0),
        ([stored(256, medium="STORAGE"), stored(16)], 16),
        ([stored(64, group_idx=1)], 0),
        ([stored(64, group_idx=1), BlockRemoved((2,)), stored(16), stored(32)], 16),
        ([stored(0), stored(16)], 16),
        ([stored(64, spec_kind="mamba"), stored(16, group_idx=1, spec_kind="mla_attention")], 16),
        ([stored(64, spec_kind="sliding_window")], 0),
    ],
)
def test_the_block_size_is_that_of_the_prefix_on_the_device(events, size):
    assert device_block_size(events) == size

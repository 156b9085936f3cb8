"""Captured batches, small builders of events, and a ZMQ context per test."""

import json
from pathlib import Path

import msgspec
import pytest
import zmq

from dynctl.core.kv import BlockRemoved, BlockStored

CAPTURES = Path(__file__).parent / "captures"


@pytest.fixture(params=sorted(path.stem for path in CAPTURES.glob("*.jsonl")))
def capture(request):
    lines = [
        json.loads(line) for line in (CAPTURES / f"{request.param}.jsonl").read_text().splitlines()
    ]
    return [line for line in lines if "batch" in line]


@pytest.fixture
def zmq_context():
    context = zmq.Context()
    yield context
    context.destroy(linger=0)


@pytest.fixture
def payload_of():
    return lambda line: msgspec.msgpack.encode(line["batch"])


@pytest.fixture
def stored():
    def make(handles, parent=None, first_token=0, block_size=2, **extra):
        tokens = tuple(range(first_token, first_token + block_size * len(handles)))
        return BlockStored(tuple(handles), parent, tokens, block_size, **extra)

    return make


@pytest.fixture
def removed():
    return lambda *handles: BlockRemoved(tuple(handles))

"""From an engine's events to the router's answer, through everything that may go wrong on the way (Q9, K1 to K11).

Engines publish into a channel that loses, doubles and delays; replays are whole, cut short, or never come; engines
restart with and without a new stamp. Once it is quiet, the index says of every engine what a request would find there.
"""

import random

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule

from dynctl.core.kv import AllBlocksCleared, BlockRemoved, BlockStored
from dynctl.kv import wire
from dynctl.kv.events import EventBatch, decode, encode
from dynctl.kv.hashing import BlockHasher
from dynctl.kv.orphans import ORPHAN_AGE_S
from dynctl.kv.sequence import REPLAY_SILENCE_S, EventSequence, Verdict
from dynctl.kv.tracker import BlockTracker
from dynctl.router.metrics import Metrics
from dynctl.router.prefix_index import PrefixIndex
from dynctl.router.sources.feed import KvFeed, LostError

HASHER = BlockHasher(b"s", 2)
ENGINES = ("a", "b")


def handle(prefix):
    return hash(("engine", tuple(prefix))) & (2**64 - 1)


class Engine:
    """An engine with its publisher, and the relay's and router's sides of its events."""

    def __init__(self, name, index, buffer_steps):
        self.name, self.index, self.buffer_steps = name, index, buffer_steps
        self.now_s = 0.0
        self.num_published = 0
        self.begin_incarnation(1)

    def begin_incarnation(self, number):
        self.number, self.held, self.sent, self.delayed = number, set(), [], []
        self.sequence, self.tracker = EventSequence(), BlockTracker(HASHER)
        self.reader = wire.FrameReader()
        self.index.drop(self.name)
        self.feed = KvFeed(self.index, Metrics(), self.name, f"i{number}")
        self.send(wire.Snapshot(f"i{number}", -1, 2, []))
        self.asked = None
        self.obey(self.sequence.start(self.now_s))

    def restart_unseen(self):
        """A new process on the same sockets, whose stamp nobody changed."""
        self.held, self.sent, self.delayed, self.asked = set(), [], [], None
        self.obey(self.sequence.reconnected(self.now_s))

    def publish(self, events, way):
        # Two starts may do the same things: the stamps of their batches tell them apart, as an engine's clock does.
        self.num_published += 1
        payload = encode(EventBatch(float(self.num_published), tuple(events)))
        message = (len(self.sent), payload)
        self.sent.append(payload)
        if way in {"arrives", "twice"}:
            self.live(message)
        if way == "twice":
            self.live(message)
        if way == "late":
            self.delayed.append(message)

    def live(self, message):
        if self.sequence.takes(*message):
            self.obey(Verdict(apply=[message]))
        else:
            self.obey(self.sequence.live(*message, self.now_s))

    def obey(self, verdict):
        if verdict.reset:
            self.tracker.reset()
            self.send(wire.Snapshot(f"i{self.number}", -1, 2, []))
        for seq, payload in verdict.apply:
            delta = self.tracker.apply(decode(payload).events, self.now_s)
            if not delta.is_empty:
                frame = wire.Delta(
                    f"i{self.number}", seq, delta.stored, delta.removed, delta.cleared
                )
                self.send(frame)
        if verdict.replay_from is not None:
            self.asked = verdict.replay_from

    def send(self, frame):
        for received in self.reader.feed(wire.encode(frame)):
            try:
                for _ in self.feed.apply(received):
                    pass
            except LostError as error:
                raise AssertionError("the relay's own stream is never torn") from error

    def answer(self, number=None):
        """Answer the replay asked for: all of it, or only so many batches and no end."""
        if self.asked is None:
            return
        start, self.asked = self.asked, None
        first = max(start, len(self.sent) - self.buffer_steps, 0)
        for seq in range(first, len(self.sent)):
            if number is not None and seq - first >= number:
                return
            self.obey(self.sequence.replayed(seq, self.sent[seq], self.now_s))
            if self.asked is not None:
                return  # asked anew
        self.obey(self.sequence.replay_ended(self.now_s))

    def settle(self):
        for message in self.delayed:
            self.live(message)
        self.delayed = []
        for _ in range(20):
            self.now_s += max(REPLAY_SILENCE_S, ORPHAN_AGE_S) + 1
            self.obey(self.sequence.tick(self.now_s))
            for _ in range(4):
                self.answer()
            self.obey(self.sequence.audit(self.now_s))
            for _ in range(4):
                self.answer()

    def depth(self, tokens):
        depth = 0
        while 2 * (depth + 1) <= len(tokens) and handle(tokens[: 2 * (depth + 1)]) in self.held:
            depth += 1
        return depth


class PipelineMachine(RuleBasedStateMachine):
    """Any history; what is known is compared whenever it is quiet."""

    def __init__(self):
        super().__init__()
        self.index = PrefixIndex()
        self.queries = [[0] * 16]

    @initialize(buffer_steps=st.sampled_from([3, 10_000, 10_000]))
    def start(self, buffer_steps):
        self.engines = {name: Engine(name, self.index, buffer_steps) for name in ENGINES}

    names = st.sampled_from(ENGINES)

    @rule(name=names, seed=st.integers(0, 2**32))
    def works(self, name, seed):
        """A few steps of one engine; what it says of each may or may not arrive."""
        engine, rng = self.engines[name], random.Random(seed)
        for _ in range(rng.randrange(1, 7)):
            kind = rng.random()
            if kind < 0.65:
                tokens = [rng.randrange(3) for _ in range(rng.randrange(2, 17))]
                self.queries = [tokens, *self.queries[:7]]
                events = self.computed(engine, tokens)
            elif kind < 0.95:
                handles = sorted(engine.held)
                gone = rng.sample(handles, min(len(handles), 2))
                engine.held.difference_update(gone)
                events = [BlockRemoved((*gone, 7))]
            else:
                engine.held.clear()
                events = [AllBlocksCleared()]
            engine.publish(events, rng.choice(["arrives", "arrives", "twice", "late", "lost"]))

    def computed(self, engine, tokens):
        events = []
        for end in range(2, len(tokens) // 2 * 2 + 1, 2):
            own, parent = handle(tokens[:end]), handle(tokens[: end - 2]) if end > 2 else None
            if own not in engine.held:
                engine.held.add(own)
                events.append(BlockStored((own,), parent, tuple(tokens[end - 2 : end]), 2))
        return events

    @rule(name=names, first=st.booleans())
    def a_late_batch_arrives(self, name, first):
        delayed = self.engines[name].delayed
        if delayed:
            self.engines[name].live(delayed.pop(0 if first else -1))

    @rule(name=names, number=st.sampled_from([None, None, 0, 1, 3]))
    def a_replay_is_answered(self, name, number):
        self.engines[name].answer(number)

    @rule(name=names)
    def time_passes(self, name):
        engine = self.engines[name]
        engine.now_s += REPLAY_SILENCE_S
        engine.obey(engine.sequence.tick(engine.now_s))
        engine.obey(engine.sequence.audit(engine.now_s))

    @rule(name=names)
    def restarts(self, name):
        engine = self.engines[name]
        engine.begin_incarnation(engine.number + 1)
        for tokens in self.queries:
            assert name not in self.index.match(HASHER.prompt(tokens))

    @rule(name=names)
    def restarts_unseen(self, name):
        self.engines[name].restart_unseen()

    @rule()
    def it_is_quiet(self):
        for engine in self.engines.values():
            engine.settle()
        for tokens in self.queries:
            found = self.index.match(HASHER.prompt(tokens))
            for name, engine in self.engines.items():
                depth, known = engine.depth(tokens), found.get(name, 0)
                if engine.sequence.counts.num_lost:
                    assert known <= depth, (name, known, depth)
                else:
                    assert known == depth, (name, known, depth)

    @invariant()
    def counts_are_never_negative(self):
        for name in ENGINES:
            assert self.index.num_blocks(name) >= 0
        assert len(self.index) >= 0


TestPipeline = PipelineMachine.TestCase
TestPipeline.settings = settings(max_examples=60, stateful_step_count=40, deadline=None)

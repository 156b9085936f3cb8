"""Where prompt tokens went, on traces with known answers; and every injected cause of zero hits named in time."""

import random

import pytest

from dynctl.core.deployment import EngineInfo, EngineState
from dynctl.core.kv import BlockRemoved, BlockStored
from dynctl.kv.hashing import BlockHasher
from dynctl.kv.tracker import BlockTracker
from dynctl.kv.wire import SourceHealth
from dynctl.router.config import Settings
from dynctl.router.desk import load_policy
from dynctl.router.findings import Evidence, are_far, diagnose
from dynctl.router.hits import HitBook, Outlook
from dynctl.router.metrics import Metrics
from dynctl.router.placement import Order, Placement
from dynctl.router.prefix_index import PrefixIndex, Source
from dynctl.router.probes import EngineNotes, Probes
from dynctl.router.prompt import Hashers, Prompt
from dynctl.router.sources.fleet import Fleet
from dynctl.router.worker_table import WorkerTable

HASHERS = Hashers("deployment")
BLOCK = 16


def prompt_of(seed, num_tokens=321):
    rng = random.Random(seed)
    return [rng.randrange(1000) for _ in range(num_tokens)]


def outlook(tokens, held=0, predicted=0):
    blocks = HASHERS.of(BLOCK).prompt(tokens)
    num_blocks = (len(tokens) - 1) // BLOCK
    return Outlook(None, blocks, num_blocks, BLOCK, held, predicted, len(tokens))


def test_the_loss_is_split_into_cold_eviction_and_routing():
    book = HitBook()
    book.completed(outlook(prompt_of(1)), 321, 0)  # never seen
    book.completed(outlook(prompt_of(1), held=320, predicted=320), 321, 320)  # all there
    book.completed(outlook(prompt_of(1), held=320, predicted=0), 321, 0)  # on another engine
    book.completed(outlook(prompt_of(1), held=128, predicted=128), 321, 128)  # rest evicted

    assert book.tokens == {"hit": 448, "routing": 320, "eviction": 192, "cold": 320}
    shown = book.to_json()
    assert shown["bound_unlimited_ratio"] == pytest.approx(960 / 1284, abs=1e-5)
    assert shown["bound_present_ratio"] == pytest.approx(768 / 1284, abs=1e-5)
    assert shown["reported_ratio"] == shown["predicted_ratio"]


def test_a_shared_start_counts_as_seen_and_the_rest_as_cold():
    book = HitBook()
    first, second = prompt_of(1), prompt_of(1)[:160] + prompt_of(2, 161)
    assert book.completed(outlook(first), 321, 0) == 0
    assert book.completed(outlook(second), 321, None) == 160

    assert book.tokens["eviction"] == 160
    assert book.tokens["cold"] == 320 + 160
    assert book.to_json()["requests_reported"] == 1


def test_an_engine_that_counts_otherwise_is_told_of_in_its_own_tokens():
    book = HitBook()
    # We count 321 where the engine counts 642, as with text that stands for tokens.
    book.completed(outlook(prompt_of(1)), 642, 0)
    book.completed(outlook(prompt_of(1), held=320, predicted=160), 642, 352)

    assert book.tokens == {"hit": 352, "routing": 288, "eviction": 0, "cold": 640}
    assert book.predicted_tokens == 320
    ratios = book.to_json()
    assert ratios["bound_present_ratio"] == pytest.approx(640 / 1284, abs=1e-5)
    assert ratios["bound_unlimited_ratio"] + ratios["lost_cold_ratio"] <= 1.0


class Scene:
    """One engine, real index and books, virtual time; a fault says what is wrong with the engine."""

    def __init__(self, fault, *, repeats=True):
        self.fault, self.repeats = fault, repeats
        self.table, self.index = WorkerTable(Settings()), PrefixIndex()
        self.probes = Probes(self.table, self.index, HASHERS)
        info = EngineInfo(
            *("e", "e.1", EngineState.READY, "aggregated", "d", "sim", "m"), block_size_tokens=BLOCK
        )
        self.table.put(info)
        rng = random.Random(1)
        self.placement = Placement(self.table, self.index, load_policy("kv"), Settings(), rng)
        seed = {"seed": b"another", "no seed": b""}.get(fault, b"deployment")
        self.size = 32 if fault == "block_size" else BLOCK
        self.tracker = BlockTracker(BlockHasher(seed, self.size))
        self.held = {}
        self.source = Source("e", "e.1")
        notes = self.probes.notes["e"] = EngineNotes()
        notes.has_events_source = fault != "no_events_source"
        notes.is_caching = fault != "caching_off"
        notes.num_undecodable = 9 if fault == "event_version" else 0
        if fault in {"tokenizer", "chat_template"}:
            where = "'a chat'" if fault == "chat_template" else "'Hello'"
            notes.parity_detail = f"first difference in {where}"
            self.table.get("e").parity = "mismatch"
        notes.num_other_groups = 7 if fault == "attention" else 0
        self.notes = notes
        self.lost_s = 0.0
        self.is_silent = fault in {
            *("no_events_source", "no_events", "event_version", "caching_off", "attention")
        }

    def serve(self, tokens, now_s):
        prompt = Prompt.known(HASHERS, tokens)
        placed = self.placement.place(Order("r", prompt, None, 8), now_s)
        cached = self.run(tokens, now_s)
        placed.main.prefill_ended(now_s)
        placed.main.release()
        given = placed.outlook or outlook(tokens)._replace(worker=placed.main.worker)
        self.probes.ended(given, cached, now_s)

    def lose(self):
        """Events are missing for good: whoever reads them forgets all, and takes up what comes next."""
        self.index.end(self.source)
        self.tracker = BlockTracker(BlockHasher(b"deployment", self.size))
        self.notes.num_lost += 1

    def run(self, tokens, now_s):
        """Compute a prompt as the engine does; returns the cached tokens it reports."""
        if self.fault == "events_lost" and now_s - self.lost_s >= 4.0:
            self.lost_s = now_s
            self.lose()
        size, parent, events, cached = self.size, None, [], 0
        for end in range(size, len(tokens) + 1, size):
            handle = hash(tuple(tokens[:end])) & (2**64 - 1)
            if handle in self.held:
                cached = end
            else:
                self.held[handle] = None
                lora = "tuned" if self.fault == "salt" else None
                block = tuple(tokens[end - size : end])
                events.append(BlockStored((handle,), parent, block, size, lora_name=lora))
            parent = handle
        if not self.is_silent:
            if not self.index.holds(self.source):
                self.index.begin(self.source)
            self.index.store(self.source, self.tracker.apply(events, now_s).stored)
            self.notes.num_keyed = self.tracker.counts.num_keyed_roots
            self.notes.num_orphans = self.tracker.orphans.num_dropped
        if self.fault in {"never_reused", "caching_off"}:
            return 0
        if self.fault == "half":
            return cached // 2
        return None if self.fault == "no_report" else cached

    def evict(self, num_left):
        """Let go of the oldest blocks, ends before beginnings."""
        gone = list(self.held)[: max(len(self.held) - num_left, 0)]
        for handle in gone:
            del self.held[handle]
        self.index.remove(
            self.source, self.tracker.apply([BlockRemoved(tuple(reversed(gone)))], 0.0).removed
        )

    def breaks(self, fault):
        """From now on something is wrong with an engine that was well."""
        self.fault = fault
        self.is_silent = fault == "no_events"
        if fault == "seed":  # what the relay told before goes with it
            self.index.drop("e")
            self.held.clear()
            self.tracker = BlockTracker(BlockHasher(b"another", self.size))

    def seconds_until_named(self, began_s=0.0, prompt_at=None):
        """Run for a minute; when the finding came, and what it was."""
        named = None
        for step in range(300):
            now_s = began_s + step * 0.2
            seed = step % 5 if self.repeats else step
            self.serve(prompt_at(now_s) if prompt_at else prompt_of(seed), now_s)
            if step % 5 == 0:
                self.index.sweep(now_s)
                for finding in self.probes.tick(now_s):
                    named = named or (now_s - began_s, finding.cause)
        return named


CAUSES = {
    "no_events_source": "no_events_source",
    "no_events": "no_events",
    "events_lost": "events_lost",
    "event_version": "event_version",
    "attention": "attention",
    "caching_off": "caching_off",
    "tokenizer": "tokenizer",
    "chat_template": "chat_template",
    "block_size": "block_size",
    "seed": "seed",
    "no seed": "seed",
    "salt": "salt",
    "no_report": "no_report",
    "never_reused": "never_reused",
}


@pytest.mark.parametrize("fault", CAUSES)
def test_each_injected_cause_is_named_within_30_seconds(fault):
    found = Scene(fault).seconds_until_named()

    assert found is not None
    at_s, cause = found
    assert cause == CAUSES[fault]
    assert at_s <= 30.0


def next_turn(now_s):
    """One of five conversations that begin alike, longer by a block every second, and anew every half minute."""
    number, round_ = round(now_s * 5) % 5, int(now_s) // 30
    more = prompt_of(round_ * 5 + number + 1, 16 * (1 + int(now_s) % 30))
    return prompt_of(0)[:160] + more


@pytest.mark.parametrize("fault", ["no_events", "events_lost", "seed", "never_reused"])
def test_a_cause_that_comes_after_a_while_is_named_as_soon(fault):
    scene = Scene("")
    for minute in range(5):
        assert scene.seconds_until_named(60.0 * minute, next_turn) is None
    scene.breaks(fault)

    at_s, cause = scene.seconds_until_named(300.0, next_turn)

    assert cause == fault
    assert at_s <= 30.0


def test_hits_far_from_what_was_predicted_are_named_with_both_figures_once_that_lasts():
    scene = Scene("half")
    at_s, cause = scene.seconds_until_named()

    assert cause == "hits_differ"
    assert 30.0 <= at_s <= 60.0
    (finding,) = scene.probes.findings()
    assert "of its last 128 prompts 100% were expected to be cached there" in finding.text
    assert "it reports 50%" in finding.text
    assert "let go of blocks" in finding.hint
    assert scene.probes.tick(60.0) == [], "told once"

    scene.fault = ""
    for step in range(200):
        scene.serve(prompt_of(step % 5), 60.0 + step * 0.2)
    scene.probes.tick(100.0)
    assert scene.probes.findings() == ()


@pytest.mark.parametrize(
    ("predicted", "reported", "expected"),
    [(0.5, 0.39, True), (0.5, 0.41, False), (0.5, 0.62, True), (0.0, 0.0, False), (0.0, 0.2, True)],
)
def test_more_than_ten_points_over_enough_tokens_are_far(predicted, reported, expected):
    told = [(1024, int(1024 * predicted), int(1024 * reported))] * 32
    assert are_far(told) is expected
    assert not are_far(told[1:])
    assert not are_far([(1000, 1000, 0)] * 32)


def test_hits_that_no_event_told_of_point_at_the_events():
    e = Evidence("e", num_ended=99, num_reported=99, num_stored_blocks=9, differs_for_s=31.0)
    e.told_hits.extend([(1024, 0, 512)] * 40)
    found = diagnose(e)
    assert found.cause == "hits_differ"
    assert "0% were expected" in found.text
    assert "it reports 50%" in found.text
    assert "holds more than its events tell" in found.hint
    e.differs_for_s = 29.0
    assert diagnose(e) is None


def test_an_engine_that_never_tells_its_hits_is_named_also_where_nothing_repeats():
    assert Scene("no_report", repeats=False).seconds_until_named()[1] == "no_report"


@pytest.mark.parametrize("repeats", [True, False])
def test_a_healthy_engine_is_never_accused_also_when_nothing_repeats(repeats):
    scene = Scene("", repeats=repeats)

    assert scene.seconds_until_named() is None
    assert scene.probes.findings() == ()


def test_an_engine_that_evicts_all_the_time_is_not_accused():
    scene = Scene("", repeats=False)
    for step in range(300):
        scene.serve(prompt_of(step), step * 0.2)
        scene.evict(num_left=60)  # three prompts: gone before anybody looks
        if step % 5 == 0:
            assert scene.probes.tick(step * 0.2) == []


def test_what_is_known_no_more_since_events_were_lost_once_has_no_other_name():
    """What hangs below forgotten blocks has no name of ours until it is computed anew."""
    scene = Scene("")
    assert scene.seconds_until_named() is None
    scene.lose()
    shared = prompt_of(1)[:160]
    longer = iter(range(1000))
    at_s, cause = scene.seconds_until_named(60.0, lambda _: shared + prompt_of(next(longer), 161))

    assert cause == "events_lost"
    assert at_s <= 30.0
    (finding,) = scene.probes.findings()
    assert "lost for good once" in finding.text

    # The engine's cache is emptied, and all is told anew.
    scene.index.drop("e")
    scene.held, scene.tracker = {}, BlockTracker(BlockHasher(b"deployment", scene.size))
    scene.seconds_until_named(120.0)
    scene.seconds_until_named(180.0)
    assert scene.probes.findings() == ()


@pytest.mark.parametrize("new_every", [1000, 4])
def test_what_was_cached_before_anybody_read_of_it_has_no_other_name(new_every):
    """As with a router that was started anew before warm engines and cannot ask for what they told before."""
    scene = Scene("")
    shared = prompt_of(1)[:160]
    scene.run(shared, 0.0)
    scene.index.end(scene.source)
    scene.tracker = BlockTracker(BlockHasher(b"deployment", scene.size))
    numbers = iter(range(1, 1000))

    def prompt_at(_):
        number = next(numbers)
        more = prompt_of(number, 161)
        return shared + more if number % new_every else more

    at_s, cause = scene.seconds_until_named(0.0, prompt_at)

    assert cause == "events_lost"
    assert at_s <= 30.0
    (finding,) = scene.probes.findings()
    assert "before its events were read" in finding.text


def test_a_host_that_counts_losses_beyond_all_bounds_costs_no_memory():
    scene = Scene("")
    scene.notes.num_lost = 2**62

    assert scene.seconds_until_named()[1] == "events_lost"
    assert "100 times lately" in scene.probes.findings()[0].text


def test_what_a_relay_lost_before_this_router_heard_of_it_is_no_news():
    scene = Scene("")
    fleet = Fleet(scene.table, scene.index, Metrics(), lambda: None, scene.probes.notes)
    fleet.heard("e", "e.1", SourceHealth(num_lost=7))
    assert scene.seconds_until_named() is None

    fleet.heard("e", "e.1", SourceHealth(num_lost=10))
    assert scene.seconds_until_named(60.0)[1] == "events_lost"
    assert "3 times lately" in scene.probes.findings()[0].text

    fleet.heard("e", "e.1", SourceHealth(num_lost=0))  # another relay has taken over
    assert scene.seconds_until_named(180.0) is None
    fleet.heard("e", "e.1", SourceHealth(num_lost=3))
    assert scene.seconds_until_named(240.0)[1] == "events_lost"


def test_two_losses_that_were_made_up_for_are_no_finding():
    scene = Scene("")
    for begun_s in (0.0, 60.0, 120.0):
        assert scene.seconds_until_named(begun_s, lambda now_s: prompt_of(now_s)) is None
        scene.lose()


def test_blocks_that_come_late_are_not_taken_for_blocks_of_other_names():
    """What was asked for twenty seconds comes all at once, by replay."""
    scene, named = Scene("no_events"), set()
    for step in range(100):
        scene.serve(prompt_of(step % 5), step * 0.2)
        named |= {finding.cause for finding in scene.probes.tick(step * 0.2)}
    assert named == {"no_events"}

    scene.is_silent, scene.held = False, {}
    for seed in range(5):
        scene.run(prompt_of(seed), 20.0)

    assert scene.probes.tick(20.0) == []
    assert scene.probes.findings() == ()


def test_too_little_evidence_gives_no_finding():
    assert diagnose(Evidence("e", has_events_source=False, num_ended=2)) is None

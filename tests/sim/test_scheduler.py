import random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dynctl.core.kv import BlockRemoved, BlockStored
from dynctl.kv.hashing import BlockHasher, namespace
from dynctl.kv.tracker import BlockTracker
from dynctl.sim.cache import PagedCache
from dynctl.sim.chain import Chain
from dynctl.sim.host_cache import HostCache
from dynctl.sim.scheduler import Scheduler, StepCosts
from dynctl.sim.sequence import Phase, Wish

CHAIN = Chain(range(100, 1100))


class Run:
    """A scheduler on virtual time."""

    def __init__(self, num_blocks=64, block_size=4, costs=None, chain=CHAIN, **options):
        self.cache = PagedCache(num_blocks, block_size)
        self.scheduler = Scheduler(self.cache, chain, costs or StepCosts(), **options)
        self.now_s, self.said, self.ended, self.events, self.num_steps = 0.0, {}, {}, [], 0

    def add(self, name, prompt, max_tokens, **wish):
        return self.scheduler.add(Wish(name, tuple(prompt), max_tokens, **wish), self.now_s)

    def step(self):
        step = self.scheduler.plan(self.now_s)
        if step is None:
            return False
        self.num_steps += 1
        self.now_s += step.duration_s
        for output in self.scheduler.complete(step, self.now_s):
            name = output.sequence.wish.id
            self.said.setdefault(name, []).append(output.token)
            if output.finish_reason:
                self.ended[name] = output.finish_reason
        self.events += self.scheduler.take_events()
        return True

    def until_idle(self):
        while self.step():
            assert self.num_steps < 100_000


def test_answers_follow_the_chain_whatever_runs_beside_them():
    run = Run()
    prompts = {str(i): [i, *range(10)] for i in range(8)}
    for name, prompt in prompts.items():
        run.add(name, prompt, 12)
    run.until_idle()

    assert run.said == {name: CHAIN.continuation(prompt, 12) for name, prompt in prompts.items()}
    assert set(run.ended.values()) == {"length"}
    assert run.cache.usage_ratio == 0


def test_a_repeated_prompt_is_served_from_the_cache_up_to_its_last_block():
    run = Run()
    run.add("a", range(16), 1)
    run.until_idle()
    cold_s = run.now_s
    again = run.add("b", range(16), 1)
    run.until_idle()

    assert (
        again.num_cached_tokens == 12
    )  # (16 - 1) // 4 whole blocks: the last token is always computed
    assert run.now_s - cold_s < cold_s
    assert run.said["a"] == run.said["b"]
    assert run.scheduler.counts.num_prefix_hits == 12
    assert run.scheduler.counts.num_prefix_queries == 32


def test_time_is_prefill_per_uncached_token_then_decode_per_step():
    costs = StepCosts(
        prefill_us_per_token=1000, prefill_base_ms=5, decode_ms=20, decode_us_per_seq=0
    )
    run = Run(costs=costs)
    sequence = run.add("a", range(10), 3)
    run.until_idle()

    assert sequence.times.first_token_s == pytest.approx(0.005 + 0.010)
    assert sequence.times.last_token_s == pytest.approx(0.015 + 2 * 0.020)


def test_decoding_shares_its_step():
    run = Run(
        costs=StepCosts(
            prefill_us_per_token=0, prefill_base_ms=0, decode_ms=10, decode_us_per_seq=0
        )
    )
    for name in "abcd":
        run.add(name, range(4), 11)
    run.until_idle()

    assert run.now_s == pytest.approx(0.1)


def test_seats_are_limited_and_the_rest_waits_in_order():
    run = Run(max_num_seqs=2)
    sequences = [run.add(str(i), range(4), 3) for i in range(4)]
    run.step()

    assert len(run.scheduler.running) == 2
    assert len(run.scheduler.waiting) == 2
    run.until_idle()
    scheduled = [sequence.times.scheduled_s for sequence in sequences]
    assert scheduled == sorted(scheduled)


def test_a_long_prompt_is_cut_into_chunks_within_the_budget():
    run = Run(max_num_batched_tokens=16, num_blocks=64)
    run.add("a", range(100), 1)
    run.until_idle()

    assert run.num_steps == 7
    assert run.said["a"] == CHAIN.continuation(range(100), 1)


def test_without_room_the_youngest_is_preempted_and_nothing_is_lost():
    run = Run(num_blocks=9, block_size=4)
    for name in "ab":
        run.add(name, [ord(name)] * 8, 20)
    run.until_idle()

    assert run.scheduler.counts.num_preemptions > 0
    assert run.said == {name: CHAIN.continuation([ord(name)] * 8, 20) for name in "ab"}


def test_an_aborted_request_frees_its_blocks_at_once():
    run = Run()
    sequence = run.add("a", range(20), 100)
    run.step()
    assert run.cache.usage_ratio > 0
    run.scheduler.stop(sequence)

    assert (run.cache.usage_ratio, sequence.phase) == (0, Phase.DONE)
    run.until_idle()
    run.scheduler.stop(sequence)
    assert run.cache.usage_ratio == 0


def test_a_request_aborted_while_its_step_runs_says_nothing():
    run = Run()
    sequence = run.add("a", range(4), 5)
    step = run.scheduler.plan(0)
    run.scheduler.stop(sequence)

    assert run.scheduler.complete(step, 1) == []


def test_end_of_sequence_and_stop_tokens_end_a_request():
    chain = Chain(range(100, 1100), eos_every=10)
    run = Run(chain=chain)
    run.add("eos", [1], 1000)
    run.add("long", [1], 60, ignore_eos=True)
    expected = chain.continuation([2], 5, ignore_eos=True)
    run.add("token", [2], 60, ignore_eos=True, stop_token_ids=frozenset([expected[4]]))
    run.until_idle()

    assert run.said["eos"] == chain.continuation([1], 1000)
    assert run.said["eos"][-1] == chain.eos_id
    assert (run.ended["eos"], run.ended["long"], run.ended["token"]) == ("stop", "length", "stop")
    assert run.said["token"] == expected


def test_events_hash_like_the_prompt_a_router_sees():
    run = Run()
    run.add("plain", range(9), 8)
    run.add("salted", range(9), 8, cache_salt="tenant")
    run.until_idle()
    hasher = BlockHasher(b"seed", 4)
    tracker = BlockTracker(hasher)
    known = tracker.apply(run.events, 0).stored
    whole = [*range(9), *CHAIN.continuation(range(9), 8)]

    assert hasher.prompt(whole).hashes() == [
        name for name in known if name in hasher.prompt(whole).hashes()
    ]
    assert set(known) == {
        *hasher.prompt(whole).hashes(),
        *hasher.prompt(whole, namespace(keys=("tenant",))).hashes(),
    }
    keys = [
        event.extra_keys[0]
        for event in run.events
        if isinstance(event, BlockStored) and not event.parent_block_hash
    ]
    assert keys == [None, ["tenant"]]


def hand_over(prompt, num_tokens, block_size=4, warm=()):
    """Prefill on one scheduler, decode on another, as the transfer does."""
    prefill = Run(block_size=block_size, has_connector=True)
    decode = Run(block_size=block_size, has_connector=True)
    if warm:
        decode.add("warm", warm, 1)
        decode.until_idle()
    source = prefill.add("p", prompt, 1, is_remote_decode=True)
    prefill.until_idle()
    target = decode.add("d", prompt, num_tokens, remote_prefill={"x": 1})
    decode.until_idle()
    [fetch] = decode.scheduler.take_fetches()
    num_local = len(fetch.block_states)
    decode.scheduler.fetched(fetch, source.block_states[num_local:], source.tail_state)
    decode.until_idle()
    return prefill, decode, source, target


@pytest.mark.parametrize("length", [1, 2, 3, 4, 5, 7, 8, 9, 16, 17])
def test_prefill_and_decode_apart_say_the_same_as_together(length):
    prompt = list(range(length))
    prefill, decode, source, target = hand_over(prompt, 12)

    assert decode.said["d"] == CHAIN.continuation(prompt, 12)
    assert prefill.said["p"] == decode.said["d"][:1]
    assert target.num_external_tokens == length
    assert decode.scheduler.counts.num_external_hits == length
    assert decode.cache.usage_ratio == 0
    assert prefill.cache.usage_ratio > 0  # kept until pulled
    prefill.scheduler.release(source)
    assert prefill.cache.usage_ratio == 0


def test_decode_pulls_only_what_it_lacks():
    _, decode, _, target = hand_over(list(range(17)), 5, warm=list(range(9)))

    assert (target.num_cached_tokens, target.num_external_tokens) == (8, 9)
    assert decode.said["d"] == CHAIN.continuation(range(17), 5)


def test_wrong_kv_gives_a_wrong_answer():
    """The chain's state is the KV: parameters of another prompt are visible in the text, as on a real engine."""
    prefill, decode = Run(has_connector=True), Run(has_connector=True)
    source = prefill.add("p", range(50, 60), 1, is_remote_decode=True)
    prefill.until_idle()
    decode.add("d", range(10), 5, remote_prefill={"x": 1})
    decode.until_idle()
    [fetch] = decode.scheduler.take_fetches()
    decode.scheduler.fetched(fetch, source.block_states, source.tail_state)
    decode.until_idle()

    assert decode.said["d"] != CHAIN.continuation(range(10), 5)


def test_a_pull_that_fails_frees_everything():
    decode = Run(has_connector=True)
    decode.add("d", range(10), 5, remote_prefill={"x": 1})
    decode.until_idle()
    [fetch] = decode.scheduler.take_fetches()
    assert decode.cache.usage_ratio > 0
    decode.scheduler.stop(fetch)

    assert decode.cache.usage_ratio == 0
    assert not decode.scheduler.fetching
    decode.scheduler.fetched(fetch, [], 0)  # an answer that comes too late changes nothing
    assert not decode.scheduler.waiting


@settings(max_examples=60, deadline=None)
@given(st.integers(0, 2**32), st.integers(6, 40), st.integers(1, 8))
def test_any_mixture_of_requests_follows_the_chain_and_leaks_nothing(
    seed, num_blocks, max_num_seqs
):
    """Small caches, shared prefixes, aborts at random steps, pulls in between: all answers right, all blocks back."""
    rnd = random.Random(seed)
    run = Run(
        num_blocks=num_blocks,
        block_size=4,
        max_num_seqs=max_num_seqs,
        max_num_batched_tokens=16,
        has_connector=True,
    )
    capacity = (num_blocks - 1) * 4
    open_ones, prompts, states = [], {}, Run(num_blocks=4096, has_connector=True)
    aborted = set()
    for i in range(rnd.randrange(1, 20)):
        length = rnd.randrange(1, max(2, capacity // 2))
        prompt = [*range(length // 2), *(rnd.randrange(3) for _ in range(length - length // 2))]
        max_tokens = rnd.randrange(1, max(2, capacity - length))
        remote = {"x": 1} if rnd.random() < 0.3 else None
        sequence = run.add(str(i), prompt, max_tokens, remote_prefill=remote)
        prompts[str(i)] = (prompt, max_tokens)
        open_ones.append(sequence)
        for _ in range(rnd.randrange(5)):
            run.step()
        if rnd.random() < 0.2:
            stopped = rnd.choice(open_ones)
            if stopped.phase is not Phase.DONE:
                aborted.add(stopped.wish.id)
            run.scheduler.stop(stopped)
        for fetch in run.scheduler.take_fetches():
            source = states.add(
                "s" + fetch.wish.id, fetch.wish.prompt_ids, 1, is_remote_decode=True
            )
            states.until_idle()
            run.scheduler.fetched(
                fetch, source.block_states[len(fetch.block_states) :], source.tail_state
            )
            states.scheduler.release(source)
    while run.step() or run.scheduler.fetching:
        for fetch in run.scheduler.take_fetches():
            source = states.add(
                "s" + fetch.wish.id, fetch.wish.prompt_ids, 1, is_remote_decode=True
            )
            states.until_idle()
            run.scheduler.fetched(
                fetch, source.block_states[len(fetch.block_states) :], source.tail_state
            )
            states.scheduler.release(source)

    for sequence in open_ones:
        prompt, max_tokens = prompts[sequence.wish.id]
        assert sequence.phase is Phase.DONE
        expected = CHAIN.continuation(prompt, max_tokens)
        said = run.said.get(sequence.wish.id, [])
        assert said == expected[: len(said)]
        assert len(said) == max_tokens or sequence.wish.id in aborted
    assert run.cache.usage_ratio == 0


def host_run(num_host_blocks, **options):
    host = HostCache(num_host_blocks, 4, is_self_describing=options.pop("describes", False))
    costs = StepCosts(
        100, prefill_base_ms=0, decode_ms=0, decode_us_per_seq=0, load_us_per_token=10
    )
    return Run(num_blocks=12, costs=costs, host=host, **options)


def ask(run, name, prompt):
    sequence, started_s = run.add(name, prompt, 1), run.now_s
    run.until_idle()
    assert run.said[name] == CHAIN.continuation(prompt, 1)
    return sequence, run.now_s - started_s


def test_what_the_device_evicts_is_loaded_from_the_host_in_a_fraction_of_the_time():
    run = host_run(num_host_blocks=100)
    _, computed_s = ask(run, "first", range(33))
    ask(run, "other", range(100, 143))  # the whole device
    again, loaded_s = ask(run, "again", range(33))

    assert (again.num_cached_tokens, again.num_loaded_tokens) == (32, 32)
    assert computed_s == pytest.approx(33 * 100e-6)
    assert loaded_s == pytest.approx(32 * 10e-6)
    counts = run.scheduler.counts
    assert (counts.num_host_hits, counts.num_external_hits, counts.num_prefix_hits) == (32, 32, 0)


def test_the_host_forgets_the_ends_of_prompts_first_and_says_so():
    run = host_run(num_host_blocks=10)
    ask(run, "first", range(33))
    of_host = [event for event in run.events if event.medium == "CPU"]
    names = [handle for event in of_host for handle in event.block_hashes]
    run.events.clear()
    ask(run, "other", range(100, 117))
    gone = [e.block_hashes for e in run.events if isinstance(e, BlockRemoved) and e.medium == "CPU"]

    assert len(names) == 8
    assert gone == [(names[7], names[6])]
    assert len(run.scheduler.host) == 10


@pytest.mark.parametrize("describes", [False, True])
@pytest.mark.parametrize("seed", range(4))
def test_a_tracker_knows_what_the_host_has_whatever_is_evicted(seed, describes):
    rng = random.Random(seed)
    run = host_run(num_host_blocks=30, describes=describes)
    hasher = BlockHasher(b"s", 4)
    tracker, told = BlockTracker(hasher), set()
    shared = [rng.randrange(50) for _ in range(12)]
    for number in range(40):
        prompt = shared[: 4 * rng.randrange(4)] + [
            rng.randrange(50) for _ in range(rng.randrange(1, 25))
        ]
        sequence, _ = ask(run, str(number), prompt)
        tracker.apply(run.events, 0)
        for delta in tracker.take_slower():
            told = (told - set(delta.removed)) | set(delta.stored)
        run.events.clear()
        blocks = hasher.prompt(prompt)
        in_host = len(run.scheduler.host.find(sequence.hashes(len(prompt) // 4, 4)))
        known = 0
        while known < blocks.num_blocks and blocks.hash_at(known + 1) in told:
            known += 1
        assert known == in_host
    assert tracker._slower[1].num_unnamed == 0

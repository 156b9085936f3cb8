"""A shadow policy says beforehand what switching to it brings, and changes nothing meanwhile."""

import random

import msgspec
import pytest

from dynctl.core.deployment import EngineInfo, EngineState
from dynctl.router.config import Settings
from dynctl.router.desk import load_policy
from dynctl.router.merging import add_answers, add_shadows
from dynctl.router.placement import Order, Placement
from dynctl.router.prefix_index import PrefixIndex, Source
from dynctl.router.prompt import Hashers, Prompt
from dynctl.router.shadow import Shadow
from dynctl.router.worker_table import WorkerTable

HASHERS = Hashers("s")


def fleet(policy, capacity=200_000):
    table, index = WorkerTable(Settings()), PrefixIndex()
    for i in range(4):
        table.put(
            EngineInfo(
                *(f"e{i}", f"e{i}.1", EngineState.READY, "aggregated", "d", "sim", "m"),
                block_size_tokens=16,
                kv_capacity_tokens=capacity,
            )
        )
        index.begin(Source(f"e{i}", f"e{i}.1"))
    return index, Placement(table, index, load_policy(policy), Settings(), random.Random(1))


def serve(index, placement, number=600, num_answered=0):
    """Conversations on shared prefixes, on engines whose cache is what the index says; the hit rate they get.

    Answers are part of the next turn.
    """
    rng = random.Random(2)
    shared = [[rng.randrange(1000) for _ in range(512)] for _ in range(6)]
    histories = [list(rng.choice(shared)) for _ in range(60)]
    hit = asked = 0
    chosen = []
    for i in range(number):
        history = rng.choice(histories)
        history += [rng.randrange(1000) for _ in range(100)]
        now_s = i * 0.1
        index.sweep(now_s)
        blocks = HASHERS.of(16).prompt(history)
        held = index.match(blocks, (len(history) - 1) // 16)
        prompt = Prompt.known(HASHERS, list(history))
        placed = placement.place(Order("r", prompt, None, num_answered or 16), now_s)
        engine = placed.main.worker.id
        chosen.append(engine)
        hit += held.get(engine, 0) * 16
        asked += len(history)
        history += [rng.randrange(1000) for _ in range(num_answered)]
        index.store(Source(engine, f"{engine}.1"), HASHERS.of(16).prompt(history).hashes())
        placed.main.prefill_ended(now_s + 0.05)
        placed.main.release()
    return hit / asked, chosen


@pytest.mark.parametrize("num_answered", [0, 120])
def test_what_the_shadow_says_is_what_switching_gives(num_answered):
    index, placement = fleet("round_robin")
    placement.shadow = Shadow("kv", load_policy("kv"), "round_robin", random.Random(3))
    _, with_shadow = serve(index, placement, num_answered=num_answered)
    said = placement.shadow.to_json()

    index, plain = fleet("round_robin")
    before, without = serve(index, plain, num_answered=num_answered)
    assert with_shadow == without, "the shadow does not act"

    index, placement = fleet("kv")
    got, _ = serve(index, placement, num_answered=num_answered)
    assert said["real"]["hit_ratio"] == pytest.approx(before, abs=0.03)
    assert said["shadow"]["hit_ratio"] == pytest.approx(got, abs=0.03)
    assert said["shadow"]["hit_ratio"] > said["real"]["hit_ratio"] + 0.1
    assert said["shadow"]["ttft_ms"] < said["real"]["ttft_ms"]
    assert said["num_decisions"] == 600
    assert 0.0 < said["gain"]["band"] < 0.05
    assert got - before == pytest.approx(said["gain"]["hit_ratio"], abs=said["gain"]["band"])


def test_simulated_caches_are_as_large_as_the_engines_own():
    hits = []
    for capacity in (2_000, 8_000, 200_000):
        index, placement = fleet("round_robin", capacity)
        placement.shadow = Shadow("kv", load_policy("kv"), "round_robin", random.Random(3))
        serve(index, placement, 300)
        said = placement.shadow.to_json()
        hits.append((said["real"]["hit_ratio"], said["shadow"]["hit_ratio"]))

    assert hits == sorted(hits)
    assert hits[2][0] > hits[0][0] + 0.1
    assert hits[2][1] > hits[0][1] + 0.1


def test_a_shadow_of_the_same_policy_says_the_same():
    index, placement = fleet("least_loaded")
    placement.shadow = Shadow(
        "least_loaded", load_policy("least_loaded"), "least_loaded", random.Random(3)
    )
    serve(index, placement)
    said = placement.shadow.to_json()

    assert said["shadow"]["hit_ratio"] == pytest.approx(said["real"]["hit_ratio"], abs=0.05)


def test_engines_that_get_nothing_count_in_how_even_the_spread_is():
    class First:
        uses_index, term_names = True, ()

        def choose(self, *args):
            return 0

    index, placement = fleet("round_robin")
    placement.shadow = Shadow("first", First(), "round_robin", random.Random(3))
    serve(index, placement, 100)
    said = placement.shadow.to_json()

    assert said["shadow"]["max_over_mean"] == 4.0
    assert said["real"]["max_over_mean"] == 1.0


def test_a_shadow_that_fails_is_stopped_and_harms_nobody():
    class Breaks:
        uses_index, term_names = True, ()

        def choose(self, *args):
            raise ValueError("a fault of ours")

    index, placement = fleet("kv")
    placement.shadow = Shadow("breaks", Breaks(), "kv", random.Random(3))
    serve(index, placement, 5)

    assert placement.shadow is None


def counted(seed, number):
    index, placement = fleet("round_robin")
    placement.shadow = Shadow("kv", load_policy("kv"), "round_robin", random.Random(seed))
    serve(index, placement, number)
    return msgspec.json.encode(placement.shadow.to_json())


def test_what_several_processes_shadows_count_is_joined():
    texts = [counted(3, 400), b"null", counted(4, 150)]
    one, other = (msgspec.json.decode(text) for text in (texts[0], texts[2]))
    joined = msgspec.json.decode(add_shadows(texts))

    assert joined["num_decisions"] == 550
    assert joined["num_same"] == one["num_same"] + other["num_same"]
    for side in ("real", "shadow"):
        sums = [told["sums"][side] for told in (one, other)]
        hits, tokens = (sum(s[name] for s in sums) for name in ("hit_tokens", "prompt_tokens"))
        assert joined[side]["policy"] == one[side]["policy"]
        assert joined[side]["hit_ratio"] == pytest.approx(hits / tokens, abs=1e-4)
        ttft_ms = sum(s["ttft_ms"] for s in sums) / 550
        assert joined[side]["ttft_ms"] == pytest.approx(ttft_ms, abs=0.01)
    counts = [
        one["sums"]["real"]["requests"][f"e{i}"] + other["sums"]["real"]["requests"][f"e{i}"]
        for i in range(4)
    ]
    assert joined["real"]["max_over_mean"] == pytest.approx(max(counts) * 4 / sum(counts))
    # Eleven whole batches; the more there are, the surer.
    assert joined["sums"]["gain"]["num_batches"] == 11
    assert joined["gain"]["band"] < other["gain"]["band"]
    assert msgspec.json.decode(add_shadows([msgspec.json.encode(joined)])) == joined


def test_processes_that_follow_another_policy_or_none_are_left_out():
    own = counted(3, 60)
    else_ = own.replace(b'"shadow_policy":"kv"', b'"shadow_policy":"random"')

    assert else_ != own
    assert add_shadows([b"null", own, else_]) == own
    assert add_shadows([b"null", b"null"]) == b"null"
    assert add_answers("/shadow", b"", (200, b"null"), [own]) == (200, own)

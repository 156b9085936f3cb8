"""Every injected cause of zero hits is named by the router's own questions, behind a relay and without one.

Each fault is put into one engine of a fleet, so that one run shows them all; the sound engine beside them is never accused.
"""

import asyncio
import dataclasses
import random

import msgspec
import pytest
from router_bench import until
from router_models import other_template, other_tokenizer
from router_relays import relayed, talk
from router_sims import Sim, generate, prompt_of, routed_sims


class Changed(Sim):
    """An engine whose events are not what they should be."""

    def __init__(self, name, directory, change):
        super().__init__(name, directory)
        self._change = change

    async def start(self, text):
        await super().start(text)
        self._change(self.engine.publisher)


def with_lora(publisher):
    """All blocks belong to a LoRA that nobody asks with."""
    publish = publisher.publish

    def changed(batch, **options):
        events = [
            msgspec.structs.replace(event, lora_name="tuned")
            if hasattr(event, "token_ids")
            else event
            for event in batch.events
        ]
        return publish(msgspec.structs.replace(batch, events=tuple(events)), **options)

    publisher.publish = changed


def of_another_version(publisher):
    """Events of a kind this release does not know."""

    def changed(batch, **_):
        payload = msgspec.msgpack.encode([batch.ts, [{"type": "PageHeld", "page": 1}], 0])
        seq = publisher._next_seq
        publisher._next_seq += 1
        publisher._buffer.append((seq, payload))
        publisher._pub.send_multipart([b"", seq.to_bytes(8, "big"), payload])
        return seq

    publisher.publish = changed


async def causes_of(bench, expected):
    """Wait until all are named; nobody asks the engines anything meanwhile. The limit only catches hangs."""
    began_s, found = bench.desk.loop.time(), {}
    while found != expected and bench.desk.loop.time() - began_s < 100:
        await asyncio.sleep(0.1)
        found = {finding.engine: finding.cause for finding in bench.desk.probes.findings()}
    return found


def test_each_cause_is_named_through_a_relay(run, tls, short_dir, tmp_path):
    async def main():
        sims = [
            Sim("sound", short_dir),
            Sim("no-cache", short_dir, prefix_caching=0),
            Sim("silent", short_dir),
            Sim("wrong-port", short_dir),
            Sim("other-topic", short_dir, topic="kv"),
            Sim("wide-blocks", short_dir, block_size=32),
            Sim("other-words", short_dir, own_text=other_tokenizer(tmp_path / "a")),
            Sim("other-chats", short_dir, own_text=other_template(tmp_path / "b")),
            Sim("other-seed", short_dir),
            Sim("no-seed", short_dir),
            Changed("lora", short_dir, with_lora),
            Changed("newer", short_dir, of_another_version),
        ]
        entries = {
            "silent": {"kv_events": None, "kv_replay": None},
            "wrong-port": {"kv_events": f"ipc://{short_dir}/nobody", "kv_replay": None},
            "other-topic": {"topic": "another"},
            "other-seed": {"block_hash_seed": "another"},
            "no-seed": {"block_hash_seed": ""},
        }
        parities = {"other-words": "mismatch", "other-chats": "mismatch"}
        async with relayed(tls, *sims, entries=entries, parities=parities, probe_s=60) as bench:
            expected = {
                "no-cache": "caching_off",
                "silent": "no_events_source",
                "wrong-port": "events_unreachable",
                "other-topic": "topic",
                "wide-blocks": "block_size",
                "other-words": "tokenizer",
                "other-chats": "chat_template",
                "other-seed": "seed",
                "no-seed": "seed",
                "lora": "salt",
                "newer": "event_version",
            }
            assert await causes_of(bench, expected) == expected
            await until(lambda: not any(w.active_requests for w in bench.desk.workers.all()))
            bench.assert_books_balance()
            hits = bench.desk.hits.to_json()
            # All but the engine without a cache find what they were asked a moment ago.
            assert 0.85 < hits["probe_ratio"] < 1.0
            assert hits["probes"] >= 3 * len(sims)

    run(main)


def test_each_cause_is_named_without_a_relay(run, short_dir, tmp_path):
    async def main():
        away = Sim("wrong-port", short_dir)
        away.target = dataclasses.replace(away.target, kv_events=f"ipc://{short_dir}/nobody")
        topic = Sim("other-topic", short_dir, topic="kv")
        topic.target = dataclasses.replace(topic.target, topic="another")
        silent = Sim("silent", short_dir)
        silent.target = dataclasses.replace(silent.target, kv_events=None, kv_replay=None)
        sims = [
            Sim("sound", short_dir),
            Sim("no-cache", short_dir, prefix_caching=0),
            *(away, topic, silent),
            Changed("lora", short_dir, with_lora),
            Changed("newer", short_dir, of_another_version),
        ]
        async with routed_sims(*sims, settings={"probe_s": 60}) as bench:
            expected = {
                "no-cache": "caching_off",
                "wrong-port": "events_unreachable",
                "other-topic": "topic",
                "silent": "no_events_source",
                "lora": "salt",
                "newer": "event_version",
            }
            assert await causes_of(bench, expected) == expected

    run(main)


async def asked_until_one_is_found(bench, ask):
    """Ask for new prompts until something is found; the limit only catches hangs."""
    rng = random.Random(3)
    async with asyncio.timeout(100):
        while not bench.desk.probes.findings():
            await ask(bench, prompt_of(rng, bench.text.words, 100), 2)
    (found,) = bench.desk.probes.findings()
    return found.engine, found.cause


LOSSY = {"fault": ("lose-events,ratio=0.5",)}


def test_events_that_are_lost_for_good_are_named_through_a_relay(run, tls, short_dir):
    async def main():
        async with relayed(
            tls, Sim("e0", short_dir, **LOSSY), entries={"e0": {"kv_replay": None}}
        ) as bench:
            assert await asked_until_one_is_found(bench, talk) == ("e0", "events_lost")

    run(main)


def test_events_that_are_lost_for_good_are_named_without_a_relay(run, short_dir):
    async def main():
        sim = Sim("e0", short_dir, **LOSSY)
        sim.target = dataclasses.replace(sim.target, kv_replay=None)
        async with routed_sims(sim) as bench:
            assert await asked_until_one_is_found(bench, generate) == ("e0", "events_lost")

    run(main)


def test_probe_questions_end_when_they_are_switched_off_or_the_router_drains(run, short_dir):
    async def main():
        sim = Sim("e0", short_dir)
        async with routed_sims(sim, settings={"probe_s": 0}) as bench:
            await asyncio.sleep(1.2)
            assert bench.desk.hits.num_probes == 0
            assert bench.desk.hits.to_json()["probe_ratio"] is None

    run(main)


def test_a_sound_engine_finds_all_of_a_second_question(run, short_dir):
    async def main():
        async with routed_sims(Sim("e0", short_dir), settings={"probe_s": 0.2}) as bench:
            async with asyncio.timeout(60):
                while bench.desk.hits.num_probes < 6:
                    await asyncio.sleep(0.05)
            assert bench.desk.hits.to_json()["probe_ratio"] == pytest.approx(1.0)
            assert bench.desk.probes.findings() == ()
            assert len(bench.desk.ring) == 0

    run(main)

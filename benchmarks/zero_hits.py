"""How soon a router names why an engine's cache is not hit any more (wanted: each of eight causes within 30 s).

Two simulated engines and a router, all of them processes, with traffic of repeated prefixes as text and as chats. Once all is
well, one engine is started anew with one thing wrong, as after a bad change, or its events begin to get lost; the clock runs
from when it serves again. What belongs to a host's agent goes through a relay. Shown is what an operator reads: the finding as
`/findings` has it (and the metric that `top` reads, or it does not count). Of that engine's prompt tokens three shares are
given: what it reported as cached while all was well, and what the router expected and it reported afterwards. Any other
finding, of either engine, is a false one. Three more engines are started anew with nothing wrong, or lose events that can be
asked for again: nothing may be found of them for a minute.
Run: python benchmarks/zero_hits.py [NAME…] [--at-once 4]; exits 1 when a cause is named late, otherwise or not at all.
"""

import argparse
import asyncio
import json
import random
import sys
import tempfile
import textwrap
import time
from contextlib import AsyncExitStack, suppress
from dataclasses import dataclass
from math import inf
from pathlib import Path

import relayed
from sick_engine import JSON, Cause, Engine, Process, ended, other_models
from stand import free_ports

from dynctl.core.exposition import parse
from dynctl.http1.upstream import Address, Upstream, UpstreamError
from dynctl.sim.options import MODEL_DIR
from dynctl.sim.text import TextModel

LIMIT_S = 30.0
GIVE_UP_S = 45.0
CALM_S = 60.0
"""So long nothing may be found where nothing is wrong."""
STAYS_S = 8.0
"""A finding is watched for so long after it came: it may not turn into another one."""
WARM_S = 12.0
AWAY_S = 5.0
"""Between an engine's end and its next start; models take longer to load."""
POLL_S = 0.2

REQUESTS_S, NUM_PREFIXES, USES = 8.0, 8, 12
"""Each of so many prefixes is asked with about so often, then another takes its place."""
PREFIX_WORDS, OWN_WORDS, ANSWER_TOKENS = 600, 24, 4

SEED = "deployment"

CAUSES = (
    Cause("seed", "seed", is_relayed=True, entry={"block_hash_seed": "another"}),
    Cause("block size", "block_size", ("--block-size", "32"), is_relayed=True),
    Cause("events off", "events_unreachable", has_events=False),
    Cause("events silent", "no_events", has_events=False, is_passed=True, has_replay=False),
    Cause("events lost", "no_events", fault="lose-events", has_replay=False),
    Cause("tokenizer", "tokenizer", ("--tokenizer", "{folder}/words")),
    Cause("chat template", "chat_template", ("--tokenizer", "{folder}/chats")),
    Cause("salt", "salt", salt="tenant-7"),
    Cause("version", "event_version", is_newer=True, is_passed=True, has_replay=False),
    Cause("cache off", "caching_off", ("--prefix-caching", "0")),
    Cause("topic", "topic", ("--topic", "other"), topic="kv"),
    Cause("not told", "no_events_source", is_relayed=True, entry={"kv_events": None}),
    Cause("half lost", "events_lost", fault="lose-events,ratio=0.5", has_replay=False),
    Cause("started anew", ""),
    Cause("started anew, relayed", "", is_relayed=True),
    Cause("half lost, replayed", "", fault="lose-events,ratio=0.5"),
)


@dataclass(frozen=True)
class Answer:
    at_s: float
    engine: str
    num_tokens: int
    predicted: int
    reported: int


class Traffic:
    """Clients that ask with the same beginnings again and again."""

    def __init__(self, port, seed):
        self._upstream = Upstream(Address(host="127.0.0.1", port=port))
        self._draw, self._text = random.Random(seed), TextModel(MODEL_DIR)
        self._prefixes = [self._words(PREFIX_WORDS) for _ in range(NUM_PREFIXES)]
        self.answers, self.num_failed = [], 0

    async def run(self):
        try:
            async with asyncio.TaskGroup() as group:
                while True:
                    group.create_task(self._ask())
                    await asyncio.sleep(self._draw.expovariate(REQUESTS_S))
        finally:
            await self._upstream.close()

    def share(self, engine, what, since_s, until_s):
        """Of an engine's prompt tokens meanwhile, those expected to be cached or reported so."""
        own = [
            one for one in self.answers if one.engine == engine and since_s <= one.at_s < until_s
        ]
        total = sum(one.num_tokens for one in own)
        return sum(getattr(one, what) for one in own) / total if total else None

    def _words(self, number):
        return self._text.decode([self._draw.choice(self._text.words) for _ in range(number)])

    async def _ask(self):
        draw = self._draw
        at = draw.randrange(NUM_PREFIXES)
        prefix, own = self._prefixes[at], self._words(OWN_WORDS)
        if draw.random() * USES < 1:
            self._prefixes[at] = self._words(PREFIX_WORDS)
        body, path = {"model": "sim", "max_tokens": ANSWER_TOKENS}, "/v1/completions"
        if draw.random() < 0.5:
            body["prompt"] = f"{prefix} {own}"
        else:
            path = "/v1/chat/completions"
            system = {"role": "system", "content": prefix}
            body["messages"] = [system, {"role": "user", "content": own}]
        headers = (*JSON, (b"x-dynctl-explain", b"1"))
        try:
            answer = await self._upstream.fetch(
                "POST", path, headers, json.dumps(body).encode(), 30.0
            )
        except UpstreamError:
            self.num_failed += 1
            return
        if answer.status != 200:
            self.num_failed += 1
            return
        told, usage = dict(answer.headers), json.loads(answer.body)["usage"]
        self.answers.append(
            Answer(
                time.monotonic(),
                told[b"x-dynctl-engines"].decode(),
                usage["prompt_tokens"],
                int(told[b"x-dynctl-predicted-cached-tokens"]),
                usage["prompt_tokens_details"]["cached_tokens"],
            )
        )


class Watch:
    """What the router finds wrong, as an operator would read it."""

    def __init__(self, path):
        self._upstream = Upstream(Address(path=path))
        self.seen = {}
        """By engine and cause: when it was shown first, and the finding."""
        self.in_metrics = set()

    async def look(self):
        now_s = time.monotonic()
        for found in await self.ask("/findings"):
            self.seen.setdefault((found["engine"], found["cause"]), (now_s, found))
        metrics = await self._upstream.fetch("GET", "/metrics")
        for sample in parse(metrics.body.decode(), {GAUGE}).get(GAUGE, ()):
            self.in_metrics.add((sample.labels["engine"], sample.labels["cause"]))

    async def look_until(self, until_s, wanted=None):
        """Look for a while, or until what is wanted was shown."""
        while time.monotonic() < until_s and (wanted is None or wanted not in self.seen):
            await self.look()
            await asyncio.sleep(POLL_S)

    async def ask(self, path):
        return json.loads((await self._upstream.fetch("GET", path)).body)

    async def knows_all(self):
        """Wait until the router sends requests to both engines by what they cache."""
        async with asyncio.timeout(60):
            while True:
                with suppress(UpstreamError):
                    engines = (await self.ask("/engines"))["engines"]
                    if len(engines) == 2 and not any(one["lack"] for one in engines):
                        return
                await asyncio.sleep(POLL_S)

    async def close(self):
        await self._upstream.close()


GAUGE = "dynctl_router_findings"


class Scene:
    """Engines, perhaps a relay, and a router."""

    def __init__(self, cause, folder, models):
        self.cause, self.folder = cause, folder
        self.engines = [Engine(name, folder, models) for name in ("e0", "e1")]
        self.agent = None
        [self.port] = free_ports(1)

    async def run(self, seed):
        """Let it be well, break it, watch it; the row of it."""
        sick, cause = self.engines[1], self.cause
        async with AsyncExitStack() as stack:
            for engine in self.engines:
                await engine.enter(stack)
                await engine.start(Cause("", "", topic=cause.topic))
            admin = await self._route(stack)
            watch = Watch(admin)
            stack.push_async_callback(watch.close)
            await watch.knows_all()
            traffic = Traffic(self.port, seed)
            stack.push_async_callback(ended, asyncio.create_task(traffic.run()))
            began_s = time.monotonic()
            await watch.look_until(began_s + WARM_S)
            await self._break(sick, watch)
            broken_s = time.monotonic()
            wanted = (sick.name, cause.shown)
            if cause.shown:
                await watch.look_until(broken_s + GIVE_UP_S, wanted)
                await watch.look_until(time.monotonic() + STAYS_S)
            else:
                await watch.look_until(broken_s + CALM_S)
            shares = [
                traffic.share(sick.name, what, *span)
                for what, span in (
                    ("reported", (began_s + WARM_S / 2, began_s + WARM_S)),
                    ("predicted", (broken_s, inf)),
                    ("reported", (broken_s, inf)),
                )
            ]
            return Row(cause, watch, wanted, broken_s, shares, traffic)

    async def _break(self, engine, watch):
        cause = self.cause
        if cause.fault:
            control = Upstream(Address(path=engine.control))
            body = json.dumps({"spec": cause.fault}).encode()
            answer = await control.fetch("POST", "/faults", JSON, body)
            await control.close()
            if answer.status != 200:
                raise SystemExit(answer.body.decode())
            return
        if self.agent is not None:
            self.agent.tell([self._entry(0), self._entry(1, "starting", 2)])
        await engine.stop()
        await watch.look_until(time.monotonic() + AWAY_S)
        await engine.start(cause)
        if self.agent is not None:
            self.agent.tell([self._entry(0), self._entry(1, "ready", 2, cause.entry)])

    def _entry(self, number, state="ready", start=1, otherwise=()):
        engine = self.engines[number]
        return {
            "info": {
                "id": engine.name,
                "incarnation": f"{engine.name}.{start}",
                "state": state,
                "role": "aggregated",
                "deployment": "",
                "kind": "sim",
                "model": "sim",
                "block_size_tokens": 16,
            },
            "socket": engine.http,
            "kv_events": engine.events,
            "kv_replay": engine.replay,
            "block_hash_seed": SEED,
        } | dict(otherwise)

    async def _route(self, stack):
        """Start the router, behind a relay or straight before the engines; where its admin socket is."""
        admin, folder = f"{self.folder}/admin", self.folder
        if self.cause.is_relayed:
            [relay_port] = free_ports(1)
            relayed.certificates(folder)
            self.agent = stack.enter_context(
                relayed.Agent(f"{folder}/agent", [self._entry(0), self._entry(1)])
            )
            relay = Process(Path(folder, "relay.log"))
            stack.push_async_callback(relay.stop)
            await relay.start(*relayed.relay_command(folder, relay_port, f"{folder}/agent"))
            command = relayed.router_command(
                folder, self.port, relay_port, "kv", str(MODEL_DIR), block_hash_seed=SEED
            )
        else:
            command = [sys.executable, "-m", "dynctl", "route", "--tokenizer", MODEL_DIR]
            command += ["--listen", f"127.0.0.1:{self.port}"]
            for engine in self.engines:
                replay = f",kv-replay={engine.replay}" if self.cause.has_replay else ""
                events = engine.passed if self.cause.is_passed else engine.events
                places = f"kv-events={events}{replay},topic={self.cause.topic}"
                command += ["--engine", f"unix:{engine.http},id={engine.name},{places}"]
        router = Process(Path(folder, "router.log"))
        stack.push_async_callback(router.stop)
        await router.start(*command, "--admin-socket", admin)
        return admin


class Row:
    """What came of one scene."""

    def __init__(self, cause, watch, wanted, broken_s, shares, traffic):
        self.cause, self.shares = cause, shares
        self.num_answers, self.num_failed = len(traffic.answers), traffic.num_failed
        shown_s, self.found = watch.seen.get(wanted, (None, None))
        self.after_s = None if shown_s is None else shown_s - broken_s
        self.others = [
            f"{engine or 'router'}: {name} after {at_s - broken_s:.1f} s: {found['text']}"
            for (engine, name), (at_s, found) in watch.seen.items()
            if (engine, name) != wanted
        ]
        is_in_top = wanted in watch.in_metrics
        is_in_time = self.after_s is not None and 0 <= self.after_s <= LIMIT_S
        self.is_held = not self.others and (not cause.shown or (is_in_time and is_in_top))

    def show(self):
        after = "–" if self.after_s is None else f"{self.after_s:.1f}"
        before, *shares = ["–" if share is None else f"{share:.0%}" for share in self.shares]
        print(
            f"{self.cause.name:23}{'relay' if self.cause.is_relayed else 'route':7}{self.cause.shown or 'none':20}"
            f"{after:>7}{before:>10}{shares[0]:>11}{shares[1]:>10}  {'holds' if self.is_held else 'MISSES'}"
        )
        lines = [f"{self.found['text']}; {self.found['hint']}"] if self.found else []
        lines += [f"also {other}" for other in self.others]
        if self.num_failed:
            lines.append(f"{self.num_failed} requests failed, {self.num_answers} did not")
        for line in lines:
            print(textwrap.indent(textwrap.fill(line, 110), "    "))


async def measure(causes, at_once):
    """A row for each cause, in their order."""
    room = asyncio.Semaphore(at_once)

    async def one(number, cause, models):
        async with room:
            with tempfile.TemporaryDirectory(prefix="zero-") as folder:
                return await Scene(cause, folder, models).run(number)

    with tempfile.TemporaryDirectory(prefix="zero-") as models:
        other_models(Path(models))
        async with asyncio.TaskGroup() as group:
            tasks = [group.create_task(one(n, cause, models)) for n, cause in enumerate(causes)]
        return [task.result() for task in tasks]


def main():
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("names", nargs="*", help=", ".join(cause.name for cause in CAUSES))
    parser.add_argument("--at-once", type=int, default=4, help="scenes; each is three processes")
    options = parser.parse_args()
    if unknown := set(options.names) - {cause.name for cause in CAUSES}:
        parser.error(f"no cause is named {', '.join(unknown)}")
    wanted = [one for one in CAUSES if not options.names or one.name in options.names]
    rows = asyncio.run(measure(wanted, options.at_once))
    print(
        f"{'wrong with an engine':23}{'by':7}{'shown as':20}{'after s':>7}{'well':>10}{'predicted':>11}{'reported':>10}"
    )
    for row in rows:
        row.show()
    return 0 if all(row.is_held for row in rows) else 1


if __name__ == "__main__":
    sys.exit(main())

"""Simulated engines in this process, and a router straight before them."""

import json
from contextlib import asynccontextmanager

from router_bench import Bench, Client, events, until

from dynctl.http1.server import serve
from dynctl.router.config import EngineTarget, RouterConfig, make_settings
from dynctl.router.run import Router
from dynctl.router.sources.split import worker_ids
from dynctl.sim.api.routes import Api
from dynctl.sim.engine import SimEngine
from dynctl.sim.options import MODEL_DIR, SimOptions
from dynctl.sim.text import TextModel

FAST = {
    "prefill_us_per_token": 20.0,
    "prefill_base_ms": 0.5,
    "decode_ms": 0.5,
    "decode_us_per_seq": 5.0,
}


class Sim:
    """One simulated engine in this process."""

    def __init__(self, name, directory, role="aggregated", *, own_text=None, ranks=1, **options):
        self.name = name
        self.names = worker_ids(name, ranks)
        """Of the workers it is to a router."""
        self.own_text = own_text
        """Its tokenizer, where it isn't the one of the others."""
        self.role = role
        side = options.pop("side_channel", "127.0.0.1:0" if role != "aggregated" else None)
        places = f"ipc://{directory}/{name}" if ranks == 1 else f"ipc://{directory}/inproc-{name}"
        events_at, replay_at = f"{places}.kv", f"{places}.re"
        self.options = SimOptions(
            uds=f"{directory}/{name}.sock",
            kv_events=events_at,
            kv_replay=replay_at,
            side_channel=side,
            data_parallel_size=ranks,
            role="both" if role == "aggregated" else role,
            **(FAST | options),
        )
        self.target = EngineTarget(
            id=name,
            url=f"unix:{directory}/{name}.sock",
            role=role,
            kv_events=events_at,
            kv_replay=replay_at,
            ranks=ranks,
        )

    async def start(self, text):
        self.ranks = [SimEngine(self.options, text, rank) for rank in range(len(self.names))]
        self.engine = self.ranks[0]
        self.server = await serve(Api(*self.ranks).handle, path=self.options.uds)
        for rank in self.ranks:
            await rank.start()

    async def stop(self):
        for rank in self.ranks:
            await rank.close()
        await self.server.close(0)


@asynccontextmanager
async def routed_sims(
    *sims, policy="kv", settings=None, tokenizer=str(MODEL_DIR), parity="verified", **options
):
    text = TextModel(MODEL_DIR)
    for sim in sims:
        await sim.start(sim.own_text or text)
    config = RouterConfig(
        listen="127.0.0.1:0",
        policy=policy,
        tokenizer=tokenizer,
        engines=tuple(sim.target for sim in sims),
        settings=make_settings(
            {"engine_poll_s": 0.1, "conditional_prefill": 0, "probe_s": 0} | (settings or {})
        ),
        **options,
    )
    async with Router(config) as router:
        client = Client(router.port)
        bench = Bench(router, sims, client)
        bench.text = text
        try:
            workers = router.desk.workers
            await until(
                lambda: (
                    len(workers.all()) == sum(len(sim.names) for sim in sims)
                    and all(w.is_serving() for w in workers.all())
                )
            )
            if tokenizer and parity:
                await until(lambda: all(w.parity == parity for w in workers.all()))
            yield bench
        finally:
            await client.upstream.close()
            for sim in sims:
                await sim.stop()


async def told(bench):
    """Wait until the router has heard of all that its engines have cached and told."""
    speaking = [sim for sim in bench.engines if sim.target.kv_events and not sim.own_text]
    await until(
        lambda: all(
            bench.desk.index.num_blocks(name) == rank.scheduler.cache.num_cached
            for sim in speaking
            for name, rank in zip(sim.names, sim.ranks, strict=True)
        )
    )


def prompt_of(rng, words, num_tokens):
    return [rng.choice(words) for _ in range(num_tokens)]


async def generate(bench, prompt, num_tokens, **extra):
    """Complete a prompt of token ids as a stream; return the ids that came."""
    answer = await bench.client.complete(
        model="sim",
        prompt=prompt,
        max_tokens=num_tokens,
        stream=True,
        return_token_ids=True,
        **extra,
    )
    assert answer.status == 200, answer.body
    data = events(answer.body)
    assert data[-1] == b"[DONE]", data[-1]
    ids = []
    for item in data[:-1]:
        for choice in json.loads(item)["choices"]:
            ids += choice.get("token_ids") or []
    return ids

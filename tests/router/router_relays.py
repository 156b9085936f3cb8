"""A relay with simulated engines behind it, and a router that reaches them through it only."""

import json
from contextlib import AsyncExitStack, asynccontextmanager

from router_bench import Bench, Client, events, until

from dynctl.agents.protocol import RelayEntry
from dynctl.agents.relay.__main__ import server_context
from dynctl.agents.relay.relay import Relay
from dynctl.core.deployment import EngineInfo, EngineState
from dynctl.http1.server import serve
from dynctl.router.config import RelayTarget, RouterConfig, TlsFiles, make_settings
from dynctl.router.run import Router
from dynctl.sim.options import MODEL_DIR
from dynctl.sim.text import TextModel


class Host:
    """A relay with simulated engines behind it; the test plays the agent."""

    def __init__(self, tls, sims, look_s=5.0):
        self.tls = tls
        self.look_s = look_s
        self.sims = {sim.name: sim for sim in sims}
        self.port = 0
        self.entries = {}

    async def start_relay(self):
        self.relay = Relay(self.look_s)
        self.server = await serve(
            self.relay.handle,
            host="127.0.0.1",
            port=self.port,
            ssl=server_context(self.tls),
            admit=self.relay.admit,
        )
        self.port = self.server.port
        self.relay.take_table(self.entries)

    async def stop_relay(self):
        self.relay.end_streams()
        await self.server.close(0)
        await self.relay.close()

    def name(self, name, incarnation, state=EngineState.READY, entry=None, **facts):
        """Put an engine into the table; `entry`: what the agent says of it otherwise."""
        sim = self.sims[name]
        info = EngineInfo(
            id=name,
            incarnation=incarnation,
            state=state,
            role=sim.role,
            deployment="chat",
            kind="sim",
            model="sim",
            block_size_tokens=16,
            max_model_len_tokens=8192,
            ranks=len(sim.names),
            **facts,
        )
        self.entries = self.entries | {
            name: RelayEntry(
                info=info,
                socket=sim.options.uds,
                **(
                    {
                        "kv_events": sim.options.kv_events,
                        "kv_replay": sim.options.kv_replay,
                        "block_hash_seed": "seed",
                    }
                    | (entry or {})
                ),
            )
        }
        self.relay.take_table(self.entries)

    def remove(self, name):
        self.entries = {other: e for other, e in self.entries.items() if other != name}
        self.relay.take_table(self.entries)


@asynccontextmanager
async def relayed(tls, *sims, entries=None, parities=None, look_s=5.0, more=(), **settings):
    """`entries` and `parities` by engine: what its entry says otherwise, and what the tokenizer check is to find.

    `look_s`: between the relay's looks at engines' figures. `more`: further relays.
    """
    text = TextModel(MODEL_DIR)
    async with AsyncExitStack() as stack:
        for sim in sims:
            await sim.start(sim.own_text or text)
            stack.push_async_callback(sim.stop)
        host = Host(tls, sims, look_s)
        await host.start_relay()
        stack.push_async_callback(lambda: host.stop_relay())
        for sim in sims:
            host.name(sim.name, "i1", entry=(entries or {}).get(sim.name))
        files = TlsFiles(str(tls / "router.crt"), str(tls / "router.key"), str(tls / "ca.crt"))
        config = RouterConfig(
            listen="127.0.0.1:0",
            deployment="chat",
            served_names=("chat-model",),
            tokenizer=str(MODEL_DIR),
            block_hash_seed="seed",
            relays=(RelayTarget("host-a", "127.0.0.1", host.port), *more),
            tls=files,
            settings=make_settings({"probe_s": 0} | settings),
        )
        router = await stack.enter_async_context(Router(config))
        client = Client(router.port)
        stack.push_async_callback(client.upstream.close)
        bench = Bench(router, sims, client)
        bench.text, bench.host = text, host
        wanted = {name: "verified" for sim in sims for name in sim.names} | (parities or {})
        await until(lambda: {w.id: w.parity for w in bench.desk.workers.all()} == wanted)
        yield bench


async def talk(bench, prompt, num_tokens):
    answer = await bench.client.complete(
        model="chat-model", prompt=prompt, max_tokens=num_tokens, stream=True, return_token_ids=True
    )
    assert answer.status == 200, answer.body
    assert events(answer.body)[-1] == b"[DONE]", answer.body[-600:]
    found = []
    for item in events(answer.body)[:-1]:
        for choice in json.loads(item)["choices"]:
            found += choice.get("token_ids") or []
    return found

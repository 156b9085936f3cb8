"""Engines and relays that answer what cannot be read when asked what there is: they are asked again, and nobody else suffers."""

import msgspec
import pytest
from router_bench import routed, until
from router_fakes import MODEL, FakeEngine

from dynctl.agents.relay.__main__ import server_context
from dynctl.core.deployment import EngineInfo, EngineState
from dynctl.http1.server import serve
from dynctl.router.config import RelayTarget, RouterConfig, TlsFiles, make_settings
from dynctl.router.run import Router

DEEP = b"[" * 20_000
INFO = EngineInfo(*("e0", "e0.1", EngineState.READY, "aggregated", "d", "sim", MODEL))


@pytest.mark.parametrize(
    "models",
    [b"", b"[]", b'{"data":[]}', b'{"data":[{"id":"\xff"}]}', b'{"more":%b' % DEEP],
    ids=["nothing", "list", "none", "no-text", "deep"],
)
def test_an_engine_whose_models_cannot_be_read_is_asked_again(run, models):
    class Strange(FakeEngine):
        answer, num_asked = models, 0

        def _on_exchange(self, exchange):
            if exchange.request.path == "/v1/models" and self.answer is not None:
                self.num_asked += 1
                exchange.respond(200, self.answer)
            else:
                super()._on_exchange(exchange)

    async def main():
        strange, other = Strange("e0"), FakeEngine("e1")
        async with routed(strange, other, wait=False) as bench:
            watch = bench.router._watch
            await until(lambda: watch.done() or (strange.num_asked > 2 and bench.desk.can_serve()))
            assert not watch.done()
            assert "e0" in bench.desk.fleet.silent
            assert (await bench.client.complete()).status == 200

            strange.answer = None
            await until(lambda: bench.desk.workers.get("e0").is_serving())
            assert bench.desk.fleet.silent == {}

    run(main)


@pytest.mark.parametrize(
    "table", [b"{}", b'[{"id":"\xff"}]', b'[{"more":%b' % DEEP], ids=["object", "no-text", "deep"]
)
def test_a_relay_whose_table_cannot_be_read_is_asked_again(run, tls, table):
    async def main():
        told = [table, table, msgspec.json.encode([INFO])]

        def tell(exchange):
            if exchange.request.path == "/v1/engines":
                exchange.start(200, [])
                exchange.write(told[0] + b"\n")
                del told[: len(told) > 1]

        server = await serve(tell, host="127.0.0.1", port=0, ssl=server_context(tls))
        config = RouterConfig(
            listen="127.0.0.1:0",
            relays=(RelayTarget("host-a", "127.0.0.1", server.port),),
            tls=TlsFiles(*(str(tls / name) for name in ("router.crt", "router.key", "ca.crt"))),
            settings=make_settings({"probe_s": 0.0}),
        )
        async with Router(config) as router:
            desk = router.desk
            await until(lambda: router._watch.done() or desk.can_serve())
            assert not router._watch.done()
            assert desk.fleet.silent == {}
        await server.close(0)

    run(main)

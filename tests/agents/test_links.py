"""What relays of other hosts say: what cannot be read is asked for again, and ends nobody."""

import asyncio

import msgspec
import pytest

from dynctl.agents.links import Links
from dynctl.agents.protocol import MemberInfo, Peer
from dynctl.agents.relay.__main__ import server_context
from dynctl.core.deployment import EngineState
from dynctl.deploy.tls import ensure_authority, ensure_leaf
from dynctl.http1.server import serve

INFO = MemberInfo("e0.1", 1, "d", EngineState.STARTING, is_waiting=True)


@pytest.fixture
def tls(tmp_path):
    authority = ensure_authority(tmp_path / "ca")
    (tmp_path / "ca.crt").write_bytes(authority.cert)
    for stem, party in (("host", "relay"), ("member", "member")):
        leaf = ensure_leaf(tmp_path / "ca", authority, f"{party}:h1", "h1", None)
        (tmp_path / f"{stem}.crt").write_bytes(leaf.cert)
        (tmp_path / f"{stem}.key").write_bytes(leaf.key)
    return tmp_path


@pytest.mark.parametrize(
    "line",
    [b"{}", b'[{"id":"\xff"}]', b'[{"more":' + b"[" * 20_000],
    ids=["object", "no-text", "deep"],
)
def test_a_relay_that_says_what_cannot_be_read_is_asked_again(tls, line):
    told = [line, msgspec.json.encode([INFO])]
    silences = []

    def tell(exchange):
        exchange.start(200, [])
        exchange.write(told[0] + b"\n")
        del told[: len(told) > 1]

    async def main():
        server = await serve(tell, host="127.0.0.1", port=0, ssl=server_context(tls))
        peer = Peer("e0.1", "h1", "127.0.0.1", server.port)
        async with asyncio.timeout(60), asyncio.TaskGroup() as group:
            links = Links(tls, group, lambda: silences.append(links.hear(peer).silence))
            links.follow([peer])
            while links.hear(peer).info != INFO:
                await links.wait(1.0)
            await links.close()
        await server.close(0)

    asyncio.run(main())
    assert silences[0].startswith("its relay said what cannot be read")
    assert silences[-1] == ""

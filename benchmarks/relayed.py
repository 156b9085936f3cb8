"""A router behind the agent's relay with mutual TLS: what both need to run, and a stand-in for the agent.

The stand-in tells the relay its table over a Unix socket, and keeps the stream open for others.
"""

import json
import socket
import sys
import threading
from contextlib import suppress
from pathlib import Path

from dynctl.deploy.tls import ensure_authority, ensure_leaf

HOST_NAME = "bench-host"


class Agent:
    """Tells its relay the table of engines at a Unix socket, and again whenever that changes."""

    def __init__(self, path, table):
        self._table, self._streams, self._lock = table, [], threading.Lock()
        self._listener = socket.socket(socket.AF_UNIX)
        self._listener.bind(str(path))
        self._listener.listen()
        threading.Thread(target=self._accept, daemon=True).start()

    def __enter__(self):
        return self

    def __exit__(self, *_):
        self._listener.shutdown(socket.SHUT_RDWR)
        self._listener.close()
        for stream in self._streams:
            stream.close()

    def tell(self, table):
        with self._lock:
            self._table = table
            for stream in self._streams:
                with suppress(OSError):  # it has asked anew
                    stream.sendall(self._line())

    def _line(self):
        line = json.dumps(self._table).encode() + b"\n"
        return b"%x\r\n%b\r\n" % (len(line), line)

    def _accept(self):
        while True:
            try:
                stream, _ = self._listener.accept()
            except OSError:
                return
            stream.recv(65_536)
            with self._lock:
                stream.sendall(
                    b"HTTP/1.1 200 OK\r\ncontent-type: application/x-ndjson\r\n"
                    b"transfer-encoding: chunked\r\n\r\n" + self._line()
                )
                self._streams.append(stream)


def agent_told(path, engine_ports, kv_ports):
    """An agent with the table of some adopted engines."""
    table = [
        {
            "info": {
                "id": f"e{number}",
                "incarnation": "1",
                "state": "ready",
                "role": "aggregated",
                "deployment": "",
                "kind": "external",
                "model": "mock",
                "block_size_tokens": 16,
            },
            "socket": "",
            "url": f"http://127.0.0.1:{port}",
            "kv_events": f"tcp://127.0.0.1:{kv_port}",
        }
        for number, (port, kv_port) in enumerate(zip(engine_ports, kv_ports, strict=True))
    ]
    return Agent(path, table)


def certificates(folder):
    """Those of a host and of its router, signed by one authority."""
    folder = Path(folder)
    authority = ensure_authority(folder / "ca")
    tls = folder / "tls"
    tls.mkdir(exist_ok=True)
    (tls / "ca.crt").write_bytes(authority.cert)
    for stem, common_name in (("host", f"relay:{HOST_NAME}"), ("router", "router:bench")):
        pair = ensure_leaf(folder / "ca", authority, common_name, HOST_NAME, None)
        (tls / f"{stem}.crt").write_bytes(pair.cert)
        (tls / f"{stem}.key").write_bytes(pair.key)
    return tls


def relay_command(folder, port, agent_socket):
    command = [sys.executable, "-m", "dynctl.agents.relay", "--root", folder]
    return [*command, "--listen", f"127.0.0.1:{port}", "--agent-socket", agent_socket]


def router_command(folder, port, relay_port, policy, model, **more):
    """Write the router's configuration, `more` in it, and start it with that."""
    tls = Path(folder) / "tls"
    config = {
        "listen": f"127.0.0.1:{port}",
        "policy": policy,
        "tokenizer": model,
        "relays": [{"host_name": HOST_NAME, "address": "127.0.0.1", "port": relay_port}],
        "tls": {
            "ca": str(tls / "ca.crt"),
            "cert": str(tls / "router.crt"),
            "key": str(tls / "router.key"),
        },
    } | more
    path = Path(folder) / "router.json"
    path.write_text(json.dumps(config))
    return [sys.executable, "-m", "dynctl.router", "--config", path]

"""A router behind the agent's relay with mutual TLS: what both need to run, and a stand-in for the agent.

The stand-in tells the relay its table once, over a Unix socket, and keeps the stream open.
"""

import json
import socket
import sys
import threading
from contextlib import contextmanager
from pathlib import Path

from dynctl.deploy.tls import ensure_authority, ensure_leaf

HOST_NAME = "bench-host"


@contextmanager
def agent_told(path, engine_ports, kv_ports):
    """Serve the table of some engines at a Unix socket."""
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
    line = json.dumps(table).encode() + b"\n"
    answer = (
        b"HTTP/1.1 200 OK\r\ncontent-type: application/x-ndjson\r\ntransfer-encoding: chunked\r\n"
        b"\r\n%x\r\n%b\r\n" % (len(line), line)
    )
    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind(str(path))
        listener.listen()
        streams = []

        def tell():
            while True:
                try:
                    stream, _ = listener.accept()
                except OSError:
                    return
                stream.recv(65_536)
                stream.sendall(answer)
                streams.append(stream)

        threading.Thread(target=tell, daemon=True).start()
        try:
            yield
        finally:
            listener.shutdown(socket.SHUT_RDWR)
            for stream in streams:
                stream.close()


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


def router_command(folder, port, relay_port, policy, model):
    """Write the router's configuration, and start it with that."""
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
    }
    path = Path(folder) / "router.json"
    path.write_text(json.dumps(config))
    return [sys.executable, "-m", "dynctl.router", "--config", path]

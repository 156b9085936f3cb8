"""A tiny OpenAI-shaped server on a Unix socket or loopback port, standard library only: an engine program for agent tests.

Behaviour by flags; it accepts and ignores whatever else a real engine's argv holds.
"""

import argparse
import json
import os
import signal
import socketserver
import subprocess
import sys
import time
from http.server import BaseHTTPRequestHandler
from pathlib import Path

NEVER = "/dev/null/never"
"""A path at which nothing can be, whatever lies about on this machine."""
CACHE = (
    'vllm:cache_config_info{block_size="16",num_gpu_blocks="100",kv_cache_size_tokens="None"} 1\n'
)


class Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    options: argparse.Namespace

    def address_string(self):
        return "unix"

    def log_message(self, *args):
        pass

    def _send(self, value, status=200, kind="application/json"):
        body = value.encode() if isinstance(value, str) else json.dumps(value).encode()
        self.send_response(status)
        self.send_header("content-type", kind)
        self.send_header("content-length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def do_GET(self):
        match self.path:
            case "/health":
                self._send({})
            case "/version":
                self._send({"version": self.options.version})
            case "/v1/models":
                self._send({"data": [{"id": self.options.model, "max_model_len": 4096}]})
            case "/metrics":
                running = int(Path(self.options.busy_file).exists())
                text = CACHE + f"vllm:num_requests_running {running}\nvllm:num_requests_waiting 0\n"
                text += "vllm:prompt_tokens_total 7\n"
                self._send(text, kind="text/plain")
            case _:
                self._send({}, 404)

    def do_POST(self):
        length = int(self.headers.get("content-length", 0))
        wish = json.loads(self.rfile.read(length) or b"{}")
        if wish.get("model") != self.options.model:
            self._send({"error": {"message": "no such model"}}, 404)
            return
        hang = Path(self.options.hang_file)
        while hang.exists():
            hang.with_name(f"{hang.name}.asked").touch()
            time.sleep(0.05)
        self._send({"choices": [{"text": "1"}]})


class Server(socketserver.ThreadingMixIn, socketserver.UnixStreamServer):
    daemon_threads = True

    def get_request(self):
        request, _ = super().get_request()
        return request, ("unix", 0)


class TcpServer(socketserver.ThreadingMixIn, socketserver.TCPServer):
    daemon_threads = True
    allow_reuse_address = True


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--uds")
    parser.add_argument("--listen", type=int, default=0)
    parser.add_argument("--port-file")
    parser.add_argument("--served-model-name", "--model", dest="model", default="m")
    parser.add_argument("--serves", default="")
    parser.add_argument("--version", default="1.0")
    parser.add_argument("--say", default="")
    parser.add_argument("--die", type=int, default=None)
    parser.add_argument("--ignore-term", action="store_true")
    parser.add_argument("--grandchild", action="store_true")
    parser.add_argument("--flood", type=float, default=0.0)
    parser.add_argument("--busy-file", default=NEVER)
    parser.add_argument("--sleep-first", type=float, default=0.0)
    parser.add_argument("--hang-file", default=NEVER)
    options, _ = parser.parse_known_args()
    options.model = options.serves or options.model
    Handler.options = options
    if options.say:
        print(options.say, flush=True)
    if options.die is not None:
        sys.exit(options.die)
    if options.ignore_term:
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
    else:
        signal.signal(signal.SIGTERM, lambda *_: os._exit(0))
    if options.grandchild:
        # It leaves the session and its parent, as renamed engine workers may.
        code = "import signal,time; signal.signal(signal.SIGTERM, signal.SIG_IGN); time.sleep(600)"
        subprocess.Popen([sys.executable, "-c", code], start_new_session=True)
    time.sleep(options.sleep_first)
    with (
        Server(options.uds, Handler)
        if options.uds
        else TcpServer(("127.0.0.1", options.listen), Handler) as server
    ):
        if options.port_file:
            Path(options.port_file).write_text(str(server.server_address[1]))
        if options.flood:
            line = b"x" * 1000 + b"\n"
            end = time.time() + options.flood
            while time.time() < end:
                os.write(1, line * 1000)
                time.sleep(0.01)
        server.serve_forever()


main()

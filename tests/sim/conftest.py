"""Runs simulated engines as processes, on Unix sockets in a short temporary directory."""

import json
import shutil
import signal
import subprocess
import sys
import tempfile
from pathlib import Path

import httpx
import pytest
import zmq

from dynctl.kv.events import decode
from dynctl.kv.publisher import END_SEQ
from dynctl.sim.chain import Chain
from dynctl.sim.options import MODEL_DIR
from dynctl.sim.text import TextModel


class EngineProcess:
    """One engine: `http` speaks to it, `control` to its control socket."""

    def __init__(self, folder, name, *flags):
        self.folder, self.name = folder, name
        self.socket = folder / f"{name}.sock"
        self.kv_events, self.kv_replay = f"ipc://{folder}/{name}.kv", f"ipc://{folder}/{name}.re"
        argv = [sys.executable, "-m", "dynctl.sim", "--uds", str(self.socket), "--model", "tiny"]
        argv += ["--control", f"{self.socket}.control", "--kv-events", self.kv_events]
        argv += ["--kv-replay", self.kv_replay, "--topic", f"kv@{name}", "--decode-ms", "2", *flags]
        self.process = subprocess.Popen(argv, stdout=subprocess.PIPE, text=True)
        self.ready = self.process.stdout.readline()
        self.http = self.client(self.socket)
        self.control = self.client(f"{self.socket}.control")

    def client(self, socket):
        transport = httpx.HTTPTransport(uds=str(socket))
        return httpx.Client(transport=transport, base_url="http://engine", timeout=60)

    def complete(self, prompt, max_tokens=8, headers=None, **body):
        body = {
            "model": "tiny",
            "prompt": prompt,
            "max_tokens": max_tokens,
            "return_token_ids": True,
            **body,
        }
        return self.http.post("/v1/completions", json=body, headers=headers)

    def token_ids(self, *args, **body):
        answer = self.complete(*args, **body)
        assert answer.status_code == 200, answer.text
        return answer.json()["choices"][0]["token_ids"]

    def stream(self, path, **body):
        """Return the parsed events of a stream, the end mark as text."""
        events = []
        body = {"model": "tiny", "stream": True, **body}
        with self.http.stream("POST", path, json=body) as answer:
            assert answer.status_code == 200, answer.read()
            for line in answer.iter_lines():
                if line.startswith("data: "):
                    data = line.removeprefix("data: ")
                    events.append(data if data == "[DONE]" else json.loads(data))
        return events

    def state(self):
        return self.control.get("/state").json()

    def fault(self, spec):
        answer = self.control.post("/faults", json={"spec": spec})
        assert answer.status_code == 200, answer.text

    def metrics(self):
        """Return samples: name with sorted labels other than engine and model → value."""
        out = {}
        for line in self.http.get("/metrics").text.splitlines():
            if not line.startswith("#"):
                name, value = line.rsplit(" ", 1)
                name = name.replace('engine="0",', "").replace('model_name="tiny",', "")
                out[name.replace('model_name="tiny"', "").replace(",}", "}").replace("{}", "")] = (
                    float(value)
                )
        return out

    def close(self):
        self.http.close()
        self.control.close()
        if self.process.poll() is None:
            self.process.send_signal(signal.SIGTERM)
        try:
            self.process.wait(60)
        finally:
            self.process.kill()
            self.process.wait()
            self.process.stdout.close()


@pytest.fixture(scope="module")
def start_engine():
    """Start engines that live as long as the module's tests: start_engine("name", "--flag", "value")."""
    folder = Path(tempfile.mkdtemp(prefix="sim"))
    engines = []

    def start(name, *flags):
        engine = EngineProcess(folder, name, *flags)
        engines.append(engine)
        assert engine.ready, f"engine {name} did not start"
        return engine

    yield start
    for engine in engines:
        engine.close()
    shutil.rmtree(folder)


@pytest.fixture(scope="session")
def text():
    return TextModel(MODEL_DIR)


@pytest.fixture(scope="session")
def chain(text):
    return Chain(text.words, seed=0, eos_id=text.eos_id)


@pytest.fixture
def zmq_events():
    """Return everything an engine's replay socket has, decoded."""
    context = zmq.Context()

    def replay(engine):
        dealer = context.socket(zmq.DEALER)
        dealer.connect(engine.kv_replay)
        dealer.send_multipart([b"", (0).to_bytes(8, "big")])
        batches = []
        while dealer.poll(60_000):
            frames = dealer.recv_multipart()
            if frames[2] == END_SEQ:
                break
            batches.append(decode(frames[3]))
        dealer.close(linger=0)
        return batches

    yield replay
    context.destroy(linger=0)

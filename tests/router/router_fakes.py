"""An engine for tests: OpenAI answers over http1, behaviour scripted per request by a function."""

import asyncio
import json

from dynctl.http1.server import serve

MODEL = "tiny"


class FakeEngine:
    """Serves completions; `script(body) -> None | str` names a fault for that request.

    Faults: `refuse` (connection cut before any byte), `status:N`, `cut:N` (cut after N tokens), `stall` (never answers),
    `error:N` (error event after N tokens), `no-done`, `no-end` (silence after `[DONE]`), `early-done`, `html`, `hang:N` (silence
    after N tokens).
    """

    def __init__(self, name="e0", role="aggregated", tokens=6, gap_s=0.0, script=None):
        self.name = name
        self.role = role
        self.tokens = tokens
        self.gap_s = gap_s
        self.script = script or (lambda body: None)
        self.requests = []
        self.headers = []
        self.num_gone = 0
        self.num_running = self.most_running = 0
        self.go = asyncio.Event()
        """While it is clear, answers wait before their next token."""
        self.go.set()
        self.cached_tokens = 0
        self.block_size = 16
        self.transfer = {}
        self.split = lambda data: [data]
        self._tasks = set()

    async def start(self):
        self.server = await serve(self._on_exchange, host="127.0.0.1", port=0)
        self.url = f"http://127.0.0.1:{self.server.port}"
        return self

    async def stop(self):
        for task in tuple(self._tasks):
            task.cancel()
        if self._tasks:
            await asyncio.wait(self._tasks)
        await self.server.close(0)

    def _on_exchange(self, exchange):
        path = exchange.request.path
        if path == "/health":
            exchange.respond(200, b"")
        elif path == "/v1/models":
            data = [{"id": MODEL, "object": "model", "max_model_len": 4096}]
            exchange.respond(200, json.dumps({"object": "list", "data": data}).encode())
        elif path == "/metrics":
            line = f'vllm:cache_config_info{{block_size="{self.block_size}",num_gpu_blocks="1000"}} 1.0\n'
            exchange.respond(200, line.encode(), b"text/plain")
        elif path in {"/v1/completions", "/v1/chat/completions"}:
            body = json.loads(exchange.request.body)
            self.requests.append(body)
            request = exchange.request
            self.headers.append({**dict(request.headers), b"x-request-id": request.request_id})
            task = asyncio.create_task(
                self._answer(exchange, body, path.endswith("chat/completions"))
            )
            self._tasks.add(task)
            task.add_done_callback(self._tasks.discard)
            exchange.on_gone = lambda: self._gone(task)
        else:
            exchange.respond(404, b'{"detail":"Not Found"}')

    def _gone(self, task):
        self.num_gone += 1
        task.cancel()

    async def _answer(self, exchange, body, is_chat):
        self.num_running += 1
        self.most_running = max(self.most_running, self.num_running)
        try:
            fault, _, number = (self.script(body) or "").partition(":")
            if fault == "refuse":
                exchange.abort()
            elif fault == "status":
                error = {
                    "message": f"status {number} from 10.1.2.3:8000 at /srv/models/x",
                    "code": int(number),
                }
                exchange.respond(int(number), json.dumps({"error": error}).encode())
            elif fault == "stall":
                await asyncio.sleep(3600)
            elif fault == "html":
                exchange.respond(200, b"<html>no</html>", b"text/html")
            elif (body.get("kv_transfer_params") or {}).get("do_remote_decode"):
                exchange.respond(200, json.dumps(self._prefill_answer(body, is_chat)).encode())
            elif body.get("stream"):
                await self._stream(exchange, body, is_chat, fault, int(number or 0))
            else:
                await self.go.wait()
                await asyncio.sleep(self.gap_s)
                exchange.respond(200, json.dumps(self._whole(is_chat)).encode())
        finally:
            self.num_running -= 1

    def usage(self):
        return {
            "prompt_tokens": 20,
            "completion_tokens": self.tokens,
            "total_tokens": 20 + self.tokens,
            "prompt_tokens_details": {"cached_tokens": self.cached_tokens},
        }

    def _whole(self, is_chat):
        text = "".join(f" {self.name}{i}" for i in range(self.tokens))
        choice = {"index": 0, "finish_reason": "length"}
        choice |= {"message": {"role": "assistant", "content": text}} if is_chat else {"text": text}
        return {
            "id": "x",
            "object": "x",
            "created": 1,
            "model": MODEL,
            "choices": [choice],
            "usage": self.usage(),
        }

    def _prefill_answer(self, body, is_chat):
        params = {
            "do_remote_prefill": True,
            "do_remote_decode": False,
            "remote_block_ids": [[1, 2]],
            "remote_engine_id": f"id-{self.name}",
            "remote_request_id": f"r{len(self.requests)}",
            "remote_host": "127.0.0.1",
            "remote_port": 5600,
            "tp_size": 1,
        }
        return self._whole(is_chat) | {"kv_transfer_params": params | self.transfer}

    def chunk(self, is_chat, text, finish=None, **extra):
        choice = {"index": 0, "finish_reason": finish}
        choice |= {"delta": {"content": text}} if is_chat else {"text": text}
        return self.event(
            {"id": "x", "object": "x", "created": 1, "model": MODEL, "choices": [choice], **extra}
        )

    @staticmethod
    def event(document):
        return b"data: " + json.dumps(document, separators=(",", ":")).encode() + b"\n\n"

    async def _stream(self, exchange, body, is_chat, fault, number):
        exchange.start(200, [(b"content-type", b"text/event-stream")])
        send = lambda data: [exchange.write(piece) for piece in self.split(data)]  # noqa: E731
        has_usage = (body.get("stream_options") or {}).get("include_usage")
        extra = {"usage": None} if has_usage else {}
        if is_chat:
            first = {
                "index": 0,
                "delta": {"role": "assistant", "content": ""},
                "finish_reason": None,
            }
            send(
                self.event(
                    {
                        "id": "x",
                        "object": "x",
                        "created": 1,
                        "model": MODEL,
                        "choices": [first],
                        **extra,
                    }
                )
            )
        for i in range(self.tokens):
            if fault == "cut" and i == number:
                exchange.abort()
                return
            if fault == "hang" and i == number:
                await asyncio.sleep(3600)
            if fault == "error" and i == number:
                send(self.event({"error": {"message": "boom", "code": 500}}))
                send(b"data: [DONE]\n\n")
                exchange.finish()
                return
            if fault == "early-done" and i == number:
                send(b"data: [DONE]\n\n")
                exchange.finish()
                return
            await self.go.wait()
            finish = "length" if i == self.tokens - 1 else None
            send(self.chunk(is_chat, f" {self.name}{i}", finish, **extra))
            await asyncio.sleep(self.gap_s)
        if has_usage:
            send(
                self.event(
                    {
                        "id": "x",
                        "object": "x",
                        "created": 1,
                        "model": MODEL,
                        "choices": [],
                        "usage": self.usage(),
                    }
                )
            )
        if fault != "no-done":
            send(b"data: [DONE]\n\n")
        if fault == "no-end":
            await asyncio.sleep(3600)
        exchange.finish()

# ruff: noqa: ARG002, F401, FURB167, I001, RUF023, UP031
# Origin: the harness of the peers measurement (files of the same name), unchanged but for formatting.
"""Mock OpenAI engine(s): N workers on consecutive ports in one process, raw asyncio protocol on uvloop.

--mode zero: canned answers, no service time (router overhead tests).
--mode sim : prefill time by uncached tokens (LRU block prefix cache), fixed inter-token latency.
GET /stats[?reset=1][&clear=1] gives and resets the counters of that worker.
"""

import argparse
import asyncio
import json
import re
import time

import uvloop

import simcore
from simcore import SimWorker, ZmqPublisher, out_tokens, render_chat, tok_text, tokenize

RE_CL = re.compile(rb"\r\ncontent-length: *(\d+)", re.I)
RE_TE = re.compile(rb"\r\ntransfer-encoding: *chunked", re.I)
RE_MT = re.compile(rb'"max(?:_completion)?_tokens": *(\d+)')
RE_STREAM = re.compile(rb'"stream": *true')


def http(body, ctype=b"application/json", status=b"200 OK"):
    return (
        b"HTTP/1.1 "
        + status
        + b"\r\ncontent-type: "
        + ctype
        + b"\r\ncontent-length: "
        + str(len(body)).encode()
        + b"\r\n\r\n"
        + body
    )


SSE_HEAD = (
    b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream; charset=utf-8\r\ncache-control: no-cache\r\n"
    b"transfer-encoding: chunked\r\n\r\n"
)
END = b"0\r\n\r\n"


def chunk(b):
    return b"%x\r\n%s\r\n" % (len(b), b)


class Worker:
    def __init__(self, loop, wid, port, args):
        self.loop, self.wid, self.port, self.args = loop, wid, port, args
        self.model = args.model.encode()
        pub = (
            ZmqPublisher("tcp://127.0.0.1:%d" % (args.kv_port + wid), args.block, args.kv_format)
            if args.kv_port
            else None
        )
        self.sim = SimWorker(
            loop, wid, args.block, args.capacity, args.prefill_us, args.base_ms, args.itl_ms, pub
        )
        self.fp = b"w%d" % wid
        self.n = 0
        pre = b'"created":1,"model":"' + self.model + b'","system_fingerprint":"' + self.fp + b'",'
        self.pre = pre
        usage = b'"usage":{"prompt_tokens":16,"completion_tokens":4,"total_tokens":20}'
        self.canned = {
            True: http(
                b'{"id":"cmpl-1","object":"chat.completion",'
                + pre
                + b'"choices":[{"index":0,"message":{"role":'
                b'"assistant","content":"w1 w2 w3 w4"},"finish_reason":"stop"}],' + usage + b"}"
            ),
            False: http(
                b'{"id":"cmpl-1","object":"text_completion",'
                + pre
                + b'"choices":[{"index":0,"text":'
                b'"w1 w2 w3 w4","logprobs":null,"finish_reason":"stop"}],' + usage + b"}"
            ),
        }
        self.zero_chunk = {c: chunk(self.delta(c, b" w1")) for c in (True, False)}
        self.zero_last = {
            c: chunk(self.delta(c, b" w2", b'"stop"')) + chunk(b"data: [DONE]\n\n") + END
            for c in (True, False)
        }
        models = {
            "object": "list",
            "data": [
                {
                    "id": args.model,
                    "object": "model",
                    "created": 1,
                    "owned_by": "vllm",
                    "root": args.model_path or args.model,
                    "max_model_len": 131072,
                }
            ],
        }
        info = {
            "model_path": args.model_path or args.model,
            "served_model_name": args.model,
            "tokenizer_path": args.model_path,
            "is_generation": True,
            "version": "0.0.0",
            "tp_size": 1,
            "dp_size": 1,
            "max_running_requests": 256,
            "max_total_tokens": args.capacity * args.block,
            "page_size": args.block,
            "model_type": "llama",
            "architectures": ["LlamaForCausalLM"],
            "weight_version": "default",
            "internal_states": [{}],
        }
        self.fixed = {
            b"/health": http(b"", b"text/plain"),
            b"/health_generate": http(b"", b"text/plain"),
            b"/ping": http(b""),
            b"/v1/models": http(json.dumps(models).encode()),
            b"/version": http(b'{"version":"0.11.0"}'),
            b"/get_server_info": http(json.dumps(info).encode()),
            b"/server_info": http(json.dumps(info).encode()),
            b"/get_model_info": http(json.dumps(info).encode()),
            b"/model_info": http(json.dumps(info).encode()),
            b"/flush_cache": http(b"{}"),
        }

    def delta(self, chat, text, fin=b"null", usage=b"", role=False):
        if chat:
            r = b'"role":"assistant",' if role else b""
            return (
                b'data: {"id":"cmpl-1","object":"chat.completion.chunk",'
                + self.pre
                + b'"choices":[{"index":0,"delta":{'
                + r
                + b'"content":"'
                + text
                + b'"},"finish_reason":'
                + fin
                + b"}]"
                + usage
                + b"}\n\n"
            )
        return (
            b'data: {"id":"cmpl-1","object":"text_completion",'
            + self.pre
            + b'"choices":[{"index":0,"text":"'
            + text
            + b'","logprobs":null,"finish_reason":'
            + fin
            + b"}]"
            + usage
            + b"}\n\n"
        )

    def render(self, path, body):
        """Token ids of a request, as vLLM's render endpoints give them (a router without a tokenizer asks here)."""
        d = json.loads(body)
        if path.endswith(b"chat/completions/render"):
            toks = tokenize(render_chat(d["messages"]))
        else:
            toks = tokenize(d["prompt"]) if isinstance(d["prompt"], str) else list(d["prompt"])
        r = {
            "request_id": "r",
            "token_ids": toks,
            "model": self.args.model,
            "sampling_params": {},
            "stream": False,
        }
        return http(json.dumps(r if b"chat" in path else [r]).encode())

    def metrics(self):
        s = self.sim
        use = min(1.0, len(s.cache) / max(1, s.capacity))
        lab = b'{model_name="' + self.model + b'",engine="0"} '
        return http(
            b"vllm:num_requests_running"
            + lab
            + b"%d\nvllm:num_requests_waiting" % int(s.busy)
            + lab
            + b"%d\nvllm:kv_cache_usage_perc" % len(s.queue)
            + lab
            + b"%f\n" % use,
            b"text/plain; version=0.0.4",
        )

    def get(self, path):
        p, _, q = path.partition(b"?")
        if p in self.fixed:
            return self.fixed[p]
        if p == b"/metrics":
            return self.metrics()
        if p == b"/stats":
            d = self.sim.stats()
            d["zero_requests"] = self.n
            if b"reset=1" in q:
                self.n = 0
                self.sim.reset(b"clear=1" in q)
            return http(json.dumps(d).encode())
        if p in (b"/get_load", b"/v1/loads"):
            s = self.sim
            n = len(s.queue) + int(s.busy)
            return http(
                json.dumps(
                    [
                        {
                            "dp_rank": 0,
                            "num_reqs": n,
                            "num_waiting_reqs": len(s.queue),
                            "num_tokens": 0,
                        }
                    ]
                ).encode()
            )
        return http(b'{"error":"not found"}', status=b"404 Not Found")


class Conn(asyncio.Protocol):
    __slots__ = ("w", "buf", "tr", "busy", "left", "chat")

    def __init__(self, w):
        self.w, self.buf, self.busy = w, b"", False

    def connection_made(self, tr):
        self.tr = tr

    def connection_lost(self, exc):
        self.tr = None

    def data_received(self, data):
        self.buf = self.buf + data if self.buf else data
        if not self.busy:
            self.pump()

    def pump(self):
        while not self.busy and self.tr is not None:
            buf = self.buf
            i = buf.find(b"\r\n\r\n")
            if i < 0:
                return
            head = buf[: i + 2]
            if head.startswith(b"PRI "):  # HTTP/2 or gRPC probe: this engine speaks HTTP/1.1 only
                self.tr.close()
                return
            m = RE_CL.search(head)
            if m:
                end = i + 4 + int(m.group(1))
                if len(buf) < end:
                    return
                body = buf[i + 4 : end]
            elif RE_TE.search(head):
                r = self.dechunk(buf, i + 4)
                if r is None:
                    return
                body, end = r
            else:
                body, end = b"", i + 4
            self.buf = buf[end:]
            method, path, _ = head.split(b" ", 2)
            if path.endswith(b"completions/render"):
                self.tr.write(self.w.render(path, body))
            elif method == b"POST" and path.endswith(b"completions"):
                self.completion(path, body)
            else:
                self.tr.write(self.w.get(path))

    @staticmethod
    def dechunk(buf, i):
        out = []
        while True:
            j = buf.find(b"\r\n", i)
            if j < 0:
                return None
            n = int(buf[i:j].split(b";")[0], 16)
            if len(buf) < j + 4 + n:
                return None
            if n == 0:
                return b"".join(out), j + 4
            out.append(buf[j + 2 : j + 2 + n])
            i = j + 4 + n

    def completion(self, path, body):
        w = self.w
        chat = path.endswith(b"chat/completions")
        if w.args.mode == "zero":
            w.n += 1
            if not RE_STREAM.search(body):
                self.tr.write(w.canned[chat])
                return
            m = RE_MT.search(body)
            self.left, self.chat, self.busy = (int(m.group(1)) if m else 16), chat, True
            self.tr.write(SSE_HEAD)
            w.loop.call_soon(self.tick)
            return
        d = json.loads(body)
        if chat:
            toks = tokenize(render_chat(d["messages"]))
        else:
            p = d["prompt"]
            toks = tokenize(p) if isinstance(p, str) else list(p)
        n = d.get("max_completion_tokens") or d.get("max_tokens") or 16
        stream = bool(d.get("stream"))
        out = out_tokens(toks, n)
        text = [(" " + tok_text(t)).encode() for t in out]
        self.busy = True
        st = {"cached": 0}

        def usage():
            return (
                b'"usage":{"prompt_tokens":%d,"completion_tokens":%d,"total_tokens":%d,"prompt_tokens_details":'
                b'{"cached_tokens":%d}}' % (len(toks), n, len(toks) + n, st["cached"])
            )

        def first(cached):
            st["cached"] = cached
            if stream and self.tr:
                self.tr.write(
                    SSE_HEAD
                    + chunk(w.delta(chat, text[0], b'"length"' if n == 1 else b"null", role=True))
                )

        def token(i):
            if stream and self.tr:
                self.tr.write(chunk(w.delta(chat, text[i], b'"length"' if i == n - 1 else b"null")))

        def done():
            if self.tr:
                if stream:
                    opt = (d.get("stream_options") or {}).get("include_usage")
                    u = b""
                    if opt:
                        u = chunk(
                            b'data: {"id":"cmpl-1","object":"chat.completion.chunk",'
                            + w.pre
                            + b'"choices":[],'
                            + usage()
                            + b"}\n\n"
                        )
                    self.tr.write(u + chunk(b"data: [DONE]\n\n") + END)
                else:
                    t = b"".join(text)
                    c = (
                        b'{"index":0,"message":{"role":"assistant","content":"'
                        + t
                        + b'"},"finish_reason":"length"}'
                        if chat
                        else b'{"index":0,"text":"'
                        + t
                        + b'","logprobs":null,"finish_reason":"length"}'
                    )
                    self.tr.write(
                        http(
                            b'{"id":"cmpl-1","object":"chat.completion",'
                            + w.pre
                            + b'"choices":['
                            + c
                            + b"],"
                            + usage()
                            + b"}"
                        )
                    )
            self.busy = False
            self.pump()

        # Clients of the harness chat; what comes as token ids is a router's own.
        w.sim.submit(toks, n, first, token, done, chat or isinstance(d["prompt"], str))

    def tick(self):
        if self.tr is None:
            return
        self.left -= 1
        if self.left > 0:
            self.tr.write(self.w.zero_chunk[self.chat])
            self.w.loop.call_soon(self.tick)
        else:
            self.tr.write(self.w.zero_last[self.chat])
            self.busy = False
            self.pump()


async def main(a):
    loop = asyncio.get_running_loop()
    for i in range(a.workers):
        w = Worker(loop, i, a.port + i, a)
        await loop.create_server(lambda w=w: Conn(w), "127.0.0.1", a.port + i, backlog=1024)
    print("mock engines ready on", a.port, flush=True)
    await asyncio.Event().wait()


if __name__ == "__main__":
    p = argparse.ArgumentParser()
    p.add_argument("--port", type=int, default=9100)
    p.add_argument("--workers", type=int, default=4)
    p.add_argument("--mode", choices=["zero", "sim"], default="zero")
    p.add_argument("--model", default="mock")
    p.add_argument("--model-path", default="")
    p.add_argument("--block", type=int, default=16)
    p.add_argument("--capacity", type=int, default=4096, help="KV blocks per worker")
    p.add_argument(
        "--prefill-us", type=float, default=50.0, help="microseconds per uncached prompt token"
    )
    p.add_argument("--base-ms", type=float, default=2.0)
    p.add_argument("--itl-ms", type=float, default=8.0)
    p.add_argument(
        "--kv-port",
        type=int,
        default=0,
        help="first ZMQ PUB port for vLLM-format KV events (one per worker)",
    )
    p.add_argument("--kv-format", choices=["map", "array"], default="map")
    uvloop.run(main(p.parse_args()))

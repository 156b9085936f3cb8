# ruff: noqa: PLC0415, UP031
# Origin: the harness of the peers measurement (files of the same name), unchanged but for formatting, and for `unasked_tokens`.
"""Simulated vLLM-like worker: LRU block prefix cache, serial prefill queue, fixed inter-token latency.

Everything here is deterministic given the arrival order. Tokens are whitespace words; word "w123" is
token id 16+123, roles and specials have small ids (see make_model.py, which builds the same tokenizer
for routers that tokenize themselves).
"""

import hashlib
import struct
import time
from collections import OrderedDict, deque

SPECIALS = ["<unk>", "<s>", "</s>", "<pad>", "system", "user", "assistant", "tool"]
SPECIAL_ID = {s: i for i, s in enumerate(SPECIALS)}
WORD_BASE = 16
VOCAB_WORDS = 8192


def tokenize(text):
    out = []
    for w in text.split():
        if w[0] == "w" and w[1:].isdigit():
            out.append(WORD_BASE + int(w[1:]) % VOCAB_WORDS)
        else:
            out.append(SPECIAL_ID.get(w, 0))
    return out


def word(i):
    return "w%d" % (i % VOCAB_WORDS)


def render_chat(messages):
    """Same text as the chat template written by make_model.py."""
    parts = []
    for m in messages:
        c = m.get("content") or ""
        if isinstance(c, list):
            c = " ".join(p.get("text", "") for p in c if isinstance(p, dict))
        parts.append(m["role"])
        parts.append(c)
    parts.append("assistant")
    return " ".join(parts)


def chain_hashes(tokens, block, parent=0, start=0):
    """64-bit hash per full block, chained on the parent (signed, as vLLM/Dynamo event hashes are)."""
    out = []
    for i in range(start, len(tokens) - block + 1, block):
        h = hashlib.blake2b(
            struct.pack("<q%dI" % block, parent, *tokens[i : i + block]), digest_size=8
        ).digest()
        parent = struct.unpack("<q", h)[0]
        out.append(parent)
    return out


class SimWorker:
    """on_event(kind, payload): 'stored' (hashes, parent, tokens) / 'removed' (hashes)."""

    def __init__(
        self,
        loop,
        wid,
        block=16,
        capacity=4096,
        prefill_us=50.0,
        base_ms=2.0,
        itl_ms=8.0,
        on_event=None,
    ):
        self.loop, self.wid, self.block, self.capacity = loop, wid, block, capacity
        self.prefill_s, self.base_s, self.itl_s = prefill_us * 1e-6, base_ms * 1e-3, itl_ms * 1e-3
        self.cache = OrderedDict()
        self.queue = deque()
        self.busy = False
        self.on_event = on_event
        self.reset()

    def reset(self, clear_cache=False):
        self.n_req = self.n_prompt = self.n_cached = self.n_out = self.n_unasked = 0
        self.max_queue = 0
        self.busy_s = 0.0
        if clear_cache and self.cache:
            gone = list(self.cache)
            self.cache.clear()
            if self.on_event:
                for i in range(0, len(gone), 512):
                    self.on_event("removed", gone[i : i + 512])

    def stats(self):
        return {
            "worker": self.wid,
            "requests": self.n_req,
            "prompt_tokens": self.n_prompt,
            "cached_tokens": self.n_cached,
            "output_tokens": self.n_out,
            "unasked_tokens": self.n_unasked,
            "blocks": len(self.cache),
            "max_queue": self.max_queue,
            "prefill_busy_s": round(self.busy_s, 3),
            "waiting": len(self.queue),
            "running": int(self.busy),
        }

    def submit(self, tokens, max_tokens, on_first, on_token, on_done, of_client=True):
        """Callbacks run on the loop. on_first(cached) then on_token(i) max_tokens-1 times, on_done().

        What no client asked for takes its time, but of the counters only one: the tokens that were computed for it.
        """
        hashes = chain_hashes(tokens, self.block)
        self.queue.append((tokens, hashes, max_tokens, on_first, on_token, on_done, of_client))
        if len(self.queue) > self.max_queue:
            self.max_queue = len(self.queue)
        if not self.busy:
            self._next()

    def _next(self):
        if not self.queue:
            self.busy = False
            return
        self.busy = True
        req = self.queue.popleft()
        tokens, hashes = req[0], req[1]
        usable = (len(tokens) - 1) // self.block  # vLLM always recomputes at least the last token
        n = 0
        cache = self.cache
        while n < usable and hashes[n] in cache:
            n += 1
        cached = n * self.block
        if req[-1]:
            self.n_req += 1
            self.n_prompt += len(tokens)
            self.n_cached += cached
        else:
            self.n_unasked += len(tokens) - cached
        cost = self.base_s + (len(tokens) - cached) * self.prefill_s
        self.busy_s += cost
        self.loop.call_later(cost, self._prefilled, req, cached)

    def _insert(self, hashes, tokens):
        cache = self.cache
        new_from = None
        for i, h in enumerate(hashes):
            if h not in cache:
                cache[h] = None
                if new_from is None:
                    new_from = i
        # touch from the tail so that heads of chains are the most recent (vLLM frees tails first)
        for h in reversed(hashes):
            cache.move_to_end(h)
        if new_from is not None and self.on_event:
            b = self.block
            parent = hashes[new_from - 1] if new_from else None
            self.on_event(
                "stored", (hashes[new_from:], parent, tokens[new_from * b : len(hashes) * b])
            )
        if len(cache) > self.capacity:
            gone = []
            while len(cache) > self.capacity:
                gone.append(cache.popitem(last=False)[0])
            if self.on_event:
                self.on_event("removed", gone)

    def _prefilled(self, req, cached):
        tokens, hashes, _, on_first, *_ = req
        self._insert(hashes, tokens)
        on_first(cached)
        self._step(req, 1)
        self._next()

    def _step(self, req, i):
        if i >= req[2]:
            self._finish(req)
        else:
            self.loop.call_later(self.itl_s, self._tok, req, i)

    def _tok(self, req, i):
        req[4](i)
        self._step(req, i + 1)

    def _finish(self, req):
        tokens, hashes, max_tokens, _, _, on_done, _ = req
        self.n_out += max_tokens
        out = out_tokens(tokens, max_tokens)
        full = tokens + out[:-1]
        b = self.block
        nh = len(hashes)
        more = chain_hashes(full, b, hashes[-1] if nh else 0, nh * b)
        self._insert(hashes + more, full)
        on_done()


def out_tokens(tokens, n):
    """Deterministic answer: a function of the prompt, so every worker answers the same."""
    s = (sum(tokens[-32:]) * 2654435761 + len(tokens)) & 0xFFFFFFFF
    out = []
    for _ in range(n):
        s = (s * 1664525 + 1013904223) & 0xFFFFFFFF
        out.append(WORD_BASE + (s >> 8) % VOCAB_WORDS)
    return out


def tok_text(t):
    return word(t - WORD_BASE)


class ZmqPublisher:
    """vLLM KV events: [topic, 8-byte big-endian seq, msgpack([ts, events, dp_rank])].

    fmt 'map': each event is a map with a "type" tag (current vLLM; vllm-router 0.1.17 accepts nothing else).
    fmt 'array': each event is an array led by its tag (older vLLM).
    """

    def __init__(self, endpoint, block, fmt="map"):
        import msgspec
        import zmq

        self.enc = msgspec.msgpack.Encoder()
        self.sock = zmq.Context.instance().socket(zmq.PUB)
        self.sock.setsockopt(zmq.SNDHWM, 100000)
        self.sock.bind(endpoint)
        self.seq, self.block, self.fmt = 0, block, fmt

    def __call__(self, kind, p):
        u = 0xFFFFFFFFFFFFFFFF
        if kind == "stored":
            hashes, parent, tokens = p
            hs, par = [h & u for h in hashes], None if parent is None else parent & u
            if self.fmt == "map":
                ev = {
                    "type": "BlockStored",
                    "block_hashes": hs,
                    "parent_block_hash": par,
                    "token_ids": tokens,
                    "block_size": self.block,
                    "lora_id": None,
                    "medium": "GPU",
                    "lora_name": None,
                }
            else:
                ev = ["BlockStored", hs, par, tokens, self.block, None, "GPU"]
        else:
            hs = [h & u for h in p]
            ev = (
                {"type": "BlockRemoved", "block_hashes": hs, "medium": "GPU"}
                if self.fmt == "map"
                else ["BlockRemoved", hs, "GPU"]
            )
        self.sock.send_multipart(
            [b"", struct.pack(">Q", self.seq), self.enc.encode([time.time(), [ev], 0])]
        )
        self.seq += 1

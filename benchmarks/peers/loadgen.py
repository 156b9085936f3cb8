# ruff: noqa: ARG002, FURB167, I001, PERF401, UP031
# Origin: the harness of the peers measurement (files of the same name), unchanged but for formatting.
"""Load generator on raw asyncio (uvloop): closed loop, open loop (Poisson) and a multi-turn shared-prefix trace.

Prints one JSON line. All requests are bounded by --seconds / --requests / the trace length.
"""

import argparse
import asyncio
import json
import random
import re
import time

import uvloop

from simcore import word

RE_CL = re.compile(rb"\r\ncontent-length: *(\d+)", re.I)
RE_CHUNK = re.compile(rb"\r\ntransfer-encoding: *chunked", re.I)
RE_TEXT = re.compile(rb'"(?:content|text)": ?" ?(w[^"]*)"')
RE_CACHED = re.compile(rb'"cached_tokens": ?(\d+)')
RE_PROMPT = re.compile(rb'"prompt_tokens": ?(\d+)')
RE_FP = re.compile(rb'"system_fingerprint": ?"w(\d+)"')


class Client(asyncio.Protocol):
    """One connection, one request at a time. Result: dict on self.fut."""

    def __init__(self, loop, detail):
        self.loop, self.detail = loop, detail
        self.fut = None
        self.tr = None

    def connection_made(self, tr):
        self.tr = tr

    def connection_lost(self, exc):
        self.tr = None
        if self.fut and not self.fut.done():
            self.fut.set_exception(ConnectionError("connection closed in mid-answer"))

    def request(self, raw):
        self.buf, self.parts = b"", []
        self.body_at = -1
        self.t0 = time.perf_counter()
        self.t_first = self.t_text = self.t_last = 0.0
        self.nchunk = 0
        self.fut = self.loop.create_future()
        self.tr.write(raw)
        return self.fut

    def data_received(self, data):
        now = time.perf_counter()
        if self.body_at < 0:
            self.buf += data
            i = self.buf.find(b"\r\n\r\n")
            if i < 0:
                return
            head = self.buf[: i + 2]
            self.status = int(head[9:12])
            self.body_at = i + 4
            m = RE_CL.search(head)
            self.need = int(m.group(1)) if m else -1
            data = self.buf[i + 4 :]
            self.got = 0
            self.tail = b""
        if self.need >= 0:
            self.got += len(data)
            self.parts.append(data)
            if self.got >= self.need:
                self.finish(now)
            return
        if not data:
            return
        if self.t_first == 0.0:
            self.t_first = now
        if self.detail:
            n = len(RE_TEXT.findall(data))
            if n:
                if self.t_text == 0.0:
                    self.t_text = now
                self.t_last = now
                self.nchunk += n
        self.parts.append(data)
        self.tail = (self.tail + data)[-5:]
        if self.tail == b"0\r\n\r\n":
            self.finish(now)

    def finish(self, now):
        self.t_end = now
        if self.fut and not self.fut.done():
            self.fut.set_result(None)


async def connect(host, port, detail=False):
    loop = asyncio.get_running_loop()
    _, p = await loop.create_connection(lambda: Client(loop, detail), host, port)
    return p


def post(path, obj, host):
    b = json.dumps(obj).encode()
    return (
        b"POST "
        + path.encode()
        + b" HTTP/1.1\r\nhost: "
        + host.encode()
        + b"\r\ncontent-type: application/json\r\n"
        b"accept: */*\r\ncontent-length: " + str(len(b)).encode() + b"\r\n\r\n" + b
    )


def pct(v, p):
    if not v:
        return None
    v = sorted(v)
    return v[min(len(v) - 1, int(p / 100 * len(v)))]


def ms(x):
    return None if x is None else round(x * 1e3, 3)


def bodies(a, stream):
    rnd = random.Random(7)
    out = []
    for _ in range(64):
        words = " ".join(word(rnd.randrange(8192)) for _ in range(a.prompt_words))
        d = {
            "model": a.model,
            "max_tokens": a.chunks if stream else 4,
            "temperature": 0,
            "stream": stream,
        }
        if a.ignore_eos:
            d["ignore_eos"] = True
        if a.api == "chat":
            d["messages"] = [{"role": "user", "content": words}]
            out.append(post("/v1/chat/completions", d, "%s:%d" % (a.host, a.port)))
        else:
            d["prompt"] = words
            out.append(post("/v1/completions", d, "%s:%d" % (a.host, a.port)))
    return out


async def closed(a, stream):
    raws = bodies(a, stream)
    lat, ttft, errs, total = [], [], [0], [0]
    stop = [0.0]
    warm = time.perf_counter() + a.warmup

    async def one(k):
        c = await connect(a.host, a.port)
        i = k
        while True:
            now = time.perf_counter()
            if now >= stop[0]:
                return
            try:
                await c.request(raws[i % 64])
            except Exception:
                errs[0] += 1
                c = await connect(a.host, a.port)
                continue
            i += 1
            total[0] += 1
            if c.status != 200:
                errs[0] += 1
            elif c.t0 >= warm:
                lat.append(c.t_end - c.t0)
                if stream:
                    ttft.append(c.t_first - c.t0)

    stop[0] = time.perf_counter() + a.warmup + a.seconds
    await asyncio.gather(*[one(k) for k in range(a.concurrency)])
    el = a.seconds
    return {
        "rps": round(len(lat) / el, 1),
        "n": len(lat),
        "total": total[0],
        "errors": errs[0],
        "lat_p50_ms": ms(pct(lat, 50)),
        "lat_p99_ms": ms(pct(lat, 99)),
        "ttft_p50_ms": ms(pct(ttft, 50)),
        "ttft_p99_ms": ms(pct(ttft, 99)),
        "chunks_per_s": round(len(lat) * a.chunks / el) if stream else None,
    }


async def open_loop(a, stream):
    """Poisson at a.rate; latency from the scheduled send."""
    raws = bodies(a, stream)
    rnd = random.Random(11)
    free, lat, ttft, errs, tasks = [], [], [], [0], []
    for _ in range(8):
        free.append(await connect(a.host, a.port))

    async def one(i):
        c = free.pop() if free else await connect(a.host, a.port)
        try:
            await c.request(raws[i % 64])
        except Exception:
            errs[0] += 1
            return
        if c.status != 200:
            errs[0] += 1
        elif i >= 20:
            lat.append(c.t_end - c.t0)
            if stream:
                ttft.append(c.t_first - c.t0)
        free.append(c)

    t = time.perf_counter()
    end = t + a.seconds
    i = 0
    while t < end:
        d = t - time.perf_counter()
        if d > 0:
            await asyncio.sleep(d)
        tasks.append(asyncio.ensure_future(one(i)))
        i += 1
        t += rnd.expovariate(a.rate)
    await asyncio.gather(*tasks)
    return {
        "n": len(lat),
        "total": i,
        "errors": errs[0],
        "lat_p50_ms": ms(pct(lat, 50)),
        "lat_p99_ms": ms(pct(lat, 99)),
        "ttft_p50_ms": ms(pct(ttft, 50)),
        "ttft_p99_ms": ms(pct(ttft, 99)),
    }


async def pair(a):
    """Low rate, one request at a time, ports in turn: latencies of all routers under the same noise. Port 1 is the base."""
    ports = [int(x) for x in a.ports.split(",")]
    rnd = random.Random(5)
    cs = {p: await connect(a.host, p) for p in ports}
    res = {p: {False: [], True: [], "ttft": [], "err": 0} for p in ports}
    reqs = {}
    for p in ports:
        a.port = p
        reqs[p] = {False: bodies(a, False), True: bodies(a, True)}
    end = time.perf_counter() + a.seconds
    i = 0
    while time.perf_counter() < end:
        stream = i % 3 == 2
        for p in rnd.sample(ports, len(ports)):
            await asyncio.sleep(1.0 / a.rate)
            c = cs[p]
            if c.tr is None:
                c = cs[p] = await connect(a.host, p)
            try:
                await c.request(reqs[p][stream][i % 64])
            except Exception:
                res[p]["err"] += 1
                continue
            if c.status != 200:
                res[p]["err"] += 1
            elif i >= 3:
                res[p][stream].append(c.t_end - c.t0)
                if stream:
                    res[p]["ttft"].append(c.t_first - c.t0)
        i += 1
    out = {}
    b = res[ports[0]]
    for p in ports:
        r = res[p]
        out[str(p)] = {"requests": len(r[False]) + len(r[True]) + r["err"], "errors": r["err"]}
        for name, k in (("short", False), ("stream", True), ("stream_ttft", "ttft")):
            for q in (10, 50, 90, 99):
                out[str(p)]["%s_p%d_ms" % (name, q)] = ms(pct(r[k], q))
            if r[k] and b[k]:
                for q in (10, 50, 99):
                    out[str(p)]["%s_added_p%d_ms" % (name, q)] = ms(pct(r[k], q) - pct(b[k], q))
    return out


def make_trace(a):
    """Conversations with zipf-shared system prompts. Returns list of (start offset, system, [user turns])."""
    rnd = random.Random(a.seed)
    groups = []
    for _ in range(a.groups):
        n = rnd.randrange(a.sys_words // 2, a.sys_words * 3 // 2)
        groups.append(" ".join(word(rnd.randrange(8192)) for _ in range(n)))
    wts = [1.0 / (g + 1) ** a.zipf for g in range(a.groups)]
    convs, t = [], 0.0
    for _ in range(a.convs):
        g = rnd.choices(range(a.groups), wts)[0]
        turns = []
        for _ in range(a.turns):
            n = rnd.randrange(a.user_words // 2, a.user_words * 3 // 2)
            turns.append(
                (
                    " ".join(word(rnd.randrange(8192)) for _ in range(n)),
                    rnd.expovariate(1.0 / a.think),
                )
            )
        convs.append((t, groups[g], turns))
        t += rnd.expovariate(a.conv_rate)
    return convs


async def trace(a):
    convs = make_trace(a)
    rec, errs, per = [], [], {}
    start = time.perf_counter() + 0.2
    hp = "%s:%d" % (a.host, a.port)

    async def conv(off, system, turns):
        await asyncio.sleep(max(0, start + off - time.perf_counter()))
        msgs = [{"role": "system", "content": system}]
        c = await connect(a.host, a.port, True)
        for text, think in turns:
            msgs.append({"role": "user", "content": text})
            d = {
                "model": a.model,
                "messages": msgs,
                "max_tokens": a.out_tokens,
                "stream": True,
                "temperature": 0,
                "stream_options": {"include_usage": True},
            }
            if a.ignore_eos:
                d["ignore_eos"] = True
            try:
                if c.tr is None:
                    c = await connect(a.host, a.port, True)
                await c.request(post("/v1/chat/completions", d, hp))
            except Exception as e:
                errs.append(repr(e))
                return
            body = b"".join(c.parts)
            if c.status != 200:
                errs.append("%d %s" % (c.status, body[:200].decode("latin1")))
                return
            words = b" ".join(m.strip() for m in RE_TEXT.findall(body)).decode()
            msgs.append({"role": "assistant", "content": words})
            mc, mp, mf = RE_CACHED.search(body), RE_PROMPT.search(body), RE_FP.search(body)
            nout = len(words.split())
            rec.append(
                (
                    c.t_text - c.t0,
                    (c.t_last - c.t_text) / max(1, nout - 1),
                    c.t_end - c.t0,
                    int(mp.group(1)) if mp else 0,
                    int(mc.group(1)) if mc else 0,
                    nout,
                )
            )
            if mf:
                k = mf.group(1).decode()
                per[k] = per.get(k, 0) + 1
            await asyncio.sleep(think)

    await asyncio.gather(*[conv(*c) for c in convs])
    el = time.perf_counter() - start
    pt, ct = sum(r[3] for r in rec), sum(r[4] for r in rec)
    tt = [r[0] for r in rec]
    return {
        "n": len(rec),
        "errors": len(errs),
        "first_errors": errs[:2],
        "seconds": round(el, 2),
        "client_hit_rate": round(ct / pt, 4) if pt else None,
        "prompt_tokens": pt,
        "ttft_mean_ms": ms(sum(tt) / len(tt)) if tt else None,
        "ttft_p50_ms": ms(pct(tt, 50)),
        "ttft_p90_ms": ms(pct(tt, 90)),
        "ttft_p99_ms": ms(pct(tt, 99)),
        "itl_p50_ms": ms(pct([r[1] for r in rec], 50)),
        "itl_p99_ms": ms(pct([r[1] for r in rec], 99)),
        "e2e_p50_ms": ms(pct([r[2] for r in rec], 50)),
        "out_tok_s": round(sum(r[5] for r in rec) / el, 1),
        "per_worker": per,
    }


def parser():
    p = argparse.ArgumentParser()
    p.add_argument("kind", choices=["short", "stream", "rate", "rate-stream", "pair", "trace"])
    p.add_argument("--host", default="127.0.0.1")
    p.add_argument("--port", type=int, required=True)
    p.add_argument("--ports", default="", help="pair: comma-separated, the first is the base")
    p.add_argument("--model", default="mock")
    p.add_argument("--api", choices=["chat", "completions"], default="chat")
    p.add_argument("--concurrency", type=int, default=32)
    p.add_argument("--seconds", type=float, default=5)
    p.add_argument("--warmup", type=float, default=1)
    p.add_argument("--rate", type=float, default=50)
    p.add_argument("--prompt-words", type=int, default=16)
    p.add_argument("--chunks", type=int, default=64)
    p.add_argument("--ignore-eos", action="store_true")
    p.add_argument("--convs", type=int, default=60)
    p.add_argument("--turns", type=int, default=6)
    p.add_argument("--groups", type=int, default=8)
    p.add_argument("--zipf", type=float, default=1.0)
    p.add_argument("--sys-words", type=int, default=1024)
    p.add_argument("--user-words", type=int, default=128)
    p.add_argument("--out-tokens", type=int, default=32)
    p.add_argument("--think", type=float, default=0.6)
    p.add_argument("--conv-rate", type=float, default=6.0)
    p.add_argument("--seed", type=int, default=1)
    return p


if __name__ == "__main__":
    a = parser().parse_args()
    f = {
        "short": lambda: closed(a, False),
        "stream": lambda: closed(a, True),
        "rate": lambda: open_loop(a, False),
        "rate-stream": lambda: open_loop(a, True),
        "pair": lambda: pair(a),
        "trace": lambda: trace(a),
    }[a.kind]
    print(json.dumps(uvloop.run(f())))

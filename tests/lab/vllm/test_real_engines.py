"""Real vLLM engines with NIXL between them, brought up by dynctl on lab hosts: the same text, and true counts.

Two cores and engines that spin: few tokens, long limits, and no latency asserted, but for one ratio of means.
"""

import json
import os
import random
import signal
import time
import urllib.request
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from itertools import pairwise
from statistics import fmean
from typing import Any

import pytest
from hostlab import engine_env
from hostlab.cluster import Cluster, fetch_wheels
from hostlab.lab import HostSpec, Lab
from tokenizers import Tokenizer

from dynctl.agents.engines.vllm import UCX_TCP_PORTS

pytestmark = [pytest.mark.lab, pytest.mark.root, pytest.mark.vllm, pytest.mark.timeout(2400)]

MODEL = "tiny"
BLOCK = 32
NUM_PROMPTS = 20
MAX_TOKENS = 12
UP_TIMEOUT_S = 1800.0
MAX_LEN = 8192
LONG, NUM_TURNS = range(8), 12
"""First turns, which nobody has cached, are few."""
FIRST_TOKENS, TURN_TOKENS, LONGEST_TOKENS = 7200, 40, 7950
"""A conversation grows to nearly MAX_LEN; its template and the answers come to another 20 tokens a turn."""
LONG_BLOCKS = len(LONG) * LONGEST_TOKENS * 6 // 10 // BLOCK
"""An engine's cache: 60 % of what all conversations are in the end."""
AGGREGATED = [{"role": "aggregated", "replicas": 2}]
OVER_HOSTS = [{"role": "aggregated", "tp": 2, "nodes": 2}]
"""Not a pipeline: on CPUs vLLM 0.32 has none without a compiler (its runner allocates what stages hand on while it warms up)."""
PREFILL_DECODE = [
    {"role": "prefill", "replicas": 1, "hosts": ["cpu-1"]},
    {"role": "decode", "replicas": 1, "hosts": ["cpu-2"]},
]


class Stage:
    """One cluster at a time on the lab's hosts; two layouts would not fit the machine together."""

    def __init__(self, lab: Lab) -> None:
        self.lab = lab
        self.cluster = Cluster(lab)
        self.layout: list[dict[str, Any]] | None = None
        self.cache_blocks = 0
        model = engine_env.engine_dir() / "model/tokenizer.json"
        self.tokenizer = Tokenizer.from_file(str(model))
        self._reference: list[str] = []
        self.before = left_by_ops(lab)

    def up(self, layout: list[dict[str, Any]], cache_blocks: int = 0) -> Cluster:
        """Bring a layout up, unless it is up already; `cache_blocks`: long prompts, and caches of so many blocks."""
        if (self.layout, self.cache_blocks) == (layout, cache_blocks):
            return self.cluster
        self.down()
        own_args = {"num-gpu-blocks-override": cache_blocks} if cache_blocks else {}
        engine = {
            "kind": "vllm",
            "python": engine_env.HOST_PYTHON,
            "device": "cpu",
            "allow_old_version": True,
            # float32: two engines must agree to the last token.
            "args": {"enforce-eager": True, "dtype": "float32", **own_args},
            # Hosts have no compiler, which parts of tensor-parallel layers ask for even so.
            "env": {"TORCH_COMPILE_DISABLE": 1} if layout is OVER_HOSTS else {},
        }
        limits = {
            "max_model_len_tokens": MAX_LEN if cache_blocks else 2048,
            "max_num_seqs": 4,
            "block_size_tokens": BLOCK,
        }
        listen = f"{self.lab['head'].address}:8000"
        deployment = {
            "name": "chat",
            "model": engine_env.HOST_MODEL,
            "served_name": MODEL,
            "engine": engine,
            "pools": layout,
            "limits": limits,
            "router": {
                "host": "head",
                "listen": listen,
                "allow_insecure_listen": True,
                # Every request hands over, also where computing twice would be cheaper; and where engines'
                # counters are compared with what was asked, the router asks nothing of its own.
                "settings": {"conditional_prefill": 0, "probe_s": 60 if cache_blocks else 0},
            },
        }
        slots = {name: {"cpu_slots": 1} for name in ("cpu-1", "cpu-2")}
        self.lab.write_inventory([deployment], hosts=slots)
        (self.lab.home / "plan.yaml").unlink(missing_ok=True)
        self.layout, self.cache_blocks = layout, cache_blocks
        done = self.lab.dynctl("up", "--yes", timeout_s=UP_TIMEOUT_S)
        assert done.returncode == 0, f"{done.stderr}\n{self.logs()}"
        return self.cluster

    def down(self) -> None:
        """Take down what is up, and check that nothing is left."""
        if self.layout is None:
            return
        self.layout = None
        done = self.lab.dynctl("down", "--yes", timeout_s=600)
        assert done.returncode == 0, done.stderr
        assert self.lab.left_on_hosts() == {}

    def logs(self) -> str:
        """The engines' last words, for a failure."""
        done = self.lab.dynctl("logs", "-n", "60", "chat-*", timeout_s=60)
        return (done.stdout + done.stderr)[-8000:]

    def ask(self, path: str, body: dict[str, Any]) -> dict[str, Any]:
        """Send one request through the router."""
        url = f"http://{self.lab['head'].address}:8000{path}"
        data = json.dumps({"model": MODEL, "temperature": 0, **body}).encode()
        request = urllib.request.Request(url, data, {"content-type": "application/json"})
        with self.lab.inside(), urllib.request.urlopen(request, timeout=600) as answer:
            return dict(json.load(answer))

    def complete(self, prompt: str) -> dict[str, Any]:
        """Ask for the continuation of a prompt, always the same number of tokens."""
        body = {"prompt": prompt, "max_tokens": MAX_TOKENS, "ignore_eos": True}
        return self.ask("/v1/completions", body)

    def stream(self, messages: list[dict[str, str]]) -> tuple[float, str, dict[str, Any]]:
        """Ask for a short answer as a stream: seconds to the first event, the text, usage."""
        url = f"http://{self.lab['head'].address}:8000/v1/chat/completions"
        body = {
            "model": MODEL,
            "messages": messages,
            "temperature": 0,
            "max_tokens": 4,
            "ignore_eos": True,
            "stream": True,
            "stream_options": {"include_usage": True},
        }
        data = json.dumps(body).encode()
        request = urllib.request.Request(url, data, {"content-type": "application/json"})
        first_s, text, usage = 0.0, "", {}
        with self.lab.inside():
            began_s = time.monotonic()
            with urllib.request.urlopen(request, timeout=600) as answer:
                for line in answer:
                    if not line.startswith(b"data: {"):
                        continue
                    first_s = first_s or time.monotonic()
                    event = json.loads(line[6:])
                    usage = event.get("usage") or usage
                    for choice in event["choices"]:
                        text += choice["delta"].get("content") or ""
        return first_s - began_s, text, dict(usage)

    def count(self, prompt: str) -> int:
        """Tokens of a prompt, by the model's own tokenizer."""
        return len(self.tokenizer.encode(prompt).ids)

    def reference(self) -> list[str]:
        """What one aggregated engine answers to the prompts."""
        if not self._reference:
            self.up(AGGREGATED)
            self._reference = [text_of(self.complete(prompt)) for prompt in PROMPTS]
        return self._reference


def words(seed: str, count: int) -> str:
    """Text that no other seed shares a beginning with."""
    draw = random.Random(seed)
    letters = "abcdefghijklmnopqrstuvwxyz"
    return " ".join("".join(draw.choices(letters, k=draw.randint(2, 7))) for _ in range(count))


PROMPTS = [words(f"prompt {i}", 30 + 9 * i) for i in range(NUM_PROMPTS)]


def text_of(answer: dict[str, Any]) -> str:
    return str(answer["choices"][0]["text"])


def cached_of(answer: dict[str, Any]) -> int:
    return int(answer["usage"]["prompt_tokens_details"]["cached_tokens"])


def settle() -> None:
    """Let KV events reach the router; on busy cores that takes a moment."""
    time.sleep(1.0)


@pytest.fixture(scope="module")
def stage(make_lab: Callable[..., Lab]) -> Iterator[Stage]:
    shown = ((str(engine_env.engine_dir()), engine_env.HOST_PATH),)
    lab = make_lab(HostSpec("cpu-1", binds=shown), HostSpec("cpu-2", binds=shown), HostSpec("head"))
    fetch_wheels(lab, "head")
    stage = Stage(lab)
    yield stage
    stage.down()


def test_one_aggregated_engine_answers_the_same_twice(stage: Stage) -> None:
    texts = stage.reference()
    assert (
        len(set(texts)) == NUM_PROMPTS
    )  # the model says different things, so comparing texts means something
    assert [text_of(stage.complete(prompt)) for prompt in PROMPTS[:3]] == texts[:3]


def test_two_aggregated_engines_hit_as_often_as_the_trace_allows(stage: Stage) -> None:
    cluster = stage.up(AGGREGATED)
    prefixes = [words(f"prefix {group}", 120) for group in range(4)]
    trace = [f"{prefixes[i % 4]} {words(f'tail {i}', 20)}" for i in range(24)]
    before = prefix_counters(cluster)
    asked = cached = best = 0
    seen: list[list[int]] = []
    for prompt in trace:
        ids = stage.tokenizer.encode(prompt).ids
        answer = stage.complete(prompt)
        assert answer["usage"]["prompt_tokens"] == len(ids)
        settle()
        asked += len(ids)
        cached += cached_of(answer)
        best += bound(ids, seen)
        seen.append(ids)
    after = prefix_counters(cluster)
    assert best / asked > 0.5  # else the trace proves nothing
    assert abs(cached - best) / asked <= 0.01
    queries, hits = (now - then for now, then in zip(after, before, strict=True))
    # An engine that idles is asked for a token now and then, to see that it lives.
    assert asked <= queries <= 1.01 * asked
    assert hits == cached
    used = {d["engine"] for d in cluster.decisions("chat", len(trace))}
    assert used == {"chat-aggregated-0", "chat-aggregated-1"}


def test_on_a_second_turn_the_router_predicts_what_the_engine_counts(stage: Stage) -> None:
    cluster = stage.up(AGGREGATED)
    for turns in conversations(stage, 4):
        decision = cluster.decisions("chat", 1)[0]
        assert decision["is_tokenized"]
        assert decision["overlap_tokens"] == decision["cached_tokens"] == turns[-1]
        assert decision["overlap_tokens"] >= 3 * BLOCK


def test_long_conversations_stay_where_they_are_cached_and_answer_sooner(stage: Stage) -> None:
    """Each engine's cache holds 60 % of the conversations: the router must split them and keep them apart."""
    cluster = stage.up(AGGREGATED, LONG_BLOCKS)
    found = {policy: hold_long(stage, cluster, policy) for policy in ("kv", "round_robin")}
    for policy, run in found.items():
        print(policy, run)
    kv, spread = found["kv"], found["round_robin"]
    assert LONGEST_TOKENS - 200 < kv.longest <= LONGEST_TOKENS
    assert kv.cached >= 0.97 * kv.bound
    assert kv.mean_ttft_s <= 0.6 * spread.mean_ttft_s
    hits = cluster.router("chat", "/hits")
    assert hits["probe_ratio"] == 1.0
    assert hits["predicted_ratio"] == pytest.approx(hits["reported_ratio"], abs=0.02)


@dataclass(frozen=True, slots=True)
class LongRun:
    """What became of one set of long conversations; tokens."""

    cached: int
    bound: int
    asked: int
    longest: int
    mean_ttft_s: float


def hold_long(stage: Stage, cluster: Cluster, policy: str) -> LongRun:
    """Hold long conversations turn by turn under one policy; they share nothing with any held before."""
    cluster.router("chat", f"/policy?name={policy}", "POST")
    talks = [[said_by("user", some_tokens(stage, f"{policy} {i}", FIRST_TOKENS))] for i in LONG]
    seen: set[int] = set()
    cached = best = asked = longest = 0
    ttfts_s = []
    draw = random.Random("the same order for all")
    for turn in range(NUM_TURNS):
        for i in draw.sample(LONG, len(LONG)):
            ttft_s, said, usage = stage.stream(talks[i])
            ids = stage.tokenizer.encode(rendered(talks[i]), add_special_tokens=False).ids
            assert usage["prompt_tokens"] == len(ids)
            best += BLOCK * sum(prefix in seen for prefix in prefixes_of(ids))
            # All but the last token of an answer is in the cache too.
            whole = stage.tokenizer.encode(rendered(talks[i]) + said, add_special_tokens=False).ids
            seen.update(prefixes_of(whole))
            cached += int(usage["prompt_tokens_details"]["cached_tokens"])
            asked += len(ids)
            longest = max(longest, len(ids))
            ttfts_s.append(ttft_s)
            more = some_tokens(stage, f"{policy} {i} {turn}", TURN_TOKENS)
            talks[i] += [said_by("assistant", said), said_by("user", more)]
    return LongRun(cached, best, asked, longest, fmean(ttfts_s))


def prefixes_of(ids: list[int]) -> list[int]:
    """Name the prefixes in whole blocks that leave a token to compute."""
    return [hash(tuple(ids[:end])) for end in range(BLOCK, len(ids), BLOCK)]


def said_by(role: str, content: str) -> dict[str, str]:
    return {"role": role, "content": content}


def rendered(messages: list[dict[str, str]]) -> str:
    """The conversation as the tiny model's template puts it."""
    turns = "".join(f"<|turn|>{one['role']}\n{one['content']}<|end|>\n" for one in messages)
    return f"<s>{turns}<|turn|>assistant\n"


def some_tokens(stage: Stage, seed: str, count: int) -> str:
    """Text of about so many tokens."""
    text = words(seed, count)
    return text[: len(text) * count // stage.count(text)]


def test_prefill_and_decode_give_the_text_of_one_engine(
    stage: Stage, until: Callable[..., None]
) -> None:
    reference = stage.reference()
    cluster = stage.up(PREFILL_DECODE)
    before = {source: pulled(cluster, source) for source in SOURCES}
    answers = [stage.complete(prompt) for prompt in PROMPTS]
    assert [text_of(a) for a in answers] == reference
    prompt_tokens = sum(stage.count(prompt) for prompt in PROMPTS)
    assert sum(a["usage"]["prompt_tokens"] for a in answers) == prompt_tokens
    moved: dict[str, float] = {}

    def all_counted() -> bool:
        # An engine counts a little after it has answered.
        moved.update((source, pulled(cluster, source) - before[source]) for source in SOURCES)
        return sum(moved.values()) >= prompt_tokens

    until(all_counted, "every prompt's tokens are counted")
    decisions = cluster.decisions("chat", 2 * NUM_PROMPTS)
    ids = list(dict.fromkeys(d["request_id"] for d in reversed(decisions)))[-NUM_PROMPTS:]
    asked = dict(zip(ids, PROMPTS, strict=True))
    # On a busy machine the router may lose sight of the prefill engine: then the decode engine does all of it.
    whole = {d["request_id"]: d["path"] for d in decisions if d["leg"] == "whole"}
    print(moved, whole)
    assert set(whole.values()) <= {"no_prefill_engine", "link_down"}
    assert ids[0] not in whole, "up ends when the router reaches all engines"
    assert len(whole) <= NUM_PROMPTS // 4
    local_tokens = sum(stage.count(asked[request_id]) for request_id in whole)
    assert moved["external_kv_transfer"] == prompt_tokens - local_tokens
    assert moved["local_cache_hit"] == 0
    # An engine that idles is asked for a token now and then, to see that it lives.
    assert moved["local_compute"] <= local_tokens + 0.01 * prompt_tokens
    legs = [(d["leg"], d["engine"]) for d in decisions]
    assert legs.count(("prefill", "chat-prefill-0")) == NUM_PROMPTS - len(whole)
    assert legs.count(("decode", "chat-decode-0")) == NUM_PROMPTS - len(whole)


def test_prefill_counts_what_the_router_predicted_on_a_second_turn(stage: Stage) -> None:
    cluster = stage.up(PREFILL_DECODE)
    for _ in conversations(stage, 3):
        prefill = next(d for d in cluster.decisions("chat", 2) if d["leg"] == "prefill")
        assert prefill["overlap_tokens"] == prefill["cached_tokens"]
        assert prefill["overlap_tokens"] >= 3 * BLOCK


def test_no_transfer_failed_between_the_engines(stage: Stage) -> None:
    cluster = stage.up(PREFILL_DECODE)
    assert cluster.metric("chat-decode-0", "vllm:nixl_num_failed_transfers_total") == 0
    assert cluster.metric("chat-decode-0", "vllm:nixl_num_failed_notifications_total") == 0
    assert cluster.metric("chat-decode-0", "vllm:nixl_bytes_transferred_sum") > 0


def test_engines_listen_to_the_network_only_for_their_transfers(stage: Stage) -> None:
    stage.up(PREFILL_DECODE)
    first, last = (int(part) for part in UCX_TCP_PORTS.split("-"))
    planned = {*range(18800, 19000), *range(first, last + 1)}
    for name in ("cpu-1", "cpu-2"):
        open_ports = {p for a, p in stage.lab[name].listening() if not a.startswith("127.")}
        assert 18800 in open_ports
        assert open_ports - {22} <= planned


def test_down_leaves_nothing_of_real_engines(stage: Stage) -> None:
    stage.up(PREFILL_DECODE)
    stage.down()
    for host in stage.lab.hosts.values():
        assert host.processes("vllm|VLLM|dynctl|multiprocessing") == []
    assert left_by_ops(stage.lab) == stage.before


# Last: what is killed leaves its segments of shared memory in /dev/shm, which nobody removes.
def test_an_engine_over_two_hosts_says_what_one_says_and_comes_back_as_one(
    stage: Stage, until: Callable[..., None]
) -> None:
    reference = stage.reference()[:5]
    cluster = stage.up(OVER_HOSTS)
    assert [text_of(stage.complete(prompt)) for prompt in PROMPTS[:5]] == reference
    before = cluster.units()
    engine, member = "chat-aggregated-0", "chat-aggregated-0.1"
    assert before[member]["incarnation"] == f"{before[engine]['incarnation']}.1"
    hosts = {name: stage.lab[before[name]["host"]] for name in (engine, member)}
    meeting = json.loads(stage.lab.dynctl("plan", "-o", "json").stdout)["deployments"][0]["pools"]
    port = meeting[0]["replicas"][0]["rendezvous_port"]
    addresses = {
        address
        for host in hosts.values()
        for address, listening in host.listening()
        if listening >= 32768
    }
    # What they open to each other is on the data address; torch's own meeting place cannot be.
    assert addresses == {host.address for host in hosts.values()}
    assert port in {listening for _, listening in hosts[engine].listening()}

    for process in hosts[member].processes("VLLM::Worker"):
        os.kill(process.pid, signal.SIGKILL)

    def is_back() -> bool:
        now = cluster.units()
        return now[engine]["state"] == now[member]["state"] == "ready" and (
            now[engine]["incarnation"] != before[engine]["incarnation"]
        )

    until(is_back, "both parts started again", UP_TIMEOUT_S)
    until(lambda: text_of(stage.complete(PROMPTS[0])) == reference[0], "it serves again")


def left_by_ops(lab: Lab) -> dict[str, list[str]]:
    """Files of the user `ops` on every host, in the places programs leave things; sshd's own set apart."""
    places = ["/home/ops", "/tmp", "/var/tmp", "/dev/shm", "/opt", "/srv"]
    argv = ["find", *places, "-user", "ops", "-not", "-path", "/home/ops/.ssh*"]
    return {h.name: sorted(h.run(argv).stdout.splitlines()) for h in lab.hosts.values()}


SOURCES = ("external_kv_transfer", "local_compute", "local_cache_hit")


def pulled(cluster: Cluster, source: str) -> float:
    """Prompt tokens of the decode engine by where they came from."""
    name = "vllm:prompt_tokens_by_source_total"
    return cluster.metric("chat-decode-0", name, source=source)


def prefix_counters(cluster: Cluster) -> tuple[float, float]:
    """Tokens both aggregated engines looked up in their prefix caches, and found there."""
    engines = ("chat-aggregated-0", "chat-aggregated-1")
    names = ("vllm:prefix_cache_queries_total", "vllm:prefix_cache_hits_total")
    queries, hits = (sum(cluster.metric(e, name) for e in engines) for name in names)
    return queries, hits


def bound(ids: list[int], seen: list[list[int]]) -> int:
    """Tokens that could have been cached: whole blocks shared with an earlier prompt, the last token computed."""
    longest = 0
    for other in seen:
        shared = next(
            (i for i, (a, b) in enumerate(zip(ids, other, strict=False)) if a != b),
            min(len(ids), len(other)),
        )
        longest = max(longest, shared)
    return min(longest, len(ids) - 1) // BLOCK * BLOCK


def conversations(stage: Stage, count: int) -> Iterator[list[int]]:
    """Hold conversations of two turns; after each, give the cached tokens the engine told per turn."""
    for i in range(count):
        messages = [{"role": "user", "content": words(f"{stage.layout} first {i}", 80)}]
        told = []
        for turn in range(2):
            answer = stage.ask(
                "/v1/chat/completions", {"messages": messages, "max_tokens": MAX_TOKENS}
            )
            told.append(cached_of(answer))
            said = answer["choices"][0]["message"]["content"] or ""
            messages += [
                {"role": "assistant", "content": said},
                {"role": "user", "content": words(f"{stage.layout} next {i} {turn}", 10)},
            ]
            settle()
        assert all(a < b for a, b in pairwise(told))
        yield told

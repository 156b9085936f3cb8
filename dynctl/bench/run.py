"""Drives a load against a server: learns its token counting, sends on schedule, collects records.

Not here: what figures mean (`record`), summaries (`report`). IO: HTTP through `client`, clock.
"""

import asyncio
import random
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Any

from dynctl.bench.arrivals import Load
from dynctl.bench.client import Reply, Target, Traffic, growth
from dynctl.bench.record import Record
from dynctl.bench.report import ClientFacts, Measured, RouterCounts, Setting
from dynctl.bench.statistics import percentile
from dynctl.bench.stream import Chunk
from dynctl.bench.words import CANDIDATES, COMMON, ENOUGH_WORDS, TokenCount, alike, fit
from dynctl.bench.workload import Ask, Source
from dynctl.core.workload import Slo
from dynctl.errors import DynctlError, ExitCode

DRAIN_S = 60.0
"""How long answers may take after the last request was sent; what is left then is `unfinished`."""
LAG_PERIOD_S = 0.02
REFUSED_PAUSE_S = 0.05
PROGRESS_PERIOD_S = 5.0
WATCH_S = 1.0
"""How long a server is watched for traffic of others."""

WEIGHERS = 8
WEIGHED_TIMES = 16
WEIGHED_AT_ONCE = 24

Say = Callable[[str], None]


@dataclass(frozen=True, slots=True)
class Wish:
    """One run as asked for."""

    workload: Source
    load: Load
    duration_s: float
    warmup_s: float = 0.0
    seed: int = 1
    slo: Slo = field(default_factory=Slo)
    block_size_tokens: int = 16
    drain_s: float = DRAIN_S

    def setting(self, target: Target, count: TokenCount) -> Setting:
        """Write down what was asked for and what was learnt before the run."""
        return Setting(
            url=target.url,
            model=target.model,
            api=target.api,
            workload=self.workload.text,
            load=str(self.load),
            duration_s=self.duration_s,
            warmup_s=self.warmup_s,
            seed=self.seed,
            slo=self.slo,
            block_size_tokens=self.block_size_tokens,
            per_chunk_usage=target.dialect.per_chunk_usage,
            fixed_lengths=target.dialect.fixed_lengths,
            overhead_tokens=count.overhead_tokens,
            lead_tokens=count.lead_tokens,
            tokens_per_word=count.per_word_tokens,
            recorded=self.workload.recorded,
        )


async def other_traffic(target: Target) -> str:
    """Watch a server for a moment; say what others are asking of it, empty when nothing is seen."""
    before = await target.traffic()
    if before.under_way:
        return f"{before.under_way:.0f} requests of others are under way"
    if before.requests_total is None:
        return ""
    await asyncio.sleep(WATCH_S)
    after = await target.traffic()
    came = growth(before, after).requests_total
    if came or after.under_way:
        return f"{max(came or 0, after.under_way or 0):.0f} requests of others came within {WATCH_S:g} s"
    return ""


async def learn_counting(target: Target, workload: Source) -> TokenCount:
    """Measure how the server counts tokens, so that prompts get the lengths asked for.

    Raises:
        DynctlError: when the server does not answer, or the workload does not fit its context.
    """
    _check_length(target, workload)
    first = await target.settle_dialect(_probe(workload, COMMON, 8))
    if first.prompt_tokens is None:
        return TokenCount()
    count = await _fit(target, workload, COMMON)
    if count.per_word_tokens != 1:
        count = await _fit(target, workload, alike(await _weigh(target, workload)))
    return replace(count, tail_tokens=await _tail(target, count))


async def _tail(target: Target, count: TokenCount) -> float:
    """Learn what the chat template adds after the last text, from how much one more exchange adds.

    A message is its header, its text and its close; the tail is the close of the last one and the header of the
    answer, so two messages more (of one word each) add two tails.
    """
    if target.api != "chat":
        return 0.0
    word = count.words[0]
    short = Ask((("user", word),), 1, None)
    long = Ask((("user", word), ("assistant", word), ("user", word)), 1, None)
    added = await _count_tokens(target, long) - await _count_tokens(target, short)
    return max(0.0, added / 2 - count.per_word_tokens)


async def _fit(target: Target, workload: Source, words: tuple[str, ...]) -> TokenCount:
    points = [(n, await _count(target, workload, words, n)) for n in (8, 8 + len(words))]
    try:
        return fit(words, points[0], points[1])
    except ValueError as error:
        raise DynctlError(f"{target.url} counts tokens oddly: {error}") from error


async def _weigh(target: Target, workload: Source) -> dict[str, int]:
    """Say what so many of each candidate cost beyond a prompt that begins alike."""
    head = COMMON[:2]
    base = await _count(target, workload, head, len(head))
    costs: dict[str, int] = {}
    few_at_once = asyncio.Semaphore(WEIGHERS)

    async def weigh(word: str) -> None:
        words = (*head, *[word] * WEIGHED_TIMES)
        async with few_at_once:
            costs[word] = await _count(target, workload, words, len(words)) - base

    for start in range(0, len(CANDIDATES), WEIGHED_AT_ONCE):
        async with asyncio.TaskGroup() as group:
            for word in CANDIDATES[start : start + WEIGHED_AT_ONCE]:
                group.create_task(weigh(word))
        if max(Counter(costs.values()).values()) >= ENOUGH_WORDS:
            break
    return {word: costs[word] for word in CANDIDATES if word in costs}


def _check_length(target: Target, workload: Source) -> None:
    longest, limit = workload.longest_tokens, target.max_model_len_tokens
    if longest is not None and limit is not None and longest > limit:
        raise DynctlError(
            f"prompts and answers reach {longest} tokens, and {target.model} takes {limit}",
            "ask for shorter ones in --workload, or leave them out of the trace",
            code=ExitCode.REFUSED,
        )


async def _count(target: Target, workload: Source, words: tuple[str, ...], num_words: int) -> int:
    return await _count_tokens(target, _probe(workload, words, num_words))


async def _count_tokens(target: Target, ask: Ask) -> int:
    reply = await target.send(ask)
    if reply.stream.prompt_tokens is None:
        raise DynctlError(
            f"{target.url} did not count the tokens of a prompt: {reply.outcome} {reply.error}".rstrip()
        )
    return reply.stream.prompt_tokens


def _probe(workload: Source, words: tuple[str, ...], num_words: int) -> Ask:
    """A prompt of the workload's shape with so many words, each of `words` in turn."""
    if not workload.begins_with_system:
        return Ask((("user", _cycle(words, num_words)),), 1, None)
    return Ask((("system", words[0]), ("user", _cycle(words, num_words - 1))), 1, None)


def _cycle(words: tuple[str, ...], num_words: int) -> str:
    return " ".join(words[i % len(words)] for i in range(num_words))


class Drive:
    """One run under way. `run` returns when all answers are in, or soon after `stop` is set."""

    def __init__(self, target: Target, wish: Wish, count: TokenCount, stop: asyncio.Event) -> None:
        self._target = target
        self._wish = wish
        self._stop = stop
        self._script = wish.workload.script(count, wish.seed)
        self._records: list[Record] = []
        self._under_way: set[asyncio.Task[None]] = set()
        self._num_asks = 0
        self._is_closing = False
        self._lags_s: list[float] = []
        self._start_s = 0.0

    async def run(self, say: Say) -> Measured:
        """Send everything, wait for the answers, and return what was measured."""
        before = await self._target.traffic()
        self._start_s, cpu_s = time.monotonic(), time.process_time()
        until_s = self._wish.warmup_s + self._wish.duration_s
        async with asyncio.TaskGroup() as group:
            stopped = group.create_task(self._stop.wait(), name="bench:stop")
            watchers = [
                stopped,
                group.create_task(self._watch_lag(), name="bench:lag"),
                group.create_task(self._tell(say, until_s), name="bench:progress"),
            ]
            sender = group.create_task(self._send_all(group, until_s), name="bench:send")
            await asyncio.wait({stopped}, timeout=until_s)
            if self._wish.load.is_open:
                # What was due but not yet sent still goes out: leaving it out would flatter a late client.
                await asyncio.wait({stopped, sender}, return_when=asyncio.FIRST_COMPLETED)
            self._is_closing = True
            sender.cancel()
            until_s = min(until_s, self._now_s())
            cpu_ratio = (time.process_time() - cpu_s) / self._now_s()
            lag_p99_ms = _p99_ms(self._lags_s)
            await self._drain(stopped)
            for task in (*watchers, *self._under_way):
                task.cancel()
        router = growth(before, await self._target.traffic())
        return Measured(
            records=tuple(sorted(self._records, key=lambda r: r.number)),
            since_s=min(self._wish.warmup_s, until_s),
            until_s=until_s,
            client=ClientFacts(cpu_ratio, lag_p99_ms),
            router=_router_counts(router),
            is_partial=self._stop.is_set(),
        )

    def _now_s(self) -> float:
        return time.monotonic() - self._start_s

    async def _send_all(self, group: asyncio.TaskGroup, until_s: float) -> None:
        load = self._wish.load
        if not load.is_open:
            for _ in range(load.concurrency):
                self._own(group.create_task(self._keep_asking()))
            return
        rng = random.Random(f"{self._wish.seed}/arrivals")  # noqa: S311 - not a secret
        for due_s in load.offsets_s(rng, until_s):
            await asyncio.sleep(max(0.0, due_s - self._now_s()))
            self._own(group.create_task(self._ask(due_s)))

    def _own(self, task: asyncio.Task[None]) -> None:
        self._under_way.add(task)
        task.add_done_callback(self._under_way.discard)

    async def _keep_asking(self) -> None:
        while not self._is_closing:
            await self._ask(self._now_s())
            if not self._records[-1].is_ok:
                # A server that refuses at once must not be asked as fast as the loop can spin.
                await asyncio.sleep(REFUSED_PAUSE_S)

    async def _ask(self, due_s: float) -> None:
        number = self._num_asks
        self._num_asks += 1
        ask = self._script.next()
        reply = None
        try:
            reply = await self._target.send(ask)
        finally:
            self._records.append(self._record(number, ask, due_s, reply))
            is_ok = reply is not None and self._records[-1].is_ok
            self._script.answered(ask, reply.stream.text if reply and is_ok else None)

    def _record(self, number: int, ask: Ask, due_s: float, reply: Reply | None) -> Record:
        known = Record(
            number=number,
            outcome="unfinished",
            scheduled_s=due_s,
            sent_s=due_s,
            is_warmup=due_s < self._wish.warmup_s,
            isl_asked_tokens=ask.isl_tokens,
            osl_asked_tokens=ask.osl_tokens,
            group=ask.group,
            shared_tokens=ask.shared_tokens,
            chat=ask.chat,
            turn=ask.turn,
        )
        if reply is None:
            return known
        stream, start_s = reply.stream, self._start_s
        is_estimated = stream.output_tokens is None
        if ask.shared_ratio is not None:
            known = replace(
                known, shared_tokens=int(ask.shared_ratio * (stream.prompt_tokens or 0))
            )
        return replace(
            known,
            outcome=reply.outcome,
            error=reply.error,
            sent_s=reply.sent_s - start_s,
            first_s=_minus(stream.first_s, start_s),
            first_answer_s=_minus(stream.first_answer_s, start_s),
            end_s=_minus(stream.end_s, start_s),
            chunks=tuple(Chunk(at_s - start_s, num) for at_s, num in stream.chunks),
            prompt_tokens=stream.prompt_tokens,
            output_tokens=len(stream.chunks) if is_estimated else stream.output_tokens,
            cached_tokens=stream.cached_tokens,
            is_estimated=is_estimated,
        )

    async def _drain(self, stopped: "asyncio.Task[bool]") -> None:
        deadline_s = self._now_s() + self._wish.drain_s
        while self._under_way and not stopped.done():
            left_s = deadline_s - self._now_s()
            if left_s <= 0:
                return
            waiting: set[asyncio.Task[Any]] = {stopped, *self._under_way}
            await asyncio.wait(waiting, timeout=left_s, return_when=asyncio.FIRST_COMPLETED)

    async def _watch_lag(self) -> None:
        while True:
            due_s = time.monotonic() + LAG_PERIOD_S
            await asyncio.sleep(LAG_PERIOD_S)
            self._lags_s.append(time.monotonic() - due_s)

    async def _tell(self, say: Say, until_s: float) -> None:
        while True:
            await asyncio.sleep(PROGRESS_PERIOD_S)
            failed = sum(not record.is_ok for record in self._records)
            say(
                f"bench {min(self._now_s(), until_s):.0f} of {until_s:.0f} s: {self._num_asks} sent, "
                f"{len(self._records) - failed} answered, {failed} failed"
            )


def _minus(at_s: float | None, start_s: float) -> float | None:
    return None if at_s is None else at_s - start_s


def _p99_ms(lags_s: list[float]) -> float:
    return percentile(sorted(lags_s), 0.99) * 1e3 if lags_s else 0.0


def _router_counts(grown: Traffic) -> RouterCounts | None:
    prompt_tokens, hit_tokens = grown.prompt_tokens_total, grown.predicted_hit_tokens_total
    if prompt_tokens is None or hit_tokens is None:
        return None
    return RouterCounts(prompt_tokens, hit_tokens, grown.decision, grown.queue)

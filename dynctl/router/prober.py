"""Asks every engine a question of the router's own, twice: what is cached the second time is true whatever clients ask.

So a broken precondition of prefix routing shows within seconds, also where nobody repeats a prompt. A question is a few
blocks of random words and one token of answer; it never leaves this deployment. IO: upstream connections.
"""

import asyncio
import logging
import random
from typing import TYPE_CHECKING

import msgspec

from dynctl.core.text import clean
from dynctl.http1.upstream import UpstreamError
from dynctl.router.api.requests import COMPLETIONS
from dynctl.router.api.shapes import Usage
from dynctl.router.api.streams import read_answer
from dynctl.router.hits import Outlook
from dynctl.router.sources.route import Route
from dynctl.router.tokens import NOT_FAULTS, ModelTokenizer
from dynctl.router.workers import Worker

if TYPE_CHECKING:
    from dynctl.router.desk import Desk

log = logging.getLogger("dynctl.router")

_LOOK_S = 0.5
_FIRST_S = (0.5, 2.5, 4.5, 6.5)
"""After an engine began to serve: as many questions as a finding needs."""
_BLOCKS = 4
_USUAL_BLOCK = 16
_WORD_CHARS = 6
"""A random word of hex digits is two tokens or more wherever words are made of parts."""
_TIMEOUT_S = 10.0


class Prober:
    """Keeps asking; `run` until cancelled."""

    def __init__(self, desk: "Desk") -> None:
        self._desk = desk
        self._every_s = desk.settings.probe_s
        self._rng = random.Random()  # noqa: S311 - words nobody else asks with, no secret
        self._since_s: dict[tuple[str, str], float] = {}
        """By incarnation: when it was first seen serving."""
        self._num_asked: dict[tuple[str, str], int] = {}

    async def run(self) -> None:
        """Ask whoever is due."""
        if self._every_s <= 0:
            return
        asking: dict[str, asyncio.Task[None]] = {}
        async with asyncio.TaskGroup() as group:
            while True:
                workers = self._desk.workers.all()
                keys = {worker.key for worker in workers}
                for known in (self._since_s, self._num_asked):
                    for key in [key for key in known if key not in keys]:
                        del known[key]
                asking = {engine: task for engine, task in asking.items() if not task.done()}
                for worker in workers:
                    if worker.id not in asking and self._is_due(worker):
                        self._num_asked[worker.key] = self._num_asked.get(worker.key, 0) + 1
                        asking[worker.id] = group.create_task(
                            self._ask(worker), name=f"probe:{worker.id}"
                        )
                await asyncio.sleep(_LOOK_S)

    def _is_due(self, worker: Worker) -> bool:
        now_s = self._desk.loop.time()
        # A busy engine is judged by what clients ask; it has no time for questions.
        if not worker.is_serving() or not worker.has_room(now_s) or self._desk.is_draining:
            return False
        age_s = now_s - self._since_s.setdefault(worker.key, now_s)
        number = self._num_asked.get(worker.key, 0)
        further = number - len(_FIRST_S)
        due_s = _FIRST_S[number] if further < 0 else _FIRST_S[-1] + (further + 1) * self._every_s
        return age_s >= due_s

    async def _ask(self, worker: Worker) -> None:
        desk, now_s = self._desk, self._desk.loop.time()
        route = desk.fleet.routes.get(worker.id)
        if route is None:
            return
        size = worker.block_size or _USUAL_BLOCK
        booking = worker.book(_BLOCKS * size, _BLOCKS * size, 1, now_s, 0.0)
        try:
            text = new_text(desk.tokens.tokenizer, _BLOCKS * size, self._rng)
            first = await _complete(route, worker.info.model, text)
            second = await _complete(route, worker.info.model, text)
            if first is not None and second is not None:
                self._judge(worker, text, size, (first, second))
        except UpstreamError as error:
            log.debug("engine %s did not answer a probe: %s", clean(worker.id), clean(str(error)))
        except NOT_FAULTS:
            raise
        except BaseException:  # looking at an engine must not end the watch over all
            log.exception("the probe of engine %s failed", clean(worker.id))
        finally:
            booking.release()

    def _judge(self, worker: Worker, text: str, size: int, usages: tuple[Usage, Usage]) -> None:
        desk, now_s = self._desk, self._desk.loop.time()
        cacheable = (usages[1].prompt_tokens - 1) // size
        if cacheable < 1:
            return
        cached = usages[1].cached_tokens
        desk.hits.probed(cacheable * size, cached)
        tokenizer = desk.tokens.tokenizer
        ids = [] if tokenizer is None else tokenizer.encode(text, has_special=True)
        blocks = desk.hashers.of(size).prompt(ids)
        outlook = Outlook(worker, blocks, cacheable, size, 0, 0, len(ids))
        desk.probes.ended(outlook, usages[0].cached_tokens, now_s)
        repeated = outlook._replace(held=cacheable * size, predicted=cacheable * size)
        desk.probes.ended(repeated, cached, now_s)


def new_text(tokenizer: ModelTokenizer | None, num_tokens: int, rng: random.Random) -> str:
    """Write a text of some tokens that nobody can have cached."""
    number = max(num_tokens // 2, 1) + 1
    text = " ".join(f"{rng.getrandbits(4 * _WORD_CHARS):06x}" for _ in range(number))
    if tokenizer is None or len(set(tokenizer.encode(text, has_special=False))) > 2:
        return text
    # A vocabulary of whole words takes them all for its unknown one, and that was asked for before.
    return tokenizer.random_text(num_tokens + 1, rng)


async def _complete(route: Route, model: str, text: str) -> Usage | None:
    """Ask for one token; None where the engine refuses.

    Raises:
        UpstreamError: when there is no whole answer in time.
    """
    body = {"model": model, "prompt": text, "max_tokens": 1, "temperature": 0.0}
    answer = await route.fetch("POST", COMPLETIONS, msgspec.json.encode(body), _TIMEOUT_S)
    return read_answer(answer.body).usage if answer.status == 200 else None

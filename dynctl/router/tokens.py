"""Prompts → token ids with the model's own tokenizer, as the engine counts them.

Short prompts are tokenised at once (less than a hop to a thread costs), longer ones in a thread; texts seen before
come from a cache. IO: files (once), threads.
"""

import asyncio
import ctypes
import logging
import os
import random
from array import array
from collections import OrderedDict
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, Final

import msgspec
from tokenizers import Tokenizer

from dynctl.errors import ExitCode, RouterError
from dynctl.router.api.requests import CHAT, ApiRequest
from dynctl.router.config import Settings
from dynctl.router.prompt import Hashers, Prompt
from dynctl.router.template import ChatTemplate
from dynctl.router.text_blocks import pseudo_ids, spelled
from dynctl.router.units import UnitCutter

log = logging.getLogger("dynctl.router")

_PATIENCE_S = 10.0
"""For a prompt in the thread: longer than any takes, and than a client should wait to be placed a little better."""

NOT_FAULTS: Final = (asyncio.CancelledError, KeyboardInterrupt, SystemExit)
"""All else that comes out of a tokenizer is one, also what is no Exception: a library in Rust raises that where it is wrong
about itself."""

_SPECIAL = ("bos_token", "eos_token", "unk_token", "pad_token", "sep_token", "cls_token")


class ModelTokenizer:
    """A tokenizer directory: tokenizer.json, and the chat template where there is one."""

    def __init__(self, tokenizer: Tokenizer, template: ChatTemplate | None) -> None:
        tokenizer.no_truncation()
        tokenizer.no_padding()
        self._tokenizer = tokenizer
        self._template = template
        self.cutter = UnitCutter(tokenizer)
        """Cuts rendered chats into parts that are tokenised once."""

    def text_of(self, request: ApiRequest) -> str | None:
        """The prompt's text; None where it cannot be known."""
        if request.endpoint == CHAT:
            return None if self._template is None else self._template.render(request.body)
        if request.body.get("truncate_prompt_tokens") or request.body.get("prompt_embeds"):
            return None
        return request.prompt_text

    def encode(self, text: str, *, has_special: bool) -> list[int]:
        """Tokenise; `has_special` adds the tokens the model frames a plain prompt with."""
        ids: list[int] = self._tokenizer.encode_batch_fast([text], add_special_tokens=has_special)[
            0
        ].ids
        return ids

    def random_text(self, num_tokens: int, rng: random.Random) -> str:
        """Spell random tokens."""
        size = self._tokenizer.get_vocab_size()
        text: str = self._tokenizer.decode([rng.randrange(size) for _ in range(num_tokens)])
        return text

    def chat_ids(self, messages: Sequence[Mapping[str, Any]]) -> list[int] | None:
        """Tokenise a conversation, for the parity check."""
        text = None if self._template is None else self._template.render({"messages": messages})
        return None if text is None else self.encode(text, has_special=False)


_TOKENIZER_HINT = "give the model's directory, or none at all"


def load_tokenizer(directory: str) -> ModelTokenizer:
    """Read a tokenizer directory.

    Raises:
        RouterError: when there is no readable tokenizer.json, or the template is malformed.
    """
    # One thread per call: parallelism over a batch of one only costs, and its pool does not survive forks.
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
    path = Path(directory) / "tokenizer.json"
    if not path.is_file():
        raise RouterError(f"no tokenizer.json in {directory}", _TOKENIZER_HINT, code=ExitCode.USAGE)
    try:
        tokenizer = Tokenizer.from_file(str(path))
    except Exception as error:  # the library raises plain Exception
        raise _unusable(path, error) from error
    _give_back_memory()
    config = _read_json(Path(directory) / "tokenizer_config.json")
    special = {name: text for name in _SPECIAL if (text := _token_text(config.get(name)))}
    source = _template_source(Path(directory), config)
    return ModelTokenizer(tokenizer, ChatTemplate(source, special) if source else None)


def _unusable(path: Path, error: Exception) -> RouterError:
    return RouterError(f"{path} cannot be used: {error}", _TOKENIZER_HINT, code=ExitCode.USAGE)


def _give_back_memory() -> None:
    """Return to the system what reading left behind: of 150,000 words 50 MB of 97."""
    with suppress(AttributeError, OSError):  # other C libraries have no such call
        ctypes.CDLL(None).malloc_trim(0)


def _template_source(directory: Path, config: Mapping[str, Any]) -> str | None:
    file = directory / "chat_template.jinja"
    if file.is_file():
        try:
            return file.read_text(encoding="utf-8")
        except (OSError, UnicodeDecodeError) as error:
            raise _unusable(file, error) from error
    source = config.get("chat_template")
    if isinstance(source, list):
        entries = [entry for entry in source if isinstance(entry, dict)]
        named = {entry.get("name"): entry.get("template") for entry in entries}
        source = named.get("default")
    return source if isinstance(source, str) else None


def _token_text(token: object) -> str | None:
    if isinstance(token, dict):
        token = token.get("content")
    return token if isinstance(token, str) else None


def _read_json(path: Path) -> dict[str, Any]:
    if not path.is_file():
        return {}
    try:
        found = msgspec.json.decode(path.read_bytes())
    except (OSError, ValueError, RecursionError, msgspec.MsgspecError) as error:
        raise _unusable(path, error) from error
    return found if isinstance(found, dict) else {}


class Tokenized(msgspec.Struct, frozen=True):
    """What is known of a prompt's tokens."""

    ids: Sequence[int] | None
    """None: routed by load only."""
    num_chars: int
    how: str
    """`given`, `short`, `cache`, `inline`, `thread`, `text`, `none` or `late`."""

    def prompt(self, hashers: Hashers, request: ApiRequest) -> Prompt:
        """The prompt as routing needs it."""
        if self.ids is None:
            return Prompt.guessed(hashers, self.num_chars)
        return Prompt.known(hashers, self.ids, partial(spelled, request))


class PromptTokens:
    """Tokenises requests; `close` ends the threads."""

    def __init__(self, tokenizer: ModelTokenizer | None, settings: Settings) -> None:
        self._tokenizer = tokenizer
        self._short_chars = settings.short_request_chars
        self._inline_chars = settings.inline_tokenize_chars
        self._cache: OrderedDict[tuple[str, bool], array[int]] = OrderedDict()
        self._cache_bytes = 0
        self._max_cache_bytes = settings.token_cache_bytes
        self._num_overdue = 0
        """Prompts given up that the thread still works on."""
        # One thread: its work holds no lock of the interpreter, and two cores serve engines too.
        self._threads = ThreadPoolExecutor(max_workers=1, thread_name_prefix="tokenize")

    @property
    def tokenizer(self) -> ModelTokenizer | None:
        """The model's tokenizer, if there is one."""
        return self._tokenizer

    def submit(self, request: ApiRequest, deliver: Callable[[Tokenized], None]) -> None:
        """Call `deliver` with the tokens: at once where they are known or cheap, else later on the loop."""
        ids = request.prompt_ids
        if ids is not None:
            deliver(Tokenized(ids, len(ids) * 4, "given"))
            return
        tokenizer = self._tokenizer
        number = request.num_chars
        if number < self._short_chars:
            deliver(Tokenized(None, number, "short"))
        elif request.num_sequences > 1:
            deliver(Tokenized(None, number, "none"))
        elif tokenizer is None:
            text_ids = pseudo_ids(request)
            deliver(Tokenized(text_ids, number, "none" if text_ids is None else "text"))
        elif number <= self._inline_chars:
            deliver(self._finished(number, self._work(tokenizer, request), "inline"))
        elif self._num_overdue:
            # Nobody knows when the thread is free again.
            deliver(Tokenized(None, number, "late"))
        else:
            self._submit(_Job(tokenizer, request, number, deliver))

    def _submit(self, job: "_Job") -> None:
        """Let the thread do it, with patience for a while."""
        loop = asyncio.get_running_loop()
        work = self._threads.submit(self._work, job.tokenizer, job.request)
        timer = loop.call_later(_PATIENCE_S, self._give_up, job, work)
        asyncio.wrap_future(work).add_done_callback(partial(self._on_done, job, timer))

    def _give_up(self, job: "_Job", work: "Future[_Work | None]") -> None:
        job.is_given_up = True
        if not work.cancel():
            self._num_overdue += 1
            log.warning(
                "a prompt of %d characters is not tokenised after %.0f s: until it is, long prompts are routed by load",
                *(job.num_chars, _PATIENCE_S),
            )
        job.deliver(Tokenized(None, job.num_chars, "late"))

    def _on_done(
        self, job: "_Job", timer: asyncio.TimerHandle, done: "asyncio.Future[_Work | None]"
    ) -> None:
        timer.cancel()
        if done.cancelled():
            return
        work = None if done.exception() is not None else done.result()
        tokenized = self._finished(job.num_chars, work, "thread")
        if job.is_given_up:
            self._num_overdue -= 1
        else:
            job.deliver(tokenized)

    def close(self) -> None:
        """End the threads."""
        self._threads.shutdown(wait=True, cancel_futures=True)

    def _work(self, tokenizer: ModelTokenizer, request: ApiRequest) -> "_Work | None":
        """Render and tokenise what is not in the cache; runs on the loop or in the thread."""
        try:
            text = tokenizer.text_of(request)
            if text is None:
                return None
            has_special = bool(request.body.get("add_special_tokens", request.endpoint != CHAT))
            # The tokens that frame a plain prompt belong to the whole of it.
            parts = [text] if has_special else tokenizer.cutter.cut(text)
            keys = [(part, has_special) for part in parts]
            found = {key: self._cache.get(key) for key in keys}
            missing = [key for key, ids in found.items() if ids is None]
            if not missing:
                fresh: list[array[int]] = []
            elif has_special:
                fresh = [array("I", tokenizer.encode(text, has_special=True))]
            else:
                fresh = tokenizer.cutter.encode([part for part, _ in missing])
            found.update(zip(missing, fresh, strict=True))
            known = [ids for key in keys if (ids := found[key]) is not None]
            ids = known[0] if len(known) == 1 else sum(known, array("I"))
            return _Work(keys, found, missing, ids)
        except NOT_FAULTS:
            raise
        except BaseException as error:
            if not isinstance(error, Exception):
                log.exception(
                    "the tokenizer failed on a prompt of %d characters", request.num_chars
                )
            return None

    def _finished(self, num_chars: int, work: "_Work | None", how: str) -> Tokenized:
        """Put fresh work into the cache; on the loop only, so that the cache has one writer."""
        if work is None:
            return Tokenized(None, num_chars, "none")
        try:
            self._keep(work)
        except Exception:  # it only saves time: the tokens are here
            log.exception("the cache of tokens failed")
        return Tokenized(work.ids, num_chars, how if work.missing else "cache")

    def _keep(self, work: "_Work") -> None:
        cache = self._cache
        for key in work.keys:
            if key in cache:
                cache.move_to_end(key)
                continue
            packed = work.found[key]
            if packed is not None:
                cache[key] = packed
                self._cache_bytes += _entry_bytes(key[0], packed)
        while self._cache_bytes > self._max_cache_bytes:
            (old_text, _), old = cache.popitem(last=False)
            self._cache_bytes -= _entry_bytes(old_text, old)


@dataclass(slots=True)
class _Job:
    """A prompt for the thread; delivered once."""

    tokenizer: ModelTokenizer
    request: ApiRequest
    num_chars: int
    deliver: Callable[[Tokenized], None]
    is_given_up: bool = False


@dataclass(frozen=True, slots=True)
class _Work:
    """A prompt tokenised, and the parts it was made of."""

    keys: "list[tuple[str, bool]]"
    found: "dict[tuple[str, bool], array[int] | None]"
    missing: "list[tuple[str, bool]]"
    """Those that had to be tokenised now."""
    ids: "array[int]"


def _entry_bytes(text: str, ids: "array[int]") -> int:
    return len(text) + 4 * len(ids) + 300

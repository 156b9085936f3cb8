"""What is sent: synthetic prompts, shared prefixes, chats over several turns; seeded, so that a run can be repeated.

Not here: when (`arrivals`), sending (`client`). Pure.
"""

import math
import random
import re
from collections import deque
from dataclasses import dataclass, field
from typing import Protocol

from dynctl.bench.words import TokenCount, text
from dynctl.core.units import whole
from dynctl.errors import UsageError

KINDS: dict[str, dict[str, str]] = {
    "synthetic": {"isl": "1024", "osl": "128"},
    "mixed": {"isl": "either(128,2048)", "osl": "either(32,256)"},
    "prefix": {"groups": "32", "len": "1024", "suffix": "128", "osl": "128"},
    "multiturn": {
        "chats": "16",
        "turns": "4",
        "groups": "1",
        "system": "256",
        "isl": "128",
        "osl": "128",
    },
}
"""Kind of workload to its keys and their defaults; lengths in tokens."""
LENGTHS = {"isl", "osl", "suffix"}
"""Keys that may vary: `256`, `either(128,2048)`, `uniform(100,400)` or `lognormal(MEAN,SIGMA)`."""

_ITEM = re.compile(r"([a-z]+)=([^,(]+(?:\([^)]*\))?)(?:,|$)")
_LENGTH = re.compile(r"^(either|uniform|lognormal)\(([0-9.]+),([0-9.]+)\)$")
MAX_LENGTH_TOKENS = 10_000_000


@dataclass(frozen=True, slots=True)
class Length:
    """A length in tokens: fixed, or drawn anew for each request."""

    kind: str
    first: float
    second: float = 0.0

    @property
    def longest(self) -> int | None:
        """The most that is drawn, where that is bounded by a few values."""
        if self.kind not in {"fixed", "either"}:
            return None
        return int(max(self.first, self.second))

    def draw(self, rng: random.Random) -> int:
        """Draw a length of at least one token."""
        if self.kind == "either":
            return int(rng.choice((self.first, self.second)))
        if self.kind == "uniform":
            return max(1, round(rng.uniform(self.first, self.second)))
        if self.kind == "lognormal":
            # `first` is the mean of the drawn lengths, not of their logarithms.
            mu = math.log(self.first) - self.second**2 / 2
            return max(1, round(rng.lognormvariate(mu, self.second)))
        return int(self.first)


@dataclass(frozen=True, slots=True)
class Workload:
    """A kind of workload with its keys resolved."""

    kind: str
    isl: Length
    """Tokens of the whole prompt with the chat template (synthetic, mixed); of the suffix's text (prefix); of each user
    turn's text (multiturn)."""
    osl: Length
    shared_tokens: int = 0
    """Length of the prefix that requests of one group share."""
    groups: int = 0
    chats: int = 0
    turns: int = 1
    text: str = ""
    """As it was written."""

    @property
    def begins_with_system(self) -> bool:
        """Whether a system message comes first."""
        return self.groups > 0

    @property
    def recorded(self) -> "Recorded | None":
        """Nothing was."""
        return None

    def script(self, count: TokenCount, seed: int) -> "Script":
        """What writes its requests."""
        return Script(self, count, seed)

    @property
    def longest_tokens(self) -> int | None:
        """Prompt and answer of the longest request; None when lengths are drawn or answers add up over turns."""
        if self.isl.longest is None or self.osl.longest is None:
            return None
        return self.shared_tokens + (self.isl.longest + self.osl.longest) * self.turns


def parse_workload(spec: str) -> Workload:
    """Read `synthetic:isl=1024,osl=128`, `mixed`, `prefix:groups=32,len=1024,…` or `multiturn:chats=16,turns=4,…`.

    Raises:
        UsageError: for an unknown kind or key, or a bad value; names the keys there are.
    """
    kind, _, rest = spec.partition(":")
    if kind not in KINDS:
        raise UsageError(
            f"--workload {spec!r}: no workload {kind!r}",
            f"there are: {', '.join(KINDS)}; a trace is sent by dynctl bench replay FILE",
        )
    keys = dict(KINDS[kind])
    known = f"{kind} knows: " + ", ".join(f"{key}={value}" for key, value in keys.items())
    at = 0
    while at < len(rest):
        match = _ITEM.match(rest, at)
        if match is None or match[1] not in keys:
            raise UsageError(f"--workload {spec!r}: cannot read {rest[at:]!r}", known)
        keys[match[1]] = match[2].strip()
        at = match.end()
    try:
        values = {key: _length(value, key in LENGTHS) for key, value in keys.items()}
    except ValueError as error:
        raise UsageError(f"--workload {spec!r}: {error}", known) from error
    return _workload(kind, values, spec)


def _length(value: str, may_vary: bool) -> Length:
    match = _LENGTH.match(value)
    if match and may_vary:
        length = Length(match[1], float(match[2]), float(match[3]))
        low = length.first
        high = low if length.kind == "lognormal" else length.second
        if length.kind == "either":
            low, high = sorted((low, high))
            if not (low.is_integer() and high.is_integer()):
                raise ValueError(f"{value!r} is not two whole numbers")
        if not 1 <= low <= high <= MAX_LENGTH_TOKENS or length.second > MAX_LENGTH_TOKENS:
            raise ValueError(f"{value!r} is out of range")
        return length
    number = whole(value)
    if number is None or not 1 <= number <= MAX_LENGTH_TOKENS:
        raise ValueError(f"{value!r} is no number of 1 or more")
    return Length("fixed", float(number))


def _workload(kind: str, values: dict[str, Length], spec: str) -> Workload:
    number = {key: int(length.first) for key, length in values.items() if length.kind == "fixed"}
    if kind in {"synthetic", "mixed"}:
        return Workload(kind, values["isl"], values["osl"], text=spec)
    if kind == "prefix":
        return Workload(
            kind, values["suffix"], values["osl"], number["len"], number["groups"], text=spec
        )
    return Workload(
        kind,
        values["isl"],
        values["osl"],
        number["system"],
        number["groups"],
        number["chats"],
        number["turns"],
        text=spec,
    )


FEWEST_WORDS = 3
"""A text is never shorter, so that even tiny prompts differ; `asked` and `got` in the report then do as well."""

Message = tuple[str, str]
"""Role and text."""


@dataclass(frozen=True, slots=True)
class Ask:
    """One request to send."""

    messages: tuple[Message, ...]
    osl_tokens: int
    isl_tokens: int | None
    """Prompt length aimed at; None for later turns, where answers decide."""
    group: int | None = None
    """Requests of one group begin with the same `shared_tokens`."""
    shared_tokens: int = 0
    chat: int | None = None
    turn: int = 1
    shared_ratio: float | None = None
    """Share of the prompt that an earlier one begins with, where its tokens are not known before it is answered."""
    session: str = ""
    """Sent along as `X-Dynctl-Session`."""


@dataclass(frozen=True, slots=True)
class Recorded:
    """What a replayed trace is."""

    digest: str
    """Of its times, lengths, blocks and texts."""
    num_requests: int
    speed: float
    block_tokens: int
    ideal_ratio: float
    """Its own hit rate, see the definition of `kv_trace_ideal_ratio`."""


class Writer(Protocol):
    """Makes requests one after the other."""

    def next(self) -> Ask:
        """Make the next one; never waits."""
        ...

    def answered(self, ask: Ask, answer: str | None) -> None:
        """Take in an answer; None: it failed."""
        ...


class Source(Protocol):
    """What is sent in a run: a made workload, or a recorded one."""

    @property
    def text(self) -> str:
        """As reports name it."""
        ...

    @property
    def longest_tokens(self) -> int | None:
        """Prompt and answer of the longest request, where that is known."""
        ...

    @property
    def begins_with_system(self) -> bool:
        """Whether a system message comes first."""
        ...

    @property
    def recorded(self) -> Recorded | None:
        """What was recorded, of a trace."""
        ...

    def script(self, count: TokenCount, seed: int) -> Writer:
        """What writes its requests."""
        ...


@dataclass(slots=True)
class _Chat:
    number: int
    group: int
    messages: list[Message] = field(default_factory=list)
    num_turns: int = 0


class Script:
    """Makes the next request, and takes in answers where later requests contain them.

    The content of a request depends on the seed and its number (or chat and turn) alone, not on timing.
    """

    def __init__(self, workload: Workload, count: TokenCount, seed: int) -> None:
        self._workload = workload
        self._count = count
        self._seed = seed
        self._num_asks = 0
        self._num_chats = 0
        self._idle: deque[_Chat] = deque()
        self._busy: dict[int, _Chat] = {}

    def next(self) -> Ask:
        """Make the next request; never waits: when every chat is being answered, a new one begins."""
        number = self._num_asks
        self._num_asks += 1
        if self._workload.kind == "multiturn":
            return self._next_turn()
        rng = self._rng("ask", number)
        group = rng.randrange(self._workload.groups) if self._workload.groups else None
        tail_tokens, osl_tokens = self._workload.isl.draw(rng), self._workload.osl.draw(rng)
        if group is None:
            text_tokens = tail_tokens - self._count.overhead_tokens
            return Ask((("user", self._text(rng, text_tokens)),), osl_tokens, tail_tokens)
        messages = (("system", self._head(group)), ("user", self._text(rng, tail_tokens)))
        shared_tokens = self._workload.shared_tokens
        isl_tokens = self._with_overhead(shared_tokens + tail_tokens)
        return Ask(messages, osl_tokens, isl_tokens, group, shared_tokens)

    def answered(self, ask: Ask, answer: str | None) -> None:
        """Take in the answer to a request of `next`; None: it failed, so that its chat ends."""
        if ask.chat is None:
            return
        chat = self._busy.pop(ask.chat)
        if answer is None or chat.num_turns >= self._workload.turns:
            return
        chat.messages.append(("assistant", answer))
        self._idle.append(chat)

    def _next_turn(self) -> Ask:
        # Chats take turns, so that a chat's next turn comes after the others had theirs.
        if self._idle and len(self._idle) + len(self._busy) >= self._workload.chats:
            chat = self._idle.popleft()
        else:
            chat = self._new_chat()
        chat.num_turns += 1
        self._busy[chat.number] = chat
        rng = self._rng("turn", chat.number, chat.num_turns)
        user_tokens, osl_tokens = self._workload.isl.draw(rng), self._workload.osl.draw(rng)
        chat.messages.append(("user", self._text(rng, user_tokens)))
        shared_tokens = self._workload.shared_tokens
        isl_tokens = self._with_overhead(shared_tokens + user_tokens)
        return Ask(
            tuple(chat.messages),
            osl_tokens,
            isl_tokens if chat.num_turns == 1 else None,
            chat.group,
            shared_tokens,
            chat.number,
            chat.num_turns,
        )

    def _new_chat(self) -> _Chat:
        number = self._num_chats
        self._num_chats += 1
        group = number % self._workload.groups
        return _Chat(number, group, [("system", self._head(group))])

    def _head(self, group: int) -> str:
        return self._text(self._rng("group", group), self._workload.shared_tokens)

    def _text(self, rng: random.Random, num_tokens: float) -> str:
        num_words = max(FEWEST_WORDS, round(num_tokens / self._count.per_word_tokens))
        return text(rng, self._count.words, num_words)

    def _with_overhead(self, num_tokens: int) -> int:
        return round(num_tokens + self._count.overhead_tokens)

    def _rng(self, *parts: object) -> random.Random:
        return random.Random("/".join(map(str, (self._seed, *parts))))  # noqa: S311 - not a secret


def prompt_text(messages: tuple[Message, ...]) -> str:
    """Join messages into one prompt for the completions API, each on a line of its own but for answers.

    An answer stands right behind the prompt it continued, as it does in the cache of the engine that gave it.
    """
    lines = [text if role == "assistant" else f"\n{text}" for role, text in messages]
    return "".join(lines).removeprefix("\n")

"""Why hits stay away, per engine: each precondition of prefix routing is checked on live traffic, and the broken one named.

When a request ends, its prompt must be in its engine's published blocks a few seconds later, found under our own hash.
Where it is not, what is known of the engine says why. Only the last requests count, so that an engine that was well for
long is named as soon as one that never was. A workload without repeats is no fault and gives no finding.
Not here: gathering the evidence (`probes`). Pure.
"""

from collections import deque
from collections.abc import Iterable
from dataclasses import dataclass, field
from enum import Enum, auto

_NUM_LOOKS = 8
_NUM_REPEATS = 16
"""In a burst of one new prompt the index expects it where it is still computed: so many in a row are no burst."""


class Look(Enum):
    """What became of a prompt that was looked for after it ended."""

    FOUND = auto()
    OTHER_SIZE = auto()
    """In blocks of another size."""
    KEYED = auto()
    """Not found, and since others were, blocks with a LoRA or a salt came."""
    LOST = auto()
    """Not found, and events were missing for good, or spoke of what nobody told before."""
    UNSEEDED = auto()
    """Under the hash without the deployment's seed."""
    MISSING = auto()


def _looks() -> deque[Look]:
    return deque(maxlen=_NUM_LOOKS)


def _repeats() -> deque[tuple[int, int]]:
    return deque(maxlen=_NUM_REPEATS)


def _told_hits() -> deque[tuple[int, int, int]]:
    return deque(maxlen=_NUM_TOLD)


@dataclass(slots=True)
class Evidence:
    """What is known of one engine incarnation."""

    engine: str
    has_events_source: bool = True
    """Whether anybody tells its events at all."""
    was_connected: bool = True
    """Whether whoever reads them has ever reached them."""
    events_at: str = ""
    """Where they are read; empty: a relay knows."""
    other_topic: str = ""
    """The topic of its events, where it isn't the one subscribed to."""
    num_other_ranks: int = 0
    """Event batches of data-parallel ranks not expected where they came from."""
    num_other_groups: int = 0
    """Events of groups of layers whose blocks do not stand for a prefix."""
    num_lost: int = 0
    """Times that its events were missing for good, so that all that was known of it was forgotten: in the last minute, or
    since a prompt was found."""
    has_orphans: bool = False
    """Whether in the last minute they spoke of blocks whose beginnings nobody told."""
    num_ranks: int = 0
    """Data-parallel ranks it says it has; 0: it does not say."""
    num_ranks_read: int = 0
    """Whose events are read; 0: whoever reads them does not say."""
    num_stored_blocks: int = 0
    """Blocks it was said to hold."""
    empty_for_s: float = 0.0
    """For how long there were none of those."""
    num_undecodable: int = 0
    """Event batches that could not be read."""
    is_caching: bool | None = None
    """Whether the engine says that its prefix cache is on; None: it does not say."""
    parity: str = "unverified"
    parity_detail: str = ""
    block_size: int = 0
    """The router asks with."""
    looks: deque[Look] = field(default_factory=_looks)
    """At the last prompts, after they ended there."""
    other_size: int = 0
    num_unheard: int = 0
    """Prompts in a row that were not found while no block of any came, of an engine whose prompts were found before."""
    num_reported: int = 0
    """Answers that said how much was cached."""
    num_ended: int = 0
    num_text: int = 0
    """Of those, the ones placed by their text, because the router has no tokenizer."""
    repeats: deque[tuple[int, int]] = field(default_factory=_repeats)
    """Of the last prompts that this engine must have had, because its published blocks say so: how many tokens, and how
    many it reports."""
    told_hits: deque[tuple[int, int, int]] = field(default_factory=_told_hits)
    """Of the last prompts that it said the hits of: tokens, those expected to be hits, and those it reports."""
    differs_for_s: float = 0.0
    """For how long those sums have been far from each other."""


@dataclass(frozen=True, slots=True)
class Finding:
    """A precondition that does not hold on one engine, or something wrong with the router."""

    engine: str
    """Empty: the router itself."""
    cause: str
    text: str
    hint: str


_NUM_TOLD = 128
_MIN_TOLD = 32
_MIN_TOLD_TOKENS = 32_768
_MAX_DIFFERENCE = 0.1
"""Of the prompts' tokens. Real engines differ from what is predicted by less than a hundredth."""

SILENCE_S = 12.0
"""An engine that computes tells of blocks more often. After 10 s whoever reads them asks again for what may have been missed,
and learns of another topic: before that, silence says nothing."""

_PATIENCE_S = 30.0
"""Prompts that come at once are expected where the first of them is still computed: that is over sooner."""

_MIN_UNREPORTED = 16
_MIN_CHECKED = 3
_MIN_LOST = 3
"""Fewer may be one stall of the network."""
_MIN_REPEATED_TOKENS = 256


def diagnose(e: Evidence) -> Finding | None:
    """Name the first broken precondition; None: nothing is wrong, or too little is known yet."""
    if e.num_ended < _MIN_CHECKED:
        return None
    found = _tokens(e) or events_fault(e) or _identity(e) or _reports(e)
    return None if found is None else Finding(e.engine, *found)


def _tokens(e: Evidence) -> tuple[str, str, str] | None:
    """Whether prompts are asked for in tokens at all."""
    if e.num_text < _MIN_CHECKED:
        return None
    return (
        "no_tokenizer",
        "the router has no tokenizer: prompts are matched by their text, not by what the engine says it holds",
        "give the router the model's directory (--tokenizer, or tokenizer in the inventory)",
    )


def events_fault(e: Evidence) -> tuple[str, str, str] | None:
    """Say why no events arrive that can be read: cause, text and hint; None: they do, or may still come."""
    if not e.has_events_source:
        return (
            "no_events_source",
            "nobody tells what its cache holds: no KV events of it are read",
            "give kv-events=… to route, or as engine.args for adopted servers; engines that dynctl up starts tell by themselves",
        )
    if e.is_caching is False:
        return (
            "caching_off",
            "the engine's prefix cache is off",
            "start it without --no-enable-prefix-caching",
        )
    if not e.was_connected:
        return (
            "events_unreachable",
            f"nothing answers {f'at {e.events_at}, ' if e.events_at else ''}where its KV events should come from",
            "start it with --kv-events-config enable_kv_cache_events=true, and check kv-events' address and port",
        )
    if e.other_topic:
        return (
            "topic",
            f"its KV events have the topic {e.other_topic!r}, which nobody subscribes to",
            "give the same topic on both sides, or none to the router",
        )
    return _ranks(e) or _losses(e) or _silence(e)


def _losses(e: Evidence) -> tuple[str, str, str] | None:
    """Whether events are missing for good again and again."""
    is_lost = e.num_lost >= _MIN_LOST or (_says_nothing(e) and (e.num_lost or e.has_orphans))
    return _lost(e) if is_lost else None


def _says_nothing(e: Evidence) -> bool:
    """Whether no block of it is known; just after all was forgotten that means nothing yet."""
    return not e.num_stored_blocks and e.empty_for_s >= SILENCE_S


def _lost(e: Evidence) -> tuple[str, str, str]:
    if e.num_lost:
        times = "once" if e.num_lost == 1 else f"{e.num_lost} times lately"
        text = f"KV events of it were lost for good {times}, and with them all that was known of its cache"
    else:
        text = "its KV events go on from blocks that nobody told of: it cached those before its events were read, or some were lost"
    return (
        "events_lost",
        text,
        "give kv-replay=… to route, so that what is missing is asked for; where it is given, see that it answers there",
    )


def _silence(e: Evidence) -> tuple[str, str, str] | None:
    """Whether what comes says anything."""
    if e.num_undecodable and _says_nothing(e):
        return (
            "event_version",
            f"{e.num_undecodable} KV event batches could not be read, and no others came",
            "its version publishes events that this dynctl does not know: upgrade dynctl, or start the version that worked",
        )
    if e.num_other_groups and _says_nothing(e):
        return (
            "attention",
            "its events only speak of layers that keep a part of a prefix: sliding windows, chunks, states",
            "no prefix can be told of such a model; requests are placed by load and by what engines were sent",
        )
    if _says_nothing(e):
        return (
            "no_events",
            "requests end here and no KV event says what they left in the cache",
            "start it with --kv-events-config enable_kv_cache_events=true, and give route its topic and kv-replay=…",
        )
    if e.num_unheard >= _MIN_CHECKED:
        return (
            "no_events",
            "requests end here and no KV event comes any more",
            "give kv-replay=… to route, so that what is lost is asked for again; else restart the engine",
        )
    return None


def _ranks(e: Evidence) -> tuple[str, str, str] | None:
    """Whether the events of all its data-parallel ranks are read, each where it is expected."""
    hint = "give route ranks=N, and as kv-events the port of the first: each rank has the next one"
    if e.num_ranks_read and e.num_ranks > e.num_ranks_read:
        return (
            "ranks",
            f"it has {e.num_ranks} data-parallel ranks, and events of {e.num_ranks_read} are read",
            hint,
        )
    if 0 < e.num_ranks < e.num_ranks_read:
        return (
            "ranks",
            f"it has {e.num_ranks} data-parallel ranks, not {e.num_ranks_read}: the others get no requests",
            f"give route ranks={e.num_ranks}",
        )
    if e.num_other_ranks:
        return (
            "ranks",
            f"{e.num_other_ranks} event batches name another data-parallel rank than expected there",
            hint,
        )
    return None


def _identity(e: Evidence) -> tuple[str, str, str] | None:
    """Whether the engine's blocks have the names we ask by."""
    if e.parity == "mismatch":
        is_template = "chat" in e.parity_detail
        return (
            "chat_template" if is_template else "tokenizer",
            f"the engine counts tokens differently: {e.parity_detail}",
            "give the router the engine's own model directory",
        )
    num_found = e.looks.count(Look.FOUND)
    num_missed = len(e.looks) - num_found
    if len(e.looks) < _MIN_CHECKED or num_found > num_missed:
        return None
    if Look.OTHER_SIZE in e.looks:
        return (
            "block_size",
            f"its blocks have {e.other_size} tokens, the router asks for blocks of {e.block_size}",
            "plan what the engine has: limits.block_size_tokens in the inventory, dynctl plan, dynctl up",
        )
    if Look.UNSEEDED in e.looks:
        return (
            "seed",
            "its blocks are hashed without this deployment's seed",
            "relay and router are of different ups: dynctl up on all hosts gives both the same block_hash_seed",
        )
    if e.looks.count(Look.KEYED) * 2 >= num_missed:
        return (
            "salt",
            "its blocks carry a cache salt or a LoRA that the router does not ask with",
            "what stands between router and engine adds one: let clients name it to the router (cache_salt, or the LoRA as model)",
        )
    if (e.num_lost or e.has_orphans) and e.looks.count(Look.LOST) * 2 >= num_missed:
        return _lost(e)
    if num_found:
        return None
    return (
        "seed",
        "its blocks never have the names of the prompts it was sent",
        "dynctl up gives relay and router the same block_hash_seed; else compare model revision and tokenizer of both sides",
    )


def _reports(e: Evidence) -> tuple[str, str, str] | None:
    """Whether the engine finds what it published."""
    repeated_tokens = sum([expected for expected, _ in e.repeats])
    has_repeats = repeated_tokens >= _MIN_REPEATED_TOKENS
    if not e.num_reported and (has_repeats or e.num_ended >= _MIN_UNREPORTED):
        return (
            "no_report",
            "its answers do not say how many prompt tokens were cached",
            "start it with --enable-prompt-tokens-details; hits are real but cannot be verified",
        )
    if not has_repeats or any(reported for _, reported in e.repeats):
        return _difference(e)
    return (
        "never_reused",
        "it publishes blocks, is sent their prompts, and reports no hit",
        "look for a cache salt or a reset of its prefix cache",
    )


def are_far(told: Iterable[tuple[int, int, int]]) -> bool:
    """Whether predicted and reported hits are far from each other, over enough tokens."""
    number, tokens, predicted, reported = _sums(told)
    far = abs(predicted - reported) > _MAX_DIFFERENCE * tokens
    return far and number >= _MIN_TOLD and tokens >= _MIN_TOLD_TOKENS


def _sums(told: Iterable[tuple[int, int, int]]) -> tuple[int, int, int, int]:
    number = tokens = predicted = reported = 0
    for one in told:
        number += 1
        tokens += one[0]
        predicted += one[1]
        reported += one[2]
    return number, tokens, predicted, reported


def _difference(e: Evidence) -> tuple[str, str, str] | None:
    """Whether it finds about as much in its cache as was expected there."""
    if e.differs_for_s < _PATIENCE_S or not are_far(e.told_hits):
        return None
    number, tokens, predicted, reported = _sums(e.told_hits)
    text = (
        f"of its last {number} prompts {predicted / tokens:.0%} were expected to be cached there, and it reports "
        f"{reported / tokens:.0%}"
    )
    if reported < predicted:
        hint = (
            "it may let go of blocks before it gets to a prompt (KV memory full, long queue: fewer requests at once, or more "
            "memory), or its events come late"
        )
    else:
        hint = (
            "it holds more than its events tell: some are lost (give kv-replay=…), come late, or it loads from a store that "
            "tells nothing"
        )
    return "hits_differ", text, hint

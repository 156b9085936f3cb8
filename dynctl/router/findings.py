"""Why hits stay away, per engine: each precondition of prefix routing is checked on live traffic, and the broken one named.

When a request ends, its prompt must be in its engine's published blocks a few seconds later, found under our own hash.
Where it is not, what is known of the engine says why. A workload without repeats is no fault and gives no finding.
Not here: gathering the evidence (`probes`). Pure.
"""

from dataclasses import dataclass


@dataclass(slots=True)
class Evidence:
    """What is known of one engine incarnation, since it started or since `findings` last saw it healthy."""

    engine: str
    has_events_source: bool = True
    """Whether anybody tells its events at all."""
    was_connected: bool = True
    """Whether whoever reads them has ever reached them."""
    other_topic: str = ""
    """The topic of its events, where it isn't the one subscribed to."""
    num_stored_blocks: int = 0
    """Blocks it was said to hold."""
    num_undecodable: int = 0
    """Event batches that could not be read."""
    is_caching: bool | None = None
    """Whether the engine says that its prefix cache is on; None: it does not say."""
    parity: str = "unverified"
    parity_detail: str = ""
    block_size: int = 0
    """The router asks with."""
    num_checked: int = 0
    """Prompts looked for after they ended there."""
    num_found: int = 0
    num_found_at_other_size: int = 0
    """Of those not found, the ones found in blocks of another size."""
    other_size: int = 0
    num_keyed: int = 0
    """Of those not found, requests with a LoRA or a salt."""
    num_unseeded: int = 0
    """Of those not found, the ones found under the hash without the deployment's seed."""
    num_reported: int = 0
    """Answers that said how much was cached."""
    num_ended: int = 0
    num_text: int = 0
    """Of those, the ones placed by their text, because the router has no tokenizer."""
    repeated_tokens: int = 0
    """Prompt tokens this engine must have had, because its published blocks say so."""
    reported_tokens: int = 0


@dataclass(frozen=True, slots=True)
class Finding:
    """A precondition that does not hold on one engine."""

    engine: str
    cause: str
    text: str
    hint: str


_MIN_CHECKED = 3
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
            "nobody tells this engine's KV events",
            "give kv-events=… to route, or let dynctl up start the engine",
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
            "nothing answers where its KV events should come from",
            "start it with --kv-events-config enable_kv_cache_events=true, and check kv-events' address and port",
        )
    if e.other_topic:
        return (
            "topic",
            f"its KV events have the topic {e.other_topic!r}, which nobody subscribes to",
            "give the same topic on both sides, or none to the router",
        )
    if e.num_undecodable and not e.num_stored_blocks:
        return (
            "event_version",
            f"{e.num_undecodable} event batches could not be read",
            "this engine version publishes events dynctl does not know",
        )
    if not e.num_stored_blocks and not e.num_found:
        return (
            "no_events",
            "requests end here and no KV event ever came",
            "start the engine with --kv-events-config enable_kv_cache_events=true, under a topic that is subscribed to",
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
    if e.num_checked < _MIN_CHECKED or e.num_found * 2 > e.num_checked:
        return None
    if e.num_found_at_other_size:
        return (
            "block_size",
            f"its blocks have {e.other_size} tokens, the router asks for blocks of {e.block_size}",
            "let the engine report its block size, or restart the router",
        )
    if e.num_unseeded:
        return (
            "seed",
            "its blocks are hashed without this deployment's seed",
            "give relay and router the same block_hash_seed",
        )
    if e.num_keyed * 2 > e.num_checked - e.num_found:
        return (
            "salt",
            "its blocks carry a cache salt or a LoRA that the router does not ask with",
            "salted requests only hit under their own salt",
        )
    if e.num_found:
        return None
    return (
        "seed",
        "its blocks never have the names of the prompts it was sent",
        "compare block_hash_seed, model revision and tokenizer of engine and router",
    )


def _reports(e: Evidence) -> tuple[str, str, str] | None:
    """Whether the engine finds what it published."""
    if e.repeated_tokens < _MIN_REPEATED_TOKENS or e.reported_tokens:
        return None
    if not e.num_reported:
        return (
            "no_report",
            "its answers do not say how many prompt tokens were cached",
            "start it with --enable-prompt-tokens-details; hits are real but cannot be verified",
        )
    return (
        "never_reused",
        "it publishes blocks, is sent their prompts, and reports no hit",
        "look for a cache salt or a reset of its prefix cache",
    )

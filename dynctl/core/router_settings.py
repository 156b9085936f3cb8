"""Limits and rates of a router, each with its default; an inventory and a router's own file name those that differ.

Not here: what a router does with them.
Pure.
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass, replace

from dynctl.core.units import GIB, MIB
from dynctl.errors import UsageError


@dataclass(frozen=True, slots=True)
class Settings:
    """Limits and defaults; every one can be set in the configuration."""

    max_retries: int = 2
    """Further attempts before the first byte, each on another engine where there is one."""
    retry_budget_ratio: float = 0.2
    """Retries under way may be this share of the requests in flight …"""
    retry_budget_floor: int = 3
    """… but at least this many."""
    connect_timeout_s: float = 2.0
    first_token_timeout_s: float = 30.0
    """Or four times the predicted time to first token, whichever is longer."""
    gap_timeout_s: float = 20.0
    """Without a token while other streams of the engine stand still too; three times that otherwise."""
    body_timeout_s: float = 600.0
    """For a whole answer that is not streamed."""
    queue_limit: int = 2000
    queue_timeout_s: float = 10.0
    priority_ageing_s: float = 5.0
    """Whoever waits rises by one class every so often (`X-Dynctl-Priority`); 0: never, and low classes may starve."""
    max_concurrent_requests: int = 0
    """Under way at once, waiting ones included, in all processes of a port; further ones are refused with 429. 0: no limit."""
    default_slots: int = 256
    """Requests an engine takes at once where it does not say its limit of sequences (`max_num_seqs`)."""
    max_requests_per_engine: int = 0
    """Sent to one engine at once, whatever more it would take; further ones wait in the router's queue. 0: no limit of ours."""
    kv_lookahead_tokens: int = 32
    """A request goes to an engine that has KV memory for it beside what runs there, with so many further tokens of each answer,
    and else waits in the router's queue. More: fewer preemptions, later first tokens; at most an answer's expected length counts.
    0: engines queue, and preempt, by themselves."""
    prefill_tokens_s: float = 10_000.0
    """Prefill rate assumed until learned."""
    prefill_base_ms: float = 5.0
    itl_ms: float = 15.0
    """Inter-token latency of a batch of one assumed until learned."""
    itl_slope_ms: float = 0.1
    """What each further running sequence adds to it, until learned."""
    transfer_ms_per_token: float = 0.005
    """What moving a token's KV to a decode engine is assumed to cost: 100 KiB a token at 20 GB/s."""
    transfer_setup_ms: float = 2.0
    """What a transfer is assumed to cost before its first byte; both are learned per pair of engines."""
    transfer_max_bytes: int = 0
    """Larger prompts are computed where they are generated; 0: no limit."""
    kv_bytes_per_token: int = 0
    """Of the model's KV; 0: not known, and no limit in bytes applies."""
    host_load_gbytes_s: float = 20.0
    """How fast an engine is assumed to load KV from its host's memory, …"""
    storage_load_gbytes_s: float = 2.0
    """… and from anywhere else, at `kv_bytes_per_token` or 100 KiB; …"""
    load_setup_ms: float = 1.0
    """… and what a load is assumed to cost before its first byte. All are learned per engine."""
    conditional_prefill: int = 1
    """With pools: 1 decides per request whether to prefill elsewhere and copy, or on the decode engine; 0 always copies."""
    decode_stall: float = 1.0
    """What a millisecond of prefill on a decode engine costs each sequence it runs, in milliseconds. A guess."""
    stickiness: float = 1.0
    """How long policy `kv` holds on to caches. 0: it ignores them; below 1 what is cached counts for so much less; above 1 an
    engine's excess over its fair share counts for so much less, which is what makes requests leave their cache."""
    near_ms: float = 1.0
    """Candidates whose cost is within this of the best …"""
    near_ratio: float = 0.02
    """… or within this share of it count as equal; one of them is taken at random."""
    local_prefill_max_tokens: int = 0
    """With prefill/decode pools: up to this many uncached tokens the decode engine prefills itself."""
    kv_lease_s: float = 30.0
    """How long a prefill engine keeps the blocks it promised."""
    kv_lease_margin_s: float = 15.0
    """Unused transfer parameters are given to another decode engine only with this much of the lease left."""
    index_max_bytes: int = GIB
    """What is known of caches never takes more; in a wheel as much as the power of two below."""
    decisions: int = 10_000
    """Decisions kept for `/decisions`."""
    decision_log_every: int = 1
    """Where there is a decision log, the decisions of every n-th request go there, n being this; 0: of none."""
    decision_log_short_every: int = 16
    """Of these, short requests (`short_request_chars`) that were answered go there every n-th time only; 0: never. What
    went wrong goes there always."""
    decision_log_max_bytes: int = 64 * MIB
    """All its files together: the oldest go."""
    short_request_chars: int = 512
    """Prompts of fewer characters are not tokenised and routed by load alone: their prefill is cheaper than to find out
    where it is cached. 0: every prompt is tokenised."""
    inline_tokenize_chars: int = 1024
    """Longer prompts are tokenised in a thread, off the event loop."""
    token_cache_bytes: int = 64 * MIB
    max_body_bytes: int = 16 * MIB
    max_prompts: int = 64
    max_n: int = 16
    max_json_depth: int = 64
    drain_s: float = 120.0
    """After SIGTERM running requests may take this long."""
    probe_s: float = 60.0
    """How often each engine is asked a question of the router's own twice, to see that its cache works; 0: never."""
    warm_prefixes: int = 8
    """So many of the prefixes most conversations begin with are computed on an engine that joins others, before clients
    ask for them there; 0: none."""
    warm_idle: int = 6
    """So many times a minute an idle engine with free KV memory computes a hot prefix whose holders are above their share;
    0: never."""
    session_ttl_s: float = 600.0
    """For so long after its last request a session (`X-Dynctl-Session`) goes on at the engine that had that one; 0: the
    field is not looked at."""
    engine_poll_s: float = 2.0
    """How often an engine without a relay is asked for its health."""


DEFAULTS = Settings()
NAMES = tuple(Settings.__dataclass_fields__)

_POSITIVE = frozenset(("default_slots", "engine_poll_s", "itl_ms", "prefill_tokens_s"))
"""Without which nothing is served, or no time is ever predicted."""


def fault_of(name: str, value: float) -> str:
    """Say what is wrong with one setting; empty when nothing is."""
    if name not in NAMES:
        return f"no router setting is called {name}"
    if not (math.isfinite(value) and value >= 0):
        return f"the router setting {name} is at least 0, not {value:g}"
    if name in _POSITIVE and not value:
        return f"the router setting {name} is more than 0"
    if isinstance(getattr(DEFAULTS, name), int) and value != int(value):
        return f"the router setting {name} is a whole number, not {value:g}"
    return ""


def make_settings(values: Mapping[str, float]) -> Settings:
    """Build settings from the ones that differ from their defaults.

    Raises:
        UsageError: when a name is unknown or a value makes no sense.
    """
    faults = [fault for name, value in sorted(values.items()) if (fault := fault_of(name, value))]
    if faults:
        raise UsageError("; ".join(faults), f"settings are: {', '.join(NAMES)}")
    return replace(
        DEFAULTS, **{name: type(getattr(DEFAULTS, name))(v) for name, v in values.items()}
    )

"""The last decisions, each with all it was made from and what came of it; formatted only when somebody asks.

A decision keeps the policy's frozen inputs, so that the same choice can be computed again. Pure.
"""

from collections import deque
from collections.abc import Callable, Sequence
from itertools import islice
from typing import Any

import msgspec

from dynctl.router.choosing import Load, Need, Policy
from dynctl.router.loading import Loadable
from dynctl.router.transfer_cost import PathCosts


class Decision(msgspec.Struct, eq=False):
    """One choice of an engine."""

    request_id: str
    leg: str
    """`whole`, `prefill` or `decode`; chosen as `decode`, it is `whole` where that engine is to prefill too."""
    is_tokenized: bool
    """False: the count is guessed and the index was not asked."""
    need: Need
    loads: list[Load]
    """Per candidate, before this request was booked."""
    overlaps_tokens: list[int]
    """Per candidate; what it would load counts as what that saves (`loading`)."""
    draw: float
    position: int
    asked: Policy
    """The policy that chose; the plain rule where the configured one failed, …"""
    shown_id: str = ""
    """The request id the client reads."""
    route_key: str = ""
    costs: PathCosts | None = None
    """With pools: both ways to the KV, where they were compared."""
    link: str = ""
    """With pools, where KV is to be copied: the class of link (`core.kv_links`), …"""
    move_tokens: int = 0
    """… what the decode engine lacks of the prompt, …"""
    move_bytes: int = 0
    """… and what that takes; 0: not known."""
    link_price: str = ""
    """With pools, where a move was priced: what its price rests on (`transfer_cost.Links.basis`)."""
    path_reason: str = ""
    """With pools: `copy`, or why the decode engine prefills itself."""
    is_fallback: bool = False
    """… as this says."""
    policy: str = ""
    unix_s: float = 0.0
    outcome: str = ""
    """Empty while the request runs; then its end, or the fault of this attempt; `repeated`: a prefill whose blocks no engine
    could take, made again."""
    cached_tokens: int | None = None
    """What the engine says it had cached, …"""
    counted_tokens: int = 0
    """… of a prompt of so many tokens by its count; 0: it did not say."""
    output_tokens: int = 0
    """Of its answer, by the engine's count; 0: it did not say, or did not end."""
    ttft_ms: float | None = None
    """From sending to the first token."""
    waited_ms: float = 0.0
    """From arrival to sending: tokenising, waiting for room, an earlier leg."""
    loadable: list[Loadable | None] | None = None
    """What candidates have of the prompt in slower media; None: nothing."""
    session: str = ""
    """What became of its session (`sessions.Following.look`); empty: it named none, or the policy does not look at caches."""

    left_out: dict[str, str] | None = None
    """Engines that serve and were no candidates, and why: `full` (as many sequences as it takes), `kv_memory` (it does not fit),
    `failing`, `busy` (as it said), `starts_slowly`, `failed_before` (this request); None: none."""

    @property
    def engine(self) -> str:
        """The engine taken."""
        return self.loads[self.position].engine

    @property
    def prompt_tokens(self) -> int:
        """Length of the prompt."""
        return self.need.prompt_tokens

    @property
    def overlap_tokens(self) -> int:
        """What the index expected cached there, in whatever medium."""
        return self.held_tokens(self.position)

    @property
    def device_tokens(self) -> int:
        """What of that was expected on its device."""
        found = self.to_load
        return self.overlaps_tokens[self.position] if found is None else found.device_tokens

    @property
    def to_load(self) -> Loadable | None:
        """What the engine taken is to load; None: nothing."""
        return self.loadable[self.position] if self.loadable is not None else None

    def held_tokens(self, position: int) -> int:
        """What the index expected cached at a candidate, in whatever medium."""
        found = self.loadable[position] if self.loadable is not None else None
        return self.overlaps_tokens[position] if found is None else found.held_tokens

    @property
    def most_held_tokens(self) -> int:
        """The most any candidate was expected to have."""
        if self.loadable is None:
            return max(self.overlaps_tokens)
        return max(map(self.held_tokens, range(len(self.loads))))

    def recompute(self) -> int:
        """Make the same choice again from the same inputs."""
        return self.asked.choose(self.need, self.loads, self.overlaps_tokens, self.draw)

    def predicted_ms(self, position: int) -> dict[str, float]:
        """Parts of the time to first token expected at a candidate."""
        load, need = self.loads[position], self.need
        uncached = max(need.prompt_tokens - self.held_tokens(position), 1)
        if self.leg == "decode" and need.is_moved:
            return {"transfer_ms": load.move_base_ms + uncached * load.move_ms_per_token}
        parts = {
            "queue_ms": max(load.free_at_s - need.now_s, 0.0) * 1e3,
            "prefill_ms": load.prefill_base_ms + uncached * load.prefill_ms_per_token,
        }
        found = self.loadable[position] if self.loadable is not None else None
        return parts if found is None else parts | {"load_ms": found.load_ms}

    def _shown_overlap(self, position: int) -> dict[str, float]:
        """What a candidate has of the prompt; apart from each other where some of it would be loaded."""
        shown: dict[str, float] = {"overlap_tokens": self.held_tokens(position)}
        if self.loadable is not None:
            found = self.loadable[position]
            shown["load_tokens"] = 0 if found is None else found.tokens
            shown["load_ms"] = 0.0 if found is None else round(found.load_ms, 3)
        return shown

    def to_json(self) -> dict[str, Any]:
        """The decision as a JSON object, candidates with their terms by name."""
        terms = self.asked.terms(self.need, self.loads, self.overlaps_tokens)
        candidates = []
        for position, load in enumerate(self.loads):
            named = dict(zip(self.asked.term_names, terms[position], strict=True))
            candidates.append(
                {
                    "engine": load.engine,
                    "active_requests": load.active_requests,
                }
                | self._shown_overlap(position)
                | {"predicted_ttft_ms": round(sum(self.predicted_ms(position).values()), 3)}
                | {name: round(value, 3) for name, value in named.items()}
            )
        predicted = self.predicted_ms(self.position)
        return {
            "request_id": self.request_id,
            "shown_id": self.shown_id,
            "unix_s": self.unix_s,
            "leg": self.leg,
            "route_key": self.route_key,
            "policy": self.policy,
            "is_fallback": self.is_fallback,
            "engine": self.engine,
            "prompt_tokens": self.prompt_tokens,
            "is_tokenized": self.is_tokenized,
            "overlap_tokens": self.overlap_tokens,
            "cached_tokens": self.cached_tokens,
            "counted_tokens": self.counted_tokens,
            "output_tokens": self.output_tokens,
            "predicted": {name: round(value, 3) for name, value in predicted.items()},
            "waited_ms": round(self.waited_ms, 3),
            "ttft_ms": self.ttft_ms,
            "outcome": self.outcome,
            "path": self.path_reason,
            "costs": None if self.costs is None else self.costs._asdict(),
            "link": self.link,
            "link_price": self.link_price,
            "move_tokens": self.move_tokens,
            "move_bytes": self.move_bytes,
            "session": self.session,
            "counterfactual": self._counterfactual(),
            "is_reproduced": self.recompute() == self.position,
            "candidates": candidates,
            "left_out": self.left_out or {},
        }

    def _counterfactual(self) -> dict[str, Any] | None:
        """What the same policy would have chosen without the engine it took."""
        if len(self.loads) < 2:
            return None
        others = [p for p in range(len(self.loads)) if p != self.position]
        loads = [self.loads[p] for p in others]
        overlaps = [self.overlaps_tokens[p] for p in others]
        position = others[self.asked.choose(self.need, loads, overlaps, self.draw)]
        return {
            "engine": self.loads[position].engine,
            "overlap_tokens": self.held_tokens(position),
            "predicted_ttft_ms": round(sum(self.predicted_ms(position).values()), 3),
        }


def explained(
    decisions: Sequence[Decision], waited_ms: float, queue_position: int
) -> tuple[tuple[bytes, bytes], ...]:
    """Say what is expected of a request as header fields, for a client that asked with `X-Dynctl-Explain`."""
    engines = ",".join(decision.engine for decision in decisions)
    parts_ms = sum(sum(d.predicted_ms(d.position).values()) for d in decisions)
    overlap = max((d.overlap_tokens for d in decisions), default=0)
    return (
        (b"x-dynctl-engines", engines.encode()),
        (b"x-dynctl-predicted-ttft-ms", b"%.1f" % (waited_ms + parts_ms)),
        (b"x-dynctl-predicted-cached-tokens", b"%d" % overlap),
        (b"x-dynctl-queue-position", b"%d" % queue_position),
    )


class DecisionRing:
    """Decisions, newest last; old ones fall off."""

    def __init__(self, size: int, also: Callable[[Decision], None] | None = None) -> None:
        """`also` gets every decision, too."""
        self._ring: deque[Decision] = deque(maxlen=size)
        self._also = also

    def __len__(self) -> int:
        return len(self._ring)

    def newest(self, limit: int) -> list[Decision]:
        """The newest `limit` decisions, oldest first."""
        return list(islice(self._ring, max(len(self._ring) - limit, 0), None))

    def add(self, decision: Decision, policy: str, unix_s: float) -> None:
        """Keep a decision, unless that is done."""
        if decision.unix_s:
            return
        decision.policy = policy
        decision.unix_s = unix_s
        self._ring.append(decision)
        if self._also is not None:
            self._also(decision)

    def to_json(self, limit: int, request_id: str | None = None) -> bytes:
        """The newest `limit` decisions as a JSON array, newest first; of one request where an id is given."""
        found: list[dict[str, Any]] = []
        for decision in reversed(self._ring):
            if len(found) == limit:
                break
            if request_id in {None, decision.request_id, decision.shown_id}:
                found.append(decision.to_json())
        return msgspec.json.encode(found)

"""The last decisions, each with every candidate's terms and what came of it; formatted only when somebody asks. Pure."""

from collections import deque
from dataclasses import dataclass
from typing import Any

import msgspec


@dataclass(slots=True)
class Decision:
    """One choice of an engine."""

    request_id: str
    leg: str
    """`whole`, `prefill` or `decode`."""
    prompt_tokens: int
    is_tokenized: bool
    """False: the count is guessed and the index was not asked."""
    engines: tuple[str, ...]
    active_requests: tuple[int, ...]
    """Per candidate, before this request was booked."""
    overlaps_tokens: tuple[int, ...]
    names: tuple[str, ...]
    terms: tuple[tuple[float, ...], ...]
    position: int
    policy: str = ""
    unix_s: float = 0.0
    outcome: str = ""
    """Empty while the request runs; then its end, or the fault of this attempt."""
    cached_tokens: int | None = None
    """What the engine says it had cached."""
    ttft_ms: float | None = None

    @property
    def engine(self) -> str:
        """The engine taken."""
        return self.engines[self.position]

    @property
    def overlap_tokens(self) -> int:
        """What the index expected cached there."""
        return self.overlaps_tokens[self.position]

    def to_json(self) -> dict[str, Any]:
        """The decision as a JSON object, candidates with their terms by name."""
        candidates = []
        for i, engine in enumerate(self.engines):
            candidate: dict[str, Any] = {
                "engine": engine,
                "active_requests": self.active_requests[i],
                "overlap_tokens": self.overlaps_tokens[i],
            }
            if self.terms:
                candidate |= dict(zip(self.names, self.terms[i], strict=True))
            candidates.append(candidate)
        return {
            "request_id": self.request_id,
            "unix_s": self.unix_s,
            "leg": self.leg,
            "policy": self.policy,
            "engine": self.engine,
            "prompt_tokens": self.prompt_tokens,
            "is_tokenized": self.is_tokenized,
            "overlap_tokens": self.overlap_tokens,
            "cached_tokens": self.cached_tokens,
            "ttft_ms": self.ttft_ms,
            "outcome": self.outcome,
            "candidates": candidates,
        }


class DecisionRing:
    """Decisions, newest last; old ones fall off."""

    def __init__(self, size: int) -> None:
        self._ring: deque[Decision] = deque(maxlen=size)

    def __len__(self) -> int:
        return len(self._ring)

    def add(self, decision: Decision, policy: str, unix_s: float) -> None:
        """Keep a decision."""
        decision.policy = policy
        decision.unix_s = unix_s
        self._ring.append(decision)

    def to_json(self, limit: int, request_id: str | None = None) -> bytes:
        """The newest `limit` decisions as a JSON array, newest first; of one request where an id is given."""
        found: list[dict[str, Any]] = []
        for decision in reversed(self._ring):
            if len(found) == limit:
                break
            if request_id is None or decision.request_id == request_id:
                found.append(decision.to_json())
        return msgspec.json.encode(found)

"""Decisions as lines of JSON, and back: with all inputs, so that each can be made again elsewhere and later.

No prompt, no key, no session's name is in them: ids, route keys, names of engines, and numbers. Candidates are columns, so
that names stand once a line. JSON has no infinity: null stands for it. IO: imports policies by their names.
"""

import math
from collections.abc import Mapping
from typing import Any

import msgspec

from dynctl import __version__, registry
from dynctl.errors import DynctlError
from dynctl.router.choosing import Load, Need, Policy
from dynctl.router.decisions import Decision
from dynctl.router.loading import Loadable
from dynctl.router.sessions import Following
from dynctl.router.transfer_cost import PathCosts

SCHEMA = "dynctl.decision/1"
_POLICIES = "dynctl.router.policies"

_PLAIN = (
    *("request_id", "shown_id", "unix_s", "leg", "policy", "is_fallback", "route_key", "session"),
    *("is_tokenized", "engine", "outcome", "path_reason", "cached_tokens", "counted_tokens"),
    *("output_tokens", "ttft_ms", "waited_ms", "position", "draw", "overlaps_tokens"),
    *("link", "link_price", "move_tokens", "move_bytes", "left_out"),
)
"""Fields that are written as they are."""
_NOT_READ = ("engine", "link_price")
"""As these: one follows from the rest, one came later than lines that are still on disks."""

_encode = msgspec.json.Encoder().encode
_names: dict[int, str] = {}


class RecordError(DynctlError):
    """Raised when a line is no decision that could be made again."""


def to_line(decision: Decision) -> bytes:
    """Write a decision as one line."""
    asked: Policy = decision.asked
    session: dict[str, Any] = {}
    if isinstance(asked, Following):
        session = {"session_engine": asked.engine, "session_begins": asked.begins}
        asked = asked.policy
    loads = zip(Load._fields, zip(*decision.loads, strict=True), strict=True)
    line = (
        {"schema": SCHEMA, "version": __version__}
        | {name: getattr(decision, name) for name in _PLAIN}
        | session
        | {
            "asked": _name_of(asked),
            "costs": None if decision.costs is None else decision.costs._asdict(),
            "need": decision.need._asdict(),
            "loads": dict(loads),
            "loadable": decision.loadable,
        }
    )
    return _encode(line) + b"\n"


def from_line(line: bytes) -> tuple[Decision, str]:
    """Read a decision, and the version of dynctl that made it.

    Raises:
        RecordError: when the line is cut off, something else, or of a version whose inputs were others.
    """
    try:
        told = msgspec.json.decode(line)
        return _decision(told), str(told["version"])
    except (
        DynctlError, msgspec.MsgspecError, KeyError, TypeError, ValueError, RecursionError
    ) as error:  # fmt: skip
        raise RecordError(f"no decision of this version: {type(error).__name__} {error}") from error


def _decision(told: dict[str, Any]) -> Decision:
    if told["schema"] != SCHEMA:
        raise ValueError(told["schema"])
    need: dict[str, Any] = {name: _unbounded(value) for name, value in told["need"].items()}
    decision = Decision(
        **{name: told[name] for name in _PLAIN if name not in _NOT_READ},
        link_price=told.get("link_price", ""),
        asked=_asked(told),
        need=Need(**need),
        loads=_rows(told["loads"]),
        costs=None if told["costs"] is None else PathCosts(**told["costs"]),
        loadable=None if told["loadable"] is None else _loadable(told["loadable"]),
    )
    num_candidates = len(decision.loads)
    if not 0 <= decision.position < num_candidates == len(decision.overlaps_tokens):
        raise ValueError(f"{num_candidates} candidates, and its engine at {decision.position}")
    return decision


def _name_of(policy: Policy) -> str:
    if not _names:
        for name in registry.names(_POLICIES):
            _names[id(registry.load(_POLICIES, name, "POLICY"))] = name
    return _names[id(policy)]


def _asked(told: Mapping[str, Any]) -> Policy:
    policy: Policy = registry.load(_POLICIES, told["asked"], "POLICY")
    if "session_engine" in told:
        return Following(policy, told["session_engine"], begins=told["session_begins"])
    return policy


def _rows(columns: dict[str, list[Any]]) -> list[Load]:
    names = [*columns]
    rows = [dict(zip(names, row, strict=True)) for row in zip(*columns.values(), strict=True)]
    return [Load(**{name: _unbounded(value) for name, value in row.items()}) for row in rows]


def _unbounded(value: Any) -> Any:  # noqa: ANN401 - a field of a tuple
    return math.inf if value is None else value


def _loadable(found: list[dict[str, Any] | None]) -> list[Loadable | None]:
    return [None if one is None else Loadable(**one) for one in found]

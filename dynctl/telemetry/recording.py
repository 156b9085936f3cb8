"""A recording of `top`: a header, then a line for every snapshot and every look at decisions and hits. Pure.

What processes wrote is left out, since it may quote prompts and keys: logs, commands, what causes quote. Route keys become
names without meaning. What a line may hold is listed here, so that a new field of a snapshot is not in it by itself.
Not here: files (`recorder` writes, `tape` reads), time (`player`).
"""

import hashlib
from collections.abc import Mapping
from dataclasses import dataclass, field, fields, is_dataclass, replace
from functools import lru_cache
from typing import Annotated, TypeVar

import msgspec

from dynctl.core.deployment import UnitStatus
from dynctl.core.snapshot import Histogram, HostSnapshot, Snapshot
from dynctl.core.text import clean
from dynctl.core.workload import Slo
from dynctl.telemetry.answers import Answers
from dynctl.telemetry.traces import MAX_TEXT_CHARS, Told

SCHEMA = "dynctl.recording/1"
NOT_RECORDED = "not in a recording: it may hold prompts or keys"
MAX_LINE_BYTES = 16 * 2**20
MAX_PART_BYTES = 16 * 2**30
"""Of one part, unpacked."""
MAX_LINES = 1_000_000
"""Of one part, its header included."""
MOST = 1e18
"""No figure of a cluster is larger."""
MOST_UNIX_S = 1e11
"""What a calendar can show."""
MAX_HOSTS, MAX_UNITS = 4096, 16_384
"""Of a snapshot; a course is kept of every engine."""

Seconds = Annotated[float, msgspec.Meta(ge=0.0, le=1e9)]

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class Header:
    """The first line of each part."""

    schema: str
    id: Annotated[str, msgspec.Meta(max_length=64)]
    """The same in all parts of one recording."""
    part: Annotated[int, msgspec.Meta(ge=1, le=2**31)]
    cluster: str
    started_unix_s: Annotated[float, msgspec.Meta(ge=0.0, le=MOST_UNIX_S)]
    dynctl: str
    """The version that wrote it."""
    goals: Mapping[str, Slo] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Asked:
    """What routers answered."""

    decisions: tuple[Told, ...] = ()
    hits: Mapping[str, Mapping[str, float]] = field(default_factory=dict)
    failures: Mapping[str, str] = field(default_factory=dict)
    """By router: why it could not be asked."""


@dataclass(frozen=True, slots=True)
class Entry:
    """One line: either a snapshot or what was asked."""

    at_s: Seconds
    """Since the start of the recording."""
    snapshot: Snapshot | None = None
    asked: Asked | None = None


@dataclass(frozen=True, slots=True)
class Playing:
    """Where in a recording somebody is."""

    at_s: float
    until_s: float
    """How long it is."""
    speed: float = 1.0
    is_playing: bool = True
    is_seeking: bool = False


class DamagedError(ValueError):
    """Raised when a line is none of a recording; says why."""


def encode(value: Header | Entry) -> bytes:
    """Write one line."""
    return msgspec.json.encode(value) + b"\n"


def decode_header(line: bytes) -> Header:
    """Read the first line.

    Raises:
        DamagedError: when it is none.
    """
    schema = _decoded(line, _Schema).schema
    if schema != SCHEMA:
        shown = clean(schema, 60)
        raise DamagedError(f"it is {shown!r}, this dynctl reads {SCHEMA!r}")
    header = _decoded(line, Header)
    _check(header.goals)
    return header


@dataclass(frozen=True, slots=True)
class _Schema:
    schema: str


class Stamp(msgspec.Struct):
    """What is read of each line when a recording is opened."""

    at_s: Seconds
    snapshot: msgspec.Raw = msgspec.Raw(b"null")
    asked: msgspec.Raw = msgspec.Raw(b"null")

    @property
    def is_snapshot(self) -> bool:
        """Whether it holds a snapshot."""
        return bytes(self.snapshot) != b"null"


def decode_stamp(line: bytes) -> Stamp:
    """Read when a line was written, and of which kind it is; the rest of it is only known to be JSON.

    Raises:
        DamagedError: when it is none of a recording.
    """
    stamp = _decoded(line, Stamp)
    if stamp.is_snapshot == (bytes(stamp.asked) != b"null"):
        raise DamagedError("it holds neither a snapshot nor what was asked, or both")
    return stamp


def decode_entry(line: bytes) -> Entry:
    """Read a line.

    Raises:
        DamagedError: when it is none, or holds what no cluster can be like.
    """
    entry = _decoded(line, Entry)
    _check(entry)
    if entry.snapshot is not None:
        if not 0.0 <= entry.snapshot.taken_unix_s <= MOST_UNIX_S:
            raise DamagedError("its snapshot is of no time")
        hosts = entry.snapshot.hosts
        num_units = sum(len(h.units) + len(h.engines) + len(h.routers) for h in hosts)
        if len(hosts) > MAX_HOSTS or num_units > MAX_UNITS:
            raise DamagedError(f"its snapshot has more than {MAX_HOSTS} hosts or {MAX_UNITS} units")
    return entry


def _decoded(line: bytes, kind: type[T]) -> T:
    try:
        return msgspec.json.decode(line, type=kind)
    except (msgspec.MsgspecError, ValueError, RecursionError) as error:
        raise DamagedError(clean(str(error))) from error


def _check(value: object) -> None:
    """Refuse figures that nothing can be drawn of."""
    if isinstance(value, float | int):
        if not -MOST <= value <= MOST:
            raise DamagedError("it holds a number of no size")
    elif isinstance(value, tuple | list):
        for one in value:
            _check(one)
    elif isinstance(value, Mapping):
        for one in value.values():
            _check(one)
    elif isinstance(value, Histogram):
        _check_histogram(value)
    elif is_dataclass(value):
        for name in _names(value.__class__):
            one = getattr(value, name)
            if one is not None and one.__class__ is not str:
                _check(one)


def _check_histogram(found: Histogram) -> None:
    edges, counts = found.bounds, found.counts
    is_whole = (
        len(counts) == len(edges) + 1
        and counts[0] >= 0
        and list(edges) == sorted(set(edges))
        and list(counts) == sorted(counts)
    )
    if not is_whole:
        raise DamagedError("it holds a histogram whose counts fit no buckets")
    _check((*edges[:1], *edges[-1:], counts[-1], found.total))


@lru_cache
def _names(kind: type) -> tuple[str, ...]:
    return tuple(one.name for one in fields(kind))


def recordable(snapshot: Snapshot) -> Snapshot:
    """What of a snapshot goes into a recording."""
    return Snapshot(
        snapshot.cluster, snapshot.taken_unix_s, tuple(_host(host) for host in snapshot.hosts)
    )


def _host(host: HostSnapshot) -> HostSnapshot:
    return HostSnapshot(
        host.host_name,
        units=tuple(_unit(unit) for unit in host.units),
        gpus=host.gpus,
        engines=host.engines,
        routers=host.routers,
        age_s=host.age_s,
        error=unquoted(host.error),
        relays=host.relays,
    )


def _unit(unit: UnitStatus) -> UnitStatus:
    return UnitStatus(
        unit.id,
        unit.kind,
        unit.state,
        pid=unit.pid,
        started_unix_s=unit.started_unix_s,
        num_restarts=unit.num_restarts,
        last_error=unquoted(unit.last_error),
        role=unit.role,
        deployment=unit.deployment,
        gpu_uuids=unit.gpu_uuids,
        is_held=unit.is_held,
        seen=unquoted(unit.seen),
    )


def unquoted(cause: str) -> str:
    """What dynctl says of a cause; what it quotes behind a colon, as the last line of a log, is left out."""
    told, colon, _ = cause.partition(": ")
    return clean(told) + (" (what it wrote is not recorded)" if colon else "")


def recordable_answers(answers: Answers, salt: bytes) -> Asked:
    """What of routers' answers goes into a recording: neither logs nor commands, and route keys only as names.

    The same salt gives the same names, and without it nobody can find out which key a name stands for.
    """
    failures = {
        name: unquoted(why) for name, why in answers.failures.items() if isinstance(name, str)
    }
    decisions = tuple(_decision(one, salt) for one in answers.decisions)
    return Asked(decisions, answers.hits, failures)


def _decision(one: Told, salt: bytes) -> Told:
    return replace(
        one,
        request_id=clean(one.request_id, MAX_TEXT_CHARS),
        leg=clean(one.leg, MAX_TEXT_CHARS),
        engine=clean(one.engine, MAX_TEXT_CHARS),
        shown_id=clean(one.shown_id, MAX_TEXT_CHARS),
        route_key=_name_of(one.route_key, salt),
        outcome=clean(one.outcome, MAX_TEXT_CHARS),
        path=clean(one.path, MAX_TEXT_CHARS),
        link=clean(one.link, MAX_TEXT_CHARS),
    )


def _name_of(route_key: str, salt: bytes) -> str:
    if not route_key:
        return ""
    return f"key-{hashlib.blake2b(route_key.encode(), key=salt, digest_size=4).hexdigest()}"

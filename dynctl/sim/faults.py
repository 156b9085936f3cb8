"""Faults on demand: what each one is, how it is written, and when it strikes.

A fault is written KIND[,KEY=VALUE]…, as a flag or through the control socket:

    die[,after_tokens=N | in=prefill]      the process is killed (SIGKILL to itself)
    hang[,after_tokens=N | in=prefill]     no further step is made; /health still says 200
    slow,factor=F                          everything takes F times as long
    reject[,status=503]                    new generation requests are refused with this status
    cut[,after_tokens=N]                   the client's connection is closed in mid-answer
    split                                  streams are written in pieces of 1 to 7 bytes
    health[,status=503]                    /health lies
    lose-events                            KV event batches are not sent live, only by replay
    fail-pull                              pulls from prefill engines fail
    lose-lease                             kept blocks are forgotten before they are pulled

All take `count=N` (strikes N times, then ends), `ratio=R` (strikes that share of the times), and those about requests
take `marker=TEXT` (only requests whose body contains it): a poison request is `die,marker=TEXT`.
Not here: doing it. Pure.
"""

from dataclasses import dataclass
from enum import StrEnum
from typing import TypeVar

from dynctl.errors import UsageError


class FaultKind(StrEnum):
    """What may go wrong."""

    DIE = "die"
    HANG = "hang"
    SLOW = "slow"
    REJECT = "reject"
    CUT = "cut"
    SPLIT = "split"
    HEALTH = "health"
    LOSE_EVENTS = "lose-events"
    FAIL_PULL = "fail-pull"
    LOSE_LEASE = "lose-lease"


@dataclass(slots=True)
class Fault:
    """One fault; `spec` is how it was written."""

    spec: str
    kind: FaultKind
    after_tokens: int | None = None
    """Strikes when a request has said so many tokens; None: at the first opportunity."""
    is_in_prefill: bool = False
    status: int = 503
    factor: float = 1.0
    ratio: float = 1.0
    count: int | None = None
    """Strikes left; None: without end."""
    marker: bytes = b""
    num_struck: int = 0
    _share: float = 0.0

    def strike(self) -> bool:
        """Tell whether it strikes this time, and count it."""
        if self.count == 0:
            return False
        self._share += self.ratio
        if self._share < 1:
            return False
        self._share -= 1
        self.num_struck += 1
        if self.count is not None:
            self.count -= 1
        return True


def parse_fault(spec: str) -> Fault:
    """Read a fault.

    Raises:
        UsageError: when kind, key or value makes no sense.
    """
    kind, *pairs = (part.strip() for part in spec.split(","))
    if kind not in set(FaultKind):
        raise UsageError(f"unknown fault {kind!r}", "there are: " + ", ".join(FaultKind))
    fault = Fault(spec, FaultKind(kind))
    for pair in pairs:
        key, _, value = pair.partition("=")
        try:
            _set(fault, key, value)
        except ValueError as error:
            raise UsageError(f"fault {spec!r}: {key}={value} makes no sense: {error}") from error
    return fault


def _set(fault: Fault, key: str, value: str) -> None:
    match key:
        case "after_tokens":
            fault.after_tokens = _at_least(int(value), 1)
        case "in" if value == "prefill":
            fault.is_in_prefill = True
        case "status":
            fault.status = _at_least(int(value), 400)
        case "factor":
            fault.factor = _at_least(float(value), 0)
        case "ratio":
            fault.ratio = _at_least(float(value), 0)
        case "count":
            fault.count = _at_least(int(value), 1)
        case "marker":
            fault.marker = value.encode()
        case _:
            raise ValueError("unknown key")


_Number = TypeVar("_Number", int, float)


def _at_least(value: _Number, least: _Number) -> _Number:
    if not value >= least:
        raise ValueError(f"must be at least {least}")
    return value


class Faults:
    """The faults in force. Hooks ask at each opportunity whether one strikes."""

    def __init__(self, specs: tuple[str, ...] = ()) -> None:
        self._faults = [parse_fault(spec) for spec in specs]

    def add(self, spec: str) -> None:
        """Put one more in force.

        Raises:
            UsageError: when it makes no sense.
        """
        self._faults.append(parse_fault(spec))

    def clear(self) -> None:
        """End all faults."""
        self._faults.clear()

    def listed(self) -> list[dict[str, object]]:
        """Describe the faults in force."""
        return [
            {"spec": f.spec, "num_struck": f.num_struck, "count": f.count} for f in self._faults
        ]

    def marked(self, body: bytes) -> tuple[Fault, ...]:
        """Return the faults about requests that concern this one."""
        return tuple(fault for fault in self._faults if fault.marker in body)

    def struck(self, kind: FaultKind) -> Fault | None:
        """Ask for a fault of this kind that is about no particular request."""
        for fault in self._faults:
            if fault.kind is kind and not fault.marker and fault.strike():
                return fault
        return None

    @property
    def factor(self) -> float:
        """How many times longer everything takes."""
        factor = 1.0
        for fault in self._faults:
            if fault.kind is FaultKind.SLOW and fault.strike():
                factor *= fault.factor
        return factor

"""The long story of a plan for `--why`: six facts about the case, every layout that was looked at, the P:D table.

Not here: finding layouts (`choosing`), drawing (`cli`).
Pure.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from dynctl.core.hardware import GpuState, Topology
from dynctl.core.inventory import DeploymentWish, Inventory
from dynctl.core.model import Model
from dynctl.core.plan import Plan, PlannedDeployment
from dynctl.core.units import format_bytes, format_number, format_seconds
from dynctl.planner.calibration import Calibration, shipped
from dynctl.planner.choosing import Considered, Trail, ratio_rows
from dynctl.planner.estimate import ETA_TRANSFER, Pace
from dynctl.planner.layouts import Choice, Pricer
from dynctl.planner.limits import memory_share
from dynctl.planner.trace import BURSTY_CV, TraceFacts
from dynctl.planner.transfer import Fabric

ENOUGH_GPUS = 4
SWING = 3.0
_DAY_S = 12 * 3600.0
_BUDGET = 100_000


@dataclass(frozen=True, slots=True)
class Fact:
    """One of the six facts that speak for a cluster."""

    name: str
    speaks_for: bool | None
    """None: not known."""
    text: str


@dataclass(frozen=True, slots=True)
class RatioRow:
    """One division of the engines of a prefill/decode layout."""

    num_prefill: int
    num_decode: int
    rate_rps: float
    """Within the goals; 0: they are missed at any rate."""
    ttft_p99_ms: float
    itl_p99_ms: float
    prefill_busy: float
    """Share of the time prefill engines compute, at the wished rate."""
    decode_busy: float
    """Share of the sequences decode engines can hold that run, at the wished rate."""
    is_chosen: bool


@dataclass(frozen=True, slots=True)
class Story:
    """Why one deployment is laid out as it is."""

    name: str
    verdict: str
    facts: tuple[Fact, ...]
    reasons: tuple[str, ...]
    considered: tuple[Considered, ...] = ()
    misfits: tuple[str, ...] = ()
    ratio: tuple[RatioRow, ...] = ()
    ratio_note: str = ""
    transfer: tuple[str, ...] = ()
    is_cut_short: bool = False

    @property
    def num_for(self) -> int:
        """How many facts speak for a cluster."""
        return sum(fact.speaks_for is True for fact in self.facts)


def tell(
    plan: Plan,
    topology: Topology,
    inventory: Inventory,
    models: Mapping[str, Model | None],
    trails: Mapping[str, Trail],
    traces: Mapping[str, TraceFacts],
    calibration: Calibration | None = None,
) -> tuple[Story, ...]:
    """Tell the story of every deployment, planned with a calibration; None: the shipped one."""
    wishes = {wish.name: wish for wish in inventory.deployments}
    return tuple(
        _story(
            planned,
            topology,
            wishes[planned.name],
            models.get(planned.name),
            trails.get(planned.name, Trail()),
            traces.get(planned.name),
            calibration or shipped(),
        )
        for planned in plan.deployments
    )


def _story(
    planned: PlannedDeployment,
    topology: Topology,
    wish: DeploymentWish,
    model: Model | None,
    trail: Trail,
    trace: TraceFacts | None,
    calibration: Calibration,
) -> Story:
    split = trail.chosen if trail.chosen and trail.chosen.is_split else trail.apart
    pricer = Pricer(wish, Fabric.of(topology), _BUDGET, calibration)
    rows = _ratio(pricer, split, trail.chosen) if split is not None else ()
    return Story(
        name=planned.name,
        verdict=planned.verdict,
        facts=six_facts(topology, wish, model, trail, trace),
        reasons=planned.reasons,
        considered=tuple(trail.considered),
        misfits=tuple(misfit.text for misfit in trail.misfits),
        ratio=rows,
        ratio_note=_balance(rows),
        transfer=_transfer(wish, split) if split is not None else (),
        is_cut_short=trail.is_cut_short,
    )


def six_facts(
    topology: Topology,
    wish: DeploymentWish,
    model: Model | None,
    trail: Trail,
    trace: TraceFacts | None,
) -> tuple[Fact, ...]:
    """Whether this is a case for a cluster of engines at all."""
    free = [g for host in topology.hosts for g in host.gpus if g.state is GpuState.FREE]
    return (
        Fact(
            "at least 4 GPUs",
            len(free) >= ENOUGH_GPUS,
            f"{len(free)} GPUs are free",
        ),
        _uneven(trace),
        _swings(trace),
        _larger(model, max((g.memory_bytes for g in free), default=0), wish),
        _apart(trail),
        _concurrency(wish, trail),
    )


def _uneven(trace: TraceFacts | None) -> Fact:
    name = "uneven load"
    if trace is None:
        return Fact(name, None, "not known without --trace")
    return Fact(
        name,
        trace.gap_cv >= BURSTY_CV or trace.peak_ratio >= SWING,
        f"gaps between arrivals vary by {trace.gap_cv:.1f} of their mean, the peak is {trace.peak_ratio:.1f}× the mean",
    )


def _swings(trace: TraceFacts | None) -> Fact:
    name = "day and night swings"
    if trace is None or trace.duration_s < _DAY_S:
        has = "" if trace is None else f", this one has {format_seconds(trace.duration_s)}"
        return Fact(name, None, f"not known without a --trace of at least half a day{has}")
    return Fact(
        name,
        trace.peak_ratio >= SWING,
        f"the busiest hundredth of {format_seconds(trace.duration_s)} has {trace.peak_ratio:.1f}× the mean",
    )


def _larger(model: Model | None, card_bytes: int, wish: DeploymentWish) -> Fact:
    name = "model larger than one card"
    if model is None:
        return Fact(name, None, "the model's shape is not known")
    usable = card_bytes * memory_share(wish).value
    return Fact(
        name,
        model.weight_bytes > usable,
        f"{format_bytes(model.weight_bytes)} of weights, {format_bytes(usable)} usable on the largest card",
    )


def _apart(trail: Trail) -> Fact:
    name = "need for prefill and decode apart"
    if trail.chosen is None:
        return Fact(name, None, "not searched: the inventory fixes the pools, or no GPU is used")
    is_split = trail.chosen.is_split
    if trail.gain is None:
        if is_split:
            text = "aggregated engines do not reach the goals"
        elif trail.can_split:
            text = "no prefill/decode layout reaches the goals here"
        else:
            text = "it needs two engines, the GPUs hold one"
        return Fact(name, is_split, text)
    gain = f"gain {trail.gain.expected:g}× ({trail.gain.low:g}× to {trail.gain.high:g}×) per GPU over aggregated engines"
    return Fact(
        name, is_split, gain if is_split else f"{gain}; at this rate it saves no GPU surely"
    )


def _concurrency(wish: DeploymentWish, trail: Trail) -> Fact:
    name = "more concurrency than one engine bears"
    if trail.chosen is None:
        return Fact(name, None, "not searched")
    num = sum(part.count for part in trail.chosen.parts)
    alone = trail.chosen.rate_rps / num
    return Fact(
        name,
        num > 1,
        f"{wish.workload.rate_rps:g} req/s wished, one engine bears {format_number(alone)} within the goals"
        if not trail.chosen.is_split
        else f"{wish.workload.rate_rps:g} req/s wished, {num} engines share it",
    )


def _ratio(pricer: Pricer, split: Choice, chosen: Choice | None) -> tuple[RatioRow, ...]:
    prefill, decode = split.parts
    work = pricer.wish.workload
    pace = prefill.option.pace
    assert pace is not None
    past = work.isl_tokens * work.shared_prefix_ratio
    compute_s = pace.prefill_s(work.isl_tokens - past, past)
    rows = []
    for num_p, num_d, row in ratio_rows(pricer, split):
        running = work.rate_rps * work.osl_tokens * row.served.itl_s / num_d
        bound = pricer.side(decode.option, 1).max_sequences
        rows.append(
            RatioRow(
                num_p,
                num_d,
                row.rate_rps,
                row.served.ttft_p99_s * 1e3,
                row.served.itl_p99_s * 1e3,
                min(1.0, work.rate_rps * compute_s / num_p),
                min(1.0, running / bound),
                chosen is split and (num_p, num_d) == (prefill.count, decode.count),
            )
        )
    return tuple(rows)


def _balance(rows: Sequence[RatioRow]) -> str:
    """Warn where one side idles while the other is full."""
    chosen = next((row for row in rows if row.is_chosen), None)
    if chosen is None or min(chosen.prefill_busy, chosen.decode_busy) <= 0:
        return ""
    ratio = chosen.prefill_busy / chosen.decode_busy
    if 0.33 < ratio < 3:
        return ""
    idle, full = ("decode", "prefill") if ratio > 1 else ("prefill", "decode")
    return (
        f"{idle} engines have room while {full} engines are busier "
        f"(prefill {chosen.prefill_busy:.0%}, decode {chosen.decode_busy:.0%}): smaller steps than one engine cannot be made"
    )


def _transfer(wish: DeploymentWish, split: Choice) -> tuple[str, ...]:
    """What moving KV costs against computing it, per token: where copying pays."""
    pace: Pace | None = split.parts[0].option.pace
    speed = split.speed
    if pace is None or speed is None:
        return ()
    work = wish.workload
    move_s = pace.kv_bytes_per_token / (speed.bytes_s * ETA_TRANSFER)
    compute_s = pace.prefill_s(work.isl_tokens) / work.isl_tokens
    lines = [
        f"moving a token's KV takes {format_number(move_s * 1e6)} µs over {speed.how}, computing it {format_number(compute_s * 1e6)} µs"
    ]
    if compute_s > move_s:
        tokens = 0.005 / (compute_s - move_s)
        lines.append(f"moving pays from about {tokens:.0f} tokens on, with 5 ms to set it up")
    else:
        lines.append("computing a prompt again is always cheaper than moving it over this link")
    return tuple(lines)

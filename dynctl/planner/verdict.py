"""What a layout is and why it was chosen: the verdict, its reasons, its gain.

Not here: choosing a layout (`choosing`), what to expect of it (`forecast`), the long story (`why`).
Pure.
"""

from collections.abc import Sequence
from dataclasses import replace

from dynctl.core.inventory import DeploymentWish
from dynctl.core.model import Model
from dynctl.core.plan import Figure, Pool, Role
from dynctl.core.units import format_bytes, format_number, format_seconds
from dynctl.planner.calibration import Calibration
from dynctl.planner.choosing import Trail
from dynctl.planner.estimate import (
    ETA_TRANSFER,
    TRANSFER_LATENCY_S,
    Layout,
    max_rate_rps,
    transfer_s,
)
from dynctl.planner.layouts import Choice
from dynctl.planner.limits import default_batched_tokens
from dynctl.planner.options import engines_of, with_batch
from dynctl.planner.transfer import Fabric


def judge(pools: Sequence[Pool]) -> str:
    """Name the kind of layout."""
    num = sum(len(pool.replicas) for pool in pools)
    prefill = sum(len(p.replicas) for p in pools if p.role is Role.PREFILL)
    if prefill:
        return (
            f"prefill/decode: {prefill} prefill and {num - prefill} decode, KV moves between them"
        )
    ranks = sum(len(pool.replicas) * pool.parallelism.dp for pool in pools)
    if num == 1 and ranks > 1:
        return f"single engine with KV routing: {ranks} ranks, each request to the one that holds its prefix"
    if num == 1:
        return "single engine: nothing to route between"
    return f"replicas with KV routing: {num} aggregated engines, each request to the one that holds its prefix"


def why_chosen(
    wish: DeploymentWish, model: Model, trail: Trail, fabric: Fabric, calibration: Calibration
) -> list[str]:
    """The reasons for a chosen layout that stand in the plan."""
    chosen = trail.chosen
    assert chosen is not None
    reasons = []
    if chosen.is_split:
        why = "aggregated engines do not reach the goals"
        if trail.together is not None:
            why = (
                f"aggregated engines would need {trail.together.num_gpus} GPUs for the same goals, "
                f"{chosen.num_gpus} do"
            )
        reasons.append(f"prefill and decode apart: {why}")
        reasons += _about_links(wish, chosen, fabric)
    else:
        reasons.append(
            f"{chosen.name}: the fewest GPUs that fit the model and serve {wish.workload.rate_rps:g} req/s"
        )
        reasons += _about_pieces(wish, chosen, model, calibration)
        reasons.append(_why_together(trail))
        reasons += _about_routing(wish, chosen)
    if trail.gain is not None:
        reasons.append(
            f"gain of prefill/decode over aggregated engines: {_times(trail.gain)} requests per second and GPU "
            f"within the goals ({trail.gain.source})"
        )
    return reasons


def _about_pieces(
    wish: DeploymentWish, chosen: Choice, model: Model, calibration: Calibration
) -> list[str]:
    """What bounding a step's tokens otherwise than by default brings."""
    option, slo = chosen.parts[0].option, wish.slo
    usual = default_batched_tokens(option.kind.memory_bytes, option.kind.name)
    other = with_batch(wish, model, option, usual, calibration)
    if option.max_num_batched_tokens == usual or other is None or option.pace is None:
        return []
    most = [
        max_rate_rps(Layout(engines_of(wish, each, 1)), wish.workload, slo)
        for each in (option, other)
    ]
    return [
        (
            f"prompts in pieces: with {option.max_num_batched_tokens} tokens a step (max-num-batched-tokens) one engine "
            f"bears {format_number(most[0])} req/s within the goals, with {usual} {format_number(most[1])}"
        )
    ]


def _times(gain: Figure) -> str:
    return f"{gain.expected:g}× ({gain.low:g}× to {gain.high:g}×)"


def _why_together(trail: Trail) -> str:
    chosen, apart = trail.chosen, trail.apart
    assert chosen is not None
    if apart is None:
        if not trail.can_split:
            return "do not disaggregate: prefill/decode needs two engines, the GPUs hold one"
        return "do not disaggregate: prefill/decode does not reach the goals on these GPUs"
    text = f"do not disaggregate: prefill/decode would need {apart.num_gpus} GPUs, aggregated {chosen.num_gpus}"
    if apart.num_gpus < chosen.num_gpus:
        text += "; the gain is within the error of the estimate"
    return text


def _about_links(wish: DeploymentWish, chosen: Choice, fabric: Fabric) -> list[str]:
    """What moving KV costs, and whether anybody measured it."""
    speed, pace = chosen.speed, chosen.parts[0].option.pace
    if speed is None or pace is None:
        return []
    num_bytes = wish.workload.isl_tokens * pace.kv_bytes_per_token
    moving_s = transfer_s(num_bytes, speed.bytes_s)
    found = [
        (
            f"KV of a prompt is {format_bytes(num_bytes)} and moves at {format_number(speed.bytes_s / 1e9)} GB/s "
            f"({speed.how}): about {format_seconds(moving_s)} "
            f"at {ETA_TRANSFER:.0%} of that, with {TRANSFER_LATENCY_S * 1e3:g} ms to set it up"
        )
    ]
    if chosen.where == "over hosts" and not speed.is_measured:
        found.append(
            "the links between the hosts were not measured: dynctl linktest makes this surer"
            if not fabric.has_measurements
            else "some links between the hosts were not measured"
        )
    return found


def _about_routing(wish: DeploymentWish, chosen: Choice) -> list[str]:
    """What sending a request to the engine that holds its prefix is worth."""
    num = sum(part.count for part in chosen.parts)
    shared = wish.workload.shared_prefix_ratio
    if num < 2:
        return []
    if shared <= 0:
        return [
            "KV routing gains nothing without shared prefixes: workload.shared_prefix_ratio is 0"
        ]
    gain = routing_gain(wish, chosen)
    return [
        f"gain of KV routing over routing by load: {_times(gain)} requests per second within the goals ({gain.source})"
    ]


def routing_gain(wish: DeploymentWish, chosen: Choice) -> Figure:
    """KV routing over routing by load: at worst every engine holds every prefix, at best each is computed by each anew."""
    work, slo, num = wish.workload, wish.slo, sum(p.count for p in chosen.parts)
    side = engines_of(wish, chosen.parts[0].option, num)
    routed = max_rate_rps(Layout(side), work, slo)
    spread = max_rate_rps(Layout(side, routes_by_prefix=False), work, slo)
    cold = replace(work, shared_prefix_ratio=work.shared_prefix_ratio / num)
    anew = max_rate_rps(Layout(side), cold, slo)
    expected = max(1.0, round(routed / spread, 2)) if spread > 0 else 1.0
    high = max(expected, round(routed / anew, 2)) if anew > 0 else expected
    return Figure(1.0, expected, high, "modelled, by how many prefixes there are")

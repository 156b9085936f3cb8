"""What another predictor is asked about a plan, and how its answers compare with ours.

Both are asked the same: a closed loop of as many users as the plan expects in flight, since other predictors know no
arrival rates. Not here: running the other predictor (`cli.second_opinion`).
Pure.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from dynctl.core.hardware import Topology
from dynctl.core.inventory import DeploymentWish, Inventory
from dynctl.core.model import Model
from dynctl.core.plan import Figure, Plan, PlannedDeployment, Pool, Role
from dynctl.planner.calibration import Calibration, shipped
from dynctl.planner.closed_loop import Loop, Pair, Pass, run_loop, run_pair
from dynctl.planner.drawing import parallelism_text
from dynctl.planner.estimate import Layout, Side, by_rank, figure, serve
from dynctl.planner.options import max_sequences, pace_on
from dynctl.planner.placement import Group, kind_of, replica_groups
from dynctl.planner.roofline import Engine
from dynctl.planner.transfer import Fabric

SYSTEMS = {
    "h100-sxm": "h100_sxm", "h200-sxm": "h200_sxm", "b200-sxm": "b200_sxm", "b300-sxm": "b300_sxm", "gb200": "gb200",
    "gb300": "gb300", "a100-sxm-80": "a100_sxm", "l40s": "l40s", "rtx-pro-6000": "rtx_pro_6000_server",
}  # fmt: skip
"""AIConfigurator's names of the GPUs it has measured tables for."""
_ENOUGH = 10_000
"""So many prefill engines that they do not bind where only decoding is looked at."""
FIGURES = ("ttft_ms", "tpot_ms", "out_tok_s_per_gpu")


@dataclass(frozen=True, slots=True)
class Question:
    """One layout to be priced by both."""

    id: str
    deployment: str
    layout: str
    users: int
    """In flight, on one engine; over pools of both roles: in all."""
    call: Mapping[str, Any]
    """Arguments of AIConfigurator's `cli_estimate`; the model's directory is added where it lies."""
    ours: Mapping[str, Figure]


@dataclass(frozen=True, slots=True)
class Compared:
    """One figure of both."""

    figure: str
    ours: Figure
    theirs: float
    gap: float
    """Theirs over ours, less one."""

    @property
    def is_inside(self) -> bool:
        """Whether theirs lies in our band."""
        return self.ours.low <= self.theirs <= self.ours.high


@dataclass(frozen=True, slots=True)
class Opinion:
    """What the other predictor said of one layout, beside ours."""

    deployment: str
    layout: str
    users: int
    predictor: str
    compared: tuple[Compared, ...] = ()
    engine: str = ""
    """The engine version its tables are of."""
    error: str = ""
    """Why it says nothing."""


@dataclass(slots=True)
class Asked:
    """Questions, and deployments it cannot be asked about."""

    questions: list[Question] = field(default_factory=list)
    left_out: list[Opinion] = field(default_factory=list)


def questions(
    plan: Plan,
    topology: Topology,
    inventory: Inventory,
    models: Mapping[str, Model | None],
    calibration: Calibration | None = None,
) -> Asked:
    """What to ask about every deployment; our own figures by a calibration, None: the shipped one."""
    asked = Asked()
    wishes = {wish.name: wish for wish in inventory.deployments}
    for planned in plan.deployments:
        found = _engines(planned, topology, models.get(planned.name), calibration or shipped())
        if why := _why_not(found):
            asked.left_out.append(Opinion(planned.name, planned.verdict, 0, "", error=why))
        elif planned.pools[0].role is Role.AGGREGATED:
            asked.questions += _ask_alone(planned, wishes[planned.name], found)
        else:
            asked.questions.append(_ask_pair(planned, wishes[planned.name], found, topology))
    return asked


def compare(
    asked: Asked, predictor: str, answers: Mapping[str, Mapping[str, Any]]
) -> list[Opinion]:
    """Put the answers beside ours; an answer without numbers is an error of that question."""
    return [
        *(_opinion(q, predictor, answers.get(q.id, {})) for q in asked.questions),
        *asked.left_out,
    ]


def _opinion(question: Question, predictor: str, answer: Mapping[str, Any]) -> Opinion:
    numbers = {
        name: float(value)
        for name in FIGURES
        if isinstance(value := answer.get(name), int | float) and math.isfinite(value) and value > 0
    }
    error = str(answer.get("error", "")) or ("" if numbers else "no number in its answer")
    compared = tuple(
        Compared(name, ours, theirs, theirs / ours.expected - 1)
        for name, theirs in numbers.items()
        if not error
        for ours in [question.ours[name]]
    )
    return Opinion(
        question.deployment,
        question.layout,
        question.users,
        predictor,
        compared,
        str(answer.get("engine", "")),
        error,
    )


@dataclass(frozen=True, slots=True)
class _Engines:
    """A pool with its engines as the roofline sees them, and where they are."""

    pool: Pool
    pace: Engine
    groups: tuple[Group, ...]

    @property
    def num_gpus(self) -> int:
        return len(self.groups) * self.pool.parallelism.num_gpus

    @property
    def name(self) -> str:
        sizes = parallelism_text(self.pool.parallelism)
        return f"{len(self.groups)} × {sizes} on {self.pace.spec.name}"


def _engines(
    planned: PlannedDeployment, topology: Topology, model: Model | None, calibration: Calibration
) -> list[_Engines]:
    """The pools' engines; none where one is not known."""
    hosts = {host.name: host for host in topology.hosts}
    found = []
    for pool in planned.pools:
        groups = tuple(replica_groups(pool, hosts).values())
        if model is None or not groups:
            return []
        pace = pace_on(model, kind_of(groups[0].gpus[0]), pool.parallelism, groups, calibration)
        if not isinstance(pace, Engine):
            return []
        found.append(_Engines(pool, pace, groups))
    return found


def _why_not(found: Sequence[_Engines]) -> str:
    """Why a deployment cannot be asked about; empty: it can."""
    if not found:
        return "it knows only GPU engines of a known model"
    unknown = sorted({e.pace.spec.name for e in found if e.pace.spec.name not in SYSTEMS})
    if unknown:
        return f"it has no tables for {', '.join(unknown)}"
    roles = [e.pool.role for e in found]
    if Role.PREFILL in roles and len(roles) > 2:
        return "it knows one kind of engine per role"
    return ""


def _ask_alone(
    planned: PlannedDeployment, wish: DeploymentWish, found: Sequence[_Engines]
) -> list[Question]:
    """Aggregated engines are alike: one of each pool stands for it."""
    num = sum(len(each.groups) for each in found)
    asked = []
    for at, each in enumerate(found):
        loop = _loop(wish, each, _in_flight(wish, each, num))
        ours = run_loop(each.pace.load, each.pace.used_constants, loop)
        call = {
            "mode": "agg",
            "batch_size": int(loop.concurrency),
            **_common(wish, each),
            **_sizes(each),
        }
        figures = _figures(ours, each.pace, each.pace, each.pool.parallelism.num_gpus)
        users = int(loop.concurrency)
        asked.append(
            Question(f"{planned.name}-{at}", planned.name, each.name, users, call, figures)
        )
    return asked


def _ask_pair(
    planned: PlannedDeployment,
    wish: DeploymentWish,
    found: Sequence[_Engines],
    topology: Topology,
) -> Question:
    """Prefill and decode pools together; it does not count what moving KV takes."""
    prefill, decode = sorted(found, key=lambda e: e.pool.role is not Role.PREFILL)
    work, p, d = wish.workload, prefill.pace, decode.pace
    speed = Fabric.of(topology).worst(prefill.groups, decode.groups)
    moving_s = work.isl_tokens * p.kv_bytes_per_token / speed.bytes_s
    held = _in_flight(wish, decode, len(decode.groups))
    users = held * len(decode.groups) + work.rate_rps * (p.prefill_s(work.isl_tokens) + moving_s)
    loop = _loop(wish, decode, users)
    pair = Pair(p.load, len(prefill.groups), d.load, len(decode.groups), moving_s)
    call = {
        "mode": "disagg",
        **_common(wish, prefill),
        "decode_system_name": SYSTEMS[d.spec.name],
        **_sizes(prefill, "prefill_"),
        "prefill_batch_size": 1,
        "prefill_num_workers": len(prefill.groups),
        **_sizes(decode, "decode_"),
        "decode_batch_size": max(1, round(held)),
        "decode_num_workers": len(decode.groups),
    }
    ours = run_pair(pair, d.used_constants, loop)
    return Question(
        planned.name,
        planned.name,
        f"prefill {prefill.name} + decode {decode.name}",
        int(loop.concurrency),
        call,
        _figures(ours, p, d, prefill.num_gpus + decode.num_gpus),
    )


def _in_flight(wish: DeploymentWish, each: _Engines, num: int) -> float:
    """Requests in flight on one of `num` engines at the wished rate."""
    dp = each.pool.parallelism.dp
    bound = max_sequences(wish, each.pool.memory, dp)
    side, work = by_rank(Side(each.pace, num, bound), dp), wish.workload
    layout = Layout(side)
    if each.pool.role is Role.DECODE:
        layout = Layout(Side(each.pace, _ENOUGH, math.inf), side, math.inf)
    served = serve(layout, work, work.rate_rps)
    return max(1.0, min(bound, served.sequences * dp if served.is_stable else bound))


def _loop(wish: DeploymentWish, each: _Engines, users: float) -> Loop:
    work = wish.workload
    return Loop(
        work.isl_tokens,
        work.osl_tokens,
        max(1, round(users)),
        work.isl_tokens * work.shared_prefix_ratio,
        max_sequences(wish, each.pool.memory, each.pool.parallelism.dp),
    )


def _common(wish: DeploymentWish, each: _Engines) -> dict[str, Any]:
    work = wish.workload
    is_small = each.pace.model.kv_value_bytes < 2
    return {
        **({"kvcache_quant_mode": "fp8"} if is_small else {}),
        "system_name": SYSTEMS[each.pace.spec.name],
        "backend_name": "vllm",
        "isl": work.isl_tokens,
        "osl": work.osl_tokens,
        "prefix": int(work.isl_tokens * work.shared_prefix_ratio),
    }


def _sizes(each: _Engines, prefix: str = "") -> dict[str, int]:
    p = each.pool.parallelism
    found = {
        f"{prefix}tp_size": p.tp,
        f"{prefix}pp_size": p.pp,
        f"{prefix}attention_dp_size": p.dp,
    }
    if each.pace.model.num_experts:
        found |= {f"{prefix}moe_tp_size": p.tp * p.dp // p.ep, f"{prefix}moe_ep_size": p.ep}
    return found


def _figures(ours: Pass, prefill: Engine, decode: Engine, num_gpus: int) -> dict[str, Figure]:
    return {
        "ttft_ms": figure(ours.ttft_s * 1e3, prefill.band("ttft"), prefill.source),
        "tpot_ms": figure(ours.tpot_s * 1e3, decode.band("tpot"), decode.source),
        "out_tok_s_per_gpu": figure(ours.tokens_s / num_gpus, decode.band("tokens"), decode.source),
    }

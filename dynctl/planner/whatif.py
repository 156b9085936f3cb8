"""What a plan would be if: `+2 h100, -gpu-03, rate x1.5, isl 8192, kv fp8, itl 30`, applied to the facts it is made from.

Not here: planning (`search`).
Pure.
"""

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from dynctl.core.hardware import Gpu, GpuState, Host, Topology
from dynctl.core.inventory import DeploymentWish, HostEntry, Inventory
from dynctl.core.model import Model
from dynctl.core.units import GB
from dynctl.errors import UsageError
from dynctl.planner.calibration import Calibration, shipped
from dynctl.planner.grouping import nvlink_islands
from dynctl.planner.peaks import SPECS, find_spec
from dynctl.planner.placement import natural

_MORE = re.compile(r"^([+-])\s*([0-9]{1,5})\s*(?:[x×]\s*)?([A-Za-z][\w.-]*)$")
_HOST = re.compile(r"^-\s*([A-Za-z][\w.-]*)$")
_FIGURE = re.compile(r"^([a-z]+)\s+([x×])?\s*([0-9]{1,12}(?:\.[0-9]{1,12})?)$")
_KV = re.compile(r"^kv\s+(fp8|bf16)$")
_KV_FLAGS = {"fp8": "fp8", "bf16": "bfloat16"}
_PER_HOST = 8
KEYS = "rate, isl, osl, prefix, ttft and itl take a value or a factor (x1.5)"
_HINT = f"write '+2 h100', '-2 h100', '-HOST', 'rate x1.5', 'kv fp8'; {KEYS}"


@dataclass(frozen=True, slots=True)
class Case:
    """What a plan is made from."""

    topology: Topology
    inventory: Inventory
    models: Mapping[str, Model | None]
    configs: Mapping[str, bytes] = field(default_factory=dict)
    """The models' config.json by deployment, for other predictors."""
    calibration: Calibration = field(default_factory=shipped)


def apply_changes(text: str, case: Case) -> Case:
    """Apply changes, separated by commas, in order.

    Raises:
        UsageError: naming the part that cannot be read, or names nothing there is.
    """
    parts = [part.strip() for part in text.split(",") if part.strip()]
    if not parts:
        raise UsageError("--what-if says nothing", _HINT)
    for part in parts:
        case = _apply(part, case)
    return case


def _apply(part: str, case: Case) -> Case:
    if match := _MORE.match(part):
        count, name = int(match[2]), match[3]
        return _add(case, count, name) if match[1] == "+" else _take(case, count, name)
    if match := _HOST.match(part):
        return _without(case, match[1])
    if match := _KV.match(part):
        return _kv(case, match[1])
    if (match := _FIGURE.match(part)) and match[1] in _CHANGES:
        change = _CHANGES[match[1]]
        wishes = tuple(
            change(wish, float(match[3]), bool(match[2])) for wish in case.inventory.deployments
        )
        return replace(case, inventory=replace(case.inventory, deployments=wishes))
    raise UsageError(f"--what-if: {part!r} says nothing known", _HINT)


def _named(gpu: Gpu, name: str) -> bool:
    """Whether a user's short name means this GPU: h100, h100-sxm, or part of the product's name."""
    spec = find_spec(gpu.name)
    wanted = name.lower()
    return (spec is not None and spec.name.startswith(wanted)) or wanted in gpu.name.lower()


def _add(case: Case, count: int, name: str) -> Case:
    """Add hosts with GPUs, made like those there are, else like the product's boards."""
    model_host = next(
        (h for h in case.topology.hosts if any(_named(gpu, name) for gpu in h.gpus)), None
    )
    hosts = list(case.topology.hosts)
    entries = list(case.inventory.hosts)
    number = 0
    while count > 0:
        number += 1
        fresh = f"what-if-{number}"
        if any(host.name == fresh for host in hosts):
            continue
        host = (
            _like(model_host, name, fresh, count)
            if model_host is not None
            else _by_table(name, fresh, min(count, _PER_HOST))
        )
        hosts.append(host)
        entries.append(HostEntry(fresh, fresh))
        count -= len(host.gpus)
    return replace(
        case,
        topology=replace(case.topology, hosts=tuple(hosts)),
        inventory=replace(case.inventory, hosts=tuple(entries)),
    )


def _like(host: Host, name: str, fresh: str, count: int) -> Host:
    """A host of the same make with at most `count` of those GPUs, all free."""
    kept = [i for i, gpu in enumerate(host.gpus) if _named(gpu, name)][:count]
    links = tuple(tuple(host.gpu_links[a][b] for b in kept) for a in kept)
    gpus = tuple(
        replace(
            host.gpus[i],
            index=at,
            uuid=f"WHAT-IF-{fresh}-{at}",
            state=GpuState.FREE,
            processes=(),
            is_simulated=True,
        )
        for at, i in enumerate(kept)
    )
    nics = dict(host.gpu_nics)
    near = tuple(
        (at, nics[host.gpus[i].index]) for at, i in enumerate(kept) if host.gpus[i].index in nics
    )
    return replace(
        host,
        name=fresh,
        address=fresh,
        data_address=fresh,
        machine_id=fresh,
        is_local=False,
        gpus=gpus,
        gpu_links=links,
        gpu_nics=near,
        nvlink_islands=nvlink_islands(links),
        warnings=(),
    )


def _by_table(name: str, fresh: str, count: int) -> Host:
    spec = next((s for s in SPECS if s.name.startswith(name.lower())), None)
    if spec is None:
        known = ", ".join(spec.name for spec in SPECS)
        raise UsageError(f"--what-if: no GPU is called {name!r}", f"known: {known}")
    label = f"NV{spec.num_nvlinks}" if spec.num_nvlinks else "SYS"
    links = tuple(tuple("X" if a == b else label for b in range(count)) for a in range(count))
    gpus = tuple(
        Gpu(
            index=i,
            uuid=f"WHAT-IF-{fresh}-{i}",
            name=spec.name,
            memory_bytes=int(spec.memory_gb * GB),
            is_simulated=True,
        )
        for i in range(count)
    )
    return Host(
        fresh,
        fresh,
        fresh,
        gpus=gpus,
        gpu_links=links,
        nvlink_islands=nvlink_islands(links),
        machine_id=fresh,
    )


def _take(case: Case, count: int, name: str) -> Case:
    """Take free GPUs away, from the last hosts first."""
    hosts = {host.name: host for host in case.topology.hosts}
    for host_name in sorted(hosts, key=natural, reverse=True):
        gpus = list(hosts[host_name].gpus)
        for i in reversed(range(len(gpus))):
            if count and gpus[i].state is GpuState.FREE and _named(gpus[i], name):
                gpus[i] = replace(gpus[i], state=GpuState.BUSY)
                count -= 1
        hosts[host_name] = replace(hosts[host_name], gpus=tuple(gpus))
    if count:
        raise UsageError(f"--what-if: there are {count} fewer free {name} than that", _HINT)
    changed = tuple(hosts[host.name] for host in case.topology.hosts)
    return replace(case, topology=replace(case.topology, hosts=changed))


def _without(case: Case, name: str) -> Case:
    kept = tuple(host for host in case.topology.hosts if host.name != name)
    if len(kept) == len(case.topology.hosts):
        names = ", ".join(host.name for host in case.topology.hosts)
        raise UsageError(f"--what-if: no host is called {name!r}", f"hosts: {names}")
    entries = tuple(entry for entry in case.inventory.hosts if entry.name != name)
    return replace(
        case,
        topology=replace(case.topology, hosts=kept),
        inventory=replace(case.inventory, hosts=entries),
    )


def _kv(case: Case, kind: str) -> Case:
    """Another type of the KV cache, for every deployment whose model is known."""
    models: dict[str, Model | None] = dict(case.models)
    value_bytes = 1.0 if kind == "fp8" else 2.0
    wishes = []
    for wish in case.inventory.deployments:
        args = dict(wish.engine.args)
        model = models.get(wish.name)
        if model is not None:
            factor = value_bytes / model.kv_value_bytes
            models[wish.name] = replace(
                model,
                kv_bytes_per_token=int(model.kv_bytes_per_token * factor),
                kv_value_bytes=value_bytes,
            )
        args["kv-cache-dtype"] = _KV_FLAGS[kind]
        wishes.append(replace(wish, engine=replace(wish.engine, args=tuple(args.items()))))
    return replace(
        case, inventory=replace(case.inventory, deployments=tuple(wishes)), models=models
    )


Change = Callable[[DeploymentWish, float, bool], DeploymentWish]


def _work(key: str, *, is_whole: bool = False) -> Change:
    def change(wish: DeploymentWish, value: float, is_factor: bool) -> DeploymentWish:
        changed = getattr(wish.workload, key) * value if is_factor else value
        figure: Any = max(1, round(changed)) if is_whole else changed
        return replace(wish, workload=replace(wish.workload, **{key: figure}))

    return change


def _goal(key: str) -> Change:
    def change(wish: DeploymentWish, value: float, is_factor: bool) -> DeploymentWish:
        before = getattr(wish.slo, key)
        if is_factor and before is None:
            return wish
        changed = before * value if is_factor else value
        return replace(wish, slo=replace(wish.slo, **{key: changed}))

    return change


_CHANGES: dict[str, Change] = {
    "rate": _work("rate_rps"),
    "isl": _work("isl_tokens", is_whole=True),
    "osl": _work("osl_tokens", is_whole=True),
    "prefix": _work("shared_prefix_ratio"),
    "ttft": _goal("ttft_ms"),
    "itl": _goal("itl_ms"),
}

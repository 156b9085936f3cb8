"""The few constants of the roofline, per engine and GPU generation, with where and when they were fitted.

A set is found by multiplying factors: the base, then the engine's, the engine's on this generation of GPU, what the model
adds there if it was among the fitted points, what its format of weights adds, and what `dynctl calibrate` found on this
very GPU. Constants come from one data file of the package; what that command kept is handed in.
Not here: what the constants mean for time (`roofline`), fitting (`fitting`), files of the operator.
Pure: the package's data are read once.
"""

import itertools
import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, fields, replace
from functools import cache
from importlib import resources

from dynctl.core.model import Model
from dynctl.core.text import clean
from dynctl.errors import PlanError
from dynctl.planner.memory import Beside
from dynctl.planner.peaks import GpuSpec


@dataclass(frozen=True, slots=True)
class Constants:
    """What an engine reaches of its GPU's peaks, and what it pays beside."""

    eta_weights: float = 0.8
    """Share of memory bandwidth while reading dense weights."""
    eta_experts: float = 0.6
    """The same for routed experts."""
    eta_kv: float = 0.7
    eta_latent: float = 0.4
    """The same for MLA's compressed KV."""
    eta_gemm16: float = 0.62
    """Share of the peak in 16-bit matrix products."""
    eta_gemm8: float = 0.5
    eta_gemm4: float = 0.35
    eta_experts4: float = 0.6
    """The same for experts in 4 bit."""
    eta_expert_gemm: float = 0.35
    """Of grouped products in 16 or 8 bit, against the peak of their format."""
    eta_expert_gemm4: float = 0.3
    """Of grouped products with 4-bit weights."""
    imbalance: float = 0.05
    """By how much the busiest of many expert-parallel ranks exceeds the mean."""
    slicing: float = 0.25
    """What slicing each expert over tensor-parallel ranks costs, against whole experts on each."""
    gather_us: float = 15.0
    """Latency of one expert dispatch or combine between ranks that hold different tokens."""
    eta_attention: float = 0.45
    eta_link: float = 0.4
    """Share of a link's bandwidth in an all-reduce."""
    layer_us: float = 12.0
    """Launches and small kernels of one dense layer."""
    moe_layer_us: float = 25.0
    latent_us: float = 8.0
    """What MLA adds to a layer."""
    reduce_us: float = 8.0
    """Latency of one all-reduce between two GPUs of an NVLink island."""
    sequence_us: float = 8.0
    """Scheduling and sampling of one sequence in a step."""
    step_us: float = 500.0
    host_ms: float = 15.0
    """HTTP, tokenizing and scheduling of one request before its first token."""
    spread: float = 0.7
    """How evenly tokens choose experts: 1 is at random."""
    mixing: float = 1.0
    """Share of a prompt's time that the sequences decoding beside it lose."""
    queue: float = 1.0
    """How much longer prompts wait for each other than in an M/D/1 queue."""
    burst: float = 0.1
    """Share of a benchmark's requests that meet its starting burst."""
    overlap: float = 4.0
    """Power of the norm that joins memory and arithmetic time: large takes the longer of the two."""


NAMES = tuple(item.name for item in fields(Constants))
Factors = Mapping[str, float]
TOGETHER: Mapping[str, tuple[str, ...]] = {
    "memory": ("eta_weights", "eta_experts", "eta_experts4", "eta_kv", "eta_latent"),
    "arithmetic": (
        "eta_gemm16", "eta_gemm8", "eta_gemm4", "eta_expert_gemm", "eta_expert_gemm4", "eta_attention",
    ),
    "floors": ("layer_us", "moe_layer_us", "latent_us", "step_us", "reduce_us", "gather_us", "sequence_us"),
    "host": ("host_ms",),
    "weights": ("eta_weights", "eta_experts", "eta_experts4"),
}  # fmt: skip
"""Which constants move together: end-to-end figures of one model cannot tell them apart."""
WIDTHS: Mapping[str, float] = {"bf16": 2.0, "fp8": 1.0, "nvfp4": 0.5625}
"""Bytes of one weight in the formats that GPUs multiply in: of these a wider one is never faster."""
REGIMES = ("fitted", "unfitted", "foreign")
"""How much is known of a setting, from most to least: each has a band of its own."""
SAME_SIZE = 0.02
"""GPUs whose memory differs by less are of one kind: drivers and error correction take different parts of it."""
NVFP4_SHARE = 0.57
"""Bytes of a 4-bit weight with its scale over those of an 8-bit one."""


@dataclass(frozen=True, slots=True)
class Calibration:
    """Everything fitted, and its origin."""

    origin: str
    date: str
    base: Factors
    factors: Mapping[str, Factors]
    """What the base is multiplied by: `engine`, `engine/generation`, `engine/generation/model`, `engine/generation/model/format`, or `engine/gpu`."""
    bands: Mapping[str, tuple[float, float]]
    """By `figure/family/regime`: factors from an expected figure to the low and high end of its 90 % band."""
    models: frozenset[str] = frozenset()
    """Fingerprints of the models among the fitted points."""
    origins: Mapping[str, str] = field(default_factory=dict)
    """By `engine/gpu` key: where own factors come from."""
    beside: Mapping[str, Beside] = field(default_factory=dict)
    """By `engine/gpu` key: what a running engine's KV cache told of its memory."""

    def constants(self, engine: str, spec: GpuSpec, model: Model | None = None) -> Constants:
        """The set for an engine on a kind of GPU; what was never fitted, or no model, leaves a coarser set."""
        values = {name: getattr(_PLAIN, name) for name in NAMES} | dict(self.base)
        keys = levels(engine, spec.generation, model)
        found = [self.factors.get(key, {}) for key in keys[:3]]
        found.append(self._of_format(*keys[2:]) if model else {})
        found.append(self.factors.get(f"{engine}/{spec.name}", {}))
        for name, factor in itertools.chain.from_iterable(f.items() for f in found):
            for constant in TOGETHER.get(name, (name,)):
                values[constant] *= factor
        return bounded(values)

    def _of_format(self, known: str, key: str) -> Factors:
        """What a format adds for a model, held to what narrower ones add."""
        found = dict(self.factors.get(key, {}))
        width = WIDTHS.get(key.rpartition("/")[2], 0.0)
        for narrow, narrower in WIDTHS.items():
            other = self.factors.get(f"{known}/{narrow}", {})
            if other and narrower < width:
                most = other["weights"] * width / narrower
                found["weights"] = min(found.get("weights", 1.0), most)
                found["floors"] = max(found.get("floors", 1.0), other["floors"])
        return found

    def band(self, figure: str, model: Model, engine: str, spec: GpuSpec) -> tuple[float, float]:
        """The 90 % band of `ttft`, `tpot` or `tokens`: narrow for a fitted model on a fitted engine and GPU generation.

        Others get the band of models and GPUs that were left out of a fit on purpose; an engine on a generation without
        any point, and floods of requests (`tokens-flood`), that of rows from elsewhere. A band holds those of all who
        know more: few points may by chance spread less, but less knowledge never promises more.
        """
        family = family_of(model)
        _, place, known, _ = levels(engine, spec.generation, model)
        has_points = place in self.factors or f"{engine}/{spec.name}" in self.factors
        if not has_points or figure.endswith("-flood"):
            doubt = 3
        else:
            doubt = 1 if known in self.factors else 2
        name = figure.removesuffix("-flood")
        ends = [self.bands[f"{name}/{family}/{regime}"] for regime in REGIMES[:doubt]]
        low, high = min(low for low, _ in ends), max(high for _, high in ends)
        return low / (1 + model.margin), high * (1 + model.margin)

    def beside_of(self, engine: str, total_bytes: int) -> Beside | None:
        """What is known of an engine's memory on GPUs of this size; None: nothing."""
        for key, found in self.beside.items():
            is_same_size = abs(found.total_bytes / total_bytes - 1) < SAME_SIZE
            if is_same_size and key.startswith(f"{engine}/"):
                return found
        return None

    def source(self, engine: str, spec: GpuSpec, model: Model) -> str:
        """A sentence on where the set for this engine, GPU and model comes from."""
        own = self.origins.get(f"{engine}/{spec.name}")
        if own is not None:
            return f"calibrated for {engine} on {spec.name}: {own}"
        _, place, known, _ = levels(engine, spec.generation, model)
        where = f"{engine} on {spec.generation}"
        if place not in self.factors:
            how = f"not fitted for {where}"
        else:
            how = f"fitted for {where}, {'this model included' if known in self.factors else 'this model not'}"
        return f"roofline {how}: {self.origin}, {self.date}"


_PLAIN = Constants()


def bounded(values: Factors) -> Constants:
    """A set within physics: no more than the peak, and narrower weights never slower than wider ones.

    A peak in 8 bit is twice that in 16 bit, so half of the share keeps the speed; the same from 8 to 4 bit, and for
    bytes read of experts.
    """
    found = {
        name: min(1.0, max(0.05, value)) if name.startswith("eta_") else value
        for name, value in values.items()
    }
    found["eta_gemm8"] = max(found["eta_gemm8"], found["eta_gemm16"] / 2)
    found["eta_gemm4"] = max(found["eta_gemm4"], found["eta_gemm8"] / 2)
    found["eta_experts4"] = max(found["eta_experts4"], found["eta_experts"] * NVFP4_SHARE)
    return Constants(**found)


def levels(engine: str, generation: str, model: Model | None) -> tuple[str, ...]:
    """Whose factors make a set, from coarse to fine."""
    place = f"{engine}/{generation}"
    if model is None:
        return engine, place
    known = f"{place}/{fingerprint(model)}"
    return engine, place, known, f"{known}/{stored_as(model)}"


def family_of(model: Model) -> str:
    """`moe` or `dense`."""
    return "moe" if model.num_experts else "dense"


def fingerprint(model: Model) -> str:
    """What tells a model's architecture from others', whatever it is called and however it is stored."""
    heads = f"{model.num_heads}:{model.num_kv_heads}"
    return f"{model.num_layers}x{model.hidden_size}x{heads}x{model.num_experts}"


def stored_as(model: Model) -> str:
    """The width most weights are kept in: `bf16`, `fp8`, `int8`, `int4`, `nvfp4` or `mxfp4`."""
    most = max(model.parts, key=lambda part: part.num_params, default=None)
    return most.format.removesuffix("-block") if most else ""


def read_calibration(text: str) -> Calibration:
    """Parse the data file's format."""
    data = json.loads(text)
    return Calibration(
        origin=str(data["origin"]),
        date=str(data["date"]),
        base={k: float(v) for k, v in data["base"].items()},
        factors={
            key: {k: float(v) for k, v in factors.items()}
            for key, factors in data["factors"].items()
        },
        bands={key: (float(low), float(high)) for key, (low, high) in data["bands"].items()},
        models=frozenset(str(m) for m in data.get("models", ())),
    )


@cache
def shipped() -> Calibration:
    """The calibration that comes with dynctl."""
    return read_calibration(
        resources.files(__package__).joinpath("constants.json").read_text("utf-8")
    )


def with_own(found: Calibration, text: str, where: str) -> Calibration:
    """Put what `dynctl calibrate` has kept, read from `where`, over the shipped calibration.

    Raises:
        PlanError: when the text is not what `own_text` writes.
    """
    try:
        data = json.loads(text)
        kept = data["calibrations"]
        factors = {
            str(key): {str(n): float(v) for n, v in entry["factors"].items() if n in NAMES}
            for key, entry in kept.items()
        }
        origins = {str(key): str(entry["origin"]) for key, entry in kept.items()}
        beside = {
            str(key): Beside(int(e["total_bytes"]), int(e["extra_bytes"]), str(e["origin"]))
            for key, e in data.get("memory", {}).items()
        }
        are_usable = all(0.01 < v < 100 for entry in factors.values() for v in entry.values())
        are_usable &= all(abs(e.extra_bytes) < e.total_bytes for e in beside.values())
    except (
        ValueError,
        KeyError,
        TypeError,
        AttributeError,
        OverflowError,
        RecursionError,
    ) as error:
        raise PlanError(
            f"{where} is damaged or from another version: {clean(str(error), 120)}",
            f"calibrate again, or remove it: rm {where}",
        ) from error
    if not are_usable:
        raise PlanError(
            f"{where} holds a factor out of range",
            f"calibrate again, or remove it: rm {where}",
        )
    return replace(
        found,
        factors={**found.factors, **factors},
        origins={**found.origins, **origins},
        beside=beside,
    )


def own_text(calibration: Calibration) -> str:
    """What is kept of a calibration: own factors and memory by `engine/gpu`, with their origin."""
    kept = {
        key: {
            "origin": origin,
            "factors": {n: round(v, 4) for n, v in sorted(calibration.factors[key].items())},
        }
        for key, origin in sorted(calibration.origins.items())
    }
    memory = {key: asdict(entry) for key, entry in sorted(calibration.beside.items())}
    data = {"schema": "dynctl.calibration/1", "calibrations": kept, "memory": memory}
    return json.dumps(data, indent=2) + "\n"

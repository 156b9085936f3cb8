"""How good the estimates are: `make bench-plan`. Prints every error by group, and compares with a rival.

    plan_accuracy.py            the shipped constants, fits that leave out models and GPUs, coverage, the rival
    plan_accuracy.py --quick    without the left-out fits: seconds
    plan_accuracy.py --write    fit again and write dynctl/planner/constants.json

Points come from `plan/points.csv` and `plan/measured.csv`, whose first lines and columns name their origin. Every
third point by a hash of its setting is held back from fitting. Predictions are made as `dynctl estimate` makes them.
"""

import argparse
import collections
import hashlib
import itertools
import json
import os
import random
import sys
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent / "plan"))

import fit
from judging import FIGURES, Outcome, coverage, header, medians, outcomes, quantiles, row
from measured import foreign, others, pd_order, rival
from points import Point, plain_shape, read_points, shaped

from dynctl.core.plan import Parallelism
from dynctl.planner.calibration import Calibration, shipped
from dynctl.planner.peaks import SPECS
from dynctl.planner.roofline import Engine, group_link

CONSTANTS = Path(__file__).parents[1] / "dynctl" / "planner" / "constants.json"
ORIGIN = "points.csv (aiconfigurator-core 0.12.0 silicon_sample.csv, Apache-2.0)"
PER_GROUP = 24
"""Points per model, GPU and engine in a left-out fit, so that it takes seconds."""
TARGETS = {"TPOT dense": 7.0, "TPOT MoE": 9.0, "throughput": 7.5, "TTFT": 33.0, "TPOT left-out models": 15.0, "TPOT left-out GPUs": 14.0}  # fmt: skip
COVERED, COVERED_ELSEWHERE = (85.0, 95.0), 80.0


def usable(points: Sequence[Point]) -> list[Point]:
    # The GB200 rows of this file jump between 8 and 168 ms per token without order: nothing is judged by them.
    return [p for p in points if p.gpu != "gb200"]


def thinned(points: Sequence[Point]) -> list[Point]:
    groups = collections.defaultdict(list)
    for p in points:
        groups[p.model, p.gpu, p.engine].append(p)
    chosen = random.Random(3)
    return [p for g in groups.values() for p in chosen.sample(g, min(len(g), PER_GROUP))]


Fold = tuple[str, list[Point], list[Point]]
"""A name, what is fitted, and what is predicted from it."""


def without_each(points: Sequence[Point], key: str) -> Iterator[Fold]:
    """Each model or GPU, to be predicted by a fit that has seen nothing of it."""
    for value in sorted({getattr(p, key) for p in points}):
        rest = thinned([p for p in points if getattr(p, key) != value])
        yield f"  without {value}", rest, [p for p in points if getattr(p, key) == value]


def thirds(points: Sequence[Point]) -> Iterator[Fold]:
    """Known models and GPUs in three folds, twice: a new load of a fitted layout, and a layout that is new itself."""
    for name, num_fields in (("loads", 12), ("layouts", 9)):
        folds = [fold_of("|".join(p.key.split("|")[:num_fields])) for p in points]
        for i in range(3):
            rest = [p for p, fold in zip(points, folds, strict=True) if fold != i]
            away = [p for p, fold in zip(points, folds, strict=True) if fold == i]
            yield f"  {name}, fold {i + 1} of 3", rest, away


def fold_of(text: str) -> int:
    return int(hashlib.sha256(("fold" + text).encode()).hexdigest()[:8], 16) % 3


def predicted(fold: Fold) -> list[Outcome]:
    _, rest, away = fold
    return outcomes(fit.calibrate(rest, rounds=8), away)


def out_of_fold(folds: Iterator[Fold]) -> list[Outcome]:
    """All folds, each fitted in a process of its own."""
    listed = list(folds)
    pooled: list[Outcome] = []
    with ProcessPoolExecutor(os.cpu_count()) as pool:
        for (name, _, _), found in zip(listed, pool.map(predicted, listed), strict=True):
            row(name, found)
            pooled += found
    return pooled


def bands(found: Sequence[Outcome], regime: str) -> dict[str, tuple[float, float]]:
    """The 5 % and 95 % quantiles of measured over predicted, out of fold: the band is conformal, not a guess."""
    result = {}
    for family in ("dense", "moe"):
        mine = [o for o in found if o.point.is_moe == (family == "moe")]
        for i, name in enumerate(FIGURES):
            result[f"{name}/{family}/{regime}"] = quantiles((1 / o.ratios[i] for o in mine), 0.05, 0.95)  # fmt: skip
    return result


def elsewhere(calibration: Calibration, known: dict[str, tuple[float, float]]) -> dict[str, tuple[float, float]]:  # fmt: skip
    """Bands that also hold rows of other origin: other servers, versions and hosts than the points have.

    They are too few to take quantiles of. For engines on generations without a point, and for floods, the band is from
    the farthest to the farthest; where only the model is new, four in five of them are held.
    """
    rows = foreign(calibration)
    result = {}
    for family, name in itertools.product(("dense", "moe"), FIGURES):
        low, high = known[f"{name}/{family}/unfitted"]
        every = [1 / r.ratio for r in rows if r.figure == name] or [low / 1.2, high * 1.2]
        near = [1 / r.ratio for r in rows if r.figure == name == "tpot" and has_points(calibration, r.point)]  # fmt: skip
        if near:
            least, most = quantiles(near, 0.1, 0.9)
            low, high = min(low, least), max(high, most)
        result[f"{name}/{family}/unfitted"] = low, high
        result[f"{name}/{family}/foreign"] = min(low, *every), max(high, *every)
    return result


def has_points(calibration: Calibration, p: Point) -> bool:
    return f"{p.engine}/{p.query.spec.generation}" in calibration.factors


def write(points: Sequence[Point]) -> None:
    train = [p for p in points if not p.is_held]
    # Nothing of a held point enters the bands either.
    found = bands(out_of_fold(thirds(train)), "fitted")
    found |= bands(
        out_of_fold(without_each(train, "model")) + out_of_fold(without_each(train, "gpu")),
        "unfitted",
    )
    calibration = fit.calibrate(train, rounds=16)
    found |= elsewhere(calibration, found)
    data = {
        "origin": f"{len(train)} points of {ORIGIN}",
        "date": time.strftime("%Y-%m-%d"),
        "base": {k: round(v, 5) for k, v in calibration.base.items()},
        "factors": {
            g: {k: round(v, 4) for k, v in f.items()}
            for g, f in sorted(calibration.factors.items())
        },
        "bands": {
            key: (round(min(low, 0.99), 3), round(max(high, 1.01), 3))
            for key, (low, high) in found.items()
        },
        "models": sorted(calibration.models),
    }
    CONSTANTS.write_text(json.dumps(data, indent=1) + "\n")
    print(f"wrote {CONSTANTS}")


def narrower_never_slower() -> bool:
    """Every GPU, batch and length: fp8 at most as slow as bf16, nvfp4 at most as slow as fp8."""
    plain = {
        name: plain_shape(name)
        for name in ("llama-3.1-8b", "llama-3.1-70b", "qwen3-235b-a22b", "deepseek-v3")
    }
    for name, model in plain.items():
        for spec in SPECS:
            for engine in ("vllm", "sglang", "trtllm", "other"):
                link = group_link(spec, spec.num_nvlinks, "PHB")
                engines = [
                    Engine(shaped(model, f, f), spec, Parallelism(4), link, engine)
                    for f in ("bf16", "fp8", "nvfp4")
                ]
                for wide, narrow in itertools.pairwise(engines):
                    if spec.fp4_flops is None and narrow is engines[2]:
                        continue  # no 4-bit units: such weights are multiplied in 16 bit, which fp8 may beat
                    for batch in (1, 8, 64, 512):
                        if narrow.decode_s(batch, 2000) > wide.decode_s(batch, 2000) * (1 + 1e-9):
                            print(f"  slower: {name} {spec.name} {engine} batch {batch}")
                            return False
                    if narrow.prefill_s(4000) > wide.prefill_s(4000) * (1 + 1e-9):
                        print(f"  slower: {name} {spec.name} {engine} prefill")
                        return False
    return True


def held_errors(calibration: Calibration, held: Sequence[Point]) -> tuple[dict[str, float], list[float]]:  # fmt: skip
    """Print errors of held points by group; the errors that have targets, and what the bands cover."""
    found = outcomes(calibration, held)
    header()
    row("held points", found)
    row("  dense", dense := [o for o in found if not o.point.is_moe])
    row("  MoE", moe := [o for o in found if o.point.is_moe])
    for key in ("model", "gpu", "engine"):
        for value in sorted({getattr(p, key) for p in held}):
            row(f"  {value}", [o for o in found if getattr(o.point, key) == value])
    covered = coverage(calibration, found)
    cells = [f"{n} {v:.1f} %" for n, v in zip(("TTFT", "TPOT", "tok/s"), covered, strict=True)]
    print("90 % band covers of held points: " + ", ".join(cells))
    reached = {
        "TPOT dense": medians(dense)[1],
        "TPOT MoE": medians(moe)[1],
        "throughput": medians(found)[2],
        "TTFT": medians(found)[0],
    }
    return reached, covered


def left_out_errors(points: Sequence[Point]) -> dict[str, float]:
    print("\nleft out of the fit altogether")
    models = out_of_fold(without_each(points, "model"))
    row("models, pooled", models)
    gpus = out_of_fold(without_each(points, "gpu"))
    row("GPUs, pooled", gpus)
    return {"TPOT left-out models": medians(models)[1], "TPOT left-out GPUs": medians(gpus)[1]}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--quick", action="store_true")
    parser.add_argument("--write", action="store_true")
    options = parser.parse_args()
    points = usable(read_points())
    if options.write:
        write(points)
        shipped.cache_clear()
    calibration = shipped()
    held = [p for p in points if p.is_held]
    print(f"{len(points)} points, {len(held)} held back; constants: {calibration.origin}, {calibration.date}")  # fmt: skip
    reached, covered = held_errors(calibration, held)
    if not options.quick:
        reached |= left_out_errors(points)
    rival(calibration, points)
    share = others(calibration)
    checks = {
        "order of the prefill : decode rows": pd_order(calibration),
        "fp8 never slower than bf16, nvfp4 than fp8": narrower_never_slower(),
        "band covers 85 to 95 %": all(COVERED[0] <= v <= COVERED[1] for v in covered),
        "band covers 80 % of rows of other origin": share >= COVERED_ELSEWHERE,
    }
    print("\ntargets")
    for name, value in reached.items():
        is_met = value <= TARGETS[name]
        checks[name] = is_met
        print(f"  {name:24} {value:5.1f} %  target {TARGETS[name]:4.1f} %  {'met' if is_met else 'MISSED'}")  # fmt: skip
    for name in [name for name in checks if name not in reached]:
        print(f"  {name}: {'met' if checks[name] else 'MISSED'}")
    return 0 if all(checks.values()) else 1


if __name__ == "__main__":
    sys.exit(main())

"""How good the estimates are: `make bench-plan`. Fits, prints every error by group, and compares with a rival.

    plan_accuracy.py            table of the shipped constants, left-out fits, coverage, the rival on the same rows
    plan_accuracy.py --quick    without the left-out fits
    plan_accuracy.py --write    fit again and write dynctl/planner/constants.json

Points come from `plan/points.csv` and `plan/measured.csv`, whose first lines and columns name their origin. Every
third point by a hash of its setting is held back from fitting.
"""

import argparse
import collections
import csv
import hashlib
import itertools
import json
import random
import statistics
import sys
import time
from dataclasses import dataclass
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent / "plan"))

import fit
from points import HERE, MODELS, Point, plain_shape, prepare, read_points, shaped

from dynctl.core.plan import Parallelism
from dynctl.planner.calibration import Calibration, fingerprint, shipped
from dynctl.planner.closed_loop import Loop, Pair, run_loop, run_pair
from dynctl.planner.memory import Room, sheet
from dynctl.planner.peaks import SPECS, spec_named
from dynctl.planner.roofline import Engine, group_link, load_of

CONSTANTS = Path(__file__).parents[1] / "dynctl" / "planner" / "constants.json"
ORIGIN = "points.csv (aiconfigurator-core 0.12.0 silicon_sample.csv, Apache-2.0)"
FIGURES = ("ttft", "tpot", "tokens")
PER_GROUP = 12
"""Points per model, GPU and engine in a left-out fit, so that it takes seconds."""
TARGETS = {"TPOT dense": 7.0, "TPOT MoE": 9.0, "throughput": 7.5, "TTFT": 33.0, "TPOT left-out models": 15.0, "TPOT left-out GPUs": 14.0}  # fmt: skip


@dataclass(slots=True)
class Outcome:
    """Predicted over measured, by figure."""

    point: Point
    ratios: tuple[float, float, float]


def outcomes(calibration: Calibration, points: list[Point]) -> list[Outcome]:
    found = []
    for p in points:
        c = calibration.constants(p.engine, p.generation, p.fingerprint)
        r = run_loop(p.load, c, Loop(p.isl, p.osl, p.concurrency))
        tokens = p.concurrency * p.osl / (r.ttft_s + r.tpot_s * (p.osl - 1))
        found.append(
            Outcome(
                p, (r.ttft_s * 1e3 / p.ttft_ms, r.tpot_s * 1e3 / p.tpot_ms, tokens / p.tokens_s)
            )
        )
    return found


def medians(found: list[Outcome]) -> list[float]:
    return [100 * statistics.median(abs(o.ratios[i] - 1) for o in found) for i in range(3)]


def row(name: str, found: list[Outcome]) -> None:
    if not found:
        return
    m = medians(found)
    bias = [100 * (statistics.median(o.ratios[i] for o in found) - 1) for i in range(3)]
    tail = [
        100 * sorted(abs(o.ratios[i] - 1) for o in found)[int(0.9 * (len(found) - 1))]
        for i in range(3)
    ]
    print(
        f"{name:34} {len(found):5}  "
        + "  ".join(f"{a:6.1f} {b:+6.1f} {t:6.0f}" for a, b, t in zip(m, bias, tail, strict=True)),
        flush=True,
    )


def usable(points: list[Point]) -> list[Point]:
    # The GB200 rows of this file jump between 8 and 168 ms per token without order: nothing is judged by them.
    return [p for p in points if p.gpu != "gb200"]


def thinned(points: list[Point]) -> list[Point]:
    groups = collections.defaultdict(list)
    for p in points:
        groups[p.model, p.gpu, p.engine].append(p)
    chosen = random.Random(3)
    return [p for g in groups.values() for p in chosen.sample(g, min(len(g), PER_GROUP))]


def left_out(points: list[Point], key: str) -> list[Outcome]:
    """Each model or GPU predicted by a fit that has seen nothing of it."""
    pooled: list[Outcome] = []
    for value in sorted({getattr(p, key) for p in points}):
        rest = thinned([p for p in points if getattr(p, key) != value])
        found = outcomes(
            fit.calibrate(rest, rounds=8), [p for p in points if getattr(p, key) == value]
        )
        row(f"  without {value}", found)
        pooled += found
    return pooled


def out_of_fold(points: list[Point], folds: int = 3) -> list[Outcome]:
    mixed = sorted(points, key=lambda p: hash_of(p.key))
    found: list[Outcome] = []
    for i in range(folds):
        away = mixed[i::folds]
        found += outcomes(
            fit.calibrate([p for j, p in enumerate(mixed) if j % folds != i], rounds=8), away
        )
    return found


def hash_of(text: str) -> str:
    return hashlib.sha256(("fold" + text).encode()).hexdigest()


def bands(found: list[Outcome], regime: str) -> dict[str, tuple[float, float]]:
    """The 5 % and 95 % quantiles of measured over predicted, out of fold: the band is conformal, not a guess."""
    result = {}
    for family in ("dense", "moe"):
        mine = [o for o in found if o.point.is_moe == (family == "moe")]
        for i, name in enumerate(FIGURES):
            ratios = sorted(1 / o.ratios[i] for o in mine)
            low, high = (
                ratios[int(0.05 * len(ratios))],
                ratios[min(len(ratios) - 1, int(0.95 * len(ratios)))],
            )
            result[f"{name}/{family}/{regime}"] = (
                round(min(low, 0.99), 3),
                round(max(high, 1.01), 3),
            )
    return result


def write(points: list[Point]) -> None:
    train = [p for p in points if not p.is_held]
    found = bands(out_of_fold(train), "fitted")
    # Nothing of a held point enters the bands either.
    found |= bands(left_out(train, "model") + left_out(train, "gpu"), "unfitted")
    calibration = fit.calibrate(train, rounds=16)
    elsewhere = foreign(calibration)
    for family in ("dense", "moe"):
        for name in FIGURES:
            low, high = found[f"{name}/{family}/unfitted"]
            # Few rows: the band is from the farthest to the farthest, over both families.
            ratios = [1 / ratio for kind, ratio, _, _ in elsewhere if kind == name] or [
                low / 1.2,
                high * 1.2,
            ]
            found[f"{name}/{family}/foreign"] = (
                round(min(low, *ratios), 3),
                round(max(high, *ratios), 3),
            )
    data = {
        "origin": f"{len(train)} points of {ORIGIN}",
        "date": time.strftime("%Y-%m-%d"),
        "base": {k: round(v, 5) for k, v in calibration.base.items()},
        "factors": {
            g: {k: round(v, 4) for k, v in f.items()}
            for g, f in sorted(calibration.factors.items())
        },
        "bands": found,
        "models": sorted(calibration.models),
    }
    CONSTANTS.write_text(json.dumps(data, indent=1) + "\n")
    print(f"wrote {CONSTANTS}")


def coverage(calibration: Calibration, found: list[Outcome]) -> list[float]:
    inside = [0, 0, 0]
    for o in found:
        spec = spec_named(o.point.gpu)
        for i, name in enumerate(FIGURES):
            low, high = calibration.band(name, o.point.shape, o.point.engine, spec)
            inside[i] += low <= 1 / o.ratios[i] <= high
    return [100 * n / max(1, len(found)) for n in inside]


# ---- rows of measured.csv -------------------------------------------------------------------------------------------

ENGINE_GPUS = {"a100": "a100-sxm-80", "a100_sxm": "a100-sxm-80", "rtx4090": "rtx-4090"}
QUANTS = {
    "bfloat16": "bf16",
    "fp8": "fp8",
    "fp8_block": "fp8-block",
    "nvfp4": "nvfp4",
    "int4_wo": "int4",
    "w4a16_mxfp4": "mxfp4",
}


def measured_rows() -> list[dict[str, str]]:
    return list(csv.DictReader((HERE / "measured.csv").read_text().splitlines()))


def point_of(r: dict[str, str], concurrency: float | None = None) -> Point | None:
    """A row as a point; None where the row does not say enough."""
    name = MODELS.get(r["model"])
    number = lambda key: int(float(r[key] or 1)) or 1  # noqa: E731 - one expression, used right below
    if name is None or not r["tp"] or not (r["concurrency"] or concurrency):
        return None
    moe = plain_shape(name).num_experts > 0
    dense, experts = (
        QUANTS.get(r["gemm_quant"], "bf16"),
        QUANTS.get(r["moe_quant"] or r["gemm_quant"], "bf16"),
    )
    if name == "gpt-oss-120b":
        dense, experts = "bf16", "mxfp4"
    if name == "kimi-k2" and experts in {"int4", "nvfp4"}:
        dense = "bf16"
    tp, dp = number("tp"), number("dp")
    etp, ep = (number("moe_tp"), number("moe_ep")) if moe else (1, 1)
    if moe and r["moe_ep"] and (etp * ep != tp * dp or tp * dp > 8):
        return None
    return prepare(
        Point(name, ENGINE_GPUS.get(r["system"], r["system"].replace("_", "-")), r["engine"], dense, experts if moe else dense,
              tp, dp, etp, ep, int(float(r["isl"])), int(float(r["osl"])), float(r["concurrency"] or concurrency or 1),
              float(r["ttft_ms"] or 0), float(r["tpot_ms"] or 0))
    )  # fmt: skip


def rival(calibration: Calibration, points: list[Point]) -> None:
    """The rival's own prediction beside ours, on rows whose point was held back, and on all."""
    seen = {p.key for p in points if not p.is_held}
    print(
        "\nmeasured.csv, rows the rival predicts too: median |error| %  (rival is AIConfigurator 0.12.0)"
    )
    rows = []
    for r in measured_rows():
        p = point_of(r) if r["mode"] == "agg" and r["aic_tpot_ms"] else None
        if p is not None and p.gpu != "gb200":
            rows.append((p, float(r["aic_ttft_ms"]), float(r["aic_tpot_ms"])))
    for label, chosen in (
        ("all rows", rows),
        ("rows not fitted", [x for x in rows if x[0].key not in seen]),
    ):
        if not chosen:
            continue
        for family in ("all", "dense", "MoE"):
            some = [x for x in chosen if family == "all" or x[0].is_moe == (family == "MoE")]
            if not some:
                continue
            ours = medians(outcomes(calibration, [p for p, _, _ in some]))
            theirs = [Outcome(p, (a / p.ttft_ms, b / p.tpot_ms,
                      (p.concurrency * 1e3 * p.osl / (a + b * (p.osl - 1))) / p.tokens_s)) for p, a, b in some]  # fmt: skip
            them = medians(theirs)
            print(f"  {label:16} {family:6} n {len(some):3}  ours TTFT {ours[0]:5.1f} TPOT {ours[1]:5.1f} tok/s {ours[2]:5.1f}"
                  f"   rival TTFT {them[0]:5.1f} TPOT {them[1]:5.1f} tok/s {them[2]:5.1f}")  # fmt: skip


def max_users(p: Point, limit: int) -> float:
    spec = spec_named(p.gpu)
    room = Room(spec.usable_bytes, 0.9, 256)
    held = sheet(p.shape, Parallelism(p.tp, dp=p.dp, ep=p.ep), room).kv_capacity_tokens
    return max(1.0, min(limit * p.dp, held / (p.isl + p.osl / 2)))


def foreign(calibration: Calibration) -> list[tuple[str, float, Point, str]]:
    """Rows of other origin: figure, predicted over measured, the point, the origin."""
    found = []
    for r in measured_rows():
        if "silicon" in r["source"] or r["mode"] not in {"agg", "max", "static"}:
            continue
        flood = not r["concurrency"]
        # trtllm-bench lifts the limit on sequences; servers keep their default.
        limit = 2048 if r["mode"] == "max" else 256
        p = point_of(r, 2048.0 if r["mode"] == "max" else 512.0)
        if p is None:
            continue
        c = calibration.constants(p.engine, p.generation, p.fingerprint)
        got = run_loop(p.load, c, Loop(p.isl, p.osl, p.concurrency, 0.0, max_users(p, limit)))
        ratio = (
            got.tokens_s / (p.tp * p.dp) / float(r["out_tok_s_per_gpu"])
            if flood
            else got.tpot_s * 1e3 / p.tpot_ms
        )
        found.append(("tokens" if flood else "tpot", ratio, p, r["source"].split(" ")[0]))
    return found


def others(calibration: Calibration) -> None:
    """Rows of other origin: no constant was fitted to them, and only the `foreign` bands know them."""
    print("\nrows of other origin (no constant was fitted to them): predicted over measured")
    rows = foreign(calibration)
    inside = 0
    groups = collections.defaultdict(list)
    for kind, ratio, p, origin in rows:
        low, high = calibration.band(
            "tokens-flood" if kind == "tokens" else kind, p.shape, p.engine, spec_named(p.gpu)
        )
        inside += low <= 1 / ratio <= high
        groups[origin, kind].append(ratio)
    for (origin, kind), values in sorted(groups.items()):
        print(f"  {origin:36} {kind:8} n {len(values):3}  median error {100 * statistics.median(abs(v - 1) for v in values):5.1f} %"
              f"  bias {100 * (statistics.median(values) - 1):+5.1f} %")  # fmt: skip
    print(
        f"  the 90 % band holds {inside} of {len(rows)}: {100 * inside / max(1, len(rows)):.0f} % (at least 80 % wanted)"
    )


def pd_order(calibration: Calibration) -> bool:
    """The public 1p3d / 2p2d / 3p1d rows of gpt-oss-120b on H200: does the order of throughput come out right."""
    print(
        "\nprefill : decode ratio, gpt-oss-120b on 8 H200 (out tok/s per GPU): measured → predicted"
    )
    groups = collections.defaultdict(list)
    for r in measured_rows():
        if r["mode"] == "disagg" and "pd_ratio" in r["source"]:
            wish = r["id"].split(":")[2]
            groups[wish, r["concurrency"]].append(r)
    spec = spec_named("h200-sxm")
    model = shaped(plain_shape("gpt-oss-120b"), "bf16", "mxfp4")
    load = load_of(model, spec, Parallelism(2), group_link(spec, 18, None))
    c = calibration.constants("sglang", "hopper", fingerprint(model))
    groups["2048x128", "128"] = [
        # The two of these rows that the design notes quote; the file keeps them aside.
        {
            "p_workers": "1",
            "d_workers": "3",
            "isl": "2046",
            "osl": "64",
            "out_tok_s_per_gpu": "183",
            "source": "",
        },
        {
            "p_workers": "3",
            "d_workers": "1",
            "isl": "2046",
            "osl": "64",
            "out_tok_s_per_gpu": "370",
            "source": "",
        },
    ]
    right = wrong = 0
    for (wish, users), rows in sorted(groups.items()):
        osl = statistics.mean(float(r["osl"]) for r in rows)
        pairs = []
        for r in rows:
            moving = float(r["isl"]) * model.kv_bytes_per_token / (2 * spec.link_bytes_s * 0.7)
            pair = Pair(load, int(r["p_workers"]), load, int(r["d_workers"]), 0.005 + moving)
            # The runs with 32 users came minutes after those with 128, with the same prompts: their prefixes were cached.
            cached = float(r["isl"]) - 64 if users == "32" else 0.0
            found = run_pair(pair, c, Loop(float(r["isl"]), osl, float(users), max(0.0, cached)))
            pairs.append(
                (
                    f"{r['p_workers']}p{r['d_workers']}d",
                    float(r["out_tok_s_per_gpu"]),
                    found.tokens_s / 8,
                )
            )
        for i, a in enumerate(pairs):
            for b in pairs[i + 1 :]:
                same = (a[1] > b[1]) == (a[2] > b[2])
                right, wrong = right + same, wrong + (not same)
        print(
            f"  {wish:10} c{users:4} " + "   ".join(f"{n} {m:6.0f} → {v:6.0f}" for n, m, v in pairs)
        )
    print(f"  order right in {right} of {right + wrong} pairs")
    return wrong == 0


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
    found = outcomes(calibration, held)
    print(
        f"{len(points)} points, {len(held)} held back; constants: {calibration.origin}, {calibration.date}"
    )
    print(
        f"{'':34} {'n':>5}  "
        + "  ".join(f"{name:>6} {'bias':>6} {'p90':>6}" for name in ("TTFT", "TPOT", "tok/s"))
    )
    row("held points", found)
    row("  dense", dense := [o for o in found if not o.point.is_moe])
    row("  MoE", moe := [o for o in found if o.point.is_moe])
    for key in ("model", "gpu", "engine"):
        for value in sorted({getattr(p, key) for p in held}):
            row(f"  {value}", [o for o in found if getattr(o.point, key) == value])
    covered = coverage(calibration, found)
    print(
        "90 % band covers of held points: "
        + ", ".join(
            f"{n} {v:.1f} %" for n, v in zip(("TTFT", "TPOT", "tok/s"), covered, strict=True)
        )
    )
    reached = {
        "TPOT dense": medians(dense)[1],
        "TPOT MoE": medians(moe)[1],
        "throughput": medians(found)[2],
        "TTFT": medians(found)[0],
    }
    if not options.quick:
        print("\nleft out of the fit altogether")
        row("models, pooled", models := left_out(points, "model"))
        row("GPUs, pooled", gpus := left_out(points, "gpu"))
        reached |= {
            "TPOT left-out models": medians(models)[1],
            "TPOT left-out GPUs": medians(gpus)[1],
        }
    rival(calibration, points)
    others(calibration)
    is_ordered = pd_order(calibration)
    is_monotone = narrower_never_slower()
    print("\ntargets")
    ok = is_ordered and is_monotone and all(85 <= v <= 95 for v in covered)
    for name, value in reached.items():
        ok &= value <= TARGETS[name]
        print(
            f"  {name:24} {value:5.1f} %  target {TARGETS[name]:4.1f} %  {'met' if value <= TARGETS[name] else 'MISSED'}"
        )
    print(f"  fp8 never slower than bf16, nvfp4 than fp8: {'met' if is_monotone else 'MISSED'}")
    print(f"  order of the prefill : decode rows: {'met' if is_ordered else 'MISSED'}")
    print(f"  band covers 85 to 95 %: {'met' if all(85 <= v <= 95 for v in covered) else 'MISSED'}")
    return 0 if ok else 1


if __name__ == "__main__":
    sys.exit(main())

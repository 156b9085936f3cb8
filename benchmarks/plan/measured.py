"""Rows of measured.csv: of other origin, a rival's predictions on the same rows, prefill : decode ratios. IO: reads it."""

import collections
import csv
import statistics
from dataclasses import dataclass

from judging import Outcome, medians, outcomes
from points import HERE, MODELS, Point, plain_shape, prepare, shaped

from dynctl.core.plan import Parallelism
from dynctl.planner.calibration import Calibration
from dynctl.planner.closed_loop import Loop, Pair, run_loop, run_pair
from dynctl.planner.peaks import spec_named
from dynctl.planner.roofline import group_link, load_of

GPUS = {"a100": "a100-sxm-80", "a100_sxm": "a100-sxm-80", "rtx4090": "rtx-4090"}
FORMATS = {
    "bfloat16": "bf16", "fp8": "fp8", "fp8_block": "fp8-block", "nvfp4": "nvfp4", "int4_wo": "int4",
    "w4a16_mxfp4": "mxfp4",
}  # fmt: skip
MAX_MODE_USERS, FLOOD_USERS = 2048.0, 512.0
"""trtllm-bench lifts the limit on requests and sends all at once; other floods meet a server's default limits."""


def measured_rows() -> list[dict[str, str]]:
    """Every row as text by column."""
    return list(csv.DictReader((HERE / "measured.csv").read_text().splitlines()))


def point_of(
    r: dict[str, str], concurrency: float | None = None, num_seqs: int = 0
) -> Point | None:
    """A row as a point; None where the row does not say enough, or contradicts itself."""
    name = MODELS.get(r["model"])
    if name is None or not r["tp"] or not (r["concurrency"] or concurrency):
        return None

    def number(key: str) -> int:
        return int(float(r[key] or 1)) or 1

    moe = plain_shape(name).num_experts > 0
    dense = FORMATS.get(r["gemm_quant"], "bf16")
    experts = FORMATS.get(r["moe_quant"] or r["gemm_quant"], "bf16")
    if name == "gpt-oss-120b":
        dense, experts = "bf16", "mxfp4"
    if name == "kimi-k2" and experts in {"int4", "nvfp4"}:
        dense = "bf16"
    tp, dp = number("tp"), number("dp")
    etp, ep = (number("moe_tp"), number("moe_ep")) if moe else (1, 1)
    if moe and r["moe_ep"] and (etp * ep != tp * dp or tp * dp > 8):
        return None
    point = Point(
        name, GPUS.get(r["system"], r["system"].replace("_", "-")), r["engine"], dense, experts if moe else dense,
        tp, dp, etp, ep, int(float(r["isl"])), int(float(r["osl"])), float(r["concurrency"] or concurrency or 1),
        float(r["ttft_ms"] or 0), float(r["tpot_ms"] or 0),
    )  # fmt: skip
    return prepare(point, num_seqs)


def rival(calibration: Calibration, points: list[Point]) -> None:
    """The rival's own prediction beside ours, on rows whose point was held back, and on all."""
    fitted = {p.key for p in points if not p.is_held}
    print("\nmeasured.csv, rows the rival predicts too: median |error| %  (rival is AIConfigurator 0.12.0)")  # fmt: skip
    rows = []
    for r in measured_rows():
        p = point_of(r) if r["mode"] == "agg" and r["aic_tpot_ms"] else None
        if p is not None and p.gpu != "gb200":
            rows.append((p, float(r["aic_ttft_ms"]), float(r["aic_tpot_ms"])))
    unseen = [x for x in rows if x[0].key not in fitted]
    for label, chosen in (("all rows", rows), ("rows not fitted", unseen)):
        for family in ("all", "dense", "MoE"):
            some = [x for x in chosen if family == "all" or x[0].is_moe == (family == "MoE")]
            if some:
                _beside(calibration, f"{label:16} {family:6}", some)


def _beside(calibration: Calibration, label: str, rows: list[tuple[Point, float, float]]) -> None:
    ours = medians(outcomes(calibration, [p for p, _, _ in rows]))
    theirs = medians([
        Outcome(p, (ttft / p.ttft_ms, tpot / p.tpot_ms, _tokens_s(p, ttft, tpot) / p.tokens_s))
        for p, ttft, tpot in rows
    ])  # fmt: skip
    cells = [f"TTFT {m[0]:5.1f} TPOT {m[1]:5.1f} tok/s {m[2]:5.1f}" for m in (ours, theirs)]
    print(f"  {label} n {len(rows):3}  ours {cells[0]}   rival {cells[1]}")


def _tokens_s(p: Point, ttft_ms: float, tpot_ms: float) -> float:
    return p.concurrency * 1e3 * p.osl / (ttft_ms + tpot_ms * (p.osl - 1))


@dataclass(frozen=True, slots=True)
class Foreign:
    """A row of other origin: no constant was fitted to it."""

    origin: str
    figure: str
    """`tpot`, or `tokens` of a flood."""
    ratio: float
    """Predicted over measured."""
    point: Point

    def band(self, calibration: Calibration) -> tuple[float, float]:
        """What a user is shown."""
        query = self.point.query
        asked = "tokens-flood" if self.figure == "tokens" else self.figure
        return calibration.band(asked, query.model, query.engine, query.spec)


def foreign(calibration: Calibration) -> list[Foreign]:
    """Rows of other origin: time per token where users are known, throughput of floods."""
    found = []
    for r in measured_rows():
        if "silicon" in r["source"] or r["mode"] not in {"agg", "max", "static"}:
            continue
        is_max, is_flood = r["mode"] == "max", not r["concurrency"]
        p = point_of(r, MAX_MODE_USERS if is_max else FLOOD_USERS, int(MAX_MODE_USERS) if is_max else 256)  # fmt: skip
        if p is None:
            continue
        c = calibration.constants(p.engine, p.query.spec, p.query.model)
        got = run_loop(p.load, c, p.loop)
        ratio = (
            got.tokens_s / (p.tp * p.dp) / float(r["out_tok_s_per_gpu"])
            if is_flood
            else got.tpot_s * 1e3 / p.tpot_ms
        )
        origin = r["source"].split(" ")[0]
        found.append(Foreign(origin, "tokens" if is_flood else "tpot", ratio, p))
    return found


def others(calibration: Calibration) -> float:
    """Print error and bias by origin; the percentage of rows their bands hold."""
    print("\nrows of other origin (no constant was fitted to them): predicted over measured")
    rows = foreign(calibration)
    groups = collections.defaultdict(list)
    for row in rows:
        groups[row.origin, row.figure].append(row.ratio)
    for (origin, figure), values in sorted(groups.items()):
        error = 100 * statistics.median(abs(v - 1) for v in values)
        bias = 100 * (statistics.median(values) - 1)
        print(f"  {origin:36} {figure:8} n {len(values):3}  median error {error:5.1f} %  bias {bias:+5.1f} %")  # fmt: skip
    bands = [(row.band(calibration), 1 / row.ratio) for row in rows]
    inside = sum(low <= value <= high for (low, high), value in bands)
    share = 100 * inside / max(1, len(rows))
    print(f"  the 90 % band holds {inside} of {len(rows)}: {share:.0f} %")
    return share


# Two of the rows that design notes quote and measured.csv lacks.
QUOTED = (
    {"p_workers": "1", "d_workers": "3", "isl": "2046", "osl": "64", "out_tok_s_per_gpu": "183"},
    {"p_workers": "3", "d_workers": "1", "isl": "2046", "osl": "64", "out_tok_s_per_gpu": "370"},
)


def pd_order(calibration: Calibration) -> bool:
    """The public 1p3d / 2p2d / 3p1d rows of gpt-oss-120b on H200: does the order of throughput come out right."""
    print("\nprefill : decode ratio, gpt-oss-120b on 8 H200 (out tok/s per GPU): measured → predicted")  # fmt: skip
    groups = collections.defaultdict(list)
    for r in measured_rows():
        if r["mode"] == "disagg" and "pd_ratio" in r["source"]:
            groups[r["id"].split(":")[2], r["concurrency"]].append(r)
    groups["2048x128", "128"].extend(QUOTED)
    right = wrong = 0
    for (wish, users), rows in sorted(groups.items()):
        pairs = [_ratio(calibration, r, rows, users) for r in rows]
        for i, a in enumerate(pairs):
            for b in pairs[i + 1 :]:
                is_same = (a[1] > b[1]) == (a[2] > b[2])
                right, wrong = right + is_same, wrong + (not is_same)
        print(f"  {wish:10} c{users:4} " + "   ".join(f"{n} {m:6.0f} → {v:6.0f}" for n, m, v in pairs))  # fmt: skip
    print(f"  order right in {right} of {right + wrong} pairs")
    return wrong == 0


def _ratio(calibration: Calibration, r: dict[str, str], rows: list[dict[str, str]], users: str) -> tuple[str, float, float]:  # fmt: skip
    """Name, measured and predicted tokens per second and GPU."""
    spec = spec_named("h200-sxm")
    model = shaped(plain_shape("gpt-oss-120b"), "bf16", "mxfp4")
    load = load_of(model, spec, Parallelism(2), group_link(spec, 18, None))
    isl = float(r["isl"])
    moving_s = 0.005 + isl * model.kv_bytes_per_token / (2 * spec.link_bytes_s * 0.7)
    pair = Pair(load, int(r["p_workers"]), load, int(r["d_workers"]), moving_s)
    # The runs with 32 users came minutes after those with 128, with the same prompts: their prefixes were cached.
    cached = max(0.0, isl - 64) if users == "32" else 0.0
    osl = statistics.mean(float(row["osl"]) for row in rows)
    c = calibration.constants("sglang", spec, model)
    found = run_pair(pair, c, Loop(isl, osl, float(users), cached))
    return f"{r['p_workers']}p{r['d_workers']}d", float(r["out_tok_s_per_gpu"]), found.tokens_s / 8

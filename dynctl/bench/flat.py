"""Stored results as flat rows, for spreadsheets and notebooks: requests of a run, runs of a repeat, loads of a sweep. Pure."""

from collections.abc import Iterable
from dataclasses import fields
from typing import Any

from dynctl.bench.record import Record
from dynctl.bench.repeat import Repeat
from dynctl.bench.sweep import Stage, Sweep

Row = dict[str, Any]
"""Column to value; every row of a table has the same columns. None: there is none."""


def request_rows(records: Iterable[Record]) -> list[Row]:
    """A row per request, warm-up included and marked."""
    return [
        {
            "number": r.number,
            "outcome": r.outcome,
            "error": r.error,
            "is_warmup": r.is_warmup,
            "scheduled_s": r.scheduled_s,
            "sent_s": r.sent_s,
            "end_s": r.end_s,
            "ttft_ms": r.ttft_ms,
            "ttft_service_ms": r.ttft_service_ms,
            "ttfo_ms": r.ttfo_ms,
            "tpot_ms": r.tpot_ms,
            "e2e_ms": r.e2e_ms,
            "send_lag_ms": r.send_lag_ms,
            "isl_asked_tokens": r.isl_asked_tokens,
            "prompt_tokens": r.prompt_tokens,
            "cached_tokens": r.cached_tokens,
            "osl_asked_tokens": r.osl_asked_tokens,
            "output_tokens": r.output_tokens,
            "is_estimated": r.is_estimated,
            "num_chunks": len(r.chunks),
            "group": r.group,
            "chat": r.chat,
            "turn": r.turn,
        }
        for r in records
    ]


def run_rows(found: Repeat) -> list[Row]:
    """A row per run: its figures, empty where it was left out."""
    return [
        {
            "run": at + 1,
            "seed": seed,
            "left_out": found.left_out.get(f"run-{at + 1}", ""),
            **{figure.figure: figure.values[at] for figure in found.figures},
        }
        for at, seed in enumerate(found.seeds)
    ]


def stage_rows(found: Sweep) -> list[Row]:
    """A row per load, in the order they were played."""
    knee = found.knee.load if found.knee else None
    return [
        {
            "stage": number,
            **{field.name: getattr(stage, field.name) for field in fields(Stage)},
            "missed": "; ".join(stage.missed),
            "is_knee": stage.load == knee,
            "num_gpus": found.num_gpus,
        }
        for number, stage in enumerate(found.stages, 1)
    ]

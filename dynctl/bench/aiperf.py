"""A stored run as AIPerf writes its own: `profile_export_aiperf.json` and `profile_export.jsonl`, for tools that read those. Pure.

Each figure is worked out anew by AIPerf's definition, which is not always ours: its latencies begin when a request is
sent, its inter-token latency is a mean per request, and its duration goes from the first request to the last answer. Prompt
lengths alone are the server's count, template included, where AIPerf counts with a tokenizer of its own.
Source: AIPerf's docs, reference/json-export-schema.md (1.4) and metrics-reference.md.
"""

import datetime as dt
import statistics
from collections import Counter
from collections.abc import Iterable, Sequence
from typing import Any

from dynctl.bench.record import Record
from dynctl.bench.report import Report, is_good
from dynctl.bench.statistics import percentile
from dynctl.core.workload import Slo

SCHEMA_VERSION = "1.4"
_PERCENTILES = (1, 5, 10, 25, 50, 75, 90, 95, 99)
_UNITS = {
    "time_to_first_token": "ms",
    "time_to_second_token": "ms",
    "time_to_first_output_token": "ms",
    "request_latency": "ms",
    "inter_token_latency": "ms",
    "inter_chunk_latency": "ms",
    "output_token_throughput_per_user": "tokens/sec/user",
    "output_sequence_length": "tokens",
    "input_sequence_length": "tokens",
    "usage_prompt_cache_read_tokens": "tokens",
}
"""Of metrics that each request has."""

Values = dict[str, float | list[float]]


def metrics_of(record: Record) -> Values:
    """What AIPerf would have measured of an answered request."""
    if not record.chunks or record.first_s is None:
        return {}
    last_s, sent_s = record.chunks[-1].at_s, record.sent_s
    latency_ms, ttft_ms = (last_s - sent_s) * 1e3, (record.first_s - sent_s) * 1e3
    found: Values = {"time_to_first_token": ttft_ms, "request_latency": latency_ms}
    if record.first_answer_s is not None:
        found["time_to_first_output_token"] = (record.first_answer_s - sent_s) * 1e3
    if gaps := record.chunk_gaps_ms():
        found |= {"time_to_second_token": gaps[0], "inter_chunk_latency": gaps}
    if record.output_tokens is not None:
        found["output_sequence_length"] = record.output_tokens
        if record.output_tokens > 1:
            itl_ms = (latency_ms - ttft_ms) / (record.output_tokens - 1)
            found["inter_token_latency"] = itl_ms
            if itl_ms > 0:
                found["output_token_throughput_per_user"] = 1e3 / itl_ms
    if record.prompt_tokens is not None:
        found["input_sequence_length"] = record.prompt_tokens
    if record.cached_tokens is not None:
        found["usage_prompt_cache_read_tokens"] = record.cached_tokens
    return found


def summary(report: Report, records: Iterable[Record]) -> dict[str, Any]:
    """The aggregated file of a run; what AIPerf would not have known of it stands under `dynctl`."""
    measured = [record for record in records if not record.is_warmup]
    ok = [record for record in measured if record.is_ok and record.chunks]
    start_s = min((record.sent_s for record in measured), default=0.0)
    end_s = max((record.chunks[-1].at_s for record in ok), default=start_s)
    setting = report.setting
    name = f"{report.workload_digest}-{setting.seed}"
    return {
        "schema_version": SCHEMA_VERSION,
        "benchmark_id": name,
        **_per_request([metrics_of(record) for record in ok]),
        **_of_the_run(ok, measured, end_s - start_s, setting.slo),
        "start_time": _time(report, start_s),
        "end_time": _time(report, end_s),
        "was_cancelled": report.is_partial,
        "error_summary": _errors(measured),
        "run_info": {
            "benchmark_id": name,
            "sweep_id": None,
            "random_seed": setting.seed,
            "trial": 0,
            "run_label": "run_0001",
            "variation_label": "base",
            "variation_index": 0,
            "variation_values": {},
            "cli_command": None,
        },
        "dynctl": {
            "schema": report.schema,
            "setting": setting,
            "client_limited": report.client_limited,
            "facts": report.facts,
        },
    }


def _per_request(found: Sequence[Values]) -> dict[str, Any]:
    blocks = {}
    for name, unit in _UNITS.items():
        values: list[float] = []
        for each in found:
            value = each.get(name)
            if isinstance(value, list):
                values += value
            elif value is not None:
                values.append(value)
        if values:
            blocks[name] = _block(unit, sorted(values))
    return blocks


def _block(unit: str, ordered: Sequence[float]) -> dict[str, Any]:
    return {
        "unit": unit,
        "avg": statistics.fmean(ordered),
        **{f"p{q}": percentile(ordered, q / 100) for q in _PERCENTILES},
        "min": ordered[0],
        "max": ordered[-1],
        # Its page says of a sample, but its code takes the population's.
        "std": statistics.pstdev(ordered),
        "count": len(ordered),
        "sum": sum(ordered),
    }


def _of_the_run(
    ok: Sequence[Record], measured: Sequence[Record], duration_s: float, slo: Slo
) -> dict[str, Any]:
    isl = sum(record.prompt_tokens or 0 for record in ok)
    osl = sum(record.output_tokens or 0 for record in ok)
    good = sum(is_good(record, slo) for record in ok)
    figures: dict[str, tuple[str, float]] = {
        "request_count": ("requests", len(ok)),
        "error_request_count": ("requests", len(measured) - len(ok)),
        "total_isl": ("tokens", isl),
        "total_osl": ("tokens", osl),
        "benchmark_duration": ("sec", duration_s),
    }
    if duration_s > 0:
        figures |= {
            "request_throughput": ("requests/sec", len(ok) / duration_s),
            "output_token_throughput": ("tokens/sec", osl / duration_s),
            "total_token_throughput": ("tokens/sec", (isl + osl) / duration_s),
        }
    if slo != Slo():
        figures["good_request_count"] = ("requests", good)
        if duration_s > 0:
            figures["goodput"] = ("requests/sec", good / duration_s)
    return {name: {"unit": unit, "avg": value} for name, (unit, value) in figures.items()}


def _errors(measured: Iterable[Record]) -> list[dict[str, Any]]:
    counts = Counter((r.outcome, r.error) for r in measured if not r.is_ok)
    return [
        {"error_details": _error(outcome, error), "count": num}
        for (outcome, error), num in counts.most_common()
    ]


def _error(outcome: str, error: str) -> dict[str, Any]:
    word, _, code = outcome.partition(" ")
    is_status = word == "http" and code.isascii() and code.isdigit()
    return {"code": int(code) if is_status else None, "type": outcome, "message": error or outcome}


def _unix_s(report: Report, at_s: float) -> float:
    """Wall time; a run's own clock starts a moment after the time that was noted for it."""
    return float(report.facts.get("started_unix_s", 0.0)) + at_s


def _time(report: Report, at_s: float) -> str:
    return dt.datetime.fromtimestamp(_unix_s(report, at_s), dt.UTC).isoformat()


def lines(report: Report, records: Iterable[Record]) -> list[dict[str, Any]]:
    """The file with a line per measured request."""
    found = []
    for record in records:
        if record.is_warmup:
            continue
        is_chat = record.chat is not None
        values = metrics_of(record) if record.is_ok else {}
        last_s = record.chunks[-1].at_s if record.chunks else record.sent_s
        end_s = last_s if record.end_s is None else record.end_s
        metadata = {
            "session_num": record.chat if is_chat else record.number,
            "conversation_id": str(record.chat) if is_chat else None,
            "turn_index": record.turn - 1,
            "request_start_ns": int(_unix_s(report, record.sent_s) * 1e9),
            "request_ack_ns": None,
            "request_end_ns": int(_unix_s(report, end_s) * 1e9),
            "worker_id": "dynctl",
            "record_processor_id": "dynctl",
            "benchmark_phase": "profiling",
            "was_cancelled": record.outcome == "unfinished",
            "cancellation_time_ns": None,
        }
        metrics = {name: {"value": value, "unit": _UNITS[name]} for name, value in values.items()}
        error = None if record.is_ok else _error(record.outcome, record.error)
        found.append({"metadata": metadata, "metrics": metrics, "error": error})
    return found

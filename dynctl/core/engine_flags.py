"""What an engine's own flags and variables say of the limits that plans reckon with, read as the engine reads it.

Not here: the names dynctl sets itself (`agents/engines`), limits of the inventory (`planner.limits`).
Source: `EngineArgs.add_cli_args`, `human_readable_int` and `envs` of vLLM 0.32.0.
Pure.
"""

import math
from collections.abc import Iterator
from dataclasses import dataclass

from dynctl.core.inventory import EngineSpec, Limits
from dynctl.core.units import engine_count, whole

_IN_TOKENS = frozenset({"max-model-len", "max-num-batched-tokens"})
"""vLLM takes these as `16k` too."""
_COUNTS = {
    "max-model-len": "max_model_len_tokens",
    "max-num-batched-tokens": "max_num_batched_tokens",
    "max-num-seqs": "max_num_seqs",
    "block-size": "block_size_tokens",
}
"""Flags, each with what it is called under limits."""
_LEFT_OPEN = {"max-model-len": frozenset({"auto", "-1"})}
"""Then the engine takes what fits."""
_SHARE = "gpu-memory-utilization"
_USUAL_SHARE = Limits().gpu_memory_utilization
_CPU_KV_SPACE = "VLLM_CPU_KVCACHE_SPACE"
_KINDS = frozenset({"vllm", "sim"})
_ONE = "write it in one place: the engine would take the flag"


@dataclass(frozen=True, slots=True)
class FlagFault:
    """A flag or variable that the engine could not read."""

    key: tuple[str, str]
    """`args` or `env`, and the name as it is written."""
    text: str
    hint: str


def count_of(engine: EngineSpec, flag: str) -> int | None:
    """The whole number a flag gives; None: it is not given, or left to the engine."""
    text = _given(engine, flag)[1]
    return None if text is None else _count(engine.kind, flag, text)


def memory_share_of(engine: EngineSpec) -> float | None:
    """The share of each GPU's memory a flag gives; None: it is not given."""
    text = _given(engine, _SHARE)[1]
    return None if text is None else _share(text)


def cpu_kv_gib(engine: EngineSpec) -> int | None:
    """GiB of KV cache that a CPU engine's variable gives; None: it is not given."""
    text = dict(engine.env).get(_CPU_KV_SPACE)
    return None if text is None else whole(text)


def kv_value_bytes_of(engine: EngineSpec) -> float | None:
    """Bytes of one value of the KV cache as a flag sets it; None: as the checkpoint declares, which engines follow."""
    text = _given(engine, "kv-cache-dtype")[1] or "auto"
    if text == "auto":
        return None
    return 1.0 if text.startswith(("fp8", "int8")) else 2.0


def flag_faults(engine: EngineSpec, limits: Limits) -> Iterator[FlagFault]:
    """What of these the engine could not read, or would take instead of what limits say."""
    if engine.kind not in _KINDS:
        return
    for flag, key in _COUNTS.items():
        name, text = _given(engine, flag)
        if text is None:
            continue
        count, limit = _count(engine.kind, flag, text), getattr(limits, key)
        if not count and text not in _LEFT_OPEN.get(flag, ()):
            takes_units = _takes_units(engine.kind, flag)
            hint = (
                "write 8192, or 8k for 8000" if takes_units else "write it in digits alone, as 64"
            )
            yield FlagFault(
                ("args", name), f"{flag} {text!r} is no whole number of 1 or more", hint
            )
        elif limit not in {None, count}:
            yield FlagFault(("args", name), f"{flag} is {text}, and limits.{key} {limit}", _ONE)
    name, text = _given(engine, _SHARE)
    share = None if text is None else _share(text)
    if text is not None and share is None:
        fault = f"{_SHARE} {text!r} is no share above 0 and at most 1"
        yield FlagFault(("args", name), fault, "write it as 0.9")
    elif share is not None and limits.gpu_memory_utilization not in {_USUAL_SHARE, share}:
        fault = f"{_SHARE} is {text}, and limits.gpu_memory_utilization {limits.gpu_memory_utilization:g}"
        yield FlagFault(("args", name), fault, _ONE)
    space = dict(engine.env).get(_CPU_KV_SPACE)
    if engine.device == "cpu" and space is not None and not whole(space):
        yield FlagFault(
            ("env", _CPU_KV_SPACE),
            f"{_CPU_KV_SPACE} {space!r} is no whole number of GiB of 1 or more",
            "write it as 4; the plan reckons with it, so it cannot be a reference",
        )


def _given(engine: EngineSpec, flag: str) -> tuple[str, str | None]:
    """A flag's name as written and its text; the last one counts. Dashes and underscores are alike."""
    found = [(name, text) for name, text in engine.args if name.replace("_", "-") == flag]
    return found[-1] if found else (flag, None)


def _count(kind: str, flag: str, text: str) -> int | None:
    return engine_count(text) if _takes_units(kind, flag) else whole(text)


def _takes_units(kind: str, flag: str) -> bool:
    return flag in _IN_TOKENS and kind == "vllm"


def _share(text: str) -> float | None:
    try:
        share = float(text)
    except ValueError:
        return None
    return share if math.isfinite(share) and 0 < share <= 1 else None
